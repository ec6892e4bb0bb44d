"""Calls into a user's task: what fails in them is the task's, and is told as such, with the method and the line."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import castwise
from castwise.errors import CastwiseError, StudyError

__all__ = ["calling"]

# Frames from here are not the user's own code.
_INSTALLED = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
_LIBRARIES = tuple(os.path.realpath(path) for path in (os.path.dirname(castwise.__file__), *_INSTALLED))


@contextlib.contextmanager
def calling(task: str, what: str) -> Iterator[None]:
    """Turn what the body raises into a ``StudyError`` that names the task, the method ``what`` and the user's line.

    Castwise's own errors pass: they name what is wrong already.
    """
    try:
        yield
    except CastwiseError:
        raise
    except Exception as error:
        said = str(error) or "no message"
        raise StudyError(
            f"Task {task!r}: {what} failed with {type(error).__name__}: {said}{_where(error)}. "
            f"Correct the task, or run again with --debug to see the whole traceback."
        ) from error


def _where(error: BaseException) -> str:
    """`` (train.py, line 12)``: the innermost frame of the user's own code; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith("<") and not os.path.realpath(frame.filename).startswith(_LIBRARIES):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
