"""What any watched training loop reports, whoever steps it: records for sinks, advice, throughput, memory, energy."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from castwise.watch.advice import HAZARDS, growth_advice, trend_advice
from castwise.watch.energy import Meter, meters_for
from castwise.watch.events import Event
from castwise.watch.sinks import Sink

__all__ = ["Reports"]

log = logging.getLogger("castwise.torch.watch")

_FIRST, _LAST = 40, 400  # losses that are kept, of the beginning and of the end
_TREND_EVERY = 20  # steps
_AGAIN_AFTER = 1000  # steps, until the same advice is given once more


class Reports:
    """Collects what is common to all loops, and hands it to sinks.

    Args:
        sinks: where records go.
        every: steps from one record to the next.
        samples, tokens: of one step; what `count` is told is added to it.
    """

    def __init__(self, sinks: Sequence[Sink], every: int, samples: int, tokens: int) -> None:
        self.sinks, self.every = list(sinks), every
        self.samples, self.tokens = samples, tokens
        self.steps = 0
        self._losses: list[torch.Tensor] = []
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=_LAST)
        self._told: dict[str, int] = {}
        self._counted = {"samples": 0, "tokens": 0}
        self._since, self._then = 0, time.perf_counter()
        self._meters: list[Meter] | None = None

    def loss(self, loss: torch.Tensor) -> None:
        """The loss of a micro-batch."""
        self._losses.append(loss.detach())
        if loss.dtype in (torch.float16, torch.bfloat16):
            dtype = str(loss.dtype).removeprefix("torch.")
            digits = 3 if dtype == "float16" else 2
            self.hazard("reductions", f"the loss is a {dtype}, so that its curve has {digits} digits")

    def count(self, *, samples: int = 0, tokens: int = 0) -> None:
        """Samples and tokens of the step that runs, for batches of changing size."""
        self._counted["samples"] += samples
        self._counted["tokens"] += tokens

    def write(self, record: dict[str, Any]) -> None:
        """Hand one record to every sink."""
        for sink in self.sinks:
            sink.write(record)

    # ---- metrics -----------------------------------------------------------------------------------------------------

    def step_ends(self) -> bool:
        """Count a step; whether it is one that is logged. Afterwards `step_loss` forgets."""
        self.steps += 1
        self._since += 1
        return self.steps % self.every == 0

    def step_loss(self) -> float:
        """The mean loss of the step's micro-batches, NaN where none is known; kept for trends, and then forgotten."""
        if not self._losses:
            return float("nan")
        loss = float(torch.stack([x.float().mean() for x in self._losses]).mean())
        (self._first if len(self._first) < _FIRST else self._last).append(loss)
        return loss

    def forget_losses(self) -> None:
        """The step is over."""
        self._losses.clear()

    def performance(self, device: torch.device) -> dict[str, float]:
        """Throughput since the last record; the most memory so far, in bytes; energy since the first, in joules."""
        now = time.perf_counter()
        seconds = max(now - self._then, 1e-9)
        record = {"perf/steps_per_second": self._since / seconds}
        for name, size in (("samples", self.samples), ("tokens", self.tokens)):
            total = size * self._since + self._counted[name]
            if total:
                record[f"perf/{name}_per_second"] = total / seconds
        self._counted, self._since, self._then = {"samples": 0, "tokens": 0}, 0, now
        peak = peak_bytes(device)
        if peak is not None:
            record["memory/peak_bytes"] = peak
        if self._meters is None:
            self._meters = meters_for(_gpu(device))
        return record | {meter.name: meter.joules() for meter in self._meters}

    # ---- advice ------------------------------------------------------------------------------------------------------

    def trend(self) -> None:
        """Give advice where the loss curve calls for it."""
        if self.steps % _TREND_EVERY == 0:
            for cause, words in trend_advice([*self._first, *self._last]):
                self.advise(cause, words)

    def growth(self) -> None:
        """A step broke: say so where the loss had grown out of bounds before."""
        for cause, words in growth_advice([*self._first, *self._last]):
            self.advise(cause, words)

    def hazard(self, cause: str, evidence: str) -> None:
        """Give advice on something that was seen."""
        self.advise(cause, HAZARDS[cause], evidence)

    def advise(self, cause: str, words: str, evidence: str = "") -> None:
        """Give advice, unless the same was given not long ago."""
        told = self._told.get(cause)
        if told is not None and self.steps - told < _AGAIN_AFTER:
            return
        self._told[cause] = self.steps
        self.tell(f"{words} Seen: {evidence}." if evidence else words, cause, evidence)

    def tell(self, message: str, cause: str, evidence: str) -> None:
        """Write the event of an advice."""
        event = Event(self.steps, "advice", message, {"cause": cause, "evidence": evidence})
        log.warning("step %d: %s", event.step, message)
        self.write(event.to_dict())


def peak_bytes(device: torch.device) -> int | None:
    """The most memory so far: of tensors on a device that counts it, else of the process; None where none is known."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "xpu":
        return int(torch.xpu.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux


def _gpu(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
