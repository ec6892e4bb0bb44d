"""What a framework must provide to be studied: train one run in steps that can be saved, and look into its layers.

The study itself (order of runs, storage, statistics, verdict, report) knows no framework. ``torch_backend``,
``jax_backend`` and ``keras_backend`` are implementations; another one is a module with these methods and a line in
``_BACKENDS``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast

from castwise.errors import StudyError, did_you_mean
from castwise.study.arms import Arm
from castwise.study.protocol import TaskSpec
from castwise.study.records import Ending, Evaluation, Interval

__all__ = ["Backend", "Blame", "Layer", "Run", "backend_for"]

_BACKENDS: Mapping[str, str] = {
    "torch": "castwise.study.torch_backend:TorchBackend",
    "jax": "castwise.study.jax_backend:JaxBackend",
    "keras": "castwise.study.keras_backend:KerasBackend",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the model: its path, and its kind: ``embedding``, ``norm``, ``head`` or ``other``."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class Blame:
    """What a layer did wrong on one batch, measured in the arm's format against fp32 on the same inputs.

    Attributes:
        path: the layer.
        overflow: share of its output values that fp32 has and the format has not (too large, or not finite).
        noise: its part of the rounding noise that reaches the loss, 0 to 1, over all layers.
    """

    path: str
    overflow: float
    noise: float


class Run(Protocol):
    """One training run in progress."""

    emulated: bool
    memory: Mapping[str, int]

    def evaluate(self) -> Evaluation:
        """The model as it stands."""

    def advance(self, steps: int) -> tuple[Interval, Ending | None]:
        """Train ``steps`` more steps and evaluate. An ending means that the run is over."""

    def save(self) -> bytes:
        """Everything that the rest of the run depends on."""

    def load(self, state: bytes) -> None:
        """Continue from what ``save`` gave, so that every later number is the same bit for bit."""


class Backend(Protocol):
    """A framework, for one task."""

    def settings(self) -> Mapping[str, object]:
        """What besides the study's own settings decides the numbers: versions, threads, the machine that computes."""

    def session(self) -> AbstractContextManager[None]:
        """A context in which runs are reproducible; afterwards the framework is set as it was."""

    def start(self, arm: Arm, seed: int, steps: int) -> Run:
        """A run before its first step."""

    def layers(self) -> Sequence[Layer]:
        """The layers of the task's model, in the order in which they run."""

    def blame(self, arm: Arm, seed: int, state: bytes | None) -> Sequence[Blame]:
        """Layers by what they did wrong, the worst first, for the model as in ``state`` (None: untrained)."""


def backend_for(spec: TaskSpec, *, threads: int | None = None) -> Backend:
    """The backend of the task's framework. Raises ``StudyError`` for an unknown framework."""
    target = _BACKENDS.get(spec.framework)
    if target is None:
        raise StudyError(
            f"Task {spec.spelled!r}: there is no study of framework {spec.framework!r}."
            f"{did_you_mean(spec.framework, _BACKENDS)} Known: {', '.join(_BACKENDS)}."
        )
    module, _, name = target.partition(":")
    return cast("Backend", getattr(importlib.import_module(module), name)(spec, threads=threads))
