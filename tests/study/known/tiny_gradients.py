"""A task with tiny gradients: its loss is weighted down to a millionth, as an auxiliary loss among others may be.

Adam does not care about the size of gradients, so fp32 and bf16 train well. fp16 has no number between 0 and 6e-8:
without loss scaling the gradients of the activations are zero and nothing is learned; scaled, they are ordinary.
"""

from __future__ import annotations

import torch
from made import Batch, Classes
from torch import Tensor, nn

_FEATURES = 16
_WEIGHT = 1e-6


class TinyGradients(Classes):
    """Classify with a loss that is weighted down to a millionth."""

    def samples(self, count: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(count, _FEATURES, generator=random)
        return x, (x[:, :4].sum(1) > x[:, 4:8].sum(1)).long()

    def model(self, seed: int = 0) -> nn.Module:
        return nn.Sequential(nn.Linear(_FEATURES, 32), nn.ReLU(), nn.Linear(32, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-20)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) * _WEIGHT
