"""Numbers with units, short enough for a line of text."""

from __future__ import annotations

__all__ = ["show_bytes", "show_seconds"]

_KILO = 1000.0


def show_seconds(seconds: float) -> str:
    """A time with the unit that suits its size: ``1.25 ms``."""
    return _scaled(seconds, ("s", "ms", "µs", "ns"), 1 / _KILO)


def show_bytes(size: float) -> str:
    """A size in decimal units: ``12.6 MB``."""
    return _scaled(size, ("B", "kB", "MB", "GB", "TB"), _KILO)


def _scaled(value: float, units: tuple[str, ...], step: float) -> str:
    """``value`` in the first of ``units``, each ``step`` times the one before, in which it is between 1 and 1000."""
    last = len(units) - 1
    for position, unit in enumerate(units):
        fits = abs(value) < _KILO if step > 1 else abs(value) >= 1
        if fits or position == last or value == 0:
            return f"{value:.3g} {unit}"
        value /= step
    raise AssertionError("unreachable: the last unit fits everything")
