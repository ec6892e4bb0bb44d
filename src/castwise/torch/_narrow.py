"""Gradients of weights that a plan reads in 16 bits, left in 16 bits until the step has read them.

Backward computes such a gradient in 16 bits, and autograd casts it to the weight's float32 at once, by a call for each
weight. Where a step follows, its norm can be taken of the 16 bits, and all be widened in one call: the same values.

Who looks at `p.grad` in between finds it as always: gradients stay narrow only inside of `Amp.step(loss)`, of weights
without hooks, and where nobody observes the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch

_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class NarrowGradients:
    """16-bit gradients of float32 weights, by weight."""

    def __init__(self) -> None:
        self._wanted: Container[int] = ()
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight in a 16-bit format, with a gradient that is kept here wherever it may be."""
        if type(weight) not in (torch.Tensor, torch.nn.Parameter) or not weight.is_leaf or _wrapped(weight):
            return weight.to(dtype)
        made: torch.Tensor = _Cast.apply(weight, dtype, self)  # type: ignore[no-untyped-call]
        return made

    @contextlib.contextmanager
    def kept(self, weights: Iterable[torch.Tensor]) -> Iterator[None]:
        """Around a backward pass: of which weights gradients are kept here."""
        self._wanted = frozenset(map(id, weights))
        try:
            yield
        finally:
            self._wanted = ()

    def takes(self, weight: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Keep a gradient of a weight, if it may be; what came before for the same weight is added."""
        hooks: Any = weight._backward_hooks or weight._post_accumulate_grad_hooks
        if id(weight) not in self._wanted or hooks or gradient.layout is not torch.strided:
            return False
        before = self._kept.get(id(weight))
        self._kept[id(weight)] = weight, gradient if before is None else before[1] + gradient
        return True

    @torch.no_grad()
    def settled(self) -> list[torch.Tensor]:
        """The gradients that are kept here. Where another part of one is in `p.grad`, it is added there instead."""
        for key, (weight, gradient) in list(self._kept.items()):
            if weight.grad is not None:
                wide = weight.grad.layout is torch.strided  # float32 and 16 bits add up without a cast between
                weight.grad = weight.grad + gradient if wide else gradient.to(weight.dtype) + weight.grad
                del self._kept[key]
        return [gradient for _, gradient in self._kept.values() if gradient.numel()]

    @torch.no_grad()
    def widen(self) -> None:
        """Put all gradients where the optimizer looks for them."""
        if self._kept:
            weights, narrow = zip(*self._kept.values(), strict=True)
            wide = [torch.empty_like(weight, requires_grad=False) for weight in weights]
            torch._foreach_copy_(wide, narrow)
            for weight, gradient in zip(weights, wide, strict=True):
                weight.grad = gradient
        self._kept.clear()

    def clear(self) -> bool:
        """Forget all gradients; whether there were any."""
        found = bool(self._kept)
        self._kept.clear()
        return found


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype, narrow: NarrowGradients) -> torch.Tensor:
        ctx.weight, ctx.narrow = weight, narrow
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.narrow.takes(ctx.weight, gradient):
            return None, None, None
        return gradient.to(ctx.weight.dtype), None, None
