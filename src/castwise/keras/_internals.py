"""The few private names of Keras that this front end needs, in one place.

Keras has no public way to ask whether it is only working out shapes, to read the mask that travels with a tensor, or
to keep a variable out of a layer's own list. Everything else here goes through the public API.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from castwise._extras import require

keras: Any = require("keras", extra="keras")

from keras.src.backend.common.masking import get_keras_mask, set_keras_mask  # noqa: E402
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope  # noqa: E402
from keras.src.backend.common.symbolic_scope import in_symbolic_scope  # noqa: E402
from keras.src.utils.tracking import no_automatic_dependency_tracking  # noqa: E402

__all__ = [
    "backend_name",
    "children",
    "get_keras_mask",
    "get_stateless_scope",
    "in_stateless_scope",
    "in_symbolic_scope",
    "keras",
    "no_automatic_dependency_tracking",
    "own_losses",
    "replace_variable",
    "set_dtype_policy",
    "set_keras_mask",
    "strategy_scope",
    "unlocked",
]


def backend_name() -> str:
    """ "tensorflow", "jax" or "torch": what Keras runs on in this process."""
    name: str = keras.backend.backend()
    return name


def children(layer: Any) -> list[Any]:
    """The layers directly inside a layer, in the order in which Keras tracks them."""
    return list(getattr(layer, "_layers", ()))


def own_losses(layer: Any) -> list[Any]:
    """The list that ``add_loss`` appends to outside of a stateless scope."""
    losses: list[Any] = layer._losses
    return losses


def replace_variable(variable: Any, dtype: str) -> None:
    """Keep a variable in another dtype: a new backend variable with the same value, under the same Keras variable."""
    value = keras.ops.cast(variable.value, dtype)
    variable._dtype = dtype
    variable._initialize(value)


def set_dtype_policy(layer: Any, policy: Any) -> None:
    """Give one layer a dtype policy of its own, also one that shares a ``DTypePolicyMap`` with others."""
    layer._dtype_policy = policy


def strategy_scope(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Where variables are made as the model's were: on all devices of its ``tf.distribute`` strategy, if it has one."""
    strategy = getattr(model, "distribute_strategy", None)
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if strategy is None else strategy.scope()
    return scope


@contextlib.contextmanager
def unlocked(layer: Any) -> Iterator[None]:
    """Inside, a built layer takes new attributes again."""
    tracker = layer._tracker
    locked = getattr(tracker, "locked", False)
    if locked:
        tracker.unlock()
    try:
        yield
    finally:
        if locked:
            tracker.lock()
