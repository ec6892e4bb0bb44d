"""A mapping that cannot change, so that a policy is a value through and through: hashable, picklable, safe to share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

__all__ = ["FrozenMap"]

K = TypeVar("K")
V = TypeVar("V", covariant=True)


class FrozenMap(Mapping[K, V]):
    """A read-only copy of a mapping. Equal to any mapping with the same items; its order is that of the original."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V] | None = None) -> None:
        self._items: dict[K, V] = dict(items or {})

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[type[FrozenMap[K, V]], tuple[dict[K, V]]]:
        return (type(self), (self._items,))
