"""Made-up runs and tasks for the parts of a study that need no training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from castwise.study.protocol import TaskSpec, describe
from castwise.study.records import Ending, Evaluation, Failure, Interval, RunRecord

STEPS = (50, 100, 150, 200, 250, 300, 350, 400)


def settled(start: float, end: float) -> list[float]:
    """A learning curve, the start included, that has reached ``end`` well before the last of ``STEPS``."""
    return [end + (start - end) * 4.0**-index for index in range(len(STEPS))] + [end]


def run_of(
    arm: str,
    seed: int,
    accuracy: Sequence[float],
    *,
    loss: Sequence[float] | None = None,
    skipped: Sequence[int] | None = None,
    ended: str | None = None,
) -> RunRecord:
    """A run from its accuracy (and loss) before training and at each of ``STEPS``; ``ended``: how it broke down."""
    loss = [3.0 * (1.0 - value) for value in accuracy] if loss is None else loss
    skipped = [0] * len(STEPS) if skipped is None else skipped
    intervals = tuple(
        Interval(
            step=step,
            loss=loss[index + 1],
            evaluation=Evaluation(loss[index + 1], accuracy[index + 1]),
            grad_norms=(1.0 + index,) * (50 - skipped[index]) + (math.nan,) * skipped[index],
            direction=0.999,
            scale=65536.0,
            skipped=skipped[index],
            samples=50 * 32,
            seconds=0.5,
        )
        for index, step in enumerate(STEPS)
        if index + 1 < len(accuracy)
    )
    ending = Ending(Failure.STALLED, intervals[-1].step, ended) if ended else None
    return RunRecord(arm, seed, "f", Evaluation(loss[0], accuracy[0]), intervals, ending, memory={"weights": 2048})


@pytest.fixture
def made() -> SimpleNamespace:
    """Builders: ``run`` (one record), ``arm`` (records from final accuracies), ``settled`` (a curve), ``steps``."""

    def arm(name: str, finals: Sequence[float], **kwargs: Any) -> list[RunRecord]:
        return [run_of(name, seed, settled(0.1, final), **kwargs) for seed, final in enumerate(finals)]

    return SimpleNamespace(run=run_of, arm=arm, settled=settled, steps=STEPS)


class Stub:
    """A task that is never trained."""

    metric, direction, margin = "accuracy", "higher", 0.01

    def model(self, seed: int) -> None: ...
    def optimizer(self, model: object) -> None: ...
    def batches(self, seed: int) -> list[int]:
        return []

    def loss(self, model: object, batch: object) -> float:
        return 0.0

    def evaluate(self, model: object) -> float:
        return 0.0


@pytest.fixture
def spec_of() -> Callable[..., TaskSpec]:
    """A task's description, with any attribute replaced."""

    def make(**attributes: Any) -> TaskSpec:
        return describe(type("Stub", (Stub,), attributes)())

    return make
