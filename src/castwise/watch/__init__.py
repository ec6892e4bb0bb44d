"""Watching a run: events, metrics, where they go, and how they are shown."""

from __future__ import annotations

from .events import ALARMS, Event

__all__ = ["ALARMS", "Event"]
