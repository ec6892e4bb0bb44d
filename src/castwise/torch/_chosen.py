"""What the clock decided for a module, kept with it.

Kernels sum in different orders. A copy of a module, or one that is loaded in another process, gives the same results to
the last bit only if it runs in the same kernels; and it need not wait for them to be timed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from castwise.hardware import detected

from .measure import versions

__all__ = ["Chosen", "call_of"]


class Chosen:
    """Answers so far. They hold where they were found: on another device, or with another torch, all is asked anew."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def whether(self, *question: object, device_type: str, ask: Callable[[], bool]) -> bool:
        """The answer to a question that its values name; found by `ask` where there is none yet."""
        device = detected(device_type)
        where = (device_type if device is None else device.name, *sorted(versions().items()))
        key = repr((*question, *where))
        if key not in self._known:
            self._known[key] = ask()
        return self._known[key]


def call_of(module: fx.GraphModule, flat: Sequence[Any]) -> str:
    """What names a graph and a call of it: the code, and the inputs' formats and sizes."""
    kinds = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in flat]
    return hashlib.sha256(f"{module.code}{kinds}".encode()).hexdigest()
