"""A task whose activations pass 65504, the largest number of fp16: a layer sums features in the tens of thousands.

The sums reach a few hundred thousand; a normalisation behind them brings them back. bf16 has the range of fp32 and does
not notice. In fp16 the sums are infinite, and no loss scale can help, since the values overflow on the way forward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
_FEATURES = 16
_SIZE = 20_000.0  # each feature itself is well inside fp16


def _samples(count: int, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, _FEATURES, generator=random)
    y = (x[:, :4].sum(1) > x[:, 4:8].sum(1)).long()
    return (x * _SIZE).clamp(-60_000.0, 60_000.0), y


class Overflow:
    """Classify raw features in the tens of thousands."""

    metric, direction, margin = "accuracy", "higher", 0.03
    steps, seeds, evaluate_every, threads = 128, 4, 16, 1

    def model(self, seed: int = 0) -> nn.Module:
        first = nn.Linear(_FEATURES, 32)
        nn.init.normal_(first.weight)
        return nn.Sequential(first, nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 2))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2)

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
