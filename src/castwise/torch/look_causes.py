"""What an operation's values tell of causes that make nothing infinite: positions, long sums, scores, labels, inputs.

Each rule looks at one kernel of the forward and gives evidence in words, or nothing. Thresholds are those at which
a format stops telling numbers apart, or lie far beyond what healthy models show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .attribution_values import storage_of

__all__ = ["Kernel", "Loops", "hazards_of", "input_hazard", "whole_numbers"]

LOW = (torch.float16, torch.bfloat16)
_REDUCTIONS = frozenset(
    {"sum", "mean", "cumsum", "prod", "cumprod", "linalg_vector_norm", "norm", "logsumexp", "nansum"}
)
_ROUNDINGS = 2.0  # of the result that a sum may be off by before it counts as carried in 16 bits
_POSITIONS = 16  # values in a row that make a tensor one of positions
_SCORES = 256.0  # from which on bfloat16 knows whole numbers alone, and a softmax sees but its largest
_REGRESSIONS = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss"})
_PROBABILITIES = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
_FAR = 1e3  # root mean square of an input, or of labels beside predictions, that nobody has normalised
_LOOP = 16  # additions in a row at one line that make a loop that accumulates
_LOST = 0.5  # share of added values that change nothing, from which on a loop has ceased to add


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel call of a forward.

    Attributes:
        name: in torch's spelling, without namespace.
        args, kwargs, result: of the call.
        wide: the first 16-bit result as float32 has it, None where there is none.
        layer, line: where the program made it.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    wide: torch.Tensor | None
    layer: str
    line: str


def whole_numbers(dtype: torch.dtype) -> int:
    """The largest n up to which every whole number is one of the format's: 256 in bfloat16, 2048 in float16."""
    return round(2.0 / torch.finfo(dtype).eps)


def hazards_of(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """The causes that a kernel's values point to, each with its evidence."""
    for cause, rule in _RULES:
        evidence = rule(kernel)
        if evidence:
            yield cause, evidence


def input_hazard(name: str, x: torch.Tensor) -> tuple[str, str] | None:
    """Whether an input of the model is far from unit scale."""
    size = _size(x) if x.is_floating_point() and x.layout is torch.strided and x.numel() else 0.0
    return ("inputs out of range", f"input {name} has a root mean square of {size:.4g}") if size > _FAR else None


def _size(x: torch.Tensor) -> float:
    """The root mean square of the finite values."""
    wide = x.detach().double()
    return float(torch.where(wide.isfinite(), wide, 0.0).square().mean().sqrt())


def _positions(kernel: Kernel) -> str:
    low = kernel.result
    if not isinstance(low, torch.Tensor) or low.dtype not in LOW or low.numel() < _POSITIONS:
        return ""
    most = whole_numbers(low.dtype)
    if kernel.name == "arange":
        top = float(low.detach().abs().max())
        return f"an arange up to {top:g} in {_named(low.dtype)}" if top > most and low.numel() > most else ""
    if kernel.name in ("sin", "cos"):
        x = kernel.args[0]
        top = float(x.detach().abs().max()) if x.dtype in LOW else 0.0
        words = f"the {kernel.name} of {_named(x.dtype)} angles up to {top:g}, a whole turn or more apart"
        return words if top > most and math.isfinite(top) else ""
    if kernel.name != "_to_copy" or kernel.args[0].dtype in LOW:
        return ""
    x = kernel.args[0].detach()
    top = float(x.max()) if not x.is_complex() and x.dtype is not torch.bool else 0.0
    if top <= most or not math.isfinite(top) or not bool((x == x.round()).all()):
        return ""
    places = x.unique()
    in_a_row = places.numel() >= _POSITIONS and float(places[-1] - places[0]) == places.numel() - 1
    lost = places.numel() - low.detach().unique().numel()  # type: ignore[no-untyped-call]
    if not in_a_row or not lost:
        return ""
    return f"positions up to {top:g} cast to {_named(low.dtype)}, where {lost} of {places.numel()} fall together"


def _reductions(kernel: Kernel) -> str:
    if kernel.name not in _REDUCTIONS or kernel.wide is None or not isinstance(kernel.result, torch.Tensor):
        return ""
    low, wide = kernel.result.detach().double(), kernel.wide.double()
    there = low.isfinite() & wide.isfinite() & (wide != 0)
    if not bool(there.any()):
        return ""
    error = float(((low - wide).abs() / wide.abs())[there].max())
    allowed = _ROUNDINGS * torch.finfo(kernel.result.dtype).eps
    words = f"a {kernel.name} carried in {_named(kernel.result.dtype)} is off by up to {error:.1%}"
    return words if error > allowed else ""


def _scores(kernel: Kernel) -> str:
    if kernel.name not in ("_softmax", "_safe_softmax"):
        return ""
    x = kernel.args[0].detach().float()
    top = float(torch.where(x.isfinite(), x, 0.0).max()) if x.numel() else 0.0
    return f"scores up to {top:.4g} go into a softmax" if top > _SCORES else ""


def _labels(kernel: Kernel) -> str:
    if kernel.name not in _REGRESSIONS and kernel.name not in _PROBABILITIES:
        return ""
    guess, labels = kernel.args[0], kernel.args[1].detach()
    if not bool(labels.isfinite().all()):
        return f"labels of {kernel.name} are infinite or NaN"
    low, high = float(labels.min()), float(labels.max())
    if kernel.name in _PROBABILITIES:
        return f"labels of {kernel.name} run from {low:.4g} to {high:.4g}" if low < 0.0 or high > 1.0 else ""
    size, beside = _size(labels), max(_size(guess), 1.0)
    words = f"labels of {kernel.name} have a root mean square of {size:.4g}, predictions one of {_size(guess):.4g}"
    return words if size > _FAR * beside else ""


_RULES = (
    ("positions", _positions),
    ("reductions", _reductions),
    ("attention scores", _scores),
    ("labels out of range", _labels),
)


class Loops:
    """Sums that a program makes by adding one term after the other to a 16-bit tensor."""

    def __init__(self) -> None:
        # By memory, which a weak reference keeps from being told as another's: the line that adds, and how often.
        self._sums: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self._pending: tuple[str, int, float] | None = None

    def before(self, total: torch.Tensor, term: torch.Tensor, line: str) -> None:
        """An addition of two 16-bit tensors is about to run."""
        key = storage_of(total)
        known = self._sums.get(key._cdata) if key is not None else None
        count = known[2] + 1 if known is not None and known[1] == line else 1
        lost = 0.0
        if count >= _LOOP:
            after = total.detach() + term.detach()
            there = (term.detach() != 0).expand(after.shape)
            lost = float(((after == total.detach()) & there).sum()) / max(int(there.sum()), 1)
        self._pending = line, count, lost

    def after(self, name: str, result: Any) -> Iterator[tuple[str, str]]:
        """The kernel has run: evidence, where it was an addition that has ceased to add."""
        if self._pending is None or name not in ("add", "add_") or not isinstance(result, torch.Tensor):
            return
        (line, count, lost), self._pending = self._pending, None
        key = storage_of(result)
        if key is not None:
            self._sums[key._cdata] = StorageWeakRef(key), line, count  # type: ignore[no-untyped-call]
        if count >= _LOOP and lost > _LOST:
            words = f"{lost:.0%} of the terms that are added at {line} change nothing of the {_named(result.dtype)} sum"
            yield "reductions", f"after {count} additions, {words}"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
