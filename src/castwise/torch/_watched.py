"""What an `Amp` tells of its run, and how it is saved: everything beside the step itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import nn

from castwise.errors import CastwiseError
from castwise.guard import Finding, Raised
from castwise.policy import Policy
from castwise.scaling import ScaleState
from castwise.watch.events import Event

from . import checkpoint
from ._layers import LayerHooks
from ._rules import Rules, rules_for
from ._scale import DeviceScale
from .apply import Applied
from .guard import Guard
from .guard_remedy import policy_comment, with_raised


class Watched:
    """The part of `Amp` that reports and saves."""

    model: nn.Module
    policy: Policy
    device_type: str
    planned: Applied | None
    _asked: Policy
    _guard: Guard | None
    _layers: LayerHooks | None
    _on_device: DeviceScale | None
    _rules: Rules
    _state: ScaleState

    def _raise_layers(self, raised: tuple[Raised, ...]) -> None:
        """Put the policy that was asked for in force, with the guard's raised layers on top."""
        self.policy = with_raised(self._asked, raised)
        self._rules = rules_for(self.policy, self.device_type)
        if self.planned is not None:  # its ops have their formats from a graph; the policy tells of them, for saving
            self.planned.raise_layers(raised)
            return
        if self._layers is not None:
            self._layers.remove()
        self._layers = LayerHooks(self.model, self.policy, self.device_type) if self.policy.layers else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CastwiseError(
            "Amp: it belongs to its model and its optimizer, and cannot be copied or pickled. Copy the model itself, "
            "make another Amp for the copy, and keep a run by amp.save(path) or amp.state_dict(). If the model holds "
            "its Amp as an attribute, hold it elsewhere."
        )

    def close(self) -> None:
        """Take the layer hooks off the model."""
        if self._layers is not None:
            self._layers.remove()

    @property
    def loss_scale(self) -> float:
        """What the next loss will be multiplied by (1.0 without scaling). Fetched from the device where it lives."""
        return self.scale_state.scale

    @property
    def scale_state(self) -> ScaleState:
        """The state of the loss-scale machine: scale, counters. Fetched from the device where it lives there."""
        if self._on_device is None:
            return self._state
        fetched = self._on_device.news(wait=True)
        assert fetched is not None
        return fetched[0]

    @property
    def emulated(self) -> bool:
        """Whether the policy's format is emulated on this device."""
        return self._rules.emulated

    @property
    def events(self) -> list[Event]:
        """What the guard has seen and done, the newest last (at most the last 1,000)."""
        return list(self._guard.events) if self._guard is not None else []

    @property
    def finding(self) -> Finding | None:
        """Where and why the last step that was looked into broke; None where none has."""
        return self._guard.finding if self._guard is not None else None

    def forget_finding(self) -> None:
        """Set `finding` to None, so that the next one is sure to be new."""
        if self._guard is not None:
            self._guard.finding = None

    def on_event(self, listener: Callable[[Event], None]) -> None:
        """Call `listener` with each event of the guard from now on."""
        if self._guard is not None:
            self._guard.listeners.append(listener)

    def save_policy(self, path: str | os.PathLike[str]) -> Path:
        """Write the policy that is in force, with the layers that the guard raised, for the next run to start with."""
        raised = self._guard.state.raised if self._guard is not None else ()
        return self.policy.save(path, policy_comment(raised))

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how training goes on, but for the model's, optimizer's and scheduler's own states.

        Loss scale and counters, raised layers and their waits, what is kept beside 16-bit weights, random states and,
        between micro-batches, the gradients so far.
        """
        return checkpoint.state_of(cast(Any, self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a state of torch.amp.GradScaler (its scale and good-step count).

        Load the model's and the optimizer's states first. A GradScaler's scale is kept within the policy's limits.
        Random generators (torch's, Python's, NumPy's) go on from where they were when the state was taken.

        Raises:
            PolicyError: the state belongs to another mode, model, number of micro-batches or version.
        """
        checkpoint.load_state(cast(Any, self), state)

    def save(self, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> Path:
        """Write model, optimizer, scheduler and `state_dict` to one file, atomically.

        Args:
            path: of the file. It is replaced in one step: whenever the machine dies, there is a whole one.
            extra: what else the program needs to go on (the position in its data, say): tensors and plain values.
        """
        return checkpoint.save(cast(Any, self), path, extra)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a file of `save`, and return its `extra`. Training goes on bit for bit where the device allows it.

        Raises:
            PolicyError: this is no such file, or it belongs to another model or policy.
        """
        return checkpoint.load(cast(Any, self), path)
