"""A task with everything in it that is easy to lose when a run is interrupted.

Dropout (the model's random stream), batch norm (buffers), a scheduler, accumulation, clipping, a shuffling of epochs
that remembers the epochs before, random numbers drawn from torch, NumPy and Python while batches are made, and a loss
scale that moves all the time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
_WEIGHTS = torch.linspace(-1.0, 1.0, 12)


class Shuffled:
    """Epochs of seven batches; the order of each comes from a generator that goes on from the epoch before."""

    def __init__(self, seed: int) -> None:
        self._order = torch.Generator().manual_seed(seed)
        self._x = torch.randn(7 * 32, 12, generator=torch.Generator().manual_seed(99))

    def __iter__(self) -> Iterator[Batch]:
        for part in torch.randperm(len(self._x), generator=self._order).chunk(7):
            x = self._x[part] + 0.1 * torch.randn(len(part), 12)
            x = x * (1.0 + 0.01 * random.random()) + float(np.random.normal(0.0, 0.01))
            yield x, (x @ _WEIGHTS > 0).long()


class Awkward:
    """Classify with dropout, batch norm and a restless loss scale."""

    metric, direction, margin = "accuracy", "higher", 0.05
    steps, seeds, evaluate_every, threads = 100, 3, 10, 1
    clip_norm, accumulate = 1.0, 2

    def model(self, seed: int = 0) -> nn.Module:
        norm = nn.BatchNorm1d(32)
        first = nn.Sequential(nn.Linear(12, 32), norm, nn.ReLU(), nn.Dropout(0.2))
        return nn.Sequential(*first, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def batches(self, seed: int = 0) -> Shuffled:
        return Shuffled(seed)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def validation(self) -> list[Batch]:
        x = torch.randn(256, 12, generator=torch.Generator().manual_seed(7))
        return [(x, (x @ _WEIGHTS > 0).long())]

    def evaluate(self, model: nn.Module) -> float:
        x, y = self.validation()[0]
        return float((model(x).argmax(1) == y).float().mean())
