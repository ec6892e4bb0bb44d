"""A task that needs mantissa: what matters is a small difference on top of a large offset, as in raw timestamps.

Inputs lie between 1 and 1.03 and carry their information in steps of 2^-9. fp16 (10 bits behind the point) holds them
exactly; bf16 (7 bits) rounds almost all of them to the same four numbers.
"""

from __future__ import annotations

import torch
from made import Batch, Classes
from torch import Tensor, nn

_FEATURES = 16
_STEPS = 16  # 16 steps of 2^-9 make 1/32


class Recentre(nn.Module):
    """Blow up what differs from 1: exact in fp32, but only if the difference has survived until here."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 1.0) * 64.0 - 1.0


class Mantissa(Classes):
    """Classify by small differences on top of a large offset."""

    def samples(self, count: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed(seed)
        levels = torch.randint(_STEPS, (count, _FEATURES), generator=random).float()
        weights = torch.linspace(-1.0, 1.0, _FEATURES)
        score = (levels - (_STEPS - 1) / 2) @ weights
        return 1.0 + levels * 2.0**-9, (score > 0).long()

    def model(self, seed: int = 0) -> nn.Module:
        mix = nn.Linear(_FEATURES, _FEATURES, bias=False)
        nn.init.eye_(mix.weight)
        mix.weight.requires_grad_(False)
        return nn.Sequential(mix, Recentre(), nn.Linear(_FEATURES, 32), nn.ReLU(), nn.Linear(32, 2))
