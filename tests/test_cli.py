"""The command line's frame: help, versions, exit statuses, and errors in one line."""

from __future__ import annotations

import argparse
import importlib
import io
import subprocess
import sys
from types import ModuleType

import pytest

import castwise
from castwise import PolicyError, cli


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command of our own, in a module of its own, whose main can be set."""
    module = ModuleType("castwise_test_tool")
    module.add_arguments = lambda parser: parser.add_argument("--size", type=int, default=1)  # type: ignore[attr-defined]
    module.main = lambda args: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "tool", cli.Command(module.__name__, "try things"))
    return module


def fail_with(error: BaseException) -> object:
    def main(args: argparse.Namespace) -> int:
        raise error

    return main


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"castwise {castwise.__version__}\n"


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in out
        assert command.summary.split()[0] in out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_room_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = cli.COMMANDS[name]
    assert callable(getattr(importlib.import_module(command.module), command.main))
    with pytest.raises(SystemExit) as done:
        cli.main([name, "--help"])
    assert done.value.code == 0
    assert f"usage: castwise {name}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["stduy"], ["--fast"], ["tool", "--size", "x"]])
def test_a_wrong_command_line_is_status_2(arguments: list[str], tool: ModuleType) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(arguments)
    assert done.value.code == 2


def test_a_command_gets_its_arguments_and_its_status_is_returned(tool: ModuleType) -> None:
    tool.main = lambda args: args.size  # type: ignore[attr-defined]
    assert cli.main(["tool", "--size", "3"]) == 3
    assert cli.main(["--verbose", "tool", "--debug"]) == 1
    tool.main = lambda args: 10 * args.verbose + args.debug  # type: ignore[attr-defined]
    assert cli.main(["--verbose", "tool", "--debug"]) == 11


@pytest.mark.parametrize(
    "error", [PolicyError("ops.sofmax: no such op.\n  Write 'softmax'."), FileNotFoundError("gone")]
)
def test_an_error_is_one_line_and_status_1(
    error: Exception, tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.main = fail_with(error)  # type: ignore[attr-defined]
    assert cli.main(["tool"]) == 1
    said = capsys.readouterr().err
    assert said == f"castwise: error: {' '.join(str(error).split())}\n"
    with pytest.raises(type(error)):
        cli.main(["tool", "--debug"])


def test_a_fault_of_castwise_itself_says_so_and_how_to_see_more(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.main = fail_with(KeyError("scale"))  # type: ignore[attr-defined]
    assert cli.main(["tool"]) == 70
    assert "KeyError: 'scale'. Run again with --debug" in capsys.readouterr().err
    with pytest.raises(KeyError):
        cli.main(["--debug", "tool"])


def test_an_interrupt_is_status_130_without_a_traceback(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main = fail_with(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert cli.main(["tool"]) == 130
    assert capsys.readouterr().err == "castwise: interrupted\n"


def test_a_package_that_a_command_lacks_is_an_error_that_names_its_extra(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.main = fail_with(ModuleNotFoundError("No module named 'sklearn'", name="sklearn.datasets"))  # type: ignore[attr-defined]
    monkeypatch.setitem(cli.COMMANDS, "tool", cli.Command(tool.__name__, "try things", extra="study"))
    assert cli.main(["tool"]) == 1
    assert "needs 'sklearn.datasets'" in (said := capsys.readouterr().err)
    assert "pip install 'castwise[study]'" in said
    tool.main = fail_with(ModuleNotFoundError("No module named 'castwise.x'", name="castwise.x"))  # type: ignore[attr-defined]
    assert cli.main(["tool"]) == 70


def test_output_into_a_pipe_that_closes_early_is_no_traceback() -> None:
    command = [sys.executable, "-m", "castwise", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""


def test_a_terminal_that_lacks_a_character_shows_a_question_mark(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    tool.main = lambda args: print("±1 – 误差")  # type: ignore[attr-defined]
    assert cli.main(["tool"]) == 0
    assert raw.getvalue().split() == [b"?1", b"?", b"??"]


def test_a_closed_standard_output_is_no_fault(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    tool.main = lambda args: 0  # type: ignore[attr-defined]
    assert cli.main(["tool"]) == 0
