"""Watching a run: events, metrics, where they go, and how they are shown."""

from __future__ import annotations

from .events import ALARMS, Event
from .series import Run, sparkline
from .sinks import JsonlSink, Record, Sink, TensorBoardSink, numbers, read_jsonl, sink_for

__all__ = [
    "ALARMS",
    "Event",
    "JsonlSink",
    "Record",
    "Run",
    "Sink",
    "TensorBoardSink",
    "numbers",
    "read_jsonl",
    "sink_for",
    "sparkline",
]
