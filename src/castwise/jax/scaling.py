"""Loss scaling as a value: a pytree that goes through jit, scan, checkpoints and devices like any other state.

    scale = LossScale()
    step_gradients = value_and_grad(loss_fn)

    @jax.jit
    def step(scale, params, opt_state, batch):
        (loss, grads), scale, finite = step_gradients(scale, params, batch)
        # optimizer = skip_bad_steps(optax.adam(...))
        updates, opt_state = optimizer.update(grads, opt_state, params, finite=finite)
        return scale, optax.apply_updates(params, updates), opt_state, loss

    for batch in batches:
        scale, params, opt_state, loss = step(scale, params, opt_state, batch)
        scale.check()                                                          # raises once nothing works any more

There is one state machine, ``castwise.scaling.advance``, and it runs here on device scalars. What it takes for granted
is what scalers get wrong: gradients are divided by the scale that they were multiplied by, not by the next one; the
limits are part of the value and cannot be lost on the way through jit; and a run that is stuck says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp

from castwise.errors import PolicyError, ScaleStalledError
from castwise.policy import Policy
from castwise.scaling import ScaleState, ScalingConfig, advance, initial_state, stalled_message, with_knobs

from ._rules import resolve

__all__ = ["LossScale", "all_finite", "value_and_grad"]

_FIELDS = tuple(field.name for field in fields(ScaleState))
_DTYPES = {name: jnp.float32 if name == "scale" else jnp.int32 for name in _FIELDS}


@jax.tree_util.register_pytree_with_keys_class
class LossScale:
    """A loss scale and all that decides its next value. Every method returns a new one; none changes this one.

    Args:
        config: the knobs, as a ``ScalingConfig``, or a policy (or its name) that says whether and how the loss is
            scaled.
        knobs: single knobs, by torch's names (``init_scale``, ``growth_factor``, ``backoff_factor``,
            ``growth_interval``, ``enabled``) and Castwise's (``min_scale``, ``max_scale``, ``hysteresis``,
            ``patience``, …).

    Raises:
        PolicyError: a knob is unknown or out of range.
    """

    def __init__(self, config: ScalingConfig | Policy | str | None = None, **knobs: Any) -> None:
        if config is None:
            base = ScalingConfig()
        elif isinstance(config, ScalingConfig):
            base = config
        else:
            base = resolve(Policy.coerce(config)).effective_scaling
        self.config = with_knobs(base, knobs)
        first = initial_state(self.config)
        self.state = _on_device(first)

    # ---- the value ----

    @property
    def scale_value(self) -> jax.Array:
        """The scale, a float32 scalar."""
        return jnp.asarray(self.state.scale)

    @property
    def stalled(self) -> jax.Array:
        """Whether the run is stuck: ``patience`` skips in a row where no lower scale is to be had. Usable in jit."""
        return jnp.asarray(self.state.floor_skips) >= self.config.patience

    def scale(self, tree: Any) -> Any:
        """The tree with every floating leaf multiplied by the scale; 16-bit leaves come back in float32, to hold it."""
        return jax.tree.map(lambda leaf: _times(leaf, self.scale_value, widen=True), tree)

    def unscale(self, tree: Any) -> Any:
        """The tree with every floating leaf divided by the scale, in its own dtype; computed in float32 at least."""
        inverse = 1.0 / self.scale_value
        return jax.tree.map(lambda leaf: _times(leaf, inverse, widen=False), tree)

    def adjust(self, finite: Any, *, axis_name: str | Sequence[str] | None = None) -> LossScale:
        """The scale for the next step.

        Args:
            finite: whether all gradients of this step, still scaled, were finite.
            axis_name: mesh or map axes over which the devices first agree: one bad device is a bad step for all.
        """
        after, _ = advance(self.state, _agreed(jnp.asarray(finite), axis_name), self.config, jnp.where)
        return self._with(_on_device(after))

    def check(self) -> LossScale:
        """Return this, or stop a run that is stuck. Waits for the device, so call it outside of jit.

        Raises:
            ScaleStalledError: the run has stalled; the message says what to do.
        """
        if isinstance(self.stalled, jax.core.Tracer):
            raise PolicyError(
                "LossScale.check() reads a number and cannot be traced. Inside jit, return scale.stalled."
            )
        if bool(self.stalled.any()):
            plain = ScaleState.from_dict({name: jnp.asarray(getattr(self.state, name)).max() for name in _FIELDS})
            raise ScaleStalledError(stalled_message(plain, self.config))
        return self

    def to_dict(self) -> dict[str, float | int]:
        """The state as plain numbers, for any checkpoint; ``from_dict`` reads it back. Waits for the device."""
        return self.state.to_dict()

    def from_dict(self, data: dict[str, Any]) -> LossScale:
        """This scale's knobs with a state that ``to_dict`` gave. Raises ``PolicyError`` where it is not one."""
        plain = ScaleState.from_dict(data)
        return self._with(_on_device(plain))

    def _with(self, state: ScaleState) -> LossScale:
        new = object.__new__(type(self))
        new.config, new.state = self.config, state
        return new

    def __repr__(self) -> str:
        return f"LossScale({', '.join(f'{name}={getattr(self.state, name)}' for name in _FIELDS)})"

    # ---- a pytree ----

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], ScalingConfig]:
        """The state as leaves, the knobs as structure."""
        return [(jax.tree_util.GetAttrKey(name), getattr(self.state, name)) for name in _FIELDS], self.config

    @classmethod
    def tree_unflatten(cls, config: ScalingConfig, leaves: Sequence[Any]) -> LossScale:
        """The reverse; leaves may be anything that a transformation puts there."""
        new = object.__new__(cls)
        new.config, new.state = config, ScaleState(*leaves)
        return new


def _on_device(state: ScaleState) -> ScaleState:
    """The state as device scalars, each of its own dtype."""
    scalars: list[Any] = [jnp.asarray(getattr(state, name), _DTYPES[name]) for name in _FIELDS]
    return ScaleState(*scalars)


def _times(leaf: Any, factor: jax.Array, *, widen: bool) -> Any:
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return leaf
    wide = jnp.promote_types(dtype, jnp.float32)
    result = jnp.asarray(leaf, wide) * factor.astype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    return result if widen else result.astype(dtype)


def _agreed(finite: jax.Array, axis_name: str | Sequence[str] | None) -> jax.Array:
    if axis_name is None:
        return finite
    agreed: jax.Array = jax.lax.pmin(finite.astype(jnp.int32), axis_name) > 0  # type: ignore[no-untyped-call]
    return agreed


def all_finite(tree: Any) -> jax.Array:
    """Whether every floating leaf of a tree is finite throughout: a boolean scalar."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    if not floats:
        return jnp.asarray(True)
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    axis_name: str | Sequence[str] | None = None,
) -> Callable[..., tuple[tuple[Any, Any], LossScale, jax.Array]]:
    """Like ``jax.value_and_grad``, with the loss scaled on the way.

    Args:
        fn: returns the loss, a scalar, or ``(loss, aux)`` with ``has_aux``.
        argnums: which of ``fn``'s arguments to differentiate by; the scale, which comes before them, does not count.
        has_aux: as in JAX.
        axis_name: axes over which devices agree whether the step was good. Gradients are not reduced over them.

    Returns:
        A function ``(scale, *args, **kwargs) -> ((value, grads), scale, finite)``: the value and the gradients without
        the scale (divided by the one that was used), the scale for the next step, and whether all gradients were
        finite. With ``has_aux``, ``value`` is ``(loss, aux)``.
    """

    def wrapped(scale: LossScale, *args: Any, **kwargs: Any) -> tuple[tuple[Any, Any], LossScale, jax.Array]:
        if not isinstance(scale, LossScale):
            raise PolicyError(
                f"The first argument is a {type(scale).__name__}, not a LossScale. Call it with the scale of this "
                f"step, then the function's own arguments: (scale, *args)."
            )

        def scaled(*inner: Any, **named: Any) -> tuple[Any, Any]:
            result = fn(*inner, **named)
            return scale.scale(result[0] if has_aux else result), result

        (_, value), grads = jax.value_and_grad(scaled, argnums, has_aux=True)(*args, **kwargs)
        finite = _agreed(all_finite(grads), axis_name)
        return (value, scale.unscale(grads)), scale.adjust(finite), finite

    return wrapped
