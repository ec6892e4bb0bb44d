"""The whole study in one call: load, run, judge, write."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from castwise.errors import MissingExtraError, StudyError
from castwise.hardware import detect, get_device
from castwise.study.arms import DEFAULT_PRECISIONS, arms_of
from castwise.study.backend import backend_for
from castwise.study.progress import Progress
from castwise.study.protocol import Task, TaskSpec, describe, load_task
from castwise.study.ranks import inside
from castwise.study.results import recommended_arm, results_of, write_results
from castwise.study.runner import Outcome, Settings, planned_steps, run_study

__all__ = ["checked_settings", "default_folder", "study"]

_MOST_THREADS = 1024  # with many more, thread pools crash instead of raising


def study(
    task: str | Task,
    *,
    precisions: Iterable[str] = DEFAULT_PRECISIONS,
    steps: int | None = None,
    seeds: int | None = None,
    device: str | None = None,
    margin: float | None = None,
    remedy: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    threads: int | None = None,
    nproc: int | None = None,
    report: bool = True,
    quiet: bool = True,
) -> dict[str, Any]:
    """Train ``task`` in several precisions and say which are safe.

    Args:
        task: ``"digits"``, ``"text"``, ``"path/to/file.py:Name"``, or an object with the methods of ``Task``.
        precisions: formats, presets or policy files; fp32 is always among them.
        steps, seeds: optimizer steps of each run, and runs of each precision. Default: the task's own.
        device: the device whose formats to study and to recommend for, by emulation where needed. Default: this one.
        margin: the worsening of the metric that one would accept, in its units. Default: the task's own.
        remedy: whether to look for a cure for unsafe precisions.
        out: the folder for ``results.json``, ``policy.toml``, ``report.html`` and the state to resume from.
        resume: go on with an interrupted study in ``out``, or add seeds or precisions to a finished one.
        nproc: the number of ranks, in a process that ``castwise study --nproc`` has started.
        threads: CPU threads. Default: the task's own, else the framework's.
        report: whether to draw ``report.html``.
        quiet: no progress on stderr.

    Returns:
        What ``results.json`` holds.

    Raises:
        StudyError: the task, an option or the folder cannot be used; the message says what to do.
        PolicyError, HardwareError: a precision or the device is not known.
    """
    settings = checked_settings(task, precisions, steps, seeds, device, margin, remedy)
    folder = Path(out) if out is not None else default_folder(settings.spec.spelled)
    if nproc is not None and settings.spec.framework != "torch":
        raise StudyError(f"--nproc: tasks of framework {settings.spec.framework!r} train on one process. Leave it out.")
    if nproc is not None and not inside(nproc):
        raise StudyError("nproc: processes are started by the command: castwise study TASK --nproc N.")
    backend = backend_for(settings.spec, threads=_threads(threads, settings.spec))
    if nproc is not None and nproc > 1:
        from castwise.study._torch_ranks import SharedBackend

        backend = SharedBackend(backend)
    progress = Progress(planned_steps(settings), quiet=quiet)
    try:
        outcome = run_study(settings, backend, folder, resume=resume, progress=progress)
    finally:
        progress.close()
    return _write(outcome, folder, report)


def default_folder(task: str) -> Path:
    """Where a study of ``task`` goes when nobody says: ``castwise-study-digits``; of a file's task, its name."""
    return Path(f"castwise-study-{_slug(task.rpartition(':')[2])}")


def checked_settings(
    task: str | Task,
    precisions: Iterable[str],
    steps: int | None,
    seeds: int | None,
    device: str | None,
    margin: float | None,
    remedy: bool,
) -> Settings:
    """What a study is to do; the arguments are those of ``study``, and so are the errors."""
    studied = get_device(device) if device else detect()
    arms = arms_of(precisions, studied)
    spec = load_task(task) if isinstance(task, str) else describe(task)
    if margin is not None:
        if not 0 < margin < math.inf:
            raise StudyError(f"The margin is {margin}. Give a finite number above 0, in units of the metric.")
        spec = replace(spec, margin=margin)
    return Settings(
        spec=spec,
        arms=arms,
        device=studied,
        steps=spec.steps if steps is None else steps,
        seeds=spec.seeds if seeds is None else seeds,
        remedy=remedy,
    )


def _threads(asked: int | None, spec: TaskSpec) -> int | None:
    if asked is not None and not 1 <= asked <= _MOST_THREADS:
        raise StudyError(f"The number of threads is {asked}. Give 1 to {_MOST_THREADS}.")
    return asked if asked is not None else spec.threads


def _write(outcome: Outcome, folder: Path, report: bool) -> dict[str, Any]:
    """Policies, report, results: the results last, since their presence says that the study is complete."""
    results = results_of(outcome)
    for arm in outcome.arms:
        arm.policy.save(folder / "policies" / f"{_slug(arm.name)}.toml", comment=f"{arm.name}, as studied by castwise")
    recommended_arm(outcome).policy.save(folder / "policy.toml", comment=results["verdict"]["recommended_because"])
    try:
        if report:
            from castwise.study.report import write_report

            write_report(results, folder / "report.html")
    except MissingExtraError as error:
        # A machine without plotting still gets its results, and is told what is missing.
        logging.getLogger("castwise.study").warning("no report.html: %s", error)
    return write_results(outcome, folder)


def _slug(name: str) -> str:
    """A name that is safe as a file name."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "task"
