"""Which captured graph covers which call: by the kinds of its inputs, and by their sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._caches import carried
from ._trees import flattened_plain

__all__ = ["covers", "exact_kind", "flattened", "kind_of", "shapes_of"]


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """A call's inputs as a flat list, and their structure. That of tensors alone needs no search for more inside."""
    flat = [*args, *kwargs.values()]
    if all(type(x) is torch.Tensor for x in flat):
        return flat, (len(args), *kwargs)
    plain = flattened_plain((args, kwargs))
    if plain is not None:
        return plain
    leaves, structure = pytree.tree_flatten((args, kwargs))
    flat, caches = carried(leaves)
    return flat, (structure, caches)


def exact_kind(x: Any) -> Any:
    """What of an input decides which graph runs, its sizes with it; of one that is no tensor, the value."""
    return (x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x)


def kind_of(x: Any) -> Any:
    """As `exact_kind`, but for the sizes, which a graph may leave open."""
    return (x.dtype, x.device, x.dim(), x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x)


def shapes_of(module: fx.GraphModule) -> list[tuple[Any, ...] | None]:
    """Per input its sizes: a number where it may not vary, the name of a size where it may."""
    found: list[tuple[Any, ...] | None] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            shape = getattr(value, "shape", None)
            found.append(None if shape is None else tuple(s if isinstance(s, int) else str(s) for s in shape))
    return found


def covers(module: Any, flat: list[Any]) -> bool:
    """Whether a rewritten graph is right for inputs of these sizes and values."""
    sizes: dict[str, int] = {}
    for shape, x in zip(module.castwise_shapes, flat, strict=True):
        if shape is None or not isinstance(x, torch.Tensor):
            continue
        for allowed, size in zip(shape, x.shape, strict=True):
            if (allowed if isinstance(allowed, int) else sizes.setdefault(allowed, size)) != size:
                return False
    if module.castwise_guards is not None:
        try:
            module.castwise_guards(*flat)
        except (AssertionError, RuntimeError):
            return False
    return True
