"""Handwritten digits with a small convolutional network: the classic healthy case for every 16-bit format.

The data are scikit-learn's: 1,797 images of 8×8 pixels with 17 grey levels, from the UCI "Optical Recognition of
Handwritten Digits" set (E. Alpaydin, C. Kaynak, 1998), shipped inside the package, so nothing is downloaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise._extras import require

__all__ = ["ConvNet", "Digits"]

_SPLIT_SEED = 1998  # one split for every arm and seed: the seeds vary the training, not the exam
_HELD_OUT = 797
_PIXEL_MAX = 16.0  # grey levels are 0 to 16
Batch = tuple[Tensor, Tensor]


@functools.cache
def _data() -> tuple[Batch, Batch]:
    """((training images, labels), (held-out images, labels)); images as float32 (n, 1, 8, 8) between 0 and 1."""
    images, labels = require("sklearn.datasets", extra="study").load_digits(return_X_y=True)
    x = torch.from_numpy(images).to(torch.float32).reshape(-1, 1, 8, 8) / _PIXEL_MAX
    y = torch.from_numpy(labels).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    held, train = order[:_HELD_OUT], order[_HELD_OUT:]
    return (x[train], y[train]), (x[held], y[held])


class ConvNet(nn.Module):
    """Three 3×3 convolutions, each with batch norm and ReLU, global average pooling, a linear classifier."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = self._block(1, width)
        self.middle = self._block(width, 2 * width)
        self.top = self._block(2 * width, 2 * width)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(2 * width, classes)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (n, classes) of images (n, 1, 8, 8)."""
        x = self.pool(self.middle(self.stem(x)))
        return self.head(self.top(x).mean((2, 3)))  # type: ignore[no-any-return]


class Digits:
    """Classify handwritten digits (8×8 pixels) with a small convnet with batch norm."""

    metric, direction, unit = "accuracy", "higher", ""
    margin = 0.01
    resolution = 1.0 / _HELD_OUT
    steps, seeds, threads = 250, 5, 1

    _batch_size = 64
    _peak_rate = 4e-3

    def model(self, seed: int = 0) -> nn.Module:
        return ConvNet()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self._peak_rate, weight_decay=1e-2)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self._peak_rate, total_steps=steps + 1)

    def batches(self, seed: int = 0) -> Iterator[Batch]:
        """Endless: shuffled epochs of training images, the last partial batch of each dropped."""
        (x, y), _ = _data()
        order = torch.Generator().manual_seed(seed)
        while True:
            shuffled = torch.randperm(len(y), generator=order)
            for start in range(0, len(y) - self._batch_size + 1, self._batch_size):
                chosen = shuffled[start : start + self._batch_size]
                yield x[chosen], y[chosen]

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        x, y = batch
        return functional.cross_entropy(model(x), y)

    def validation(self) -> list[Batch]:
        return [_data()[1]]

    def evaluate(self, model: nn.Module) -> float:
        x, y = (tensor.to(next(model.parameters()).device) for tensor in _data()[1])
        return float((model(x).argmax(1) == y).float().mean())
