"""Running a captured graph for study: on leaves of its own, so the model's gradients and buffers stay as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from . import _aten

__all__ = ["StudyRun", "random_state_kept"]


class StudyRun(fx.Interpreter):
    """Runs a graph whose parameters are leaves of this run: same memory, own gradients. Buffers are copies.

    Floating inputs are leaves too, where `input_gradients` is true. Where they are results of another graph of the same
    model, their gradients go on to it.
    """

    def __init__(self, module: fx.GraphModule, *, gradients: bool = True, input_gradients: bool = False) -> None:
        super().__init__(module)
        self.gradients, self.input_gradients = gradients, input_gradients
        self.leaves: dict[int, torch.Tensor] = {}

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        x = super().placeholder(target, args, kwargs)
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            # A copy, so that the graph may change it in place and the caller's stays as it is.
            if x.grad_fn is not None:
                return x.clone()
            return x.detach().requires_grad_(self.input_gradients).clone()
        return x

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = _aten.attribute(self.module, str(target))
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.leaves:
            if isinstance(value, nn.Parameter):
                leaf = value.detach().requires_grad_(self.gradients and value.requires_grad)
            else:
                leaf = value.detach().clone()
            self.leaves[id(value)] = leaf
        return self.leaves[id(value)]

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None if target == "_guards_fn" else super().call_module(target, args, kwargs)


@contextlib.contextmanager
def random_state_kept(seed: int | None = None) -> Iterator[None]:
    """Inside, random numbers are drawn from `seed` on; afterwards torch's generators are as before."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def floating(values: Any) -> list[torch.Tensor]:
    """The floating tensors in a structure of results, in order."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
