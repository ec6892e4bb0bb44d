"""A step that goes wrong on its way back: for tests and for benchmarks/faults.py alike."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Steep"]


class Steep(torch.autograd.Function):
    """Passes values on, and multiplies gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None
