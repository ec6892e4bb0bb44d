"""Events: what happened in a run that somebody may want to know, each with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from castwise._frozen import FrozenMap

__all__ = ["ALARMS", "Event"]

#: Events that say something is wrong. The others tell what was done about it, or are the loss scale's ordinary search.
ALARMS = frozenset({"finding", "scale_low", "stop", "advice"})


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        step: optimizer steps tried before it, skipped ones included.
        name: "backoff", "overflow", "finding", "skip", "lower_scale", "raise", "give_back", "postpone", "heal",
            "scale_low", "advice" or "stop".
        message: what happened, in words.
        data: the evidence, as plain data.
    """

    step: int
    name: str
    message: str
    data: Mapping[str, Any] = field(default_factory=FrozenMap)

    @property
    def alarm(self) -> bool:
        """Whether it says that something is wrong."""
        return self.name in ALARMS

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"step": self.step, "event": self.name, "message": self.message, **dict(self.data)}
