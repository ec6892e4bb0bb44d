"""The region of an `Amp` as a context: a policy's region, or the planned model in the model's place."""

from __future__ import annotations

from collections.abc import Callable
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
        self._entered: list[tuple[Callable[[], object], AbstractContextManager[None]]] = []

    def __enter__(self) -> Entered:
        amp = self._amp
        setting = tf32(amp.device_type, amp.policy.tf32)
        setting.__enter__()
        try:
            leave = self._planned() if amp.planned is not None else self._region()
        except BaseException:
            setting.__exit__(None, None, None)
            raise
        self._entered.append((leave, setting))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        leave, setting = self._entered.pop()
        try:
            leave()
        finally:
            setting.__exit__(None, None, None)

    def _region(self) -> Callable[[], object]:
        region = Region(self._amp._rules, self._cache, log=self._log)
        region.enter()
        return region.leave

    def _planned(self) -> Callable[[], object]:
        stack = ExitStack()
        assert self._amp.planned is not None
        stack.enter_context(self._amp.planned.in_place(self._cache, self._amp._narrow))
        return stack.close


def device_type_of(model: nn.Module, optimizer: Optimizer) -> str:
    """The type of device that a model trains on."""
    for p in (*model.parameters(), *parameters_of([optimizer])):
        return p.device.type
    return "cpu"
