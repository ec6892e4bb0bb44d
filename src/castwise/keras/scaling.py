"""Loss scaling for any Keras optimizer, by the state machine that all of Castwise uses.

    optimizer = castwise.keras.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(optimizer, loss="mse")

Keras' own wrapper has neither a floor nor a cap: after some 150 bad batches its scale is zero, the next good batch is
divided by it, and the weights are NaN from there on. Here the scale stays within its limits, a run that is stuck says
so, and what was skipped can be asked for.

The state lives in the four variables that Keras' wrapper has too, so that a model saved with this optimizer loads
where Castwise is not installed, and the other way round. Keras uses two of the four; this one uses all:

=================  =====================================================================================
variable           holds
=================  =====================================================================================
``iteration``      steps seen, skipped ones included
``learning_rate``  steps skipped (Keras keeps a constant 0 here; the rate itself is the inner optimizer's)
``step_counter``   good steps in a row; after a bad one, minus what ``_packed`` makes of the row of bad ones
``dynamic_scale``  the scale
=================  =====================================================================================
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from castwise._extras import require
from castwise._files import write_text
from castwise.errors import PolicyError, ScaleStalledError
from castwise.policy import Policy
from castwise.scaling import ScaleState, ScalingConfig, advance, initial_state, stalled_message, with_knobs

from ._device import resolve
from ._internals import backend_name, keras, no_automatic_dependency_tracking

__all__ = ["LossScaleOptimizer"]

log = logging.getLogger("castwise.keras")

ASSET = "castwise_loss_scale.json"
# What Keras calls two of them, in files and arguments.
_KERAS_NAMES = {"initial_scale": "init_scale", "dynamic_growth_steps": "growth_interval"}


class _SavedAsKerasOptimizer:
    """What is written to files is the class of Keras' own wrapper, which every Keras can load."""

    __class__ = property(lambda self: keras.optimizers.LossScaleOptimizer)


class LossScaleOptimizer(_SavedAsKerasOptimizer, keras.optimizers.LossScaleOptimizer):  # type: ignore[misc]
    """Any Keras optimizer, with the loss scaled and bad steps skipped.

    Args:
        inner_optimizer: a ``keras.optimizers.Optimizer``, its name or its config. Gradient accumulation, clipping and
            averages of weights are its own; it sees unscaled gradients.
        config: the knobs, as a ``ScalingConfig``, or a policy (or its name) that says whether and how the loss is
            scaled. Default: ``ScalingConfig()``.
        name: of the optimizer.
        knobs: single knobs, by torch's names (``init_scale``, ``growth_interval``, …), Castwise's (``min_scale``,
            ``max_scale``, ``patience``, …), or Keras' (``initial_scale``, ``dynamic_growth_steps``).

    Raises:
        PolicyError: a knob is unknown or out of range.
    """

    def __init__(self, inner_optimizer: Any, config: Any = None, *, name: str | None = None, **knobs: Any) -> None:
        config = _config(config, knobs)
        inner = keras.optimizers.get(inner_optimizer)
        if isinstance(inner, keras.optimizers.LossScaleOptimizer):
            inner = inner.inner_optimizer
        first = initial_state(config).scale
        super().__init__(inner, initial_scale=first, dynamic_growth_steps=config.growth_interval, name=name)
        self.config: ScalingConfig = config
        self._localise()
        self.track_gradient_norm = False

    @no_automatic_dependency_tracking  # type: ignore[untyped-decorator]
    def _localise(self) -> None:
        """The two variables that Keras made for other purposes, made again so that every replica writes its own."""
        self._variables.clear()
        self._iterations = self.add_variable((), dtype="int", aggregation="none", name="iteration")
        self._learning_rate = self.add_variable((), dtype="float32", aggregation="none", name="learning_rate")

    @no_automatic_dependency_tracking  # type: ignore[untyped-decorator]
    def build(self, var_list: Any) -> None:
        """Make the variables: the state of the scale, and the inner optimizer's."""
        if self.built:
            return
        super().build(var_list)
        self._norm = keras.Variable(0.0, dtype="float32", trainable=False, aggregation="none", name="gradient_norm")

    @property
    def variables(self) -> list[Any]:
        """All variables, in the order of Keras' own wrapper; the gradient norm, which no file holds, comes last."""
        own = super().variables
        return [*own, self._norm] if self.built else list(own)

    def save_own_variables(self, store: Any) -> None:
        """Write what Keras' wrapper would write, and no more."""
        for position, variable in enumerate(self.variables[:-1] if self.built else self.variables):
            store[str(position)] = keras.ops.convert_to_numpy(variable.value)

    def load_own_variables(self, store: Any) -> None:
        """Read what this wrapper or Keras' own has written.

        Raises:
            PolicyError: it was written for other weights.
        """
        known = self.variables[:-1] if self.built else self.variables
        if len(store.keys()) != len(known):
            raise PolicyError(
                f"The saved optimizer has {len(store.keys())} variables and this one {len(known)}. Load it into a "
                "model of the same weights, after optimizer.build(model.trainable_variables)."
            )
        for position, variable in enumerate(known):
            variable.assign(store[str(position)])

    def save_assets(self, path: str) -> None:
        """Leave the state in the file, for ``castwise.keras.load_model``: the variables alone depend on the knobs."""
        write_text(Path(path) / ASSET, json.dumps(self.state.to_dict()))

    # ---- the state ----

    @property
    def state(self) -> ScaleState:
        """The state as plain numbers. Waits for the device."""
        if not self.built:
            return initial_state(self.config)
        return ScaleState.from_dict({f.name: _number(getattr(self._state(), f.name)) for f in fields(ScaleState)})

    @property
    def gradient_norm(self) -> float:
        """The norm of the last good step's unscaled gradients; 0 until ``track_gradient_norm`` is set. Waits."""
        return _number(self._norm.value) if self.built else 0.0

    @property
    def stalled(self) -> bool:
        """Whether the run is stuck: ``patience`` skips in a row where no lower scale is to be had. Waits."""
        return self.state.floor_skips >= self.config.patience

    def check(self) -> None:
        """Stop a run that is stuck.

        Raises:
            ScaleStalledError: the run has stalled; the message says what to do.
        """
        if self.stalled:
            raise ScaleStalledError(stalled_message(self.state, self.config))

    def restore(self, state: ScaleState) -> None:
        """Continue from a state, of a checkpoint or of another optimizer."""
        ops, packed = keras.ops, _packed(state, self.config)
        for variable, value in zip(self._scale_variables(), packed, strict=True):
            variable.assign(ops.cast(value, variable.dtype))

    def _scale_variables(self) -> tuple[Any, Any, Any, Any]:
        return self._iterations, self._learning_rate, self.step_counter, self.dynamic_scale

    def _state(self) -> ScaleState:
        """The state as the backend's scalars, each int32 but for the scale."""
        ops = keras.ops
        steps, skipped, counter = (ops.cast(v.value, "int32") for v in self._scale_variables()[:3])
        row = ops.where(counter < 0, -counter, 0)  # the present row of bad steps, packed
        base = self.config.hysteresis + 1
        left = self.config.hysteresis - row % base
        good = ops.where(counter > 0, counter, 0)
        return ScaleState(ops.convert_to_tensor(self.dynamic_scale.value), good, left, row // base, steps, skipped)

    def _advance(self, finite: bool) -> None:
        after, _ = advance(self._state(), finite, self.config, _where)
        self.restore(after)

    # ---- a step: what Keras' own wrapper calls, on every backend ----

    def _unscaled(self, grads: Any, variables: Any) -> list[Any]:
        ops, scale = keras.ops, self.dynamic_scale.value
        unscaled = [
            g if g is None or self._overwrite_variable_with_gradient(v) else ops.divide(g, ops.cast(scale, "float32"))
            for g, v in zip(grads, variables, strict=True)
        ]
        if self.track_gradient_norm:
            parts = [ops.sum(ops.square(ops.cast(g, "float32"))) for g in unscaled if g is not None]
            self._norm.assign(ops.sqrt(sum(parts, ops.zeros((), "float32"))))
        return unscaled

    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        unscaled = self._unscaled(grads, trainable_variables or self._trainable_variables)
        self._advance(True)
        self.inner_optimizer.apply(unscaled, trainable_variables=trainable_variables)

    def _stateful_handle_non_finite_grads(self) -> None:
        self._advance(False)

    def _stateless_handle_finite_grads(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[Any, Any]:
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            unscaled = self._unscaled(grads, self._trainable_variables)
            self._advance(True)
            trainable, inner = self.inner_optimizer.stateless_apply(
                self.inner_optimizer.variables, unscaled, trainable_variables
            )
        own = [scope.get_current_value(v) for v in self._variables]
        return trainable, [*own, *inner, scope.get_current_value(self._norm)]

    def _stateless_handle_non_finite_grads(self, optimizer_variables: Any, trainable_variables: Any) -> tuple[Any, Any]:
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self._advance(False)
        return trainable_variables, [scope.get_current_value(v) for v in self.variables]

    def _common_apply(self, grads: Any, trainable_variables: Any = None) -> None:
        finite = self.check_finite(grads)
        if backend_name() != "jax":
            self._step_if(finite, grads, trainable_variables)
        elif finite:  # a loop without jit: JAX traces the branches of a condition, and no trace may write variables
            self._stateful_handle_finite_grads(grads, trainable_variables)
        else:
            self._stateful_handle_non_finite_grads()

    def _tf_apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """On TensorFlow, all replicas agree first.

        Gradients are summed over replicas only when the inner optimizer steps. Keras asks the first replica alone
        before that, so what another one has overflowed would be summed into the weights of all.
        """
        tf: Any = require("tensorflow", extra="tensorflow")
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            super()._tf_apply(grads, trainable_variables)
            return
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            bad = tf.cast(tf.logical_not(self.check_finite(grads)), tf.float32)
            self._step_if(context.all_reduce(tf.distribute.ReduceOp.SUM, bad) == 0.0, grads, trainable_variables)
            return

        def across(strategy: Any, grads: Any, variables: Any) -> None:
            found = strategy.extended.call_for_each_replica(self.check_finite, args=(grads,))
            finite = tf.reduce_all([tf.identity(one) for one in strategy.experimental_local_results(found)])
            step = functools.partial(
                strategy.extended.call_for_each_replica, self._stateful_handle_finite_grads, args=(grads, variables)
            )
            keras.ops.cond(finite, lambda: _nothing(step()), self._stateful_handle_non_finite_grads)

        context.merge_call(across, args=(grads, trainable_variables))

    def _step_if(self, finite: Any, grads: Any, variables: Any) -> None:
        keras.ops.cond(
            finite,
            lambda: self._stateful_handle_finite_grads(grads, variables),
            self._stateful_handle_non_finite_grads,
        )

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> LossScaleOptimizer:
        """The optimizer of a config, of this class or of Keras' own wrapper."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("inner_optimizer"), custom_objects=custom_objects)
        return cls(inner, **config)


def _config(config: Any, knobs: dict[str, Any]) -> ScalingConfig:
    if config is None:
        base = ScalingConfig()
    elif isinstance(config, ScalingConfig):
        base = config
    else:
        base = resolve(Policy.coerce(config)).effective_scaling
    given = {_KERAS_NAMES.get(key, key): value for key, value in knobs.items()}
    return with_knobs(base, given, "; and what an optimizer takes (clipnorm, use_ema, …) belongs to the inner one")


def _packed(state: ScaleState, config: ScalingConfig) -> tuple[Any, Any, Any, Any]:
    """A state as the values of the four variables."""
    row = state.floor_skips * (config.hysteresis + 1) + (config.hysteresis - state.hysteresis_left)
    return state.steps, state.skipped, _where(row > 0, -row, state.good_steps), state.scale


def _where(condition: Any, if_true: Any, if_false: Any) -> Any:
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return keras.ops.where(condition, if_true, if_false)


def _nothing(_: Any) -> None:
    return None


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
