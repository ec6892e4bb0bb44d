"""What tensors held, summed up while they are there; and what a kernel call reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._gradients import local
from .attribution_trees import tensors_in


@dataclass(frozen=True, slots=True)
class Values:
    """What a tensor held.

    Attributes:
        dtype, shape: of the tensor.
        infinite, nan: whether it has such values.
        largest: the largest finite magnitude (0.0 where there is none).
        zeros: whether it has zeros.
        bad: the share of its values that are not finite.
    """

    dtype: str
    shape: tuple[int, ...]
    infinite: bool
    nan: bool
    largest: float
    zeros: bool
    bad: float

    def __str__(self) -> str:
        size = "×".join(map(str, self.shape)) or "scalar"
        what = f"{self.dtype}[{size}] up to {self.largest:.6g}"
        if not self.bad:
            return what
        names = " and ".join(name for name, there in (("inf", self.infinite), ("NaN", self.nan)) if there)
        return f"{what}, {self.bad:.2%} {names}"


def _dense(x: torch.Tensor) -> torch.Tensor | None:
    x = local(x)  # to look at other ranks' shards would take a collective, and these ranks look elsewhere
    if not (x.is_floating_point() or x.is_complex()) or x.numel() == 0 or x.device.type == "meta":
        return None
    if x.layout is torch.sparse_coo:
        x = x._values()
    elif x.layout is not torch.strided:
        x = x.values()
    x = x.detach()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def is_bad(x: torch.Tensor) -> bool:
    dense = _dense(x)
    return dense is not None and not bool(dense.isfinite().all())


def values_of(x: torch.Tensor) -> Values | None:
    dense = _dense(x)
    if dense is None:
        return None
    wide = dense.to(torch.float64) if dense.device.type != "mps" else dense.to(torch.float32)
    finite = wide.isfinite()
    share = 1.0 - float(finite.double().mean())
    return Values(
        str(x.dtype).removeprefix("torch."),
        tuple(x.shape),
        bool(wide.isinf().any()),
        bool(wide.isnan().any()),
        float(torch.where(finite, wide, 0.0).abs().max()),
        bool((wide == 0).any()),
        share,
    )


Held = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with one that holds its values."""


def as_they_are(tree: Any) -> Held:
    return [(x, x) for _, x in tensors_in(tree)]


def as_they_were(args: Any, kwargs: Any) -> Held:
    """What a call reads, safe from what it writes: copies, as to describe each input of each call takes far longer."""
    return [(x, x.detach().clone() if _dense(x) is not None else x) for _, x in tensors_in((args, kwargs))]


def described(held: Held) -> list[tuple[torch.Tensor, Values]]:
    return [(x, values) for x, kept in held if (values := values_of(kept)) is not None]


def storage_of(x: torch.Tensor) -> Any:
    x = local(x)  # which is what layers that are spread over ranks wrap,
    x = getattr(x, "elem", x)  # and what is on its way between them
    try:
        return (x._values() if x.layout is torch.sparse_coo else x).untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def mutated(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [x for _, x in tensors_in(value)]
    return found


def scalars(args: Any) -> Iterator[Any]:
    for a in args:
        if isinstance(a, list | tuple):
            yield from scalars(a)
        elif not isinstance(a, torch.Tensor):
            yield a


def constant_in(args: Any, bad: torch.Tensor) -> float:
    """The constant that a call made infinite: a number that the program gave it, or the only culprit of a tensor.

    Its sign is that of the infinities. 0 where they differ in sign, and where there is no such constant.
    """
    if bad.layout is not torch.strided or bad.is_complex():
        return 0.0
    infinities = bad.detach()[bad.detach().isinf()]
    sign = float(infinities[0].sign()) if infinities.numel() else 0.0
    if not sign or bad.isnan().any() or not bool((infinities.sign() == sign).all()):
        return 0.0
    numbers = [abs(float(a)) for a in scalars(args) if isinstance(a, int | float) and not isinstance(a, bool)]
    finite = [a for a in numbers if math.isfinite(a)]
    if finite:
        return sign * max(finite)
    for _, x in tensors_in(args):
        if x.layout is torch.strided and x.shape == bad.shape and x.is_floating_point():
            culprits = x.detach()[bad.detach().isinf()]
            same = culprits.numel() > 1 and bool((culprits == culprits[0]).all())
            return sign * abs(float(culprits[0])) if same else 0.0
    return 0.0
