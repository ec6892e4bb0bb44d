"""What the commands that take a model from the command line have in common: the options that name it and its device."""

from __future__ import annotations

import argparse
from typing import Any

from castwise.errors import CastwiseError

__all__ = ["add_model", "example_inputs"]


def add_model(parser: argparse.ArgumentParser, more: str = "") -> None:
    """The arguments that say which model, and for which device.

    Args:
        parser: of the command.
        more: what else the command does with the model, to end the help of its argument.
    """
    parser.add_argument(
        "model",
        metavar="TASK|file.py:Model",
        help="a study task (digits, text, file.py:Task), or a module class or factory whose `example_inputs` says what "
        f"it is called with{more}",
    )
    parser.add_argument("--device", help="a device of the table, which need not be there (default: this machine)")


def example_inputs(model: Any, spec: str, kind: type[CastwiseError]) -> Any:
    """What a model says that it is called with: a tensor, a tuple or a mapping. Raises `kind` where it does not say."""
    inputs = getattr(model, "example_inputs", None)
    inputs = inputs() if callable(inputs) else inputs
    if inputs is None:
        raise kind(
            f"{spec!r} does not say what it is called with. Give the module an attribute or method "
            "`example_inputs` that is (or returns) a tensor, a tuple or a mapping."
        )
    return inputs
