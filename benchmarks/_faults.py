"""The faults of the fault bench: what breaks, how it enters, and what should be said of it.

They enter through data, weights, or an operation in a layer's own forward; never through a hook of Castwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castwise.guard import Kind as Cause

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "torch"))
from faulty import Steep

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Fault:
    """One way to break a layer, and what should be said of it."""

    name: str
    where: str  # "operation", "weight", "switch" or "data"
    cause: Cause
    phase: str
    change: Any  # a function of the layer's output, its weight or the batch; of a switch, its name and value
    narrow_only: bool = False  # breaks only what is computed in 16 bits


# ---- operations put into a layer -------------------------------------------------------------------------------------


def too_large(y: torch.Tensor) -> torch.Tensor:
    """The same values, by way of ones of up to 1e6. What is left of an infinity there is NaN, which nothing hides."""
    large = y * (1e6 / float(y.detach().abs().amax().float().clamp_min(1e-6)))
    return y + (large - large)


def too_small(y: torch.Tensor) -> torch.Tensor:
    """The same values, by way of a divisor of 1e-9."""
    large = y / (y.detach().abs() * 0.0 + 1e-9)
    return y + (large - large)


def steep(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gradients times a factor and then divided by it again; values pass."""
    return lambda y: Steep.apply(Steep.apply(y, 1.0 / factor), factor)  # type: ignore[no-untyped-call,no-any-return]


class Search:
    """Gradients times what takes them to 2**20 at the loss scale of the first step, and divided by it again."""

    def __init__(self) -> None:
        self.factor = 0.0

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        y = Searched.apply(y, self, False)  # type: ignore[no-untyped-call]
        return Searched.apply(y, self, True)  # type: ignore[no-untyped-call,no-any-return]


class Searched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, search: Search, up: bool) -> torch.Tensor:
        ctx.search, ctx.up = search, up
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        search, gradient = ctx.search, grads[0]
        if not search.factor:
            search.factor = 2.0**20 / float(gradient.abs().amax().float().clamp_min(1e-6))
        return gradient * (search.factor if ctx.up else 1.0 / search.factor), None, None


def put_into(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make a layer's own forward do one thing more."""
    forward = module.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.forward = changed  # type: ignore[method-assign]


FAULTS = (
    Fault("forward overflow", "operation", Cause.RANGE, "forward", too_large, narrow_only=True),
    Fault("underflow", "operation", Cause.RANGE, "forward", too_small, narrow_only=True),
    Fault("forward NaN", "operation", Cause.BROKEN, "forward", lambda y: y * NAN),
    Fault("backward overflow", "operation", Cause.RANGE, "backward", steep(1e14), narrow_only=True),
    Fault("scale too high", "operation", Cause.SCALE, "backward", Search, narrow_only=True),
    Fault("backward NaN", "operation", Cause.BROKEN, "backward", steep(NAN)),
    Fault("NaN weight", "weight", Cause.BROKEN, "forward", lambda w: w.fill_(NAN)),
    Fault("inf weight", "weight", Cause.BROKEN, "forward", lambda w: w.fill_(INF)),
    Fault("NaN input", "data", Cause.DATA, "forward", lambda x: x.view(-1)[:1].fill_(NAN)),
    Fault("inf input", "data", Cause.DATA, "forward", lambda x: x.view(-1)[:1].fill_(INF)),
)


# ---- switches, for models whose operations are fixed when they are planned -------------------------------------------


class Switches(nn.Module):
    """Factors that are 1 until they are turned. Values pass by way of up**2, and gradients by way of down**2."""

    def __init__(self) -> None:
        super().__init__()
        self.up: torch.Tensor
        self.down: torch.Tensor
        for name in ("up", "down"):
            self.register_buffer(name, torch.ones(()))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        y = y * self.up * self.up / self.up / self.up
        around = y / self.down / self.down * self.down * self.down
        return y.detach() + (around - around.detach())


SWITCHED = (
    Fault("forward overflow", "switch", Cause.RANGE, "forward", ("up", 2.0**15), narrow_only=True),
    Fault("backward overflow", "switch", Cause.RANGE, "backward", ("down", 2.0**15), narrow_only=True),
    Fault("NaN buffer", "switch", Cause.BROKEN, "forward", ("up", NAN)),
    *(fault for fault in FAULTS if fault.where in ("weight", "data")),
)
