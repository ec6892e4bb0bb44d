"""Layer paths from JAX's name stack.

JAX remembers for every equation which ``jax.named_scope`` it was written in; Flax linen and Haiku open one for each
module. A scope may hold several names ("encoder/layer_0"): slashes and dots both separate. Transformations (vmap, jvp)
leave entries on the stack too, which are no layers and are passed over.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

import castwise

__all__ = ["ABSOLUTE", "REGION", "in_region", "layer_path", "layers_of", "source_line"]

#: The scope, or the name of the jit call, of what a region has made: an outer region leaves an inner one as it is.
REGION = "castwise_autocast"

#: How a scope begins whose name is a whole path: what stands around it is no part of it. For frameworks on JAX that
#: open scopes of their own and know better paths.
ABSOLUTE = "castwise_layer:"

# Where the lines of JAX and of Castwise are; lines of no file begin with "<".
_OTHERS = ("<", *(f"{Path(package).parent}{os.sep}" for package in (jax.__file__, castwise.__file__)))


@functools.lru_cache(maxsize=8192)
def in_region(stack: tuple[Any, ...]) -> bool:
    """Whether an equation with this name stack was made by a region and has its formats already."""
    return any(getattr(entry, "name", "") == REGION for entry in stack)


def layer_path(outer: str, name_stack: Any) -> str:
    """The dotted path of an equation: the scopes around the jaxpr it is in, and those within."""
    inner = _inner_path(name_stack.stack) if name_stack.stack else ""
    if inner.startswith(ABSOLUTE):
        return inner.removeprefix(ABSOLUTE)
    return f"{outer}.{inner}" if outer and inner else outer or inner


@functools.lru_cache(maxsize=8192)
def _inner_path(stack: tuple[Any, ...]) -> str:
    names = [entry.name for entry in stack if type(entry).__name__ == "Scope" and entry.name != REGION]
    whole = max((place for place, name in enumerate(names) if name.startswith(ABSOLUTE)), default=None)
    if whole is not None:
        names = [names[whole].removeprefix(ABSOLUTE), *names[whole + 1 :]]
    path = ".".join(part for name in names for part in name.replace("/", ".").split(".") if part)
    return path if whole is None else ABSOLUTE + path


def layers_of(jaxpr: Jaxpr) -> tuple[str, ...]:
    """The paths of all equations, those of inner jaxprs included, in order of first use; "" for the whole first."""
    return tuple(dict.fromkeys(["", *_layers(jaxpr, "")]))


def _layers(jaxpr: Jaxpr, outer: str) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        path = layer_path(outer, eqn.source_info.name_stack)
        yield path
        for held in eqn.params.values():
            for one in held if isinstance(held, tuple | list) else (held,):
                if isinstance(one, ClosedJaxpr | Jaxpr):
                    yield from _layers(one.jaxpr if isinstance(one, ClosedJaxpr) else one, path)


def source_line(eqn: Any) -> str:
    """The line that the user wrote, such as ``model.py:41``."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_OTHERS):
            return f"{frame.file_name.rpartition('/')[2]}:{frame.line_num}"
    return ""
