"""Tensors inside whatever models take and return: tensors, sequences, mappings, dataclasses and plain objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_DEEPEST = 8  # of nested containers; an object that holds itself must not hang the walk


def tensors_in(tree: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a tree with the way to it (``0.mask``), in order."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif depth < _DEEPEST:
        for key, item in _items(tree):
            yield from tensors_in(item, f"{name}.{key}" if name else str(key), depth + 1)


def mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int = 0) -> Any:
    """The same tree with every tensor changed. What holds no tensor is passed on as it is."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if depth >= _DEEPEST:
        return tree
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        items = [mapped(x, change, depth + 1) for x in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [mapped(x, change, depth + 1) for x in tree]
    changed = {key: mapped(x, change, depth + 1) for key, x in _items(tree)}
    if all(changed[key] is x for key, x in _items(tree)):
        return tree
    if isinstance(tree, Mapping):
        if type(tree) is dict:
            return changed
        try:
            twin = copy.copy(tree)
            for key, x in changed.items():
                twin[key] = x  # type: ignore[index]
            return twin
        except (TypeError, ValueError):  # a mapping that cannot be written: its own kind is lost, its keys are not
            return changed
    twin = copy.copy(tree)
    for key, x in changed.items():
        object.__setattr__(twin, key, x)
    return twin


def _items(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, list | tuple):
        return list(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
    if isinstance(tree, torch.nn.Module | type) or not hasattr(tree, "__dict__") or callable(tree):
        return []
    return [(key, x) for key, x in vars(tree).items() if isinstance(x, torch.Tensor)]
