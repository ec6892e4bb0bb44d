"""The guard of a prepared model: what `castwise.guard` decides about a broken step, done between steps of ``fit``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from castwise import guard
from castwise.errors import NonFiniteError
from castwise.guard import Action, Finding, GuardState
from castwise.policy import LayerRule
from castwise.watch import Event
from castwise.watch.advice import advice_for

from ._examine import examine
from ._internals import keras
from ._optimizer import forget_compiled
from ._paths import escaped

__all__ = ["Guard"]

log = logging.getLogger("castwise.keras")


class Guard:
    """Looks after one run.

    Args:
        root: the prepared model.
        batches: gives inputs to look for the fault with, afresh at each call.
        tell: takes each event.
    """

    def __init__(self, root: Any, batches: Callable[[], Iterable[Any]], tell: Callable[[Event], None]) -> None:
        self.root = root
        self.config = root.policy.guard
        self.batches = batches
        self.tell = tell
        self.state = GuardState()
        self._base = root.policy

    def look(self, step: int, skipped: int, scale: float, loss: float) -> None:
        """After some steps: ``skipped`` of them in a row, up to now, were not taken.

        Raises:
            NonFiniteError: nothing helps, and it is time to stop.
        """
        if not self.config.enabled:
            return
        if skipped == 0 and math.isfinite(loss):
            self.state = guard.healthy(self.state)
            self._try_to_give_back(step)
            return
        self.state = replace(self.state, overflows=skipped)
        scaled = self.root.policy.uses_scaling
        if not guard.worth_a_look(self.state, math.isfinite(loss), scale, scaled, self.config):
            return
        finding = examine(self.root, self.batches(), scale)
        self._say(step, "finding", str(finding), finding.to_dict())
        for name, words in advice_for(finding):
            self._say(step, "advice", f"{name}: {words}")
        self.state, move = guard.decide(self.state, finding, self.config)
        if move.action is Action.RAISE:
            self._raise(step, finding)
        elif move.action is Action.STOP:
            self._say(step, "stop", move.reason)
            raise NonFiniteError(f"Step {step}: {move.reason}. Last finding: {finding}")

    def _raise(self, step: int, finding: Finding) -> None:
        self.state = guard.raised(self.state, finding.layer, (), step, self.config)
        self._apply()
        self._say(step, "raise", f"layer {finding.layer!r} computes in float32 from here on: {finding.evidence}")

    def _try_to_give_back(self, step: int) -> None:
        for one in guard.due(self.state, step):
            kept = self.state
            self.state = guard.given_back(self.state, one)
            self.root.changed(self._policy())
            finding = examine(self.root, self.batches(), 1.0)
            if finding.layer == one.layer:
                self.state = guard.postponed(kept, one, step)
                self.root.changed(self._policy())
                self._say(step, "postpone", f"layer {one.layer!r} still needs float32: {finding.evidence}")
            else:
                self._apply()
                self._say(step, "give_back", f"layer {one.layer!r} computes in its own format again")

    def _policy(self) -> Any:
        rules = tuple(LayerRule(escaped(one.layer) or "**", format="float32") for one in self.state.raised)
        return replace(self._base, layers=(*self._base.layers, *rules))

    def _apply(self) -> None:
        """From the next step on: Keras fetches the step's function each time, so a new one takes effect at once."""
        self.root.changed(self._policy())
        model = self.root.model
        forget_compiled(model)
        if isinstance(model, keras.Model):
            model.make_train_function(force=True)

    def _say(self, step: int, name: str, message: str, data: Any = None) -> None:
        event = Event(step, name, message, data or {})
        log.log(logging.WARNING if event.alarm or name == "raise" else logging.INFO, "step %d: %s", step, message)
        self.tell(event)
