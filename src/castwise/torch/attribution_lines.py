"""The line of the user's program that is running, outside of torch and of Castwise."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch

__all__ = ["line_of_hook", "line_of_program", "of_program"]

_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
_ENGINE = "_engine_run_backward"  # what calls autograd's engine, which calls hooks


def line_of_program() -> str:
    """The innermost line of the program: "file:number in function"; "" where none is running."""
    return _line_within("")


def line_of_hook() -> str:
    """The line of a hook that runs in a backward pass; "" where what runs there is not the program's."""
    return _line_within(_ENGINE)


def _line_within(caller: str) -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != caller:
        if of_program(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {_function(frame.f_code.co_qualname)}"
        frame = frame.f_back
    return ""


def of_program(frame: FrameType) -> bool:
    """Whether a frame is of the user's own code."""
    path = frame.f_code.co_filename
    return not path.startswith(_OUTSIDE) and not path.startswith("<")


def _function(name: str) -> str:
    """Its own name, also where the tracer of torch.compile has cut it in two."""
    return _RESUMED.sub(r"\1", name)
