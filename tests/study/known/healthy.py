"""Healthy tasks, small and of different kinds: no 16-bit format may be called unsafe on any of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


class _Made:
    """What the tasks here share: data from a formula, batches of 32, a fixed held-out set."""

    steps, seeds, evaluate_every, threads = 120, 3, 20, 1

    def samples(self, count: int, seed: int) -> Batch:
        raise NotImplementedError

    def batches(self, seed: int = 0) -> Iterator[Batch]:
        while True:
            seed += 1000
            yield self.samples(32, seed)

    def validation(self) -> list[Batch]:
        return [self.samples(256, 7)]


class Regression(_Made):
    """Fit a smooth function with a small network of tanh layers, by momentum SGD; no margin stated."""

    metric, direction = "squared error", "lower"

    def samples(self, count: int, seed: int) -> Batch:
        x = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        return x, torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:3] ** 2

    def model(self, seed: int = 0) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> float:
        return float(self.loss(model, self.validation()[0]))


class Recall(_Made):
    """Say which symbol came first in a sequence, with an embedding, attention, dropout and layer norm."""

    metric, direction, margin = "accuracy", "higher", 0.05

    def samples(self, count: int, seed: int) -> Batch:
        codes = torch.randint(8, (count, 12), generator=torch.Generator().manual_seed(seed))
        return codes, codes[:, 0]

    def model(self, seed: int = 0) -> nn.Module:
        return _Reader()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> float:
        codes, first = self.validation()[0]
        return float((model(codes).argmax(1) == first).float().mean())


class _Reader(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, width)
        self.place = nn.Embedding(12, width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.05, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes) + self.place(torch.arange(codes.shape[1]))
        mixed, _ = self.attention(x, x, x, need_weights=False)
        result: Tensor = self.head(self.norm(x + mixed).mean(1))
        return result
