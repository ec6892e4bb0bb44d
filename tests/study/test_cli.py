"""``castwise study`` from the command line, progress, and what it does not import."""

from __future__ import annotations

import argparse
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from castwise import cli
from castwise.policy import Policy
from castwise.study.cli import add_arguments, resume_command
from castwise.study.progress import Progress, duration

KNOWN = Path(__file__).parent / "known"


def test_a_study_ends_with_its_table_and_the_path_of_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--precisions", "bf16", "--steps", "20", "--seeds", "1", "--device", "t4", "--out", str(out)]
    assert cli.main(["study", f"{KNOWN / 'healthy.py'}:Regression", *options]) == 0
    printed, progress = capsys.readouterr()
    lines = printed.splitlines()
    assert lines[0] == "Regression on NVIDIA T4: 20 steps, 1 seed"
    assert any(line.startswith("bf16") and line.endswith("cannot tell") for line in lines)
    assert lines[-1] == f"report: {out / 'report.html'}"
    assert "left:" in progress
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    results = json.loads((out / "results.json").read_text())
    assert results["verdict"]["status"] == {"fp32": "cannot tell", "bf16": "cannot tell"}
    assert results["device"] == "NVIDIA T4"
    assert Policy.load(out / "policy.toml").low_format.name == "fp32"
    assert Policy.load(out / "policies" / "bf16.toml").low_format.name == "bf16"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["digit"], "Did you mean 'digits'"),
        (["digits", "--precisions", "fp15"], "fp16"),
        (["digits", "--device", "h1000"], "h100"),
        (["digits", "--seeds", "0"], "--seeds"),
        (["digits", "--steps", "-1"], "--steps"),
        (["digits", "--margin", "0"], "margin"),
        (["digits", "--margin", "inf"], "margin"),
        (["digits", "--threads", "0"], "threads"),
        (["digits", "--threads", "999999"], "threads"),
        (["nowhere.py:Task"], "nowhere.py"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["study", *options, "--out", str(tmp_path / "out")]) != 0
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["study", f"{KNOWN / 'healthy.py'}:Regression", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "out cannot be made (Not a directory). Name another with --out." in capsys.readouterr().err


def _parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_to_resume_asks_for_the_same_study() -> None:
    words = ["my task.py:T", "--precisions", "fp16", "--steps", "9", "--out", "a b", "--remedy", "--margin", "0.5"]
    again = _parsed(*shlex.split(resume_command(_parsed(*words)))[2:])
    assert vars(again) == vars(_parsed(*words)) | {"resume": True}
    assert resume_command(_parsed("digits")) == "castwise study digits --resume"


def test_a_study_that_does_not_train_imports_no_framework(run_python: Any) -> None:
    """All but the backends: a machine without torch can still read results, judge and draw."""
    done = run_python(
        """
        import sys
        import castwise.study, castwise.study.report, castwise.study.cli, castwise.study.table
        import castwise.study.backend, castwise.study.remedies, castwise.study.figures
        assert castwise.study.Task
        print(sorted({"torch", "jax", "keras", "tensorflow", "sklearn", "matplotlib"} & set(sys.modules)))
        """,
        hidden="name in ('torch', 'jax', 'keras', 'tensorflow')",
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_without_plotting_a_study_still_has_results(run_python: Any, tmp_path: Path) -> None:
    words = ["study", f"{KNOWN / 'healthy.py'}:Regression", "--precisions", "bf16", "--steps", "4", "--seeds", "1"]
    words += ["--quiet", "--out", str(tmp_path / "out")]
    code = f"from castwise.cli import main; raise SystemExit(main({words!r}))"
    done = run_python(code, hidden="name == 'matplotlib'")
    assert done.returncode == 0, done.stderr
    assert "castwise[study]" in done.stderr
    assert done.stdout.splitlines()[-1] == f"results: {tmp_path / 'out' / 'results.json'}"


def test_the_time_left_goes_by_the_speed_of_each_arm() -> None:
    progress = Progress({"fp32": 100, "fp16": 100}, stream=io.StringIO())
    progress.advance("fp32", 50, 5.0, "", last=False)
    assert progress.seconds_left() == pytest.approx(50 * 0.1 + 100 * 0.1)
    progress.advance("fp16", 10, 3.0, "", last=False)
    assert progress.seconds_left() == pytest.approx(50 * 0.1 + 90 * 0.3)
    progress.drop("fp16", 90)
    progress.plan("fp16+norm", 10)
    assert progress.seconds_left() == pytest.approx(50 * 0.1 + 10 * 0.3)


def test_progress_writes_lines_to_files_and_rewrites_one_line_on_terminals() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream in (io.StringIO(), Terminal()):
        progress = Progress({"fp32": 20}, stream=stream)
        progress.advance("fp32", 10, 1.0, "half", last=False)
        progress.advance("fp32", 10, 1.0, "whole", last=True)
        progress.close()
        assert ("half" in stream.getvalue()) == stream.isatty()
        assert "100%  whole  left: 0 s" in stream.getvalue()
        assert ("\r" in stream.getvalue()) == stream.isatty()
    silent = io.StringIO()
    Progress({"fp32": 20}, stream=silent, quiet=True).advance("fp32", 20, 1.0, "whole", last=True)
    assert silent.getvalue() == ""


def test_progress_never_wraps_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    Progress({"fp32": 20}, stream=stream).advance("fp32", 20, 1.0, 100 * "x", last=True)
    assert len(stream.getvalue().removeprefix("\r\x1b[2K")) == 39


def test_progress_without_stderr_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    progress = Progress({"fp32": 20})
    progress.advance("fp32", 20, 1.0, "whole", last=True)
    progress.close()


@pytest.mark.parametrize(("seconds", "said"), [(0.4, "0 s"), (59.4, "59 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")])
def test_durations_read_like_english(seconds: float, said: str) -> None:
    assert duration(seconds) == said
