"""Studying JAX tasks: one run as steps that can be saved, and a look into layers for the remedies.

A JAX task says ``framework = "jax"``. Its methods are those of ``Task``, in JAX's terms::

    class Digits:
        framework, metric, direction, margin = "jax", "accuracy", "higher", 0.01

        def model(self, seed): return {"w": ..., "b": ...}             # float32 parameters: any pytree
        def optimizer(self, model): return optax.adamw(1e-3)
        def batches(self, seed): ...                                   # pytrees of arrays
        def loss(self, model, batch): return cross_entropy(model, batch)
        def evaluate(self, model): return (predict(model).argmax(-1) == labels).mean()

``loss`` and ``evaluate`` are pure functions that JAX traces: each arm runs them through ``castwise.jax.autocast``, so
``evaluate`` returns a scalar of JAX's and not a Python number. A ``loss`` that has a parameter ``key`` gets a fresh
PRNG key at every training step, and ``None`` on validation batches, where nothing is dropped. The arrays of the model
that are not floating-point (tables of integers, keys) are left as they are; learning rates change by optax schedules.

16-bit arms compute in 16 bits on every machine: where there is no such arithmetic, XLA computes each operation in fp32
and rounds its result. It is told not to leave those roundings out, as by default it may.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from castwise._extras import require

require("jax", extra="jax")
optax: Any = require("optax", extra="jax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from castwise.errors import StudyError  # noqa: E402
from castwise.formats import FP32  # noqa: E402
from castwise.jax import LossScale, autocast, skip_bad_steps, value_and_grad  # noqa: E402
from castwise.jax._rules import device_here  # noqa: E402
from castwise.policy import Policy  # noqa: E402
from castwise.study import _jax_layers  # noqa: E402
from castwise.study._interval import SteppedRun, agreement, mean_loss, number  # noqa: E402
from castwise.study._jax_probe import (  # noqa: E402
    Programs,
    batch_size,
    packed,
    saved_bytes,
    split,
    takes_key,
    tree_bytes,
    unpacked,
)
from castwise.study._random import Feed, capture, restore, scattered_seed, seed_all, seeded  # noqa: E402
from castwise.study.arms import Arm  # noqa: E402
from castwise.study.backend import Blame, Layer  # noqa: E402
from castwise.study.calls import calling  # noqa: E402
from castwise.study.protocol import TaskSpec  # noqa: E402
from castwise.study.records import Evaluation  # noqa: E402

__all__ = ["JaxBackend", "JaxRun"]

_log = logging.getLogger("castwise.study")

# What the second number of a scattered seed stands for, so that no two uses share a stream. 1 is the data order.
_INIT, _TRAIN, _EVALUATE, _PROBE = 0, 2, 3, 4
_NEEDS_A_VALUE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


class JaxBackend:
    """See ``backend.Backend``."""

    def __init__(self, spec: TaskSpec, *, threads: int | None = None) -> None:
        if callable(getattr(spec.task, "scheduler", None)):
            raise StudyError(
                f"Task {spec.spelled!r}: a JAX task has no scheduler. Give the optimizer a schedule of optax's in "
                f"place of its learning rate."
            )
        self.spec, self.threads = spec, threads
        # XLA may keep more digits than a 16-bit format has where it joins operations; a study must not.
        self.options: dict[str, bool] = {"xla_allow_excess_precision": False}
        if threads == 1 and jax.default_backend() == "cpu":
            self.options["xla_cpu_multi_thread_eigen"] = False
        elif threads is not None:
            _log.info("JAX chose its number of threads when it started: %d is not obeyed", threads)
        self.programs = Programs(self.options)

    def settings(self) -> Mapping[str, object]:
        device = jax.devices()[0]
        return {
            "jax": jax.__version__,
            "optax": optax.__version__,
            "runs on": device.device_kind if device.platform != "cpu" else "cpu",
            "threads": 1 if "xla_cpu_multi_thread_eigen" in self.options else "JAX's own",
            "float64": bool(jnp.result_type(float) == jnp.float64),
        }

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Leave Python's and NumPy's random streams as they were; JAX has none of its own."""
        streams = capture()
        try:
            yield
        finally:
            restore(streams)

    def start(self, arm: Arm, seed: int, steps: int) -> JaxRun:
        return JaxRun(self.spec, arm, seed, self.programs)

    def layers(self) -> Sequence[Layer]:
        return self.start(Arm(FP32.name, Policy(format=FP32.name)), 0, self.spec.steps).layers()

    def blame(self, arm: Arm, seed: int, state: bytes | None) -> Sequence[Blame]:
        run = self.start(arm, seed, self.spec.steps)
        if state is not None:
            run.load(state)
        return run.blame()


class JaxRun(SteppedRun):
    """See ``backend.Run``."""

    def __init__(self, spec: TaskSpec, arm: Arm, seed: int, programs: Programs) -> None:
        self._spec, self._arm, self._seed = spec, arm, seed
        if arm.policy.weights not in ("auto", "master"):
            raise StudyError(
                f"Arm {arm.name!r} keeps its weights as {arm.policy.weights!r}, which castwise.jax does not do. "
                f"Say weights = 'master' in its policy file."
            )
        seed_all(scattered_seed(seed, _INIT))
        model = spec.model(seed)
        self.params, self._parts = split(model, spec.spelled)
        self.optimizer = skip_bad_steps(_checked_optimizer(spec.optimizer(self.params), spec.spelled))
        with calling(spec.spelled, "the optimizer's init"):
            self.state = self.optimizer.init(self.params)
        self.scale = LossScale(arm.policy.effective_scaling)
        self._feed = Feed(spec.batches, seed, task=spec.spelled)
        self._key = jax.random.key(scattered_seed(seed, _TRAIN) % 2**32)
        self._step = 0
        self._recent: Any = None
        self.memory: dict[str, int] = {}
        device = device_here()
        self.emulated = arm.format.bits < FP32.bits and (device is None or not device.native(arm.format))

        self._keyed = takes_key(spec.task.loss)
        self._low_loss = autocast(self._task_loss, arm.policy)
        self._train = programs.made(self._train_step)
        self._compare = programs.made(self._both_gradients)
        self._validate = programs.made(lambda params, batch: self._low_loss(self._parts.whole(params), batch, None))
        low_metric = autocast(spec.task.evaluate, arm.policy)
        self._measure = programs.made(lambda params: low_metric(self._parts.whole(params)))

    # ---- what is traced ----

    def _task_loss(self, model: Any, batch: Any, key: Any) -> Any:
        loss = self._spec.task.loss
        return _one_number(loss(model, batch, key=key) if self._keyed else loss(model, batch), self._spec.spelled)  # type: ignore[call-arg]

    def _mean_loss(self, loss: Callable[..., Any], params: Any, batches: Sequence[Any], key: Any) -> Any:
        model, keys = self._parts.whole(params), jax.random.split(key, len(batches))
        return jnp.stack([loss(model, batch, keys[at]) for at, batch in enumerate(batches)]).mean()

    def _train_step(self, params: Any, state: Any, scale: LossScale, batches: Sequence[Any], key: Any) -> Any:
        gradients = value_and_grad(lambda params: self._mean_loss(self._low_loss, params, batches, key))
        (loss, grads), scale, finite = gradients(scale, params)
        norm = jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(grads)))
        if self._spec.clip_norm is not None:
            factor = jnp.minimum(1.0, self._spec.clip_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), grads)
        updates, state = self.optimizer.update(grads, state, params, finite=finite, value=loss)
        return optax.apply_updates(params, updates), state, scale, (loss, norm, finite, scale.stalled)

    def _both_gradients(self, params: Any, scale: LossScale, batch: Any, key: Any) -> tuple[Any, Any]:
        def ours(params: Any) -> Any:
            return scale.scale(self._mean_loss(self._low_loss, params, [batch], key))

        def theirs(params: Any) -> Any:
            return self._mean_loss(self._task_loss, params, [batch], key)

        return scale.unscale(jax.grad(ours)(params)), jax.grad(theirs)(params)

    # ---- training ----

    def _one_step(self, batches: Sequence[Any]) -> tuple[float, float, bool]:
        key = jax.random.fold_in(self._key, self._step)
        # Tracing is like a call: what it draws from NumPy must not depend on when it happens.
        with calling(self._spec.spelled, "a training step"), seeded(scattered_seed(self._seed, _TRAIN)):
            self.params, self.state, self.scale, told = self._train(self.params, self.state, self.scale, batches, key)
            loss, norm, finite, stalled = jax.device_get(told)
        return float(loss), float(norm) if finite else math.nan, bool(stalled)

    def _size_of(self, batch: Any) -> int:
        return batch_size(batch)

    def _scale_value(self) -> float:
        return float(self.scale.scale_value)

    # ---- looking ----

    def evaluate(self) -> Evaluation:
        with seeded(scattered_seed(self._seed, _EVALUATE)):
            return Evaluation(self._validation_loss(), self._metric())

    def _metric(self) -> float:
        try:
            with calling(self._spec.spelled, "evaluate"):
                value = self._measure(self.params)
        except StudyError as error:
            if not isinstance(error.__cause__, _NEEDS_A_VALUE):
                raise
            raise StudyError(
                f"Task {self._spec.spelled!r}: evaluate needs the value of an array while JAX traces it. Compute with "
                f"jax.numpy and return a scalar of JAX's, without float() or NumPy."
            ) from error
        return number(value, self._spec.spelled)

    def _validation_loss(self) -> float:
        def loss_of(batch: Any) -> float:
            with calling(self._spec.spelled, "loss"):
                return float(self._validate(self.params, batch))

        return mean_loss(self._spec.validation(), batch_size, loss_of)

    def _direction(self) -> float:
        """The cosine between this arm's gradient and fp32's, at these weights, on the latest batch."""
        seed = scattered_seed(self._seed, _PROBE, self._step)
        key = jax.random.key(seed % 2**32)
        with seeded(seed):
            if not self.memory:
                loss = self._mean_loss
                kept = saved_bytes(lambda params: loss(self._low_loss, params, [self._recent], key), self.params)
                weights = tree_bytes(self.params)
                states = tree_bytes(self.state.inner)
                self.memory = {"weights": weights, "gradients": weights, "optimizer": states, "activations": kept}
            ours, theirs = jax.device_get(self._compare(self.params, self.scale, self._recent, key))
        return agreement(jax.tree.leaves(ours), jax.tree.leaves(theirs))

    def layers(self) -> list[Layer]:
        """See ``_jax_layers.classify``."""
        with calling(self._spec.spelled, "loss"):
            return _jax_layers.classify(self._task_loss, self._loss_arguments(), self._spec.layers)

    def blame(self) -> list[Blame]:
        """Which layers lose what fp32 keeps, on the next batch; see ``_jax_layers.blame``."""
        return _jax_layers.blame(self._task_loss, self._loss_arguments(), self._arm.policy)

    def _loss_arguments(self) -> tuple[Any, ...]:
        return self._parts.whole(self.params), self._next_batch(), jax.random.fold_in(self._key, 0)

    # ---- saving ----

    def save(self) -> bytes:
        told = {"position": self._feed.position, "step": self._step, "memory": self.memory}
        return packed(jax.tree.leaves((self.params, self.state, self.scale)), json.dumps(told))

    def load(self, state: bytes) -> None:
        leaves, structure = jax.tree.flatten((self.params, self.state, self.scale))
        values, told = unpacked(state, leaves)
        self.params, self.state, self.scale = jax.tree.unflatten(structure, values)
        data = json.loads(told)
        self._feed.skip_to(data["position"])
        self._step, self.memory = data["step"], data["memory"]


def _checked_optimizer(found: Any, task: str) -> Any:
    if not callable(getattr(found, "init", None)) or not callable(getattr(found, "update", None)):
        raise StudyError(
            f"Task {task!r}: optimizer(model) gives a {type(found).__name__}. Return a transformation of optax's, such "
            f"as optax.adamw(1e-3)."
        )
    return found


def _one_number(loss: Any, task: str) -> Any:
    if not isinstance(loss, jax.Array):
        raise StudyError(f"Task {task!r}: loss gives a {type(loss).__name__}. Return an array with one number.")
    if loss.size != 1 or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise StudyError(
            f"Task {task!r}: loss gives an array of shape {loss.shape} and {loss.dtype}. "
            f"Return one real number, such as the mean over the batch."
        )
    return loss.reshape(())
