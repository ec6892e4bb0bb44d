"""Healthy tasks, small and of different kinds: no 16-bit format may be called unsafe on any of them."""

from __future__ import annotations

import torch
from made import Batch, Classes, Made
from torch import Tensor, nn
from torch.nn import functional


class Regression(Made):
    """Fit a smooth function with a small network of tanh layers; no margin stated."""

    metric, direction = "squared error", "lower"
    steps, seeds, evaluate_every = 120, 3, 20

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


class Recall(Classes):
    """Say which symbol came first in a sequence, with an embedding, attention, dropout and layer norm."""

    margin = 0.05
    steps, seeds, evaluate_every = 120, 3, 20
    _batch, _held_out = 32, 256

    def samples(self, count: int, seed: int) -> Batch:
        codes = torch.randint(8, (count, 12), generator=torch.Generator().manual_seed(seed))
        return codes, codes[:, 0]

    def model(self, seed: int = 0) -> nn.Module:
        return _Reader()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)


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
