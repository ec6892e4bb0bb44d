"""Dotted paths for the layers of a Keras model, for the globs of layer rules.

Keras' own ``layer.path`` leaves out what it has not built and holds names that count up through a session
(``dense_17``). A path here leads from the model down, and a segment is the name that the user would look for:

1. the layer's name where somebody gave it one, or where its parent is a functional or sequential model;
2. else the attribute of its parent (``self.head = Dense(10)`` -> ``head``, ``self.blocks[2]`` -> ``blocks.2``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ._internals import children

__all__ = ["escaped", "layer_paths"]


def layer_paths(model: Any) -> dict[str, Any]:
    """Path -> layer, for the model itself (``""``) and every layer in it, each once, parents before their children."""
    found: dict[str, Any] = {"": model}
    seen = {id(model)}
    for path, layer in _below(model, "", seen):
        found[path] = layer
    return found


def escaped(path: str) -> str:
    """A path as the glob that matches it alone."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in path)


def _below(parent: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    attributes = _attributes(parent)
    taken: set[str] = set()
    for position, child in enumerate(children(parent)):
        if id(child) in seen:
            continue
        seen.add(id(child))
        segment = _segment(parent, child, attributes)
        if segment in taken:
            segment = f"{segment}_{position}"
        taken.add(segment)
        path = f"{prefix}.{segment}" if prefix else segment
        yield path, child
        yield from _below(child, path, seen)


def _segment(parent: Any, child: Any, attributes: Mapping[int, str]) -> str:
    name = str(child.name).replace(".", "_")
    if hasattr(parent, "_operations") or type(parent).__name__ == "Sequential" or not _automatic(child):
        return name
    return attributes.get(id(child), name)


def _automatic(layer: Any) -> bool:
    """Whether Keras made up the layer's name."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", type(layer).__name__)
    snake = re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
    return re.fullmatch(rf"{re.escape(snake)}(_\d+)?", layer.name) is not None


def _attributes(parent: Any) -> dict[int, str]:
    """Which attribute of its parent each layer is; lists and dicts of layers count with their places and keys."""
    held = {
        name.strip("_"): value
        for name, value in {**vars(parent), **vars(parent).get("_modules", {})}.items()
        if name not in _BOOKS and not name.startswith(_TENSORFLOWS)
    }
    found = {id(value): name for name, value in reversed(held.items()) if not isinstance(value, list | tuple | dict)}
    for name, value in held.items():
        if isinstance(value, list | tuple):
            for position, item in enumerate(value):
                found.setdefault(id(item), f"{name}.{position}")
        elif isinstance(value, dict):
            for key, item in value.items():
                found.setdefault(id(item), f"{name}.{key}")
    return found


# Where Keras, torch and TensorFlow keep every layer once more.
_BOOKS = frozenset({"_layers", "_modules", "_functional"})
_TENSORFLOWS = "_self_"
