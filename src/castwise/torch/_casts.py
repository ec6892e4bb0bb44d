"""Casting tensors, and remembering the casts of weights.

A weight is read by many calls and changes once per step, so its cast is kept: once per region for `autocast`, across
steps for `Amp`. A kept cast is served only while PyTorch's version counter says that the weight has not been written
since. Two kinds of write escape that counter (through `p.data` in place, and through a NumPy view);
`CastCache.refresh()` and the debug mode are for those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from castwise.errors import CastwiseError

_PROXY = torch._C._TorchDispatchModeKey.PROXY
_dispatch_mode, _tracing_state = torch._C._get_dispatch_mode, torch._C._get_tracing_state
_of_functorch, _grad_enabled = torch._C._functorch.is_functorch_wrapped_tensor, torch.is_grad_enabled
_VIEWS_KEPT = 64  # per weight: a loop over slices of a table must not pile up memory

_WEIGHTS_KEPT = 8192  # more than the largest models have; a bound for regions that make modules in a loop


class StaleCastError(CastwiseError, RuntimeError):
    """A kept cast no longer equals its weight: the weight was written where PyTorch's version counter does not look."""


@dataclass(slots=True)
class _Kept:
    version: int
    address: int
    cast: torch.Tensor


class CastCache:
    """The casts of weights, by weight, view geometry and target. Bounded: the oldest weights' casts are let go."""

    def __init__(self, debug: bool = False, capacity: int = _VIEWS_KEPT) -> None:
        self.debug = debug
        self.capacity = capacity  # casts kept per weight, its views included
        self.casts_made = 0
        self._kept: dict[int, tuple[weakref.ref[torch.Tensor], dict[Any, _Kept]]] = {}

    def __len__(self) -> int:
        return sum(len(kept) for _, kept in self._kept.values())

    def refresh(self) -> None:
        """Forget every kept cast: call it after writing weights through `.data` or NumPy."""
        self._kept.clear()

    def get(self, x: torch.Tensor, key: object, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`cast(x)`, kept while `x` is a weight (or a view of one) that is not written."""
        base = x._base
        weight = x if base is None else base
        entry = self._kept.get(id(weight))
        if entry is None or entry[0]() is not weight:
            if not self.capacity or not _is_weight(weight):
                return cast(x)
            kept = self._of(weight)
        elif _dispatch_mode(_PROXY) is not None or _tracing_state() is not None:  # `_traced`, with a call less
            return cast(x)
        else:
            kept = entry[1]
        differentiable = x.requires_grad and _grad_enabled()
        geometry = None if base is None else (x.storage_offset(), x.size(), x.stride(), x.is_conj(), x.is_neg())
        try:
            version, address = weight._version, weight.data_ptr()
        except RuntimeError:
            version, address = weight._version, _address(weight)
        found = kept.get((geometry, key, True))
        if (found is None or found.version != version or found.address != address) and not differentiable:
            found = kept.get((geometry, key, False))
        if found is not None and found.version == version and found.address == address:
            if self.debug:
                self._compare(found.cast, x, cast)
            return found.cast
        if len(kept) >= self.capacity:
            kept.clear()
        made = cast(x) if differentiable else _plain(x, cast)
        self.casts_made += 1
        kept[(geometry, key, differentiable)] = _Kept(version, address, made)
        return made

    def _of(self, weight: torch.Tensor) -> dict[Any, _Kept]:
        """The table of a weight that has none yet."""
        number, table = id(weight), self._kept
        own = weakref.ref(self)  # the table itself would hold a cycle, and casts until the collector comes

        def forget(_: object) -> None:
            cache = own()
            if cache is not None:
                cache._kept.pop(number, None)

        if len(table) >= _WEIGHTS_KEPT:  # a cast that is part of a graph keeps its weight alive: let the oldest go
            table.pop(next(iter(table)), None)
        casts: dict[Any, _Kept] = {}
        table[number] = (weakref.ref(weight, forget), casts)
        return casts

    def _compare(self, kept: torch.Tensor, x: torch.Tensor, cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        fresh = _plain(x, cast)
        if not torch.equal(torch.nan_to_num(fresh), torch.nan_to_num(kept.detach())):
            raise StaleCastError(
                f"the kept cast of a weight of shape {tuple(x.shape)} is stale: it was written through .data or a "
                "NumPy view, which PyTorch's version counter does not see. Write the parameter itself under "
                "torch.no_grad(), or call refresh() after such writes."
            )


def _plain(x: torch.Tensor, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A cast without history that any later mode may use: not an inference tensor, not part of a graph."""
    if torch.is_inference_mode_enabled() and not x.is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return cast(x)
    with torch.no_grad():
        return cast(x)


def _is_weight(x: torch.Tensor) -> bool:
    kind = type(x)  # asking isinstance is slow, as Parameter answers it by itself
    if not x.is_leaf or not (
        x.requires_grad or kind is Parameter or (kind is not torch.Tensor and isinstance(x, Parameter))
    ):
        return False
    if x.is_inference() or _of_functorch(x):
        return False  # no version counter; a transform's own tensor
    return not _traced()


def _traced() -> bool:
    """Whether a tracer is at work, which must see the cast itself."""
    return _dispatch_mode(_PROXY) is not None or _tracing_state() is not None


def run_and_tell(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an update that writes its first argument, a list of weights, untold, and tell their version counters."""
    result = function(*args, **kwargs)
    written = args[0] if args else kwargs.get("self", ())
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])
    return result


def _address(x: torch.Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:  # fake and sharded tensors have no address of their own
        return 0


def fits(value: float, dtype: torch.dtype) -> float:
    """A Python constant as `dtype` can hold it: finite values beyond its range become its largest of the same sign."""
    limit = torch.finfo(dtype).max
    if value > limit and value != float("inf"):
        return limit
    if value < -limit and value != float("-inf"):
        return -limit
    return value


def to_saturated(x: torch.Tensor, dtype: torch.dtype, sign: int = 0) -> torch.Tensor:
    """`x.to(dtype)` for masks and constants: finite values beyond the range saturate instead of becoming inf.

    With a sign, only those of that sign do: masks that are added lower, so an overflow upwards is one, and stays.
    """
    low = x.to(dtype)
    beyond = low.isinf() & x.isfinite()
    if sign:
        beyond = beyond & (torch.sign(low) == sign)
    return torch.where(beyond, torch.sign(low) * torch.finfo(dtype).max, low)
