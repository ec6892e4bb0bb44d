"""The quantities in which arms are compared, each with what fp32 did in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from castwise.study.protocol import TaskSpec
from castwise.study.records import Evaluation, RunRecord
from castwise.study.statistics import improvement, resolution_of, spread

__all__ = ["DEFAULT_MARGIN", "VALIDATION_LOSS", "Measure", "mean_curve", "measures_of"]

DEFAULT_MARGIN = 0.02
"""Share of what fp32 gains by training that an arm may lose, where the task states no margin."""

VALIDATION_LOSS = "validation loss"


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity that arms are compared in, with what fp32 did with it.

    Attributes:
        key: which field of an ``Evaluation`` it is.
        name, unit: for the text.
        higher_is_better: its direction.
        margin: the worsening one would accept, in its units; ``stated``: whether the task or the user chose it.
        resolution: its smallest step.
        noise: standard deviation of fp32's final value over the seeds.
        gain: what fp32 gained by training, mean over the seeds.
    """

    key: str
    name: str
    unit: str
    higher_is_better: bool
    margin: float
    stated: bool
    resolution: float
    noise: float
    gain: float

    def of(self, evaluation: Evaluation) -> float:
        return evaluation.validation if self.key == "validation" else evaluation.metric

    def curve(self, run: RunRecord) -> list[float]:
        return [self.of(run.initial), *(self.of(interval.evaluation) for interval in run.intervals)]

    def say(self, value: float) -> str:
        """A value or a difference in this measure, in words: two significant digits (three from 1 up) and the unit."""
        value += 0.0  # no "-0"
        digits = f"{value:.3g}" if abs(value) >= 1 else f"{value:.2g}"
        return f"{digits} {self.unit}" if self.unit else digits


def measures_of(spec: TaskSpec, reference: Sequence[RunRecord]) -> tuple[Measure, ...]:
    """What arms are compared in: the metric, and the validation loss where the task has one.

    Args:
        spec: the task: directions and margins.
        reference: fp32's runs, from which noise, gain and, where no margin is stated, the margin are taken.
    """
    found = [_measure("metric", spec.metric, spec.unit, spec.higher_is_better, spec.margin, spec.resolution, reference)]
    if any(math.isfinite(run.initial.validation) for run in reference) and spec.metric != VALIDATION_LOSS:
        found.append(_measure("validation", VALIDATION_LOSS, "", False, spec.loss_margin, 0.0, reference))
    return tuple(found)


def _measure(
    key: str,
    name: str,
    unit: str,
    higher_is_better: bool,
    margin: float | None,
    resolution: float | None,
    reference: Sequence[RunRecord],
) -> Measure:
    bare = Measure(key, name, unit, higher_is_better, margin or 0.0, margin is not None, resolution or 0.0, 0.0, 0.0)
    curves = [bare.curve(run) for run in reference]
    gain = improvement(mean_curve(curves), higher_is_better=higher_is_better)
    if margin is None:
        bare = replace(bare, margin=max(0.0, DEFAULT_MARGIN * gain) if math.isfinite(gain) else 0.0)
    if resolution is None:
        bare = replace(bare, resolution=resolution_of([value for curve in curves for value in curve]))
    return replace(bare, noise=spread([bare.of(run.final) for run in reference]), gain=gain)


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean over seeds at each evaluation, as far as the shortest curve goes."""
    length = min((len(curve) for curve in curves), default=0)
    return [math.fsum(curve[i] for curve in curves) / len(curves) for i in range(length)]
