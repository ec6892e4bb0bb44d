"""The torch backend: the region of ``castwise.torch`` around the model's call, one within it for a layer with rules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from castwise.formats import parse_format
from castwise.torch._casts import CastCache
from castwise.torch._region import Region, current_region
from castwise.torch._rules import rules_for
from castwise.torch.record import OpEvent

from ._device import device_kind
from ._internals import get_keras_mask, keras, set_keras_mask
from ._state import active
from .record import OpRecord

__all__ = ["Backend"]

_LOW = (torch.float16, torch.bfloat16)


class Backend:
    """Runs the calls of one prepared model."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.layered = bool(root.policy.layers)

    def run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The model's call, inside a region. Results in 16 bits come out in float32."""
        with self._region("", CastCache(), None if self.root.log is None else _Log(self.root.log)):
            result = original(*args, **kwargs)
        return keras.tree.map_structure(_widened, result)

    @contextlib.contextmanager
    def layer(self, path: str) -> Iterator[None]:
        """The call of one layer, under the rules for it."""
        outer = current_region(device_kind()) if self.layered else None
        if outer is None:
            yield
            return
        with self._region(path, outer.cache, outer.log):
            yield

    @contextlib.contextmanager
    def _region(self, path: str, cache: CastCache, log: list[Any] | None) -> Iterator[None]:
        kind = device_kind()
        region = Region(rules_for(self.root.policy, kind, path if self.layered else ""), cache, log=log)
        region.enter()
        try:
            yield
        finally:
            region.leave()


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype not in _LOW:
        return value
    wide = value.to(torch.float32)
    mask = get_keras_mask(value)
    if mask is not None:
        set_keras_mask(wide, mask)
    return wide


class _Log(list[Any]):
    """Takes a region's events and hands them on with the layer that they happened in."""

    def __init__(self, records: list[Any]) -> None:
        super().__init__()
        self.records = records

    def append(self, event: OpEvent) -> None:
        """Note one event."""
        now = active()
        names = [_name(dtype) for dtype in event.outputs if dtype.is_floating_point]
        if not names:
            return
        given = tuple(_name(dtype) for dtype in event.inputs if dtype.is_floating_point)
        fmt = "float32" if event.rule == "high" and "float64" not in names else names[0]
        self.records.append(
            OpRecord(now.layer if now else "", event.op, event.rule, fmt, given, tuple(names), event.reason)
        )


def _name(dtype: torch.dtype) -> str:
    return parse_format(dtype).long_name
