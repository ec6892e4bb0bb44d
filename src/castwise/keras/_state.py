"""Which prepared model is being called on this thread and task, and in which of its layers the call is."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Active", "active", "entered"]


@dataclass(frozen=True, slots=True)
class Active:
    """A call in progress: whose it is, and the path of the innermost layer."""

    root: Any
    layer: str


_ACTIVE: contextvars.ContextVar[Active | None] = contextvars.ContextVar("castwise_keras", default=None)


def active() -> Active | None:
    """The call of a prepared model that this code is in, if any."""
    return _ACTIVE.get()


@contextlib.contextmanager
def entered(root: Any, layer: str) -> Iterator[None]:
    """Inside, the call is in this layer; afterwards where it was, also after an exception."""
    token = _ACTIVE.set(Active(root, layer))
    try:
        yield
    finally:
        _ACTIVE.reset(token)
