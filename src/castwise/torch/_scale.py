"""The loss scale of a training step, kept on the host or on the device, and what a step reports.

On a device that runs ahead of the host, asking it whether gradients are finite makes the host wait for the whole step.
Fused optimizers need no answer: they take the scale and a "found inf" flag as device scalars and skip by themselves.
So there the state of the scale lives on the device too, moved by the same `castwise.scaling.advance`, and the host
reads a copy whenever one has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch.optim import Optimizer

from castwise.scaling import ScaleState, ScalingConfig, advance, transition

from ._gradients import parameters_of
from ._stepping import is_fused

#: Types of device that run ahead of the host and have fused optimizers.
ASYNCHRONOUS = frozenset({"cuda", "xpu"})

_FIELDS = tuple(field.name for field in fields(ScaleState))


class StepResult:
    """What one call of `Amp.step` did. Numbers are fetched from the device when they are read.

    Attributes:
        stepped: whether the weights were changed. False while micro-batches accumulate and when the step was skipped.
        grad_norm: Euclidean norm of the true (unscaled, unclipped) gradients; NaN while accumulating.
        loss_scale: the scale this step's loss was multiplied by.
        reason: why the step was taken, skipped or put off, in words.
        emulated: whether the policy's format was emulated on this device.
    """

    __slots__ = ("_fetch", "_grad_norm", "_outcome", "emulated")

    def __init__(
        self,
        stepped: bool,
        grad_norm: torch.Tensor | float,
        loss_scale: float,
        reason: str,
        emulated: bool,
    ) -> None:
        self._outcome = (stepped, loss_scale, reason)
        self._fetch: Callable[[], tuple[bool, float, str]] | None = None
        self._grad_norm = grad_norm
        self.emulated = emulated

    @classmethod
    def later(cls, fetch: Callable[[], tuple[bool, float, str]], grad_norm: torch.Tensor, emulated: bool) -> StepResult:
        """A result whose outcome (stepped, loss scale, reason) is still on the device."""
        result = cls(False, grad_norm, 0.0, "", emulated)
        result._fetch = fetch
        return result

    def _read(self) -> tuple[bool, float, str]:
        if self._fetch is not None:
            self._outcome, self._fetch = self._fetch(), None
        return self._outcome

    @property
    def stepped(self) -> bool:
        return self._read()[0]

    @property
    def loss_scale(self) -> float:
        return self._read()[1]

    @property
    def reason(self) -> str:
        return self._read()[2]

    @property
    def grad_norm(self) -> float:
        return float(self._grad_norm)

    def __repr__(self) -> str:
        return (
            f"StepResult(stepped={self.stepped}, grad_norm={self.grad_norm:.6g}, loss_scale={self.loss_scale:g}, "
            f"reason={self.reason!r}, emulated={self.emulated})"
        )


class DeviceScale:
    """A loss-scale state whose numbers are scalars on one device.

    They are float64 there, so that one small copy carries all of them; counts stay exact up to 2**53 steps.
    """

    def __init__(self, state: ScaleState, config: ScalingConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._copy: torch.Tensor | None = None
        self._arrived: Any = None
        self.set(state)

    def set(self, state: ScaleState) -> None:
        """Go on from a state that the host knows."""
        numbers = [float(getattr(state, name)) for name in _FIELDS]
        self._take(torch.tensor([*numbers, 0.0], dtype=torch.float64).to(self.device))
        self._copy = None

    def _take(self, packed: torch.Tensor) -> None:
        self._packed = packed  # the state's numbers, whether the run has stalled, and the sizes of the losses
        scalars: Any = packed.unbind()[: len(_FIELDS)]
        self.state = ScaleState(*scalars)
        self.factor = packed[0].to(torch.float32)  # what losses are multiplied by

    def advance(self, finite: torch.Tensor, losses: torch.Tensor) -> Callable[[], tuple[bool, float, str]]:
        """Move on by one step, and return how to learn what it did. Nothing is fetched.

        Args:
            finite: whether all gradients were, a bool scalar.
            losses: the step's, as a vector; they travel to the host with the state.
        """
        before = self._packed
        after, stalled = advance(self.state, finite, self.config, torch.where)
        numbers: list[torch.Tensor] = [getattr(after, name) for name in _FIELDS]
        self._take(torch.stack([*(n.to(torch.float64) for n in numbers), stalled.to(torch.float64), *losses.unbind()]))
        self._send()
        config = self.config

        def fetch() -> tuple[bool, float, str]:
            state = _state_of(before.tolist())
            outcome = transition(state, bool(finite), config)[1]
            return outcome.stepped, state.scale, outcome.reason

        return fetch

    def _send(self) -> None:
        """Start a copy to the host, unless one is still under way."""
        if self._copy is not None:
            return
        if self.device.type == "cpu":
            self._copy = self._packed
            return
        self._copy = torch.empty(self._packed.shape, dtype=torch.float64, pin_memory=True)
        self._copy.copy_(self._packed, non_blocking=True)
        self._arrived = torch.Event(self.device)
        self._arrived.record()

    def news(self, wait: bool = False, lag: bool = False) -> tuple[ScaleState, bool, bool] | None:
        """The newest state that has arrived on the host, whether the run had stalled, and whether that step's losses
        were finite; None if nothing is new.

        With `wait`, the state after the last step, fetched now. With `lag`, the state that was sent last, waited for:
        ranks hear it in the same step, whichever is the fastest.
        """
        if lag and self._arrived is not None:
            self._arrived.synchronize()
        if wait:
            numbers = self._packed.tolist()
        elif self._copy is None or (self._arrived is not None and not self._arrived.query()):
            return None
        else:
            numbers = self._copy.tolist()
        self._copy = self._arrived = None
        stalled, *losses = numbers[len(_FIELDS) :]
        return _state_of(numbers), bool(stalled), all(map(math.isfinite, losses))


def scale_on_device(
    state: ScaleState, config: ScalingConfig, optimizer: Optimizer, scheduler: object | None
) -> DeviceScale | None:
    """The state kept on the device of the optimizer's parameters, where it may be: the device runs ahead of the host,
    is the only one, and the optimizer skips by itself. A scheduler has to know whether a step was real.
    """
    devices = {p.device for p in parameters_of([optimizer])}
    if scheduler is not None or not is_fused(optimizer) or len(devices) != 1:
        return None
    device = devices.pop()
    return DeviceScale(state, config, device) if device.type in ASYNCHRONOUS else None


def _state_of(numbers: list[float]) -> ScaleState:
    return ScaleState.from_dict(dict(zip(_FIELDS, numbers, strict=False)))
