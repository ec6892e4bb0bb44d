"""The region of an `Amp` as a context: a policy's region, or the planned model in the model's place."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ._casts import CastCache
from ._gradients import parameters_of
from ._region import Region
from .devices import tf32

if TYPE_CHECKING:
    from .amp import Amp


class Entered(AbstractContextManager["Entered"]):
    """A region of an `Amp` as a context of its own, which may be entered again."""

    def __init__(self, amp: Amp, log: list[Any] | None, cache: CastCache | None = None) -> None:
        self._amp = amp
        self._log = log
        self._cache = amp._cache if cache is None else cache
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Entered:
        stack = ExitStack()
        stack.enter_context(tf32(self._amp.device_type, self._amp.policy.tf32))
        if self._amp.planned is not None:
            stack.enter_context(self._amp.planned.in_place())
            self._entered.append(stack)
            return self
        region = Region(self._amp._rules, self._cache, log=self._log)
        region.enter()
        stack.callback(region.leave)
        self._entered.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().close()


def device_type_of(model: nn.Module, optimizer: Optimizer) -> str:
    """The type of device that a model trains on."""
    for p in (*model.parameters(), *parameters_of([optimizer])):
        return p.device.type
    return "cpu"
