"""A run's records put in order: one series of numbers per metric, and the events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .advice import trend_advice
from .sinks import Record, numbers

__all__ = ["Run", "sparkline"]

# What stands before the slash of a metric that is told layer by layer; the layer's path stands after it.
_SHARES = ("overflow", "underflow", "subnormal")
_OF_LAYERS = frozenset({"grad_norm", *_SHARES, *(f"activation_{share}" for share in _SHARES)})
_ROUNDING = 1e-12
_BARS = "▁▂▃▄▅▆▇█"


class Run:
    """What has been read of a run so far. A step that was logged twice (after a resume) keeps its last record."""

    def __init__(self) -> None:
        self.series: dict[str, dict[int, float]] = {}
        self.events: list[dict[str, Any]] = []

    def add(self, records: Iterable[Record]) -> None:
        """Take in more records, in the order in which they were written."""
        for record in records:
            if "event" in record:
                self.events.append(dict(record))
                continue
            for name, value in numbers(record).items():
                self.series.setdefault(name, {})[int(record["step"])] = value

    @property
    def step(self) -> int:
        """The newest step."""
        steps = [max(values) for values in self.series.values() if values] + [int(e["step"]) for e in self.events]
        return max(steps, default=0)

    def advice(self) -> list[tuple[str, str]]:
        """What the loss curve points to (see ``advice.trend_advice``), where the run has not said so itself."""
        losses = self.points("train/loss") if "train/loss" in self.series else []
        said = {event.get("cause") for event in self.events if event["event"] == "advice"}
        return [found for found in trend_advice([value for _, value in losses]) if found[0] not in said]

    def general(self) -> list[str]:
        """The metrics of the run as a whole: those of training first, then by name."""
        names = (name for name in self.series if name.partition("/")[0] not in _OF_LAYERS)
        return sorted(names, key=lambda name: (not name.startswith("train/"), name))

    def by_layer(self) -> dict[str, list[str]]:
        """The metrics that are told layer by layer: for each, its series, the largest newest value first."""
        families: dict[str, list[str]] = {}
        for name in sorted(set(self.series) - set(self.general())):
            families.setdefault(name.partition("/")[0], []).append(name)
        for names in families.values():
            names.sort(key=lambda name: -_rank(self.points(name)[-1][1]))
        return families

    def points(self, name: str) -> list[tuple[int, float]]:
        """A metric's values by step."""
        return sorted(self.series[name].items())


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a row of bars, averaged to at most `width`; where one was not finite, a ×."""
    if not values:
        return ""
    bins = min(width, len(values))
    groups = [values[i * len(values) // bins : (i + 1) * len(values) // bins] for i in range(bins)]
    # Halved, so that the distance of the largest floats from each other is one too.
    means = [math.nan if any(not math.isfinite(v) for v in g) else sum(v / 2 / len(g) for v in g) for g in groups]
    finite = [m for m in means if math.isfinite(m)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low
    if span <= _ROUNDING * max(abs(high), abs(low)):  # averaging the same value is not exact
        span = 0.0
    top = len(_BARS) - 1
    return "".join("×" if math.isnan(m) else _BARS[round((m - low) / span * top) if span > 0 else 0] for m in means)
