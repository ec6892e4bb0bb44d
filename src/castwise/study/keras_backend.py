"""Studying Keras tasks, on whichever backend Keras has: one run as steps that can be saved, and a look into layers.

A Keras task says ``framework = "keras"``. Its methods are those of ``Task``, in Keras' terms::

    class Digits:
        framework, metric, direction, margin = "keras", "accuracy", "higher", 0.01

        def model(self, seed): return keras.Sequential([...])               # seeds are set before
        def optimizer(self, model): return keras.optimizers.Adam(1e-3)
        def batches(self, seed): ...                                        # (x, y) of NumPy arrays
        def loss(self, model, batch, training): return cross_entropy(batch[1], model(batch[0], training=training))
        def evaluate(self, model): return float((model.predict(x).argmax(-1) == y).mean())

Each arm prepares the model with ``castwise.keras.apply``. A ``loss`` that has a parameter ``training`` is told whether
it is a training step; one without it is called the same way on validation batches.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import io
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from castwise._extras import require

keras: Any = require("keras", extra="keras")

from castwise.errors import StudyError  # noqa: E402
from castwise.formats import FP32  # noqa: E402
from castwise.guard import GuardConfig  # noqa: E402
from castwise.keras import LossScaleOptimizer, apply  # noqa: E402
from castwise.keras._device import device_kind, native  # noqa: E402
from castwise.keras._internals import children  # noqa: E402
from castwise.keras._measure import as_written, layers_during, lost_and_noise  # noqa: E402
from castwise.keras._outputs import output_layers  # noqa: E402
from castwise.keras._paths import layer_paths  # noqa: E402
from castwise.keras._region import root_of  # noqa: E402
from castwise.policy import Policy  # noqa: E402
from castwise.scaling import ScaleState  # noqa: E402
from castwise.study import _random  # noqa: E402
from castwise.study._interval import SteppedRun, agreement, mean_loss, number  # noqa: E402
from castwise.study._keras_steps import gradients_for  # noqa: E402
from castwise.study._random import capture, restore, scattered_seed  # noqa: E402
from castwise.study.arms import Arm  # noqa: E402
from castwise.study.backend import Blame, Layer  # noqa: E402
from castwise.study.calls import calling  # noqa: E402
from castwise.study.protocol import TaskSpec  # noqa: E402
from castwise.study.records import Evaluation  # noqa: E402

__all__ = ["KerasBackend", "KerasRun"]

_log = logging.getLogger("castwise.study")

# What the second number of a scattered seed stands for, so that no two uses share a stream. 1 is the data order.
_INIT, _TRAIN, _EVALUATE, _PROBE = 0, 2, 3, 4


class KerasBackend:
    """See ``backend.Backend``."""

    def __init__(self, spec: TaskSpec, *, threads: int | None = None) -> None:
        if callable(getattr(spec.task, "scheduler", None)):
            raise StudyError(
                f"Task {spec.spelled!r}: a Keras task has no scheduler. Give the optimizer a "
                f"keras.optimizers.schedules schedule in place of its learning rate."
            )
        if threads is not None:
            _log.info("Keras' backend chose its number of threads when it started: %d is not obeyed", threads)
        self.spec = spec

    def settings(self) -> Mapping[str, object]:
        return {"keras": keras.__version__, "backend": keras.backend.backend(), "runs on": device_kind()}

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Leave Python's and NumPy's random streams as they were."""
        streams = capture()
        try:
            yield
        finally:
            restore(streams)

    def start(self, arm: Arm, seed: int, steps: int) -> KerasRun:
        return KerasRun(self.spec, arm, seed)

    def layers(self) -> Sequence[Layer]:
        return KerasRun(self.spec, Arm(FP32.name, Policy(format=FP32.name)), 0).layers()

    def blame(self, arm: Arm, seed: int, state: bytes | None) -> Sequence[Blame]:
        run = self.start(arm, seed, self.spec.steps)
        if state is not None:
            run.load(state)
        return run.blame()


class KerasRun(SteppedRun):
    """See ``backend.Run``."""

    def __init__(self, spec: TaskSpec, arm: Arm, seed: int) -> None:
        self._spec, self._arm, self._seed = spec, arm, seed
        self._draw_from(_INIT)
        model = spec.model(seed)
        if not isinstance(model, keras.Model):
            raise StudyError(
                f"Task {spec.spelled!r}: model({seed}) gives a {type(model).__name__}. Return a keras.Model."
            )
        self._feed = _random.Feed(spec.batches, seed, task=spec.spelled)
        self._told = "training" in inspect.signature(spec.task.loss).parameters
        if not all(layer.built for layer in layer_paths(model).values()):
            self._build(model)
        # An arm must stay what it is said to be: nothing is raised while it runs.
        self.model = apply(model, replace(arm.policy, guard=GuardConfig(enabled=False)))
        inner = keras.optimizers.get(spec.optimizer(self.model))
        if spec.clip_norm is not None:
            inner.global_clipnorm = spec.clip_norm
        self.optimizer = LossScaleOptimizer(inner, arm.policy.effective_scaling)
        self.optimizer.track_gradient_norm = True
        self.optimizer.build(self.model.trainable_variables)
        self._gradients = gradients_for(self.model, lambda batch: self._loss(batch, training=True))
        self._wide_gradients = gradients_for(self.model, lambda batch: self._loss(batch, training=True))
        self._step = 0
        self._recent: Any = None
        self.emulated = arm.format.bits < FP32.bits and not native(device_kind(), arm.format)
        self.memory: dict[str, int] = _bytes(self.model, self.optimizer)

    def _draw_from(self, *stream: int) -> None:
        """Set every seed that a backend may draw from: dropout on torch draws from torch's own, whatever Keras' are."""
        keras.utils.set_random_seed(scattered_seed(self._seed, *stream) % 2**32)

    def _build(self, model: Any) -> None:
        """Let a model that makes its weights when it is first called make them, on a batch that is drawn again."""
        batch = _random.Feed(self._spec.batches, self._seed, task=self._spec.spelled).next()
        self.model = model
        self._loss(batch, training=False)

    def _loss(self, batch: Any, *, training: bool) -> Any:
        loss: Any = self._spec.task.loss
        with calling(self._spec.spelled, "loss"):
            value = loss(self.model, batch, training=training) if self._told else loss(self.model, batch)
        if not keras.ops.is_tensor(value) or math.prod(value.shape) != 1:
            raise StudyError(
                f"Task {self._spec.spelled!r}: loss gives a {type(value).__name__}. Return a tensor with one number, "
                f"such as the mean over the batch."
            )
        return keras.ops.reshape(keras.ops.cast(value, "float32"), ())

    # ---- training ----

    def _one_step(self, batches: Sequence[Any]) -> tuple[float, float, bool]:
        before = self.optimizer.state
        self._draw_from(_TRAIN, self._step)
        found = [self._gradients(batch, before.scale / len(batches)) for batch in batches]
        gradients = [sum(parts[1:], parts[0]) for parts in zip(*(grads for _, grads in found), strict=True)]
        self.optimizer.apply(gradients, self.model.trainable_variables)
        stepped = self.optimizer.state.skipped == before.skipped
        loss = math.fsum(loss for loss, _ in found) / len(found)
        return loss, self.optimizer.gradient_norm if stepped else math.nan, self.optimizer.stalled

    def _size_of(self, batch: Any) -> int:
        leaves = keras.tree.flatten(batch)
        shape = getattr(leaves[0], "shape", ()) if leaves else ()
        return int(shape[0]) if shape else 0

    def _scale_value(self) -> float:
        return self.optimizer.state.scale

    # ---- looking ----

    def evaluate(self) -> Evaluation:
        with self._undisturbed(), _random.seeded(scattered_seed(self._seed, _EVALUATE)):
            metric = self._spec.evaluate(self.model)
            return Evaluation(self._validation_loss(), number(metric, self._spec.spelled))

    def _validation_loss(self) -> float:
        def loss_of(batch: Any) -> float:
            return float(keras.ops.convert_to_numpy(self._loss(batch, training=False)))

        return mean_loss(self._spec.validation(), self._size_of, loss_of)

    def _direction(self) -> float:
        """The cosine between this arm's gradient and fp32's, at these weights, on the latest batch."""
        root = root_of(self.model)
        scale = self.optimizer.state.scale
        with self._undisturbed():
            self._draw_from(_PROBE, self._step)
            _, ours = self._gradients(self._recent, scale)
        with self._undisturbed(), as_written(root) if root is not None else contextlib.nullcontext():
            self._draw_from(_PROBE, self._step)
            _, theirs = self._wide_gradients(self._recent, 1.0)
        return agreement(map(_numpy, ours), map(_numpy, theirs))

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Put back what a look changes: batch statistics and seeds."""
        variables = self.model.non_trainable_variables
        before = [_numpy(variable.value).copy() for variable in variables]
        try:
            yield
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

    def layers(self) -> list[Layer]:
        paths = layer_paths(self.model)
        heads = output_layers(self.model, paths, None)
        innermost = {path: layer for path, layer in paths.items() if path and not children(layer)}
        return [Layer(path, _kind(path, layer, path in heads, self._spec.layers)) for path, layer in innermost.items()]

    def blame(self) -> list[Blame]:
        """Layers by what they lose of their results on the next batch, against float32 on the same arguments."""
        root = root_of(self.model)
        if root is None:
            return []
        batch = self._next_batch()
        with self._undisturbed():
            seen = layers_during(root, lambda: self._loss(batch, training=False))
            found = {path: lost_and_noise(root, path, *what) for path, what in seen.items()}
        total = math.fsum(noise**2 for _, noise in found.values()) or 1.0
        blamed = [Blame(path, lost, noise**2 / total) for path, (lost, noise) in found.items()]
        return sorted(blamed, key=lambda one: (-one.overflow, -one.noise))

    # ---- saving ----

    def save(self) -> bytes:
        told = {
            "position": self._feed.position,
            "step": self._step,
            "memory": self.memory,
            "scale": self.optimizer.state.to_dict(),
        }
        buffer = io.BytesIO()
        arrays = {str(place): _numpy(variable.value) for place, variable in enumerate(self._variables())}
        np.savez(buffer, told=np.frombuffer(json.dumps(told).encode(), np.uint8), **arrays)
        return buffer.getvalue()

    def load(self, state: bytes) -> None:
        with np.load(io.BytesIO(state), allow_pickle=False) as data:
            told = json.loads(data["told"].tobytes())
            for place, variable in enumerate(self._variables()):
                variable.assign(data[str(place)])
        self.optimizer.restore(ScaleState.from_dict(told["scale"]))
        self._feed.skip_to(told["position"])
        self._step, self.memory = told["step"], told["memory"]

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.inner_optimizer.variables]


def _numpy(value: Any) -> Any:
    return np.asarray(keras.ops.convert_to_numpy(value))


def _bytes(model: Any, optimizer: Any) -> dict[str, int]:
    """Bytes by what they are for; Keras does not tell which activations a step keeps."""

    def of(variables: Any) -> int:
        return sum(math.prod(v.shape) * np.dtype(keras.backend.standardize_dtype(v.dtype)).itemsize for v in variables)

    weights = of(model.weights)
    gradients = of(model.trainable_variables)
    return {"weights": weights, "gradients": gradients, "optimizer": of(optimizer.inner_optimizer.variables)}


def _kind(path: str, layer: Any, head: bool, named: Mapping[str, Sequence[str]]) -> str:
    for kind, globs in named.items():
        if any(fnmatch.fnmatchcase(path, glob) for glob in globs):
            return kind
    if isinstance(layer, keras.layers.Embedding):
        return "embedding"
    if "Normalization" in type(layer).__name__:
        return "norm"
    return "head" if head else "other"
