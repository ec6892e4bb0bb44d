"""What a run tells of one interval, whatever framework trains it."""

from __future__ import annotations

import logging
import math
import reprlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from castwise.errors import StudyError
from castwise.study.arms import Arm
from castwise.study.protocol import TaskSpec
from castwise.study.records import Ending, Evaluation, Failure, Interval

__all__ = ["SteppedRun", "Taken", "agreement", "cosine", "interval_of", "mean_loss", "number", "stuck"]

_log = logging.getLogger("castwise.study")

_STUCK = {
    Failure.STALLED: "the loss scale was at its floor and gradients still overflowed",
    Failure.NON_FINITE: "gradients stayed infinite or not a number",
}


@dataclass(slots=True)
class Taken:
    """The steps of an interval: their losses, true gradient norms (NaN where one was skipped), samples and seconds."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0


def stuck(failure: Failure, step: int) -> Ending:
    """The end of a run whose steps were skipped one after another."""
    return Ending(failure, step, f"at step {step} {_STUCK[failure]}")


def interval_of(
    step: int,
    taken: Taken,
    ending: Ending | None,
    scale: Callable[[], float],
    evaluate: Callable[[], Evaluation],
    direction: Callable[[], float],
) -> tuple[Interval, Ending | None]:
    """The record of an interval that ends after `step`, and how the run ended, if it did.

    A run whose losses mostly were not finite ends, too. One that ended is not looked at any more.
    """
    finite = [loss for loss in taken.losses if math.isfinite(loss)]
    if ending is None and 2 * len(finite) < len(taken.losses):
        share = f"{len(taken.losses) - len(finite)} of {len(taken.losses)} training losses"
        ending = Ending(Failure.NON_FINITE, step, f"{share} up to step {step} were not finite")
    interval = Interval(
        step=step,
        loss=math.fsum(finite) / len(finite) if finite else math.nan,
        evaluation=Evaluation(math.nan, math.nan) if ending else evaluate(),
        grad_norms=tuple(taken.norms),
        direction=math.nan if ending else direction(),
        scale=scale(),
        skipped=sum(map(math.isnan, taken.norms)),
        samples=taken.samples,
        seconds=taken.seconds,
    )
    return interval, ending


def number(value: Any, task: str) -> float:
    """What ``evaluate`` gave, as a number.

    Raises:
        StudyError: it is none.
    """
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        shape = getattr(value, "shape", None)
        given = reprlib.repr(value) if shape is None else f"a {type(value).__name__} of shape {tuple(shape)}"
        raise StudyError(f"Task {task!r}: evaluate gives {given}. Return one number.") from error


def mean_loss(batches: Iterable[Any] | None, size_of: Callable[[Any], int], loss_of: Callable[[Any], float]) -> float:
    """The mean of the losses of batches, weighted by their sizes; NaN without batches."""
    total, count = 0.0, 0
    for batch in batches or ():
        size = size_of(batch) or 1
        total += size * loss_of(batch)
        count += size
    return total / count if count else math.nan


def agreement(ours: Iterable[Any], theirs: Iterable[Any]) -> float:
    """The cosine of the angle between two gradients, lists of arrays; NaN where either is zero or not finite."""
    pairs = [tuple(np.asarray(x, np.float64).ravel() for x in both) for both in zip(ours, theirs, strict=True)]
    with np.errstate(invalid="ignore", over="ignore"):
        dot = sum(float(x @ y) for x, y in pairs)
        norms = sum(float(x @ x) for x, _ in pairs) * sum(float(y @ y) for _, y in pairs)
    return cosine(dot, norms)


def cosine(dot: float, norms: float) -> float:
    """From a scalar product and the product of both squared norms; NaN where that is zero or not finite."""
    return dot / math.sqrt(norms) if norms > 0 and math.isfinite(norms) else math.nan


class SteppedRun:
    """A run whose every step comes back to the host as plain numbers. Frameworks add `_one_step` and the looks."""

    _spec: TaskSpec
    _arm: Arm
    _seed: int
    _feed: Any
    _step: int
    _recent: Any

    def advance(self, steps: int) -> tuple[Interval, Ending | None]:
        """See ``backend.Run``."""
        taken = Taken()
        ending: Ending | None = None
        for _ in range(steps):
            batches = [self._next_batch() for _ in range(self._spec.accumulate)]
            start = time.perf_counter()
            loss, norm, stalled = self._one_step(batches)
            taken.seconds += time.perf_counter() - start
            taken.losses.append(loss)
            taken.norms.append(norm)
            taken.samples += sum(map(self._size_of, batches))
            self._step += 1
            if stalled:
                ending = stuck(Failure.STALLED if self._arm.policy.uses_scaling else Failure.NON_FINITE, self._step)
                _log.info("%s, seed %d: %s", self._arm.name, self._seed, ending.message)
                break
        return interval_of(self._step, taken, ending, self._scale_value, self.evaluate, self._direction)

    def _next_batch(self) -> Any:
        self._recent = self._feed.next()
        return self._recent

    def _one_step(self, batches: Sequence[Any]) -> tuple[float, float, bool]:
        """Train on micro-batches: loss, norm of the true gradients (NaN if skipped), whether training cannot go on."""
        raise NotImplementedError

    def _size_of(self, batch: Any) -> int:
        raise NotImplementedError

    def _scale_value(self) -> float:
        raise NotImplementedError

    def evaluate(self) -> Evaluation:
        """See ``backend.Run``."""
        raise NotImplementedError

    def _direction(self) -> float:
        raise NotImplementedError
