"""Callbacks: what stops a run that is stuck, and what watches one and lets the guard act between its steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

from castwise.scaling import ScalingConfig
from castwise.watch import Event, sink_for

from . import _optimizer
from ._examine import batches_of
from ._guard import Guard
from ._internals import keras
from ._region import root_of
from .scaling import LossScaleOptimizer

__all__ = ["StopOnCollapse", "Watch", "with_check"]

log = logging.getLogger("castwise.keras")

_EVERY = 10  # steps between two looks, each of which waits for the device


class StopOnCollapse(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends ``fit`` with the reason once the loss scale cannot go lower and gradients are still not finite.

    ``apply`` adds it to ``fit`` by itself; with ``LossScaleOptimizer`` alone, pass it. The compiled step cannot raise,
    so the state of the scale is read here, every ``every`` steps. Skipped steps are reported with it.
    """

    def __init__(self, every: int = _EVERY) -> None:
        super().__init__()
        self.every = every
        self._skipped = 0
        self._looked = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Skips of an earlier run are not reported again."""
        optimizer = self._optimizer()
        self._skipped = optimizer.state.skipped if optimizer is not None else 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Look, every few steps; with ``steps_per_execution``, after the execution that passes them."""
        if batch + 1 - self._looked >= self.every:
            self._looked = batch + 1
            self._look(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Batches are counted from the start of the epoch."""
        self._looked = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Look, and put the scale and the skips into the history."""
        optimizer = self._look(logs)
        if optimizer is not None and logs is not None and optimizer.config.enabled:
            logs["loss_scale"], logs["skipped_steps"] = optimizer.state.scale, optimizer.state.skipped

    def _optimizer(self) -> LossScaleOptimizer | None:
        optimizer = getattr(self.model, "optimizer", None)
        return optimizer if isinstance(optimizer, LossScaleOptimizer) else None

    def _look(self, logs: Any) -> LossScaleOptimizer | None:
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        state = optimizer.state
        new = state.skipped - self._skipped
        self._skipped = state.skipped
        if new > 0:
            log.info(
                "%d of the last steps had gradients that are not finite and were skipped; the loss scale is %g now.",
                new,
                state.scale,
            )
        self._before_check(state, new, logs or {})
        optimizer.check()
        return optimizer

    def _before_check(self, state: Any, new: int, logs: Any) -> None:
        """What else there is to do with what was read."""


class Watch(StopOnCollapse):
    """Feeds a run's metrics and events to sinks, and lets the guard act on broken steps.

        model.fit(x, y, callbacks=[castwise.keras.Watch("run.jsonl", SummaryWriter("logs"))])

    Metrics are those of ``castwise.torch.watch``: loss, gradient norm, loss scale, skips, learning rate, steps per
    second, raised layers. Where a layer leaves its format's range, the guard (``Policy.guard``) raises it to float32
    between two steps, says so, and later tries to give it back.

    Args:
        targets: JSONL paths, TensorBoard writers, functions of a record, or objects with ``write(record)``.
        every: steps between two looks.
        data: inputs to look for a fault with, in batches; default: those that ``fit`` is given, where they can be read
            again.
    """

    def __init__(self, *targets: Any, every: int = _EVERY, data: Iterable[Any] | None = None) -> None:
        super().__init__(every)
        self.sinks = [sink_for(target) for target in targets]
        self.events: list[Event] = []
        self.guard: Guard | None = None
        self._data = data
        self._given: tuple[Any, int | None] = (None, None)
        self._wrapped = False
        self._since = (0, 0.0)
        self._steps = 0

    def set_model(self, model: Any) -> None:
        """Let the optimizer keep the norm of its gradients; one that scales no loss is wrapped while it is watched."""
        super().set_model(model)
        if model.optimizer is None:
            return
        if not isinstance(model.optimizer, LossScaleOptimizer):
            _optimizer.wrap_with(model, ScalingConfig(enabled=False))
            self._wrapped = True
        if not model.optimizer.track_gradient_norm:
            model.optimizer.track_gradient_norm = True
            _optimizer.forget_compiled(model)

    def given(self, x: Any, batch_size: int | None) -> None:
        """What ``fit`` trains on, told by a prepared model."""
        self._given = (x, batch_size)

    def on_train_begin(self, logs: Any = None) -> None:
        """Start the clock, and a guard for a prepared model."""
        super().on_train_begin(logs)
        root = root_of(self.model)
        self.guard = Guard(root, self._batches, self._event) if root is not None else None
        optimizer = self._optimizer()
        self._steps = optimizer.state.steps if optimizer is not None else 0
        self._since = (self._steps, time.perf_counter())

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the optimizer as it was."""
        if self._wrapped:
            self._wrapped = False
            _optimizer.unwrap(self.model)

    def _before_check(self, state: Any, new: int, logs: Any) -> None:
        loss = float(logs.get("loss", math.nan))
        if state.steps > self._since[0]:
            self._write(self._metrics(state, loss))
        if self.guard is not None:
            # Skips that ended in a good step were the scale's search; those that did not are a row.
            in_a_row = new if state.good_steps == 0 else 0
            self.guard.look(state.steps, in_a_row, state.scale, loss if "loss" in logs and in_a_row else 0.0)

    def _metrics(self, state: Any, loss: float) -> dict[str, Any]:
        before, clock = self._since
        now = time.perf_counter()
        self._since = (state.steps, now)
        optimizer = self.model.optimizer
        good = {"train/grad_norm": optimizer.gradient_norm} if state.skipped < state.steps else {}
        return {
            "step": state.steps,
            "time": time.time(),
            "train/loss": loss,
            **good,  # none is known before the first step that was taken
            "train/loss_scale": state.scale,
            "train/skipped_steps": state.skipped,
            "train/skip_rate": state.skipped / max(state.steps, 1),
            "train/learning_rate": float(keras.ops.convert_to_numpy(optimizer.learning_rate)),
            "perf/steps_per_second": (state.steps - before) / max(now - clock, 1e-9),
            "numerics/raised_layers": len(self.guard.state.raised) if self.guard is not None else 0,
        }

    def _batches(self) -> Iterable[Any]:
        return self._data if self._data is not None else batches_of(*self._given)

    def _event(self, event: Event) -> None:
        self.events.append(event)
        self._write(event.to_dict())

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(record)


def with_check(model: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``fit``, with a ``StopOnCollapse`` where the optimizer scales and there is none yet."""
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return arguments
    mine = list(keras.tree.flatten(callbacks)) if callbacks else []
    for one in mine:
        if isinstance(one, Watch):
            one.given(args[0] if args else arguments.get("x"), arguments.get("batch_size"))
    if any(isinstance(one, StopOnCollapse) for one in mine) or not isinstance(model.optimizer, LossScaleOptimizer):
        return arguments
    return {**arguments, "callbacks": [StopOnCollapse(), *mine]}
