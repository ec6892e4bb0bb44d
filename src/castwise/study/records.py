"""What is written down about a run: values that go to JSON and come back bit for bit.

A resumed study must end with the same results as an undisturbed one, so records are plain frozen data: Python's
``repr`` of a float is exact, NaN and infinities (which JSON does not have) are written as null and read as NaN.
Wall-clock quantities live in fields of their own (``seconds``), apart from everything that is reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

__all__ = ["Ending", "Evaluation", "Failure", "Interval", "RunRecord", "finite_or_none", "from_json", "to_json"]


class Failure(StrEnum):
    """How a run ended early. Each is a result of the study, not an error of it."""

    NON_FINITE = "non-finite loss"
    STALLED = "scale stalled"
    EXPLODED = "loss exploded"


@dataclass(frozen=True, slots=True)
class Ending:
    """A run that stopped before its last step.

    Attributes:
        failure: which kind.
        step: optimizer steps tried when it stopped.
        message: what happened, in words, for the report.
    """

    failure: Failure
    step: int
    message: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The model as it stands: validation loss (NaN where the task has no validation batches) and the task's metric."""

    validation: float
    metric: float


@dataclass(frozen=True, slots=True)
class Interval:
    """One stretch of training between two evaluations.

    Attributes:
        step: steps tried from the start of the run to the end of this interval.
        loss: mean training loss over the steps whose loss was finite.
        evaluation: the model at the end of the interval.
        grad_norms: the unscaled gradient norm of each step; NaN where the step was skipped.
        direction: cosine between the arm's gradient and fp32's at the same weights on the same batch, -1 to 1; NaN
            where either is zero or not finite.
        scale: the loss scale at the end.
        skipped: steps of this interval that were not taken because gradients were not finite.
        samples: training samples seen; 0 where the batch does not tell.
        seconds: wall-clock time of the training steps alone.
    """

    step: int
    loss: float
    evaluation: Evaluation
    grad_norms: tuple[float, ...]
    direction: float
    scale: float
    skipped: int
    samples: int
    seconds: float

    @property
    def grad_norm(self) -> float:
        """Mean unscaled gradient norm over the steps taken; NaN where none was."""
        finite = [norm for norm in self.grad_norms if math.isfinite(norm)]
        return math.fsum(finite) / len(finite) if finite else math.nan


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One training run: an arm and a seed.

    Attributes:
        arm, seed: which run.
        fingerprint: a hash of everything that decides the run's numbers; a resumed study compares it.
        initial: the untrained model, evaluated in the arm's own precision.
        intervals: in order.
        ending: why it stopped early; None while it runs and when it reached its last step.
        emulated: whether its arithmetic was emulated on this machine.
        memory: bytes of weights, gradients, optimizer state and saved activations, by name; empty until measured.
    """

    arm: str
    seed: int
    fingerprint: str
    initial: Evaluation
    intervals: tuple[Interval, ...] = ()
    ending: Ending | None = None
    emulated: bool = False
    memory: Mapping[str, int] = field(default_factory=dict)

    def then(self, interval: Interval) -> RunRecord:
        """The record with one interval more."""
        return replace(self, intervals=(*self.intervals, interval))

    @property
    def step(self) -> int:
        return self.intervals[-1].step if self.intervals else 0

    @property
    def skipped(self) -> int:
        return sum(interval.skipped for interval in self.intervals)

    @property
    def final(self) -> Evaluation:
        """The last evaluation; NaN throughout where the run ended early: no last model exists to be compared."""
        if self.ending is not None or not self.intervals:
            return Evaluation(math.nan, math.nan)
        return self.intervals[-1].evaluation

    @property
    def peak_loss(self) -> float:
        """The largest finite loss seen, in magnitude, untrained model included; NaN where none was finite."""
        losses = [self.initial.validation]
        for interval in self.intervals:
            losses += [interval.loss, interval.evaluation.validation]
        finite = [abs(loss) for loss in losses if math.isfinite(loss)]
        return max(finite) if finite else math.nan

    @property
    def steps_per_second(self) -> float:
        seconds = math.fsum(interval.seconds for interval in self.intervals)
        return self.step / seconds if seconds > 0 else math.nan

    @property
    def samples_per_second(self) -> float:
        seconds = math.fsum(interval.seconds for interval in self.intervals)
        samples = sum(interval.samples for interval in self.intervals)
        return samples / seconds if seconds > 0 and samples else math.nan


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN and no infinity: both become null."""
    return value if math.isfinite(value) else None


def to_json(record: RunRecord) -> dict[str, Any]:
    """The record as JSON values."""
    plain = asdict(record)
    plain["memory"] = dict(record.memory)
    cleaned: dict[str, Any] = _clean(plain)
    return cleaned


def from_json(data: Mapping[str, Any]) -> RunRecord:
    """The record that ``to_json`` wrote. Raises ``KeyError`` or ``TypeError`` where it is not one."""
    ending = data["ending"]
    return RunRecord(
        arm=data["arm"],
        seed=data["seed"],
        fingerprint=data["fingerprint"],
        initial=_evaluation(data["initial"]),
        intervals=tuple(_interval(item) for item in data["intervals"]),
        ending=None if ending is None else Ending(Failure(ending["failure"]), ending["step"], ending["message"]),
        emulated=data["emulated"],
        memory=dict(data["memory"]),
    )


def _interval(data: Mapping[str, Any]) -> Interval:
    return Interval(
        step=data["step"],
        loss=_number(data["loss"]),
        evaluation=_evaluation(data["evaluation"]),
        grad_norms=tuple(_numbers(data["grad_norms"])),
        direction=_number(data["direction"]),
        scale=_number(data["scale"]),
        skipped=data["skipped"],
        samples=data["samples"],
        seconds=_number(data["seconds"]),
    )


def _evaluation(data: Mapping[str, Any]) -> Evaluation:
    return Evaluation(_number(data["validation"]), _number(data["metric"]))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [_number(value) for value in values]


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_clean(item) for item in value]
    return value
