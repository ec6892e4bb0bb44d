"""A study that is killed loses at most one interval, and ends with the results of one that was not."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import castwise.cli
from castwise.study import study
from castwise.study.store import Store

KNOWN = Path(__file__).parent / "known"
TASK = f"{KNOWN / 'awkward.py'}:Awkward"
KILLS = 10
_WALL_CLOCK = ("throughput", "memory")


def arguments(out: Path, *options: str) -> list[str]:
    precisions = f"fp32,{KNOWN / 'restless.toml'},bf16"
    return ["study", TASK, "--seeds", "2", "--precisions", precisions, "--out", str(out), *options]


@pytest.fixture(scope="module")
def fresh() -> Any:
    """Processes of their own that need not import torch first: forked from one that has, and has done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["castwise.study.api", "castwise.study.report", "castwise.study.torch_backend"])
    return context


def reproducible(results: dict[str, Any]) -> str:
    """The results without what depends on the clock."""
    arms = {name: {k: v for k, v in arm.items() if k not in _WALL_CLOCK} for name, arm in results["arms"].items()}
    return json.dumps(results | {"arms": arms}, indent=1)


def progress(out: Path) -> tuple[int, int]:
    """(runs finished, time stamp of the run in progress): changes with every interval that is kept."""
    state = Store(out).state
    running = state / "running.bin"
    try:
        return len(list(state.glob("*.seed*.json"))), running.stat().st_mtime_ns
    except FileNotFoundError:
        return len(list(state.glob("*.seed*.json"))), 0


def wait_for_progress(out: Path, running: Callable[[], bool], intervals: int = 1) -> None:
    """Wait until a study in progress has kept so many intervals more."""
    deadline = time.monotonic() + 100
    for _ in range(intervals):
        before = progress(out)
        while progress(out) == before and running() and time.monotonic() < deadline:
            time.sleep(0.002)


def test_a_study_killed_at_ten_random_moments_ends_with_the_results_of_an_undisturbed_one(
    tmp_path: Path, fresh: Any
) -> None:
    moments = random.Random(20)
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for _ in range(KILLS):
        process = fresh.Process(target=castwise.cli.main, args=(arguments(killed, "--resume", "--quiet"),))
        process.start()
        # Some whole intervals and a part of one: in training, evaluation, writing or between two runs.
        wait_for_progress(killed, process.is_alive, intervals=moments.randint(1, 3))
        time.sleep(moments.uniform(0.0, 0.05))
        assert process.is_alive(), "the study ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (killed / "results.json").exists()
    for out in (killed, undisturbed):
        process = fresh.Process(target=castwise.cli.main, args=(arguments(out, "--resume", "--quiet"),))
        process.start()
        process.join()
        assert process.exitcode == 0
    ours, theirs = (json.loads((out / "results.json").read_text()) for out in (killed, undisturbed))
    assert reproducible(ours) == reproducible(theirs)
    assert sum(ours["arms"]["restless"]["skipped_steps"]) > 5
    for name in ("policy.toml", "policies/restless.toml"):
        assert (killed / name).read_text() == (undisturbed / name).read_text()


# What a shell starts in the background ignores the signal, and so does all that it starts. Changed after the start, as
# `preexec_fn` would fork this process, in which JAX has threads that a fork may stop for good.
HEEDS_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "castwise", *sys.argv[1:]])
"""


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "study"
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", HEEDS_CTRL_C, *arguments(out)], **pipes) as process:
        wait_for_progress(out, lambda: process.poll() is None)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert f"castwise study {TASK}" in said
    assert "--resume" in said
    assert "Traceback" not in said


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    return {"task": TASK, "precisions": ["bf16"], "steps": 40, "out": tmp_path / "study", "report": False}


def test_seeds_and_precisions_can_be_added_to_a_finished_study(small: dict[str, Any]) -> None:
    first = study(**small, seeds=1)
    stamps = {path.name: path.stat().st_mtime_ns for path in Store(small["out"]).state.glob("*.seed0.json")}
    more = study(**small | {"precisions": ["bf16", "fp16"]}, seeds=2, resume=True)
    assert {path.name: path.stat().st_mtime_ns for path in Store(small["out"]).state.glob("*.seed0.json")}.items() >= (
        stamps.items()
    )
    assert more["arms"]["bf16"]["loss"][0] == first["arms"]["bf16"]["loss"][0]
    assert len(more["arms"]["fp16"]["loss"]) == 2


def test_a_study_of_other_steps_or_another_policy_of_one_name_is_not_continued(
    small: dict[str, Any], tmp_path: Path
) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text('format = "float16"\n')
    small |= {"precisions": [str(policy)], "seeds": 1}
    study(**small)
    with pytest.raises(ValueError, match="steps"):
        study(**small | {"steps": 41}, resume=True)
    policy.write_text('format = "bfloat16"\n')
    with pytest.raises(ValueError, match="'mine' with another policy"):
        study(**small, resume=True)


def test_a_remedy_that_was_interrupted_is_continued(tmp_path: Path) -> None:
    """All runs of the arm that was asked for are there; those of the remedy are made on resume, the rest is kept."""
    options: dict[str, Any] = {
        "task": f"{KNOWN / 'overflow.py'}:Overflow", "precisions": ["fp16"], "seeds": 1, "steps": 32, "report": False,
    }  # fmt: skip
    whole = study(**options, out=tmp_path / "whole", remedy=True)
    part = tmp_path / "part"
    study(**options, out=part)
    resumed = study(**options, out=part, remedy=True, resume=True)
    assert reproducible(resumed) == reproducible(whole)
