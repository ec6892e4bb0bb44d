"""What a step casts, keeps and gets wrong, counted at dispatch: figures that do not depend on how fast a machine is."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.torch import Amp

Forward = Callable[..., Any]


@dataclass
class Counts:
    """Of one forward and backward, and the error over several batches."""

    casts: int = 0
    cast_bytes: int = 0
    """Read and written by casts between floating formats, forward and backward; of weights too."""
    step_bytes: int = 0
    """Read and written by casts in the optimizer step, of kept copies of weights and of their gradients."""
    saved_bytes: int = 0
    """Of distinct memory that the forward keeps for the backward, without parameters and casts of parameters."""
    output_error: float = 0.0
    """Relative root-mean-square distance from fp64."""
    gradient_error: float = 0.0


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self.owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.copies: list[torch.Tensor] = []  # held, so that their addresses are not given out again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._to_copy:
            source = args[0]
            if source.is_floating_point() and result.is_floating_point() and source.dtype is not result.dtype:
                self.counts.casts += 1
                self.counts.cast_bytes += source.numel() * source.itemsize + result.numel() * result.itemsize
            if source.untyped_storage().data_ptr() in self.owned:
                self.owned.add(result.untyped_storage().data_ptr())
                self.copies.append(result)
        elif func.overloadpacket is torch.ops.aten._foreach_copy_:
            pairs = [pair for pair in zip(*args[:2], strict=True) if pair[0].dtype is not pair[1].dtype]
            self.counts.step_bytes += sum(x.numel() * x.itemsize for pair in pairs for x in pair)
        return result


def count(
    model: nn.Module,
    forward: Forward,
    x: torch.Tensor,
    y: torch.Tensor,
    amp: Amp | None = None,
) -> Counts:
    """Casts and saved bytes of one step of ``model`` run as ``forward``, or in the region of an ``amp``.

    An ``amp`` has made a step before: what is kept from step to step is there.
    """
    region: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if amp is None else amp
    with region:
        loss = F.cross_entropy(forward(x).float(), y)  # captures, and whatever else happens once
    if amp is not None:
        amp.step(loss)
    del loss
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in counter.owned:
            saved.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage())
        return t

    with _Counter(model) as counter:
        if amp is not None:
            counter.owned |= {cast.untyped_storage().data_ptr() for cast in kept_casts(amp)}
        with region, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = F.cross_entropy(forward(x).float(), y)
        counter.counts.saved_bytes = sum(storage.nbytes() for storage in saved.values())
        loss.backward() if amp is None else amp.step(loss)  # type: ignore[no-untyped-call]
    model.zero_grad()
    return counter.counts


def kept_casts(amp: Amp) -> list[torch.Tensor]:
    """The casts of weights that an ``Amp`` keeps from step to step."""
    return [found.cast for _, kept in amp._cache._kept.values() for found in kept.values()]


def error(model: nn.Module, forward: Forward, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Relative distance of outputs, and of all gradients together, from those of the model in fp64."""
    exact = copy.deepcopy(model).double()
    sums = [0.0] * 4
    for x, y in batches:
        double = x.double() if x.is_floating_point() else x
        pairs: list[list[torch.Tensor]] = []
        for module, run, given in ((model, forward, x), (exact, exact, double)):
            module.zero_grad()
            out = run(given)
            F.cross_entropy(out if run is exact else out.float(), y).backward()  # type: ignore[no-untyped-call]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
            pairs.append([out.detach().double(), torch.cat([g.double().flatten() for g in gradients])])
        (have, have_gradient), (want, want_gradient) = pairs
        for at, (a, b) in enumerate(((have, want), (have_gradient, want_gradient))):
            sums[2 * at] += float((a - b).square().sum())
            sums[2 * at + 1] += float(b.square().sum())
    model.zero_grad()
    return math.sqrt(sums[0] / sums[1]), math.sqrt(sums[2] / sums[3])


def amp_forward(model: nn.Module, device: str, dtype: torch.dtype) -> Forward:
    """The model under torch.amp."""

    def forward(*args: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return model(*args)

    return forward


def low_forward(model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, Forward]:
    """A copy of the model with everything in ``dtype``."""
    low = copy.deepcopy(model).to(dtype)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return low(x.to(dtype) if x.is_floating_point() else x)

    return low, forward
