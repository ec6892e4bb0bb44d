"""Kept casts that are written anew by the step that changes their weight, while the weight is in the processor's cache.

So the next forward casts nothing. Only casts that nobody else holds are written: a graph that was kept for another
backward, or a user, goes on reading the old values, and the next forward makes a new cast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ._casts import CastCache, _address, _Kept

_HELD_BY_US = 2  # references to the memory of a tensor that only we hold: the tensor's own, and the one we ask through


def to_refresh(cache: CastCache, weight: torch.Tensor) -> list[torch.Tensor]:
    """The kept casts of a weight that a step may write anew; all others of it are forgotten. Then call `refreshed`."""
    entry = cache._kept.get(id(weight))
    if entry is None or entry[0]() is not weight:
        return []
    kept = entry[1]
    for key in [k for k, found in kept.items() if not _is_refreshable(k, found, weight)]:
        del kept[key]
    return [found.cast.detach() for found in kept.values()]


def refreshed(cache: CastCache, weight: torch.Tensor) -> None:
    """Note that the casts that `to_refresh` gave hold the values that the weight has now."""
    entry = cache._kept.get(id(weight))
    if entry is not None and entry[0]() is weight:
        for found in entry[1].values():
            found.version, found.address = weight._version, _address(weight)


@contextlib.contextmanager
def refreshing(cache: CastCache, weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Around a step that writes the weights: afterwards their kept casts are those of the new values."""
    pairs = [(weight, cast) for weight in weights for cast in to_refresh(cache, weight)]
    yield
    if pairs:
        torch._foreach_copy_([cast for _, cast in pairs], [weight.detach() for weight, _ in pairs])
        for weight, _ in pairs:
            refreshed(cache, weight)


def _is_refreshable(key: Any, found: _Kept, weight: torch.Tensor) -> bool:
    geometry, target, _ = key
    cast: Any = found.cast
    return bool(
        geometry is None
        and target is cast.dtype  # a native cast; an emulated one is made by more than a copy
        and found.version == weight._version
        and found.address == _address(weight)
        and cast.stride() == weight.stride()
        and cast._use_count() == 1
        and torch._C._storage_Use_Count(cast.untyped_storage()._cdata) <= _HELD_BY_US
    )
