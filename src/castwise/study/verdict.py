"""From records to a verdict: ``safe``, ``unsafe`` or ``cannot tell``, each with its reasons in words.

The order of the questions matters. First the reference: where fp32 itself diverged, did not learn, or was still
learning fast when the run stopped, nothing can be said about any arm. Then each arm: did its runs end, did they take
their steps, did they learn what fp32 learned? Only then the paired differences of the metric and of the validation loss
are compared with the margin, and a gap that is small but still growing withholds ``safe``. An arm is safe only where
every question has a good answer; it is unsafe where one has a clearly bad one; in between one cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from castwise.study.measures import Measure, mean_curve, measures_of
from castwise.study.protocol import TaskSpec
from castwise.study.records import RunRecord
from castwise.study.statistics import (
    PairedDifference,
    Trend,
    gain_share,
    improvement,
    paired_difference,
    seeds_needed,
    trend,
)

__all__ = ["REFERENCE", "ArmVerdict", "Status", "Verdict", "judge"]

REFERENCE = "fp32"
"""The arm every other is compared with."""

MIN_SEEDS = 3
"""Two seeds have one degree of freedom: an interval 6 standard errors wide that a lucky pair can still make narrow."""

MIN_EVALUATIONS = 4
"""Fewer points cannot show whether a curve has settled or a gap is growing."""

SETTLED = 0.2
"""At most this share of the whole gain may come in the last quarter of training; a straight line would give 0.25."""

LEARNED = 5.0
"""fp32 must gain at least this many margins, or the margin is too coarse to tell learning from not learning."""

FEW_SKIPS, MANY_SKIPS = 0.1, 0.5
"""Shares of skipped steps in the second half of training: above the first not safe, above the second unsafe.

A scaler that looks for its scale skips at the start; one that has found it skips once in growth_interval steps.
"""


class Status(StrEnum):
    SAFE = "safe"
    UNSAFE = "unsafe"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class ArmVerdict:
    """The answer about one arm.

    Attributes:
        status, reasons: the answer, and one sentence for each thing that decided it.
        differences: by measure name, against fp32; empty for fp32 itself.
        trends: by measure name, how the difference changes with training.
        failed_seeds: seeds whose run did not end, or learned less than half of what fp32 learned.
    """

    status: Status
    reasons: tuple[str, ...]
    differences: Mapping[str, PairedDifference]
    trends: Mapping[str, Trend]
    failed_seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer about all arms. ``measures``: what was compared, the metric first."""

    arms: Mapping[str, ArmVerdict]
    measures: tuple[Measure, ...]

    def detectable_difference(self) -> float | None:
        """The smallest worsening of the metric that would have shown in every arm that trained.

        None where none would have, and where all runs gave the same value, from which no size can be estimated.
        """
        key = self.measures[0].name
        found = [arm.differences[key].detectable for arm in self.arms.values() if arm.differences]
        return max((value for value in found if 0 < value < math.inf), default=None)

    @property
    def reasons(self) -> list[str]:
        return [f"{name}: {reason}" for name, arm in self.arms.items() for reason in arm.reasons]


def judge(spec: TaskSpec, runs: Mapping[str, Sequence[RunRecord]], *, steps: int) -> Verdict:
    """Judge every arm in ``runs`` against the arm named ``fp32``.

    Args:
        spec: the task: directions, margins.
        runs: by arm, one record per seed, in the same order of seeds in each.
        steps: the steps that each run was to make.
    """
    reference = runs[REFERENCE]
    measures = measures_of(spec, reference)
    doubts = _doubts(spec, reference, measures, steps)
    if doubts:
        arms = {name: ArmVerdict(Status.CANNOT_TELL, doubts, {}, {}, ()) for name in runs}
        for name in runs:
            # What is certain stays certain: a run that blew up did so, whatever the doubts about a comparison.
            if name != REFERENCE and not _broken(reference) and _broken(runs[name]):
                arms[name] = _failing(runs[name])
        return Verdict(_with_differences(arms, runs, measures), measures)
    judged = {
        name: _reference_verdict(measures) if name == REFERENCE else _judge_arm(arm, reference, measures)
        for name, arm in runs.items()
    }
    return Verdict(judged, measures)


def _doubts(spec: TaskSpec, reference: Sequence[RunRecord], measures: Sequence[Measure], steps: int) -> tuple[str, ...]:
    """Why this study can call nothing safe; empty where it can."""
    broken = [run for run in reference if run.ending is not None or not math.isfinite(run.final.metric)]
    if broken:
        how = broken[0].ending.message if broken[0].ending else "its final metric is not a number"
        return (
            f"fp32 itself failed on {len(broken)} of {len(reference)} seeds ({how}): there is nothing to compare with",
        )
    found: list[str] = []
    if len(reference) < MIN_SEEDS:
        found.append(f"too few seeds ({len(reference)}): telling a difference from luck takes at least {MIN_SEEDS}")
    if steps < spec.min_steps:
        few = "1 step is" if steps == 1 else f"{steps} steps are"
        found.append(f"{few} too few: this task needs at least {spec.min_steps}")
    if len(reference[0].intervals) < MIN_EVALUATIONS:
        count = len(reference[0].intervals)
        few = "1 evaluation is" if count == 1 else f"{count} evaluations are"
        found.append(f"{few} too few to see whether training has settled")
    worst = max(_late_skips(run) for run in reference)
    if worst > FEW_SKIPS:
        found.append(f"fp32 itself skipped {worst:.0%} of its later steps because its gradients were not finite")
    return (*found, *(doubt for measure in measures for doubt in _not_learned(measure, reference)))


def _not_learned(measure: Measure, reference: Sequence[RunRecord]) -> list[str]:
    curves = [measure.curve(run) for run in reference]
    better = measure.higher_is_better
    gains = [improvement(curve, higher_is_better=better) for curve in curves]
    if not all(gain > 0 for gain in gains) or measure.gain < LEARNED * measure.margin:
        return [
            f"fp32 has hardly learned: its {measure.name} improved by {measure.say(measure.gain)} "
            f"against a margin of {measure.say(measure.margin)}"
        ]
    late = gain_share(mean_curve(curves), 0.25, higher_is_better=better)
    if late > SETTLED:
        return [
            f"fp32 was still learning fast: {late:.0%} of the gain in {measure.name} came in the last quarter of "
            f"training, so nothing is settled; train for more steps"
        ]
    return []


def _broken(runs: Sequence[RunRecord]) -> bool:
    return any(run.ending is not None for run in runs)


def _failing(runs: Sequence[RunRecord]) -> ArmVerdict:
    ended = [(run.seed, run.ending) for run in runs if run.ending is not None]
    seed, first = ended[0]
    reason = f"{len(ended)} of {len(runs)} runs broke down (seed {seed}: {first.message}); fp32's did not"
    return ArmVerdict(Status.UNSAFE, (reason,), {}, {}, tuple(seed for seed, _ in ended))


def _with_differences(
    arms: Mapping[str, ArmVerdict], runs: Mapping[str, Sequence[RunRecord]], measures: Sequence[Measure]
) -> dict[str, ArmVerdict]:
    reference = runs[REFERENCE]
    return {
        name: arm if name == REFERENCE else replace(arm, differences=_differences(runs[name], reference, measures))
        for name, arm in arms.items()
    }


def _differences(
    arm: Sequence[RunRecord], reference: Sequence[RunRecord], measures: Sequence[Measure]
) -> dict[str, PairedDifference]:
    return {
        measure.name: paired_difference(
            [measure.of(run.final) for run in arm],
            [measure.of(run.final) for run in reference],
            higher_is_better=measure.higher_is_better,
            resolution=measure.resolution,
        )
        for measure in measures
    }


def _reference_verdict(measures: Sequence[Measure]) -> ArmVerdict:
    metric = measures[0]
    said = f"the reference: its {metric.name} improved by {metric.say(metric.gain)} in training"
    if math.isfinite(metric.noise):
        said += f" and differs from seed to seed by {metric.say(metric.noise)} (standard deviation)"
    return ArmVerdict(Status.SAFE, (said,), {}, {}, ())


def _judge_arm(arm: Sequence[RunRecord], reference: Sequence[RunRecord], measures: Sequence[Measure]) -> ArmVerdict:
    differences = _differences(arm, reference, measures)
    drifts = {m.name: _trend(arm, reference, m) for m in measures}
    failed = _failed_seeds(arm, reference, measures)
    found: list[tuple[Status, str]] = []
    if _broken(arm):
        found += [(Status.UNSAFE, reason) for reason in _failing(arm).reasons]
    elif failed:
        found.append((Status.UNSAFE, f"{len(failed)} of {len(arm)} runs learned less than half of what fp32 learned"))
    skips = max(_late_skips(run) for run in arm)
    if skips > FEW_SKIPS and not _broken(arm):
        said = f"{skips:.0%} of the later steps were skipped because gradients were not finite"
        found.append((Status.UNSAFE if skips > MANY_SKIPS else Status.CANNOT_TELL, said))
    for measure in measures:
        said_of = _compare(measure, differences[measure.name], drifts[measure.name], failed=bool(failed))
        found += [said_of] if said_of is not None else []
    # The worst answer decides, and only the reasons for it are given.
    status = next(s for s in (Status.UNSAFE, Status.CANNOT_TELL, Status.SAFE) if any(s is each for each, _ in found))
    reasons = tuple(reason for each, reason in found if each is status)
    trends = {name: drift for name, drift in drifts.items() if drift is not None}
    return ArmVerdict(status, reasons, differences, trends, failed)


def _compare(
    measure: Measure, difference: PairedDifference, drift: Trend | None, *, failed: bool
) -> tuple[Status, str] | None:
    """What one measure says; None where it says nothing that has not been said."""
    if difference.count == 0 or (failed and not difference.above(measure.margin)):
        return None  # the runs that failed have been told already
    margin = f"the margin of {measure.say(measure.margin)}"
    between = f"{measure.say(difference.lower)} to {measure.say(difference.upper)} with 90 % confidence"
    if difference.above(measure.margin):
        noise = f", {difference.mean / measure.noise:.1f} times fp32's seed-to-seed noise" if measure.noise > 0 else ""
        worse = f"{measure.name} is worse than fp32's by {measure.say(difference.mean)} ({between}{noise})"
        return Status.UNSAFE, f"{worse}, more than {margin}"
    if not difference.below(measure.margin):
        said = f"{measure.name} could be worse than fp32's by anything from {between}, which reaches past {margin}"
        needed = seeds_needed(difference.deviation, measure.margin)
        more = f"; about {needed} seeds would tell" if needed is not None and needed > difference.count else ""
        return Status.CANNOT_TELL, said + more
    if drift is not None and drift.grows_past(measure.margin):
        growth = f"{measure.say(difference.mean)} now, {measure.say(drift.ahead)} after as many steps again"
        return Status.CANNOT_TELL, f"the gap in {measure.name} is still growing: {growth}; train for more steps"
    if difference.upper <= 0:
        return Status.SAFE, f"{measure.name} is no worse than fp32's (95 % confidence; {margin})"
    most = f"at most {measure.say(difference.upper)} worse than fp32's (95 % confidence)"
    return Status.SAFE, f"{measure.name} is {most}, inside {margin}"


def _failed_seeds(
    arm: Sequence[RunRecord], reference: Sequence[RunRecord], measures: Sequence[Measure]
) -> tuple[int, ...]:
    """Seeds that did not end, or learned less than half of what fp32 did and ended worse than every seed of fp32."""
    failed = []
    for run, base in zip(arm, reference, strict=True):
        lost = any(_lost_half(measure, run, base, reference) for measure in measures)
        if run.ending is not None or not math.isfinite(run.final.metric) or lost:
            failed.append(run.seed)
    return tuple(failed)


def _lost_half(measure: Measure, run: RunRecord, base: RunRecord, reference: Sequence[RunRecord]) -> bool:
    sign = 1.0 if measure.higher_is_better else -1.0
    start, end, ours = measure.of(base.initial), measure.of(base.final), measure.of(run.final)
    worst = min(sign * measure.of(other.final) for other in reference)
    # `not >` and not `<`: a value that is no number has lost everything.
    return not sign * (ours - start) >= 0.5 * sign * (end - start) and not sign * ours >= worst - measure.margin


def _late_skips(run: RunRecord) -> float:
    """The share of steps skipped in the second half of the intervals."""
    late = run.intervals[len(run.intervals) // 2 :]
    steps = sum(len(interval.grad_norms) for interval in late)
    return sum(interval.skipped for interval in late) / steps if steps else 0.0


def _trend(arm: Sequence[RunRecord], reference: Sequence[RunRecord], measure: Measure) -> Trend | None:
    if _broken(arm) or not reference[0].intervals:
        return None
    sign = -1.0 if measure.higher_is_better else 1.0
    steps = [interval.step for interval in reference[0].intervals]
    rows = [
        [sign * (ours - theirs) for ours, theirs in zip(measure.curve(run)[1:], measure.curve(base)[1:], strict=True)]
        for run, base in zip(arm, reference, strict=True)
    ]
    return trend(rows, steps)
