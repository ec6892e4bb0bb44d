"""Layer paths for modules that JAX does not hear of: Equinox's, and Flax nnx's.

Flax linen and Haiku open a ``jax.named_scope`` for each module, so layer rules reach them as they are. Equinox and nnx
open none. ``named_layers`` gives a model whose modules do, each under the name that its parent has for it:

    def loss(model, x, y):
        logits = jax.vmap(named_layers(model))(x)            # rules may say "blocks.0.attention" now
        ...

It is a copy of the modules alone, for one call: arrays, and nnx's Variables, are the model's own, so that gradients and
running statistics go where they went. Parameters, optimizers and checkpoints keep to the model itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from castwise.errors import PolicyError

__all__ = ["named_layers"]

M = TypeVar("M")


def named_layers(model: M) -> M:
    """The model, with every module in it opening a scope when it is called.

    Args:
        model: an ``equinox.Module`` or a ``flax.nnx.Module``; or lists, tuples and dicts of them.

    Raises:
        PolicyError: there is no such module in it.
    """
    kinds = _kinds()
    seen: dict[int, Any] = {}
    named: M = _named(model, "", kinds, seen)
    if not seen:
        raise PolicyError(
            f"named_layers: there is no module of Equinox or Flax nnx in a {type(model).__name__}. Give it the model; "
            f"around plain functions, write jax.named_scope."
        )
    return named


def _kinds() -> tuple[type, ...]:
    """The module types of the frameworks that are loaded: a model of one that is not cannot be there."""
    equinox, nnx = sys.modules.get("equinox"), sys.modules.get("flax.nnx")
    found = [] if equinox is None else [equinox.Module]
    if nnx is not None:
        found += [getattr(nnx, name) for name in ("Module", "List", "Dict", "Sequential") if hasattr(nnx, name)]
    return tuple(found)


def _named(value: Any, name: str, kinds: tuple[type, ...], seen: dict[int, Any]) -> Any:
    if isinstance(value, kinds):
        if id(value) not in seen:  # a module that is used in two places stays one
            kind: Any = type(value)
            copy: Any = object.__new__(_scoped(kind, name))
            seen[id(value)] = copy
            # What is never called, as nnx's lists, opens no scope: its name goes before those of what it holds.
            before = "" if callable(value) or not name else f"{name}/"
            inner = {key: _named(one, before + key, kinds, seen) for key, one in vars(value).items()}
            vars(copy).update(inner)
        return seen[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_named(one, f"{name}/{at}", kinds, seen) for at, one in enumerate(value))
    if type(value) is dict:
        return {key: _named(one, f"{name}/{key}", kinds, seen) for key, one in value.items()}
    return value


@functools.lru_cache(maxsize=4096)
def _scoped(kind: type, name: str) -> type:
    """A subclass whose instances open the scope ``name`` when they are called. The same one for the same two."""
    if not name or not any("__call__" in vars(base) for base in kind.__mro__):
        return kind
    call: Callable[..., Any] = kind.__call__
    scoped = functools.wraps(call)(_opening(name, call))
    made: type = type(kind)(
        kind.__name__,
        (kind,),
        {"__call__": scoped, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__},
    )
    return made


def _opening(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return call(self, *args, **kwargs)

    return scoped
