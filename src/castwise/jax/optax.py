"""Optax transformations that step only where the gradients are finite.

    optimizer = with_loss_scale(optax.adamw(1e-3), LossScale("float16"))
    loss = optimizer_state.loss_scale.scale(loss)                              # ... differentiate it ...
    updates, optimizer_state = optimizer.update(scaled_grads, optimizer_state, params)

A bad step gives updates of zero and leaves the inner state as it was: moments, counters and schedules do not advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from castwise._extras import require

from .scaling import LossScale, _agreed, all_finite

__all__ = ["ScaledState", "SkipState", "skip_bad_steps", "with_loss_scale"]


class SkipState(NamedTuple):
    """State of ``skip_bad_steps``: the inner transformation's, and how many steps were skipped."""

    inner: Any
    skipped: jax.Array


class ScaledState(NamedTuple):
    """State of ``with_loss_scale``: the inner transformation's, and the scale for the next loss."""

    inner: Any
    loss_scale: LossScale


def skip_bad_steps(inner: Any, *, axis_name: str | Sequence[str] | None = None) -> Any:
    """``inner``, applied where the gradients are finite.

    Args:
        inner: an ``optax.GradientTransformation``.
        axis_name: axes over which devices agree.

    Returns:
        A transformation whose ``update`` takes ``finite=``; without it, it looks at the gradients itself.
    """
    optax = require("optax", extra="jax")
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> SkipState:
        return SkipState(inner.init(params), jnp.zeros((), jnp.int32))

    def update(
        updates: Any, state: SkipState, params: Any = None, *, finite: Any = None, **extra: Any
    ) -> tuple[Any, SkipState]:
        good = _agreed(all_finite(updates) if finite is None else jnp.asarray(finite), axis_name)
        stepped, kept = _step(inner, updates, state.inner, params, good, extra)
        return stepped, SkipState(kept, state.skipped + jnp.where(good, 0, 1).astype(jnp.int32))

    return optax.GradientTransformationExtraArgs(init, update)


def with_loss_scale(
    inner: Any, loss_scale: LossScale | None = None, *, axis_name: str | Sequence[str] | None = None
) -> Any:
    """``inner``, for gradients of a loss that was scaled by ``state.loss_scale``.

    Args:
        inner: an ``optax.GradientTransformation``; it gets unscaled gradients, so clipping means what it says.
        loss_scale: the first scale; default ``LossScale()``.
        axis_name: axes over which devices agree.

    Returns:
        A transformation. Its ``update`` divides by the scale that was used, skips bad steps and adjusts the scale.
    """
    optax = require("optax", extra="jax")
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> ScaledState:
        return ScaledState(inner.init(params), LossScale() if loss_scale is None else loss_scale)

    def update(updates: Any, state: ScaledState, params: Any = None, **extra: Any) -> tuple[Any, ScaledState]:
        good = _agreed(all_finite(updates), axis_name)
        unscaled = state.loss_scale.unscale(updates)
        stepped, kept = _step(inner, unscaled, state.inner, params, good, extra)
        return stepped, ScaledState(kept, state.loss_scale.adjust(good))

    return optax.GradientTransformationExtraArgs(init, update)


def _step(inner: Any, updates: Any, state: Any, params: Any, good: jax.Array, extra: dict[str, Any]) -> tuple[Any, Any]:
    """The inner update and state where the step is good, else zeros and the state as it was."""
    stepped, after = inner.update(updates, state, params, **extra)
    stepped = jax.tree.map(lambda new: jnp.where(good, new, jnp.zeros_like(new)), stepped)
    return stepped, jax.tree.map(lambda new, old: jnp.where(good, new, old), after, state)
