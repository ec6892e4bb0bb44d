"""The command line: ``castwise COMMAND …``.

Each command lives in the room that does its work and gives two functions: one adds its arguments to a parser, one takes
the parsed arguments and returns the exit status. Its room is imported only when it is the command asked for, so that
``castwise doctor`` runs where no framework is installed, and ``castwise --version`` at once.

Exit status: 0 done, 1 an error of the kind the message explains, 2 a wrong command line, 70 a fault in castwise itself,
130 interrupted. A command may return another status of its own, which its help then explains.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import castwise
from castwise.errors import CastwiseError, MissingExtraError

__all__ = ["COMMANDS", "Command", "main"]

_FAULT = 70  # EX_SOFTWARE of BSD's sysexits.h
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: where it is, and what the overview says of it."""

    module: str
    summary: str
    add_arguments: str = "add_arguments"  # function of the module: (parser) -> None
    main: str = "main"  # function of the module: (args) -> exit status
    extra: str = ""  # what to install where the module's own imports are missing


COMMANDS = {
    "study": Command(
        "castwise.study.cli", "train a task in several precisions and say which of them is safe", extra="study"
    ),
    "doctor": Command(
        "castwise.doctor",
        "show what this machine computes natively, each format tried",
        add_arguments="add_doctor_arguments",
        main="main_doctor",
    ),
    "advise": Command(
        "castwise.advise",
        "say which format to use on this machine or another device, and why",
        add_arguments="add_advise_arguments",
        main="main_advise",
    ),
    "plan": Command("castwise._plan_cli", "decide the format of every operation of a torch model", extra="torch"),
    "memory": Command(
        "castwise._memory_cli", "say how much memory a training step takes, and what fits", extra="torch"
    ),
    "watch": Command("castwise.watch.cli", "show a run that is being logged, in the terminal or as an HTML page"),
    "compare": Command(
        "castwise.watch.compare_cli", "run a step in float32 beside other precisions, layer by layer", extra="torch"
    ),
    "convert": Command(
        "castwise._convert_cli", "convert an ONNX model or SavedModel to mixed precision, and check it", extra="onnx"
    ),
    "verify": Command(
        "castwise._convert_cli",
        "compare a converted ONNX model or SavedModel with the one it was made from",
        add_arguments="add_verify_arguments",
        main="main_verify",
        extra="onnx",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status; errors are printed as one line, without a traceback."""
    _bear_any_text()
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        args = _parsed(arguments)
        logging.basicConfig(format="castwise: %(message)s", level=logging.INFO if args.verbose else logging.WARNING)
        with _naming_the_extra(args.command):
            status = getattr(importlib.import_module(args.command.module), args.command.main)(args)
        _flush()
        return int(status or 0)
    except KeyboardInterrupt:
        return _say("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has stopped reading. Python would complain again when it flushes at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CastwiseError, OSError) as error:
        if debug:
            raise
        return _say(f"error: {_one_line(error)}", 1)
    except Exception as error:
        if debug:
            raise
        fault = f"{type(error).__name__}: {_one_line(error)}"
        return _say(f"fault in castwise: {fault}. Run again with --debug to see where, and report it.", _FAULT)


def _bear_any_text() -> None:
    """Let a terminal or pipe that is not UTF-8 show ``?`` for what it lacks, instead of failing after hours of work."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _flush() -> None:
    if sys.stdout is not None:  # None where the program was started with its output closed
        sys.stdout.flush()


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    try:
        return _parser(arguments).parse_args(arguments)
    except SystemExit:
        _flush()  # --help and --version have printed: a closed pipe shows here, not at exit
        raise


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for this command line: only the command that it names is imported and described in full."""
    parser = argparse.ArgumentParser(
        prog="castwise", description="Mixed precision that decides by itself, and shows that the result is right."
    )
    parser.add_argument("--version", action="version", version=f"castwise {castwise.__version__}")
    _add_common(parser, debug=False, verbose=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.summary, description=f"{command.summary[0].upper()}{command.summary[1:]}."
        )
        if name == asked:
            with _naming_the_extra(command):
                getattr(importlib.import_module(command.module), command.add_arguments)(sub)
            sub.set_defaults(command=command)
        # After the command these only ever switch on, so that they may stand before it or after it.
        _add_common(sub, debug=argparse.SUPPRESS, verbose=argparse.SUPPRESS)
    return parser


def _add_common(parser: argparse.ArgumentParser, debug: object, verbose: object) -> None:
    parser.add_argument("--debug", action="store_true", default=debug, help="show tracebacks of errors")
    parser.add_argument("--verbose", action="store_true", default=verbose, help="log what is decided, and why")


@contextlib.contextmanager
def _naming_the_extra(command: Command) -> Iterator[None]:
    """Turn the lack of a package that the command's extra installs into an error that says so."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not command.extra or (error.name or "castwise").partition(".")[0] == "castwise":
            raise
        raise MissingExtraError(
            f"this command needs {error.name!r}, which is not installed; "
            f"install it with: pip install 'castwise[{command.extra}]'"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _say(message: str, status: int) -> int:
    print(f"castwise: {message}", file=sys.stderr)
    return status
