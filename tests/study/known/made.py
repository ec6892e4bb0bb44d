"""What the tasks here share: samples from a formula, endless batches of them, a held-out set; two-class problems."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


class Made:
    """Batches and a held-out set of samples that a formula gives."""

    threads = 1
    _batch, _held_out = 32, 256

    def samples(self, count: int, seed: int) -> Batch:
        raise NotImplementedError

    def batches(self, seed: int = 0) -> Iterator[Batch]:
        while True:
            seed += 1000
            yield self.samples(self._batch, seed)

    def validation(self) -> list[Batch]:
        return [self.samples(self._held_out, 7)]


class Classes(Made):
    """Classification by cross-entropy and Adam, measured by accuracy."""

    metric, direction, margin = "accuracy", "higher", 0.03
    steps, seeds, evaluate_every = 128, 4, 16
    _batch, _held_out = 64, 1024

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> float:
        x, y = self.validation()[0]
        return float((model(x).argmax(1) == y).float().mean())
