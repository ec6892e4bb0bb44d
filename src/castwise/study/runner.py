"""Running a study: every arm from every seed, in a fixed order, each interval kept before the next begins.

fp32 comes first, for its losses tell how large a loss may become before a run counts as exploded. The order and all
numbers depend on the settings alone, never on how often the study was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from castwise.errors import StudyError
from castwise.hardware import Device
from castwise.study.arms import Arm
from castwise.study.backend import Backend
from castwise.study.progress import Progress
from castwise.study.protocol import TaskSpec
from castwise.study.records import Ending, Failure, RunRecord
from castwise.study.remedies import remedies_for
from castwise.study.store import Store
from castwise.study.verdict import REFERENCE, Status, Verdict, judge

__all__ = ["Outcome", "Settings", "run_study"]

_log = logging.getLogger("castwise.study")

EXPLODED = 10.0
"""A loss this many times the largest of fp32's run with the same seed has left the range in which training happens."""

REFERENCE_EXPLODED = 100.0
"""The same for fp32 itself, against its loss before training."""

_FORMAT = 2  # of records and checkpoints: raised when older ones cannot be continued


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a study does.

    Attributes:
        spec: the task.
        arms: fp32 first.
        device: whose formats are studied, and for which the recommendation is made.
        steps, seeds: optimizer steps of a run; the seeds are 0 to ``seeds`` - 1.
        remedy: whether to look for a cure for unsafe arms.
    """

    spec: TaskSpec
    arms: tuple[Arm, ...]
    device: Device
    steps: int
    seeds: int
    remedy: bool = False

    def __post_init__(self) -> None:
        for key in ("steps", "seeds"):
            if getattr(self, key) < 1:
                raise StudyError(f"--{key} is {getattr(self, key)}. Give at least 1.")
        if self.arms[0].name != REFERENCE:
            raise StudyError(
                f"The first arm is {self.arms[0].name!r}. Put fp32 first: the others are compared with it."
            )

    @property
    def interval(self) -> int:
        """Steps between two evaluations."""
        return self.spec.interval(self.steps)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished study.

    Attributes:
        settings: what was asked for.
        arms: all arms that ran, remedies included.
        runs: by arm, one record per seed. A remedy that failed early has fewer.
        verdict: about the arms that were asked for, and the remedies that ran to the end.
        cures: unsafe arm -> the remedy that made it safe, or None where none did.
        facts: versions and the machine that computed, for the results.
    """

    settings: Settings
    arms: tuple[Arm, ...]
    runs: Mapping[str, tuple[RunRecord, ...]]
    verdict: Verdict
    cures: Mapping[str, str | None]
    facts: Mapping[str, object]


def run_study(
    settings: Settings, backend: Backend, out: str | Path, *, resume: bool = False, progress: Progress | None = None
) -> Outcome:
    """Run what is not done yet, and judge.

    Args:
        settings: what to do.
        backend: the task's framework.
        out: the folder of the study; see ``store``.
        resume: go on with what ``out`` holds.
        progress: told of every interval.

    Raises:
        StudyError: ``out`` holds another study, or the task does not keep to the protocol.
        KeyboardInterrupt: passes through; at most the interval in progress is lost.
    """
    study = _Study(settings, backend, Store(Path(out)), progress or Progress({}, quiet=True))
    with study.store.held(), backend.session():
        study.store.begin(study.identity, resume=resume)
        runs = {arm.name: tuple(study.run(arm, seed) for seed in range(settings.seeds)) for arm in settings.arms}
        verdict = judge(settings.spec, runs, steps=settings.steps)
        arms, cures = list(settings.arms), dict[str, str | None]()
        if settings.remedy:
            for arm in settings.arms:
                if verdict.arms[arm.name].status is Status.UNSAFE:
                    cures[arm.name] = study.cure(arm, runs, arms)
            complete = {name: found for name, found in runs.items() if len(found) == settings.seeds}
            verdict = judge(settings.spec, complete, steps=settings.steps)
    return Outcome(settings, tuple(arms), runs, verdict, cures, backend.settings())


class _Study:
    """One call of ``run_study``."""

    def __init__(self, settings: Settings, backend: Backend, store: Store, progress: Progress) -> None:
        self.settings, self.backend, self.store, self.progress = settings, backend, store, progress
        self.identity: dict[str, object] = {
            "task": settings.spec.spelled,
            "task file": settings.spec.digest,
            "steps": settings.steps,
            "evaluate_every": settings.interval,
            "records": _FORMAT,
            **backend.settings(),
        }
        self._ceilings: dict[int, float] = {}

    def run(self, arm: Arm, seed: int) -> RunRecord:
        """The record of one run: read, continued or made."""
        fingerprint = self._fingerprint(arm, seed)
        record = self.store.finished(arm.name, seed)
        if record is not None:
            self._same(record, fingerprint)
            self.progress.drop(arm.name, self.settings.steps)
        else:
            record = self._train(arm, seed, fingerprint)
        if arm.name == REFERENCE:
            self._ceilings[seed] = EXPLODED * record.peak_loss
        return record

    def cure(self, arm: Arm, runs: dict[str, tuple[RunRecord, ...]], arms: list[Arm]) -> str | None:
        """Try the remedies in order of cost; the name of the first that makes the arm safe, or None.

        ``runs`` and ``arms`` gain what was tried. A remedy is dropped at its first seed that does not survive.
        """
        for remedy in remedies_for(arm, self.backend, lambda: self.store.last_state(arm.name)):
            self.progress.note(f"{arm.name} is unsafe; trying {remedy.remedy}")
            self.progress.plan(remedy.name, self.settings.steps * self.settings.seeds)
            arms.append(remedy)
            records: list[RunRecord] = []
            for seed in range(self.settings.seeds):
                records.append(self.run(remedy, seed))
                if records[-1].ending is not None:
                    self.progress.drop(remedy.name, self.settings.steps * (self.settings.seeds - seed - 1))
                    break
            runs[remedy.name] = tuple(records)
            if len(records) < self.settings.seeds:
                continue
            found = judge(
                self.settings.spec, {REFERENCE: runs[REFERENCE], remedy.name: records}, steps=self.settings.steps
            )
            if found.arms[remedy.name].status is Status.SAFE:
                return remedy.name
        return None

    def _train(self, arm: Arm, seed: int, fingerprint: str) -> RunRecord:
        try:
            return self._trained(arm, seed, fingerprint)
        except StudyError as error:
            if not isinstance(error.__cause__, Exception):  # what is wrong is so in each precision
                raise
            raise StudyError(f"{error} This was in {arm.name}, with seed {seed}.") from error.__cause__

    def _trained(self, arm: Arm, seed: int, fingerprint: str) -> RunRecord:
        run = self.backend.start(arm, seed, self.settings.steps)
        kept = self.store.running(arm.name, seed)
        if kept is None:
            record = RunRecord(arm.name, seed, fingerprint, run.evaluate(), emulated=run.emulated)
        else:
            record, state = kept
            self._same(record, fingerprint)
            run.load(state)
            self.progress.drop(arm.name, record.step)
        while record.ending is None and record.step < self.settings.steps:
            start = time.monotonic()
            before = record.step
            interval, ending = run.advance(min(self.settings.interval, self.settings.steps - before))
            record = replace(record.then(interval), memory=dict(run.memory))
            record = replace(record, ending=ending or self._exploded(record))
            if record.ending is None:
                self.store.checkpoint(record, run.save())
            else:
                self.progress.drop(arm.name, self.settings.steps - record.step)
            self._tell(record, record.step - before, time.monotonic() - start)
        self.store.finish(record, keep_state=seed == 0)
        return record

    def _exploded(self, record: RunRecord) -> Ending | None:
        """Whether the latest losses are out of all proportion."""
        if record.arm == REFERENCE:
            ceiling = REFERENCE_EXPLODED * abs(record.initial.validation)
        else:
            ceiling = self._ceilings[record.seed]
        latest = record.intervals[-1]
        losses = [abs(x) for x in (latest.loss, latest.evaluation.validation) if math.isfinite(x)]
        if not ceiling > 0 or not losses or max(losses) <= ceiling:
            return None
        yardstick = (
            "its loss before training" if record.arm == REFERENCE else "the largest that fp32 had with this seed"
        )
        times = REFERENCE_EXPLODED if record.arm == REFERENCE else EXPLODED
        return Ending(
            Failure.EXPLODED, record.step, f"by step {record.step} the loss was over {times:g} times {yardstick}"
        )

    def _tell(self, record: RunRecord, steps: int, seconds: float) -> None:
        latest, spec = record.intervals[-1], self.settings.spec
        said = f"{record.arm}  seed {record.seed + 1}/{self.settings.seeds}  step {record.step}/{self.settings.steps}"
        said += f"  loss {latest.loss:.4g}  {spec.metric} {latest.evaluation.metric:.4g}"
        if record.skipped:
            said += f"  skipped {record.skipped}"
        if record.ending is not None:
            said += f"  ended: {record.ending.failure}"
        last = record.ending is not None or record.step >= self.settings.steps
        self.progress.advance(record.arm, steps, seconds, said, last=last)

    def _fingerprint(self, arm: Arm, seed: int) -> str:
        told = json.dumps([self.identity, arm.policy.to_toml(), seed], sort_keys=True, default=str)
        return hashlib.sha256(told.encode()).hexdigest()

    def _same(self, record: RunRecord, fingerprint: str) -> None:
        if record.fingerprint != fingerprint:
            raise StudyError(
                f"{self.store.root} holds runs of {record.arm!r} with another policy than it has now. "
                f"Give the changed policy file another name, or name another --out."
            )


def planned_steps(settings: Settings) -> dict[str, int]:
    """Steps of each arm, for the progress display."""
    return {arm.name: settings.steps * settings.seeds for arm in settings.arms}
