"""A study that is interrupted, at any moment and in any way, ends as if it had not been."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from castwise.errors import StudyError
from castwise.study import read_results, study

TASK = f"{Path(__file__).parent / 'known' / 'healthy.py'}:Regression"
OPTIONS = {"precisions": ["fp16", "bf16"], "steps": 64, "seeds": 2}
KILLS = 10

# Imports once and forks a study for each folder named on stdin: a kill costs no second import of torch. The study's
# single CPU thread makes forking sound.
_FORKS = """
import os, sys, json
from castwise.study import study
import castwise.study.torch_backend, castwise.study.report
task, options = json.loads(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        try:
            study(task, out=line.strip(), resume=True, threads=1, **options)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def _settled(results: dict[str, Any]) -> dict[str, Any]:
    """Results without what a clock measured."""
    settled = json.loads(json.dumps(results))
    for arm in settled["arms"].values():
        del arm["throughput"]
    return settled  # type: ignore[no-any-return]


class _Forks:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _FORKS, json.dumps([TASK, OPTIONS])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.out.readline() == "ready\n"

    @property
    def out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def run(self, folder: Path, *, kill_after: float | None) -> int:
        """Run or resume the study in ``folder``; the exit code, -9 where it was still running to be killed."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        pid = int(self.out.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, signal.SIGKILL)
        return int(self.out.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.out.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return study(TASK, out=tmp_path_factory.mktemp("undisturbed"), threads=1, **OPTIONS)  # type: ignore[arg-type]


def test_a_study_killed_at_ten_random_moments_ends_with_the_same_results(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    forks = _Forks()
    moments = random.Random(5)
    try:
        start = time.monotonic()
        assert forks.run(tmp_path / "whole", kill_after=None) == 0
        whole = time.monotonic() - start
        assert _settled(read_results(tmp_path / "whole")) == _settled(undisturbed)
        kills, round_ = 0, 0
        while kills < KILLS:  # on a machine that gets faster meanwhile, a second study takes the kills that are left
            folder = tmp_path / f"killed-{round_}"
            while code := forks.run(folder, kill_after=moments.uniform(0.0, whole / 6) if kills < KILLS else None):
                assert code == -signal.SIGKILL, "the study failed instead of being killed"
                kills += 1
            assert _settled(read_results(folder)) == _settled(undisturbed)
            round_ += 1
        assert kills >= KILLS
    finally:
        forks.close()


def test_ctrl_c_says_how_to_go_on_and_going_on_gives_the_same_results(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    words = [sys.executable, "-m", "castwise", "study", TASK, "--precisions", "fp16,bf16", "--steps", "64"]
    words += ["--seeds", "2", "--threads", "1", "--out", str(out)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out / "state" / "running.bin").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted" in said and "--resume" in said and str(out) in said
    assert "Traceback" not in said
    assert not (out / "results.json").exists()
    with pytest.raises(StudyError, match="--resume"):
        study(TASK, out=out, threads=1, **OPTIONS)  # type: ignore[arg-type]
    assert _settled(study(TASK, out=out, threads=1, resume=True, **OPTIONS)) == _settled(undisturbed)  # type: ignore[arg-type]


def test_a_study_with_other_steps_is_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "out"
    study(TASK, precisions=["bf16"], steps=8, seeds=1, threads=1, out=out)
    with pytest.raises(StudyError, match="steps = 8"):
        study(TASK, precisions=["bf16"], steps=9, seeds=1, threads=1, out=out, resume=True)


def test_more_seeds_keep_the_runs_that_are_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = study(TASK, precisions=["bf16"], steps=16, seeds=1, threads=1, out=out)
    stamps = {path.name: path.stat().st_mtime_ns for path in (out / "state").glob("*.seed0.json")}
    two = study(TASK, precisions=["bf16"], steps=16, seeds=2, threads=1, out=out, resume=True)
    assert stamps == {path.name: path.stat().st_mtime_ns for path in (out / "state").glob("*.seed0.json")}
    assert two["arms"]["bf16"]["final_metric"][0] == one["arms"]["bf16"]["final_metric"][0]
    assert len(two["arms"]["bf16"]["final_metric"]) == 2
