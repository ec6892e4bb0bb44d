"""Tuples, lists and dictionaries of a call, flattened and built again.

torch's general rules for nested structures, which users can add to, cost a small model as much as a layer. These are
the same for the plain kinds alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["builder", "flattened_plain"]

_LEAVES = (torch.Tensor, torch.nn.Parameter, int, bool, float, str, type(None))


class _Unknown(Exception):
    pass


def flattened_plain(tree: Any) -> tuple[list[Any], Any] | None:
    """The leaves in torch's order, and a description of the structure; None where a part of it is of another kind."""
    leaves: list[Any] = []
    try:
        return leaves, _described(tree, leaves)
    except _Unknown:
        return None


def _described(x: Any, leaves: list[Any]) -> Any:
    kind = type(x)
    if kind is tuple or kind is list:
        return (kind, *[_described(part, leaves) for part in x])
    if kind is dict:
        return (kind, tuple(x), *[_described(part, leaves) for part in x.values()])
    if kind not in _LEAVES:
        raise _Unknown
    leaves.append(x)
    return None


def builder(spec: pytree.TreeSpec) -> Callable[[Iterator[Any]], Any] | None:
    """What builds a structure from its leaves; None where it is not of the plain kinds alone."""
    if spec.is_leaf():
        return next
    parts = [builder(child) for child in spec.children()]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if spec.type is tuple:
        return lambda leaves: tuple([part(leaves) for part in known])
    if spec.type is list:
        return lambda leaves: [part(leaves) for part in known]
    if spec.type is dict:
        keys = list(spec.context)
        return lambda leaves: {key: part(leaves) for key, part in zip(keys, known, strict=True)}
    return None
