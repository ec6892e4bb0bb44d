"""What a function writes into Flax nnx modules that it is given: running statistics, counters of random numbers.

A region is traced, so the function gets copies of its arguments, and what it writes into a copy would be lost: batch
statistics that never move, the same dropout mask in every step. As ``nnx.jit`` does, a region therefore returns what
was written beside the result, and writes it into the modules that the caller has.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import jax

from castwise.errors import PolicyError

__all__ = ["values_of", "variables", "write_back", "written"]

log = logging.getLogger("castwise.jax")


def variables(tree: Any) -> list[Any]:
    """The nnx Variables in a tree of arguments, in order; none where Flax is not loaded."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    leaves = jax.tree.leaves(tree, is_leaf=lambda one: isinstance(one, nnx.Variable))
    return [one for one in leaves if isinstance(one, nnx.Variable)]


def values_of(held: Sequence[Any]) -> list[Any]:
    """What Variables hold now."""
    return [one.get_raw_value() for one in held]


def written(held: Sequence[Any], before: Sequence[Any], after: Any) -> dict[int, Any]:
    """New values of Variables, by position, once a function has run on the arguments that hold them.

    Args:
        held: Variables of the arguments before it ran.
        before: their values then.
        after: the arguments now, which may hold more of them.
    """
    known = set(map(id, held))
    added = sorted({type(one).__name__ for one in variables(after) if id(one) not in known}) if held else []
    if added:
        log.warning(
            "The function adds variables to a module (%s), which stay inside the region. Return what you need of them.",
            ", ".join(added),
        )
    return {at: now for at, (now, old) in enumerate(zip(values_of(held), before, strict=True)) if now is not old}


def write_back(tree: Any, changed: dict[int, Any]) -> None:
    """Write new values, by position, into the Variables of the caller's arguments.

    Raises:
        PolicyError: one of them is in the arguments twice; each copy may have got another value.
    """
    held = variables(tree)
    targets = [held[at] for at in changed]
    if len(set(map(id, targets))) < len(targets):
        names = ", ".join(sorted({type(one).__name__ for one in targets}))
        raise PolicyError(
            f"A variable of a module ({names}) is in the arguments of an autocast function more than once, and the "
            f"function writes into it. Split the module with nnx.split, give autocast a function of the state, and "
            f"return the new state."
        )
    for one, value in zip(targets, changed.values(), strict=True):
        one.set_raw_value(value)
