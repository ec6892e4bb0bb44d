"""Metrics of a training run: what an `Amp` knows of each step, as records for sinks.

    castwise.torch.watch(amp, "run.jsonl")              # castwise watch run.jsonl --follow
    castwise.torch.watch(amp, SummaryWriter("logs"))    # TensorBoard
    castwise.torch.watch(amp, lambda record: wandb.log(record, step=record["step"]))

Numbers are fetched from the device only for the steps that are logged.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from castwise.errors import PolicyError
from castwise.formats import NumberFormat, parse_format
from castwise.watch.events import Event
from castwise.watch.sinks import Sink, sink_for

from ._gradients import values_of
from ._scale import StepResult

if TYPE_CHECKING:
    from .amp import Amp

__all__ = ["Watcher", "watch"]

_FULL_RANGE = 8  # exponent bits of float32 and bfloat16: formats with as many lose nothing that float32 keeps


def watch(amp: Amp, *targets: Any, every: int = 1, layers_every: int = 0, samples: int = 0, tokens: int = 0) -> Watcher:
    """Log an `Amp`'s steps and events from now on.

    Args:
        amp: whose steps are logged.
        targets: JSONL paths, TensorBoard writers, functions of a record, or objects with ``write(record)``.
        every: log each n-th step.
        layers_every: at each n-th step, also each layer's gradient norm and the shares of its gradient values that the
            policy's format loses; 0: never. Those steps read all gradients once more.
        samples, tokens: in one step, for the throughput.

    Raises:
        PolicyError: a number is out of range. CastwiseError: a target takes no records.
    """
    if every < 1 or layers_every < 0 or samples < 0 or tokens < 0:
        raise PolicyError("watch: every must be 1 or more; layers_every, samples and tokens 0 or more.")
    watcher = Watcher([sink_for(target) for target in targets], every, layers_every, samples, tokens)
    amp._observers.append(watcher)
    amp.on_event(watcher.event)
    return watcher


class Watcher:
    """Collects the metrics of an `Amp` and hands them to sinks."""

    def __init__(self, sinks: list[Sink], every: int, layers_every: int, samples: int, tokens: int) -> None:
        self.sinks = sinks
        self.every, self.layers_every, self.samples, self.tokens = every, layers_every, samples, tokens
        self._losses: list[torch.Tensor] = []
        self._layers: dict[str, float] = {}
        self._steps = 0
        self._then = time.perf_counter()

    def loss(self, loss: torch.Tensor) -> None:
        """The loss of a micro-batch."""
        self._losses.append(loss.detach())

    def gradients(self, amp: Amp, scale: float) -> None:
        """The gradients of a step are there, still scaled."""
        if self.layers_every and self._steps % self.layers_every == 0:
            self._layers = layer_metrics(amp.model, parse_format(amp.policy.format), scale)

    def finished(self, amp: Amp, result: StepResult) -> None:
        """A step was taken or skipped."""
        self._steps += 1
        if self._steps % self.every == 0:
            self._write(self._metrics(amp, result))
        self._losses.clear()

    def event(self, event: Event) -> None:
        """Pass on an event of the guard."""
        self._write(event.to_dict())

    def _metrics(self, amp: Amp, result: StepResult) -> dict[str, Any]:
        state = amp.scale_state
        now = time.perf_counter()
        seconds, self._then = (now - self._then) / self.every, now
        loss = float(torch.stack([x.float().mean() for x in self._losses]).mean()) if self._losses else float("nan")
        record: dict[str, Any] = {
            "step": state.steps,
            "time": time.time(),
            "train/loss": loss,
            "train/grad_norm": result.grad_norm,
            "train/loss_scale": state.scale,
            "train/skipped_steps": state.skipped,
            "train/skip_rate": state.skipped / max(state.steps, 1),
            "train/learning_rate": float(amp.optimizer.param_groups[0]["lr"]),
            "perf/steps_per_second": 1.0 / max(seconds, 1e-9),
            "numerics/casts_of_weights": amp._cache.casts_made,
            "numerics/raised_layers": len(amp._guard.state.raised) if amp._guard is not None else 0,
            "memory/peak_bytes": _peak_bytes(amp.device_type),
        }
        for name, size in (("samples", self.samples), ("tokens", self.tokens)):
            if size:
                record[f"perf/{name}_per_second"] = size / max(seconds, 1e-9)
        record |= self._layers
        self._layers = {}
        return record

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(record)


def layer_metrics(model: torch.nn.Module, fmt: NumberFormat, scale: float) -> dict[str, float]:
    """Per layer with weights: the true gradient norm, and the shares of its values beyond a format's range.

    Args:
        model: whose `.grad` are there, multiplied by `scale`.
        fmt: the format that gradients pass through. Its own limits count: what float16 loses, bfloat16 keeps.
        scale: the loss scale.
    """
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        values = values_of(p for p in module.parameters(recurse=False))
        if not values:
            continue
        flat = torch.cat([v.detach().reshape(-1).double() for v in values]).abs()
        layer = path or "model"
        found[f"grad_norm/{layer}"] = float(flat.norm()) / scale
        if fmt.exponent_bits >= _FULL_RANGE:
            continue
        nonzero = max(int((flat > 0).sum()), 1)
        found[f"overflow/{layer}"] = float((flat > fmt.max).sum()) / nonzero
        found[f"underflow/{layer}"] = float(((flat > 0) & (flat < fmt.smallest_subnormal / 2)).sum()) / nonzero
        subnormal = (flat >= fmt.smallest_subnormal / 2) & (flat < fmt.smallest_normal)
        found[f"subnormal/{layer}"] = float(subnormal.sum()) / nonzero
    return found


def _peak_bytes(device_type: str) -> int:
    if device_type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # Windows has none
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux
