"""Watching a training run: metrics and advice, as records for sinks.

    castwise.torch.watch(amp, "run.jsonl")              # castwise watch run.jsonl --follow
    castwise.torch.watch(amp, SummaryWriter("logs"))    # TensorBoard
    castwise.torch.watch(amp, lambda record: wandb.log(record, step=record["step"]))
    castwise.torch.watch(optimizer, "run.jsonl", model=model)   # a loop of its own, without an Amp

Numbers are fetched from the device only for the steps that are logged. One step in `look_every` is looked at closely
while it runs (see `look`), and takes several times as long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from castwise.errors import PolicyError
from castwise.formats import parse_format
from castwise.watch.events import Event
from castwise.watch.sinks import Sink, sink_for

from ._scale import StepResult
from .clipped import ClippedTooSoon
from .guard_metrics import gradient_metrics, initial_hazard, look_metrics, spoilt_statistics
from .look import Look
from .reports import Reports
from .stale import StaleUpdates
from .watch_optimizer import OptimizerWatcher

if TYPE_CHECKING:
    from .amp import Amp

__all__ = ["Watcher", "watch"]


def watch(
    run: Amp | Optimizer,
    *targets: Any,
    every: int = 1,
    layers_every: int = 0,
    look_every: int = 1000,
    samples: int = 0,
    tokens: int = 0,
    model: nn.Module | None = None,
    scaler: Any = None,
) -> Watcher | OptimizerWatcher:
    """Log a run's steps and events from now on, and give advice where something points to a known cause.

    Args:
        run: an `Amp`, or the optimizer of a loop that steps it by itself: then give `model`, and `scaler` where there
            is one, and hand each loss to the result's `loss`.
        targets: JSONL paths, TensorBoard writers, functions of a record, or objects with ``write(record)``.
        every: log each n-th step.
        layers_every: at each n-th step, also each layer's gradient norm and the shares of its values that overflow,
            underflow or become subnormal in the policy's format; 0: never. Those steps are looked at closely.
        look_every: look closely at each n-th step, the first included, for what makes nothing infinite and still
            spoils a run; 0: never.
        samples, tokens: in one step, for the throughput. Where they change, tell the result's `count`.
        model, scaler: of a loop without an `Amp`.

    Raises:
        PolicyError: a number is out of range, or `run` is neither. CastwiseError: a target takes no records.
    """
    if every < 1 or min(layers_every, look_every, samples, tokens) < 0:
        raise PolicyError("watch: every must be 1 or more; layers_every, look_every, samples and tokens 0 or more.")
    loop = isinstance(run, Optimizer)
    if not loop and not hasattr(run, "_observers"):
        raise PolicyError(f"watch: {type(run).__name__} is no castwise.torch.Amp. Give one, or a torch optimizer.")
    if not loop and (model is not None or scaler is not None):
        raise PolicyError("watch: an Amp knows its model and its scale. Leave out model and scaler.")
    if loop and layers_every:
        raise PolicyError("watch: layers_every is told by an Amp. Leave it out for an optimizer.")
    sinks = [sink_for(target) for target in targets]
    if isinstance(run, Optimizer):
        return OptimizerWatcher(run, Reports(sinks, every, samples, tokens), look_every, model, scaler)
    watcher = Watcher(run, sinks, every, layers_every, look_every, samples, tokens)
    run._observers.append(watcher)
    run.on_event(watcher.event)
    return watcher


class Watcher(Reports):
    """Collects the metrics of an `Amp` and hands them to sinks."""

    def __init__(
        self, amp: Amp, sinks: list[Sink], every: int, layers_every: int, look_every: int, samples: int, tokens: int
    ) -> None:
        super().__init__(sinks, every, samples, tokens)
        self.amp, self.layers_every, self.look_every = amp, layers_every, look_every
        self._extra: dict[str, float] = {}
        self._look: Look | None = None
        self._stale = StaleUpdates()
        self._clipped = ClippedTooSoon()
        self._entered = False

    # ---- around a step -----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A region of training is entered."""
        if self._entered or not torch.is_grad_enabled() or not (self._in_turn(self.layers_every) or self._looks()):
            return
        if self._look is None:
            self._look = Look(self.amp.model)
        self._look.__enter__()
        self._entered = True

    def leave(self, error: BaseException | None) -> None:
        """A region is left, by an error or without one."""
        if self._entered and self._look is not None:
            self._entered = False
            self._look.__exit__(None, None, None)
        if isinstance(error, IndexError):
            words = str(error).strip()
            if words.startswith("Target"):
                self.hazard("labels out of range", words.rstrip("."))
            elif words.startswith("index out of range in self"):
                self.hazard("inputs out of range", "an embedding was asked for a row that it does not have")

    @contextlib.contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Around the backward of one loss."""
        self.loss(loss)
        if self._look is None:
            yield
        else:
            with self._look, torch.autograd.set_multithreading_enabled(False):
                yield
        if self.amp._state.scale != 1.0:
            self._clipped.after_backward(self.amp._wide.parameters())

    def gradients(self, scale: float) -> None:
        """The gradients of a step are there, still scaled by `scale`."""
        amp = self.amp
        if self._clipped.changed(scale, amp._wide.parameters()):
            self.hazard("clip before unscale", self._clipped.evidence)
        if self._in_turn(self.layers_every):
            self._extra = gradient_metrics(amp.model, parse_format(amp.policy.format), scale)
            if self._look is not None:
                self._extra |= look_metrics(self._look)
        if self._look is not None:
            self._conclude(self._look)
        if self._in_turn(self.layers_every) or self._looks():
            self._stale.before(amp._wide.parameters())

    def _conclude(self, look: Look) -> None:
        self._extra.setdefault("numerics/casts", float(look.casts.total()))
        evidence = initial_hazard(self.amp.model, look.outputs) if self.steps == 0 and self._fresh() else ""
        if evidence:
            look.hazard("initialisation", evidence)
        evidence = spoilt_statistics(self.amp.model)
        if evidence:
            look.hazard("statistics", evidence)
        for cause, evidence in look.hazards.items():
            self.hazard(cause, evidence)
        self._look = None

    def finished(self, result: StepResult) -> None:
        """A step was taken or skipped."""
        share = self._stale.after() if self._in_turn(self.layers_every) or self._looks() else None
        if share is not None and result.stepped:
            self._extra["numerics/stale_updates"] = share
        if self.step_ends():
            self.write(self._metrics(result))
            self.trend()
        self.forget_losses()

    def event(self, event: Event) -> None:
        """Pass on an event of the guard, and what it says together with the loss."""
        self.write(event.to_dict())
        if event.name in ("finding", "stop") and event.data.get("kind") != "bad input data":
            self.growth()

    def _in_turn(self, every: int) -> bool:
        return bool(every) and self.steps % every == 0

    def _looks(self) -> bool:
        return self._in_turn(self.look_every)

    def _fresh(self) -> bool:
        return self.amp.scale_state.steps == 0

    # ---- telling -----------------------------------------------------------------------------------------------------

    def tell(self, message: str, cause: str, evidence: str) -> None:
        """Give an advice through the guard, where there is one: it keeps events, and tells all who listen."""
        guard = self.amp._guard
        if guard is None:
            super().tell(message, cause, evidence)
        else:
            guard._tell("advice", message, cause=cause, evidence=evidence)

    def _metrics(self, result: StepResult) -> dict[str, Any]:
        amp, state = self.amp, self.amp.scale_state
        record: dict[str, Any] = {
            "step": state.steps,
            "time": time.time(),
            "train/loss": self.step_loss(),
            "train/grad_norm": result.grad_norm,
            "train/loss_scale": state.scale,
            "train/skipped_steps": state.skipped,
            "train/skip_rate": state.skipped / max(state.steps, 1),
            "train/learning_rate": float(amp.optimizer.param_groups[0]["lr"]),
            "numerics/casts_of_weights": amp._cache.casts_made,
            "numerics/raised_layers": len(amp._guard.state.raised) if amp._guard is not None else 0,
        }
        device = next((p.device for p in amp.model.parameters()), torch.device(amp.device_type))
        record |= self.performance(device) | self._extra
        self._extra = {}
        return record
