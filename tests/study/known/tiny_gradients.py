"""A task with tiny gradients: its loss is weighted down to a millionth, as an auxiliary loss among others may be.

Adam does not care about the size of gradients, so fp32 and bf16 train well. fp16 has no number between 0 and 6e-8:
without loss scaling the gradients of the activations are zero and nothing is learned; scaled, they are ordinary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
_FEATURES = 16
_WEIGHT = 1e-6


def _samples(count: int, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, _FEATURES, generator=random)
    return x, (x[:, :4].sum(1) > x[:, 4:8].sum(1)).long()


class TinyGradients:
    """Classify with a loss that is weighted down to a millionth."""

    metric, direction, margin = "accuracy", "higher", 0.03
    steps, seeds, evaluate_every, threads = 128, 4, 16, 1

    def model(self, seed: int = 0) -> nn.Module:
        return nn.Sequential(nn.Linear(_FEATURES, 32), nn.ReLU(), nn.Linear(32, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-20)

    def batches(self, seed: int = 0) -> Iterator[Batch]:
        while True:
            seed += 1000
            yield _samples(64, seed)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * _WEIGHT

    def validation(self) -> list[Batch]:
        return [_samples(1024, 7)]

    def evaluate(self, model: nn.Module) -> float:
        x, y = _samples(1024, 7)
        return float((model(x).argmax(1) == y).float().mean())
