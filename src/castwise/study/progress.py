"""Progress with an estimate of the time that is left, on stderr; nothing that a log file would choke on.

On a terminal one line is rewritten in place; elsewhere a line is printed for each finished run, and at least every
ten seconds while one is going on.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

__all__ = ["Progress", "duration"]

_QUIET_SECONDS = 10.0


class Progress:
    """Counts the steps of a study.

    The estimate goes by the seconds per step of each arm, since emulated arms are slower than fp32; arms not yet seen
    are taken to be as slow as the slowest so far.
    """

    def __init__(self, planned: dict[str, int], *, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._left = dict(planned)
        self._seconds: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._total = max(1, sum(planned.values()))
        self._stream = stream if stream is not None else sys.stderr
        self._quiet = quiet or self._stream is None  # None where the program was started with stderr closed
        self._live = not self._quiet and self._stream.isatty()
        self._spoken = time.monotonic()

    def plan(self, arm: str, steps: int) -> None:
        """Add steps that were not planned from the start (a remedy)."""
        self._left[arm] = self._left.get(arm, 0) + steps
        self._total += steps

    def drop(self, arm: str, steps: int) -> None:
        """Take off steps that will not be made: they were made before, or their run ended early."""
        self._left[arm] = max(0, self._left.get(arm, 0) - steps)

    def advance(self, arm: str, steps: int, seconds: float, said: str, *, last: bool) -> None:
        """Count ``steps`` steps of ``arm`` that took ``seconds``, and show ``said``."""
        self._left[arm] = max(0, self._left.get(arm, 0) - steps)
        self._steps[arm] = self._steps.get(arm, 0) + steps
        self._seconds[arm] = self._seconds.get(arm, 0.0) + seconds
        done = 1.0 - sum(self._left.values()) / self._total
        self._say(f"{done:4.0%}  {said}  left: {duration(self.seconds_left())}", important=last)

    def seconds_left(self) -> float:
        """Estimated seconds until all planned steps are made."""
        per_step = {arm: self._seconds[arm] / steps for arm, steps in self._steps.items() if steps}
        slowest = max(per_step.values(), default=0.0)
        return sum(left * per_step.get(arm, slowest) for arm, left in self._left.items())

    def note(self, text: str) -> None:
        """A line of its own."""
        if not self._quiet:
            self._clear()
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the terminal clean."""
        self._clear()

    def _say(self, line: str, *, important: bool) -> None:
        if self._quiet:
            return
        if self._live:
            # A line that wraps could not be taken back: only its last row would be rewritten.
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[2K{line[:width]}", end="", file=self._stream, flush=True)
        elif important or time.monotonic() - self._spoken > _QUIET_SECONDS:
            print(line, file=self._stream, flush=True)
            self._spoken = time.monotonic()

    def _clear(self) -> None:
        if self._live and not self._quiet:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """``"42 s"``, ``"3 min 5 s"`` or ``"2 h 10 min"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
