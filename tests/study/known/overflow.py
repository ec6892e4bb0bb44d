"""A task whose activations pass 65504, the largest number of fp16: a layer sums features in the tens of thousands.

The sums reach a few hundred thousand; a normalisation behind them brings them back. bf16 has the range of fp32 and does
not notice. In fp16 the sums are infinite, and no loss scale can help, since the values overflow on the way forward.
"""

from __future__ import annotations

import torch
from made import Batch, Classes
from torch import nn

_FEATURES = 16
_SIZE = 20_000.0  # each feature itself is well inside fp16


class Overflow(Classes):
    """Classify raw features in the tens of thousands."""

    def samples(self, count: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(count, _FEATURES, generator=random)
        y = (x[:, :4].sum(1) > x[:, 4:8].sum(1)).long()
        return (x * _SIZE).clamp(-60_000.0, 60_000.0), y

    def model(self, seed: int = 0) -> nn.Module:
        first = nn.Linear(_FEATURES, 32)
        nn.init.normal_(first.weight)
        return nn.Sequential(first, nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 2))
