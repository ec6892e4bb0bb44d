"""``results.json``: the whole study as data, for other programs and for the report, which is made from it alone.

Version 1. Lists under an arm have one entry per seed; lists of lists one inner entry per evaluation, at the steps in
``evaluated_at``. Numbers that are not finite are null. ``throughput`` and ``memory`` depend on the machine and the
moment; everything else is the same, bit for bit, however often the study was interrupted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from castwise._files import write_text
from castwise.errors import StudyError
from castwise.hardware import get_device
from castwise.study.arms import Arm, cheapest, why_recommended
from castwise.study.measures import Measure
from castwise.study.records import RunRecord, finite_or_none
from castwise.study.runner import Outcome
from castwise.study.statistics import PairedDifference
from castwise.study.store import RESULTS
from castwise.study.verdict import REFERENCE, ArmVerdict

__all__ = ["SCHEMA_VERSION", "read_results", "recommended_arm", "results_of", "write_results"]

SCHEMA_VERSION = 1

_ELSEWHERE = ("v100", "t4", "rtx_4090", "a100", "h100", "mi300x")
"""Devices that many people train on: the report says what it would recommend there."""


def results_of(outcome: Outcome) -> dict[str, Any]:
    """The study as JSON values."""
    settings, spec = outcome.settings, outcome.settings.spec
    return {
        "schema_version": SCHEMA_VERSION,
        "task": spec.spelled,
        "device": settings.device.name,
        "task_details": {
            "name": spec.name,
            "description": spec.description,
            "metric": spec.metric,
            "higher_is_better": spec.higher_is_better,
            "unit": spec.unit,
            "digest": spec.digest,
        },
        "device_details": {
            "key": settings.device.key,
            "kind": settings.device.kind,
            "support": {name: str(support) for name, support in settings.device.support.items()},
        },
        "settings": {
            "steps": settings.steps,
            "seeds": settings.seeds,
            "evaluate_every": settings.interval,
            "remedy": settings.remedy,
            **outcome.facts,
        },
        "arms": {arm.name: _arm(arm, outcome) for arm in outcome.arms},
        "verdict": _verdict(outcome),
    }


def write_results(outcome: Outcome, out: str | Path) -> dict[str, Any]:
    """Write ``results.json`` to the folder ``out``, atomically, and return what was written."""
    results = results_of(outcome)
    write_text(Path(out) / RESULTS, json.dumps(results, indent=1, allow_nan=False) + "\n")
    return results


def read_results(path: str | Path) -> dict[str, Any]:
    """Read a ``results.json``, or the one in a study's folder. Raises ``StudyError`` where it is of another version."""
    path = Path(path)
    path = path / RESULTS if path.is_dir() else path
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StudyError(
            f"{path} cannot be read as results of a study: {error}. Name the folder of a finished study."
        ) from error
    if results.get("schema_version") != SCHEMA_VERSION:
        raise StudyError(
            f"{path} has schema_version {results.get('schema_version')!r}; this castwise reads {SCHEMA_VERSION}. "
            f"Run the study again, or use the castwise that wrote it."
        )
    return results


def recommended_arm(outcome: Outcome) -> Arm:
    """The arm to train with on the study's device."""
    return cheapest(outcome.arms, _status(outcome), outcome.settings.device)


def _status(outcome: Outcome) -> dict[str, Any]:
    return {name: arm.status for name, arm in outcome.verdict.arms.items()}


def _arm(arm: Arm, outcome: Outcome) -> dict[str, Any]:
    runs = outcome.runs[arm.name]
    longest = max(runs, key=lambda run: len(run.intervals))
    device = outcome.settings.device
    rates = [run.samples_per_second for run in runs]
    per = "samples" if all(map(math.isfinite, rates)) else "steps"
    if per == "steps":
        rates = [run.steps_per_second for run in runs]
    return {
        "policy": arm.policy.to_toml(),
        "remedy": arm.remedy,
        "format": arm.format.name,
        "emulated": any(run.emulated for run in runs),
        "on_device": str(device.supports(arm.format)),
        "loss_scaling": arm.policy.uses_scaling,
        "evaluated_at": [interval.step for interval in longest.intervals],
        "final_metric": [finite_or_none(run.final.metric) for run in runs],
        "final_validation": [finite_or_none(run.final.validation) for run in runs],
        "initial_metric": [finite_or_none(run.initial.metric) for run in runs],
        "initial_validation": [finite_or_none(run.initial.validation) for run in runs],
        "loss": _series(runs, lambda interval: interval.loss),
        "validation": _series(runs, lambda interval: interval.evaluation.validation),
        "metric": _series(runs, lambda interval: interval.evaluation.metric),
        "grad_norm": _series(runs, lambda interval: interval.grad_norm),
        "direction": _series(runs, lambda interval: interval.direction),
        "loss_scale": _series(runs, lambda interval: interval.scale),
        "skipped": [[interval.skipped for interval in run.intervals] for run in runs],
        "skipped_steps": [run.skipped for run in runs],
        "step_grad_norm": [
            [finite_or_none(norm) for interval in run.intervals for norm in interval.grad_norms] for run in runs
        ],
        "ended": [
            None
            if run.ending is None
            else {"failure": str(run.ending.failure), "step": run.ending.step, "message": run.ending.message}
            for run in runs
        ],
        "throughput": _median(rates),
        "throughput_unit": f"{per}/s",
        "memory": dict(runs[0].memory),
    }


def _series(runs: Sequence[RunRecord], pick: Any) -> list[list[float | None]]:
    return [[finite_or_none(pick(interval)) for interval in run.intervals] for run in runs]


def _median(values: Sequence[float]) -> float | None:
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else None


def _verdict(outcome: Outcome) -> dict[str, Any]:
    verdict, settings = outcome.verdict, outcome.settings
    status, chosen = _status(outcome), recommended_arm(outcome)
    why = why_recommended(chosen, outcome.arms, status, settings.device)
    elsewhere = {key: cheapest(outcome.arms, status, get_device(key)).name for key in _ELSEWHERE}
    return {
        "recommended": chosen.name,
        "recommended_because": why,
        "status": {name: str(found) for name, found in status.items()},
        "detectable_difference": verdict.detectable_difference(),
        "reasons": verdict.reasons,
        "measures": [_measure(measure) for measure in verdict.measures],
        "comparisons": {
            name: _comparison(arm, verdict.measures) for name, arm in verdict.arms.items() if name != REFERENCE
        },
        "elsewhere": {get_device(key).name: name for key, name in elsewhere.items()},
        "remedies": dict(outcome.cures),
    }


def _measure(measure: Measure) -> dict[str, Any]:
    return {
        "key": measure.key,
        "name": measure.name,
        "unit": measure.unit,
        "higher_is_better": measure.higher_is_better,
        "margin": measure.margin,
        "margin_stated": measure.stated,
        "seed_noise": finite_or_none(measure.noise),
        "gain": finite_or_none(measure.gain),
    }


def _comparison(arm: ArmVerdict, measures: Sequence[Measure]) -> dict[str, Any]:
    return {
        "failed_seeds": list(arm.failed_seeds),
        **{measure.key: _difference(arm.differences.get(measure.name)) for measure in measures},
        "trend": {
            measure.key: {"per_step": found.slope, "lower": finite_or_none(found.lower), "ahead": found.ahead}
            for measure in measures
            if (found := arm.trends.get(measure.name)) is not None
        },
    }


def _difference(found: PairedDifference | None) -> Mapping[str, Any] | None:
    if found is None or found.count == 0:
        return None
    return {
        "pairs": found.count,
        "worse_by": found.mean,
        "interval": [finite_or_none(found.lower), finite_or_none(found.upper)],
        "detectable": finite_or_none(found.detectable),
        "each": list(found.each),
    }
