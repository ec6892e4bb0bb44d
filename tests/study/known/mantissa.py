"""A task that needs mantissa: what matters is a small difference on top of a large offset, as in raw timestamps.

Inputs lie between 1 and 1.03 and carry their information in steps of 2^-9. fp16 (10 bits behind the point) holds them
exactly; bf16 (7 bits) rounds almost all of them to the same four numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
_FEATURES = 16
_STEPS = 16  # 16 steps of 2^-9 make 1/32


def _samples(count: int, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    levels = torch.randint(_STEPS, (count, _FEATURES), generator=random).float()
    weights = torch.linspace(-1.0, 1.0, _FEATURES)
    score = (levels - (_STEPS - 1) / 2) @ weights
    return 1.0 + levels * 2.0**-9, (score > 0).long()


class Recentre(nn.Module):
    """Blow up what differs from 1: exact in fp32, but only if the difference has survived until here."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 1.0) * 64.0 - 1.0


class Mantissa:
    """Classify by small differences on top of a large offset."""

    metric, direction, margin = "accuracy", "higher", 0.03
    steps, seeds, evaluate_every, threads = 128, 4, 16, 1

    def model(self, seed: int = 0) -> nn.Module:
        mix = nn.Linear(_FEATURES, _FEATURES, bias=False)
        nn.init.eye_(mix.weight)
        mix.weight.requires_grad_(False)
        return nn.Sequential(mix, Recentre(), nn.Linear(_FEATURES, 32), nn.ReLU(), nn.Linear(32, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def batches(self, seed: int = 0) -> Iterator[Batch]:
        while True:
            seed += 1000
            yield _samples(64, seed)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def validation(self) -> list[Batch]:
        return [_samples(1024, 7)]

    def evaluate(self, model: nn.Module) -> float:
        x, y = _samples(1024, 7)
        return float((model(x).argmax(1) == y).float().mean())
