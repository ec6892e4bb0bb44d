"""The guard of an `Amp`: finds out why a step broke, does what helps, and says what it did.

In a healthy step it keeps references (see `attribution_capture`) and counts. Only after a step with gradients that are
not finite, or when a raised layer has waited long enough, does it run anything. `castwise.guard` decides; this
module carries out.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from castwise import guard
from castwise.errors import CastwiseError, NonFiniteError
from castwise.guard import Action, Finding, GuardState, Kind, Raised
from castwise.watch.events import Event

if TYPE_CHECKING:
    from .amp import Amp

from .advice import advise
from .attribution import attribute, live_finding, outside
from .attribution_capture import Call, Memory, Recorder
from .attribution_ranks import common_finding
from .attribution_replay import Replay
from .attribution_trace import Source, Trace
from .attribution_trees import tensors_in
from .guard_buffers import GoodBuffers, Healed, as_it_was
from .guard_remedy import Price, Remedy, rule_for

__all__ = ["Guard"]

log = logging.getLogger("castwise.torch.guard")

_EVENTS_KEPT = 1000
_ALERT_STEPS = 20  # steps that are traced while they run, after a fault that no replay could show


class Guard:
    """Watches the steps of one `Amp`.

    Args:
        amp: whose model and policy are watched.
        apply: puts a list of raised layers in force.
    """

    def __init__(self, amp: Amp, apply: Callable[[tuple[Raised, ...]], None]) -> None:
        self.model, self.device_type = amp.model, amp.device_type
        self.config = amp.policy.guard
        self.context = amp.fresh_region
        self.state = GuardState()
        self.step = 0
        self.events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self.listeners: list[Callable[[Event], None]] = []
        self.recorder = Recorder(amp.model)
        self.finding: Finding | None = None
        self._ranks = amp._ranks
        # Gathered parameters lie in memory that holds anything at first, which a trace takes for a fault: such a step
        # is repeated with all of them gathered before, but not traced while it runs.
        self._sharded = self._ranks is not None and bool(self._ranks.shards)
        self._replay = Replay(amp.model, amp.planned, self._ranks)
        self._remedy = Remedy(amp.model, self._replay, apply, self.context)
        self._losses: deque[tuple[int, Memory]] = deque()
        self._last_loss: torch.Tensor | None = None
        self._alert = 0
        self._trace: Trace | None = None
        self._buffers = GoodBuffers(amp.model, self._ranks)

    # ---- around a step -----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A region of training is entered."""
        self._buffers.keep(self.step)
        self.recorder.listen()
        if self._alert and torch.is_grad_enabled():
            self._traced().__enter__()

    def leave(self) -> None:
        """The region is left."""
        if self._trace is not None and self._trace.entered:
            self._trace.__exit__(None, None, None)
        self.recorder.leave()

    def backward(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Around the backward of one loss."""
        self._losses.append((self.step, Memory(loss)))
        self._last_loss = loss
        return contextlib.nullcontext() if self._trace is None else self._traced_backward(self._trace)

    @contextlib.contextmanager
    def _traced_backward(self, trace: Trace) -> Iterator[None]:
        with trace, torch.autograd.set_multithreading_enabled(False):
            yield

    def _traced(self) -> Trace:
        if self._trace is None:
            self._trace = trace = self._replay.new_trace(self._replay.weights())

            def note(call: Call) -> None:
                for name, x in tensors_in((call.args, call.kwargs)):
                    trace.add_source("input", name, x)

            self.recorder.on_call = note
        return self._trace

    def done(self, counts: bool, keep_steps: int = 0) -> None:
        """The step is over: let go of what was kept for it, but for the inputs of the last `keep_steps` steps.

        Args:
            counts: whether it came to its end, and was no step that an exception cut off.
            keep_steps: whose outcome is still on its way from the device.
        """
        self._trace = self.recorder.on_call = self._last_loss = None
        self.step += counts
        self.recorder.step = self.step
        self.recorder.fade(self.step - keep_steps)
        while self._losses and self._losses[0][0] < self.step - keep_steps:
            self._losses.popleft()
        if counts and self._alert:
            self._alert -= 1
            self.recorder.careful = self._alert > 0

    @property
    def alert(self) -> bool:
        """Whether steps are traced while they run, after a fault that no replay could show."""
        return self._alert > 0

    # ---- a step that was taken ---------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """A step was taken: give back what has waited long enough and is well in its own format."""
        self.state = guard.healthy(self.state)
        for one in guard.due(self.state, self.step) if self.state.raised else ():
            self._try_without(one, self._remedy)

    def _try_without(self, one: Raised, remedy: Remedy) -> None:
        calls = [c for c in self.recorder.used() if not c.overwritten]
        if not self._alike(len(calls)) or not calls:
            return
        remedy.apply(tuple(r for r in self.state.raised if r.key != one.key))
        place: tuple[str, str, str] | None = ("", "repeating the step", "")  # where it breaks, should that fail
        with self._harmless("giving a layer back"), self._replay.whole():
            place = remedy.broken(calls)
        if place is None:
            self.state = guard.given_back(self.state, one)
            words = f"{_named(one)} computes in its own format again, in which this step is finite"
            self._tell("give_back", words, layer=one.layer, waited=self.step - one.since)
            return
        remedy.apply(self.state.raised)
        self.state = guard.postponed(self.state, one, self.step)
        wait = next(r.wait for r in self.state.raised if r.key == one.key)
        broke = f"{place[1]} in {place[0] or 'the model itself'}".strip()
        words = f"{_named(one)} still needs float32, as {broke} shows; next try in {wait} steps"
        self._tell("postpone", words, layer=one.layer, because=broke, wait=wait)

    def losses(self) -> list[torch.Tensor]:
        """The losses of the step. The last as it is, which is no operation; of earlier ones only the memory is kept."""
        if self._last_loss is None:
            return []
        *earlier, _ = (loss for step, loss in self._losses if step == self.step)
        return [*(loss.tensor() for loss in earlier), self._last_loss]

    def loss_broke(self, scale: float, gradients: Sequence[torch.Tensor]) -> None:
        """A step was taken whose gradients were finite and whose loss was not: say where that came from.

        A layer whose range was too small is raised. The rest is told; nothing is skipped, as nothing was harmed.
        """
        self.state, look = guard.loss_broke(self.state)
        if not look:
            return
        finding, call = self._find(scale, (), gradients, False)
        if finding.kind is Kind.RANGE and self.config.raise_layers:
            self._raise(finding, call)

    # ---- a step that broke -------------------------------------------------------------------------------------------

    def broke(self, scale: float, scales: Sequence[float], gradients: Sequence[torch.Tensor]) -> float | None:
        """A step had gradients that are not finite.

        Args:
            scale: its loss scale.
            scales: lower loss scales that are open to it, falling; empty without dynamic scaling.
            gradients: the gradients, as they are.

        Returns:
            The loss scale to go on with, or None to leave that to the scale's own state machine.

        Raises:
            NonFiniteError: nothing helps; the message says why.
        """
        healed = self._buffers.heal()
        for one in healed:
            words = f"buffer {one.name} had become infinite or NaN and is as it was before"
            self._tell("heal", words, buffer=one.name)
        finite = all(bool(loss.tensor().isfinite().all()) for _, loss in self._losses)
        if self._ranks is not None:
            finite = self._ranks.all(finite)
        if not guard.worth_a_look(self.state, finite, scale, bool(scales), self.config):
            self.state = guard.ordinary(self.state)
            self._tell("backoff", f"gradients overflowed at a loss scale of {scale:g}", scale=scale)
            return None
        found = self._find(scale, scales, gradients, finite, healed)
        return self._act(*found, scale=scale, lower=bool(scales))

    def _find(
        self,
        scale: float,
        scales: Sequence[float],
        gradients: Sequence[torch.Tensor],
        finite: bool,
        healed: Sequence[Healed] = (),
    ) -> tuple[Finding, Call | None]:
        """Replay first: it can try cures. Then what was seen live, and else only where the fault is not."""
        losses = [loss.tensor() for _, loss in self._losses]
        useful = [s for s in scales if s >= self.config.warn_scale_below]
        found: tuple[Finding, Call | None] | None = None
        calls = self.recorder.used()
        if self._alike(-1 if any(call.overwritten for call in calls) else len(calls)):
            with self._harmless("looking for the layer that broke"), self._replay.whole():
                found = self._looked_into(calls, scale, useful)
                if healed and (found is None or found[0].kind is Kind.UNKNOWN):  # it was they that broke it
                    written = self._replay.written  # by the forward itself, which they do not explain
                    with as_it_was([one for one in healed if one.name not in written] or healed):
                        found = self._looked_into(calls, scale, useful)
        if found is None or found[0].kind is Kind.UNKNOWN:
            root = self._trace.root([*gradients, *losses]) if self._trace is not None else None
            if root is not None and not (isinstance(root, Source) and root.kind == "gradient"):
                found = live_finding(root, scale, useful or scales), None
        if found is None:
            found = outside(losses, scale), None
        if self._ranks is not None:
            found = common_finding(self._ranks, found[0]), found[1]
        if found[0].kind is Kind.UNKNOWN and useful and finite:
            # What the loss sends back overflows while a lower scale is to be had: that is what the scale is for.
            found = replace(found[0], kind=Kind.SCALE, finite_scale=useful[0]), found[1]
        if found[0].kind is Kind.UNKNOWN and not self._sharded:
            self._alert, self.recorder.careful = _ALERT_STEPS + 1, True
        before = self.state.helpless > 0 or self.state.bad_losses > 1
        again = before and self.finding is not None and self.finding.place == found[0].place
        self.finding = found[0]
        # A scale that is too high is part of the search for the highest one that works, and no alarm.
        name = "overflow" if found[0].kind is Kind.SCALE else "finding"
        self._tell(name, str(found[0]), repeated=again, **found[0].to_dict())
        for name, words in advise(found[0], self.model) if not again else ():
            self._tell("advice", words, cause=name)
        return found

    def _looked_into(
        self, calls: list[Call], scale: float, scales: Sequence[float]
    ) -> tuple[Finding, Call | None] | None:
        return attribute(self._replay, calls, self.context, scale=scale, scales=scales, device_type=self.device_type)

    def _act(self, finding: Finding, call: Call | None, *, scale: float, lower: bool) -> float | None:
        self.state, move = guard.decide(self.state, finding, self.config)
        if move.action is Action.RAISE:
            if self._raise(finding, call):
                return scale  # it was not the scale's fault
            stop = False
            if not (lower and finding.phase == "backward"):  # else the loss scale may help, lower with each skip
                self.state, stop = guard.helpless(self.state, self.config)
            move = guard.Move(Action.STOP if stop else Action.SKIP, "raising layers to float32 does not help")
        if move.action is Action.LOWER:
            self._tell("lower_scale", f"loss scale lowered to {move.scale:g}: {move.reason}", scale=move.scale)
            return move.scale
        if move.action is Action.STOP:
            raise self._stopped(finding)
        self._tell("skip", f"step skipped: {move.reason}", because=str(finding), helpless=self.state.helpless)
        return None

    def _raise(self, finding: Finding, call: Call | None) -> bool:
        if call is None:
            return self._raise_untried(finding)
        calls, before = self.recorder.used(), self.state.raised
        new: list[Raised] | None = None
        prices: list[Price] = []
        with self._harmless("raising a layer"), self._replay.whole():
            new = self._remedy.find(calls, before)
            prices = self._remedy.price(call, new, before) if new is not None else []
        if self._ranks is not None and self._ranks.any(not prices):
            prices = []
        if not new or not prices:
            self._remedy.apply(before)
            return False
        if self._ranks is not None:  # times differ
            prices = self._ranks.from_rank(0, prices)
        for one, price in zip(new, prices, strict=True):
            self.state = guard.raised(self.state, one.layer, one.ops, self.step, self.config)
            self._tell_raised(one, price, finding)
        return True

    def _raise_untried(self, finding: Finding) -> bool:
        """As `_raise`, for what was seen while a step ran that cannot be repeated: the next step shows what it does."""
        raised = {one.key for one in self.state.raised}
        found = self._remedy.candidates(finding.layer, finding.op) if finding.phase != "loss" else iter(())
        one = next((candidate for candidate in found if candidate.key not in raised), None)
        if one is None:
            return False
        self._remedy.apply((*self.state.raised, one))
        self.state = guard.raised(self.state, one.layer, one.ops, self.step, self.config)
        words = f"{_named(one)} computes in float32 from now on, untried, as this step cannot be repeated"
        self._tell("raise", words, **_what(one), because=str(finding))
        return True

    def _tell_raised(self, one: Raised, price: Price, finding: Finding) -> None:
        self._tell(
            "raise",
            f"{_named(one)} computes in float32 from now on ({price})",
            **_what(one),
            bytes=price.bytes,
            milliseconds=price.seconds * 1e3,
            because=str(finding),
        )

    def _stopped(self, finding: Finding) -> CastwiseError:
        words = [text for _, text in advise(finding, self.model)]
        advice = f" What to do next: {' '.join(words)}" if words else ""
        message = (
            f"Training has stopped after {self.state.helpless} steps in a row whose gradients were not finite, which "
            f"no lower loss scale and no wider format mends. {finding}.{advice}"
        )
        self._tell("stop", message, **finding.to_dict())
        return NonFiniteError(message)

    def _alike(self, calls: int) -> bool:
        """Whether a step of so many calls (-1: they cannot be repeated) can be repeated on all ranks in step."""
        counts = [calls] if self._ranks is None else self._ranks.gather(calls)
        return calls >= 0 and counts.count(calls) == len(counts) and self._replay.fits()

    @contextlib.contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        """An error of a replay is told, and does not end the training that it should help."""
        try:
            yield
        except Exception as error:
            log.warning("step %d: %s failed: %s: %s", self.step, what, type(error).__name__, error)

    # ---- telling -----------------------------------------------------------------------------------------------------

    def warn_scale(self, scale: float, enabled: bool) -> None:
        """Say once that the loss scale has fallen below the policy's warning level."""
        low = enabled and scale < self.config.warn_scale_below
        if low and not self.state.warned:
            self._tell(
                "scale_low",
                f"the loss scale has fallen to {scale:g} (below {self.config.warn_scale_below:g}): small gradients are "
                "lost from here on",
                scale=scale,
            )
        if low != self.state.warned:
            self.state = replace(self.state, warned=low)

    def _tell(self, name: str, message: str, **data: Any) -> None:
        event = Event(self.step, name, message, data)
        self.events.append(event)
        loud = event.alarm or name in ("raise", "heal")
        level = logging.WARNING if loud and not data.get("repeated") else logging.INFO
        log.log(level, "step %d: %s", self.step, message)
        for listener in self.listeners:
            listener(event)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on; between micro-batches, the calls so far too."""
        begun = [loss.tensor().clone() for step, loss in self._losses if step == self.step]
        return {
            **self.state.to_dict(),
            "step": self.step,
            "alert": self._alert,
            **self._buffers.state_dict(),
            "losses": begun,
            "calls": self.recorder.state() if begun else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the guard that was saved would have."""
        loaded = GuardState.from_dict(state)
        self.state, self.step, self._alert = loaded, int(state["step"]), int(state["alert"])
        self.recorder.step, self.recorder.careful = self.step, self._alert > 0
        self._buffers.load_state_dict(state, self.step)
        self._losses = deque((self.step, Memory(loss)) for loss in state.get("losses", ()))
        self.recorder.load_state(state.get("calls"))
        self._remedy.apply(loaded.raised)


def _named(one: Raised) -> str:
    layer = f"layer {one.layer}" if one.layer else "the model"
    return f"{' and '.join(one.ops)} in {layer}" if one.ops else layer


def _what(one: Raised) -> dict[str, Any]:
    return {"layer": one.layer, "ops": list(one.ops), "match": rule_for(one).match}
