"""What to do when a step breaks: the decisions, as pure data in and pure data out.

A front end finds out *why* a step had gradients that are not finite and hands that `Finding` in. What comes out is one
of five actions: skip the step, lower the loss scale, raise the guilty layer to float32, give a raised layer back, stop.
The same findings give the same decisions, also after the state went through a checkpoint.

    state, action = decide(state, finding, config)

Ordinary back-offs of the loss scale are part of its search for the largest scale that works, and no alarm: the
first few in a row are not even looked into (`worth_a_look`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from castwise._frozen import FrozenMap
from castwise._policy_checks import check_bool
from castwise.errors import PolicyError

__all__ = [
    "Action",
    "Finding",
    "GuardConfig",
    "GuardState",
    "Kind",
    "Move",
    "Raised",
    "decide",
    "due",
    "given_back",
    "healthy",
    "loss_broke",
    "postponed",
    "raised",
    "worth_a_look",
]

# A scale this low saves few of fp16's small gradients; 128 was the usual constant scale before scales were dynamic.
_WARN_SCALE_BELOW = 128.0
_PATIENCE = 3
_GIVE_BACK_AFTER = 1000
_STOP_AFTER = 10
_LONGEST_WAIT = 2**20  # steps; after ten doublings a layer is as good as raised for good


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """What is watched while a policy trains, and how much the guard may do by itself.

    Attributes:
        enabled: whether anything is watched beyond the skipped steps, which are always reported.
        warn_scale_below: log a warning once the loss scale falls below this: gradients are then being lost.
        raise_layers: whether a layer that leaves its format's range is raised to float32 while training runs.
        patience: overflows of the backward in a row that pass as the loss scale's ordinary search.
        give_back_after: steps until a raised layer is first tried in its own format again; each failure doubles it.
        stop_after: steps in a row that no remedy helps, after which training stops with the reason.
    """

    enabled: bool = True
    warn_scale_below: float = _WARN_SCALE_BELOW
    raise_layers: bool = True
    patience: int = _PATIENCE
    give_back_after: int = _GIVE_BACK_AFTER
    stop_after: int = _STOP_AFTER

    def __post_init__(self) -> None:
        for key in ("enabled", "raise_layers"):
            check_bool(key, getattr(self, key))
        number = isinstance(self.warn_scale_below, (int, float)) and not isinstance(self.warn_scale_below, bool)
        if not number or not 0 <= self.warn_scale_below <= sys.float_info.max:
            raise PolicyError(
                f"warn_scale_below: {self.warn_scale_below!r} is not a loss scale. Give 0 (never warn) or more."
            )
        object.__setattr__(self, "warn_scale_below", float(self.warn_scale_below))
        for key, least in (("patience", 0), ("give_back_after", 1), ("stop_after", 1)):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PolicyError(f"{key}: {value!r} must be a whole number of steps, {least} or more.")


class Kind(StrEnum):
    """Why a step broke."""

    SCALE = "scale too high"  # finite at a lower loss scale that still saves small gradients
    RANGE = "range too small"  # finite in float32
    BROKEN = "broken computation"  # not finite in float32 either
    DATA = "bad input data"  # the inputs were not finite to begin with
    UNKNOWN = "not found"  # the fault lies where nothing could be repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Where and why a step broke.

    Attributes:
        kind: see `Kind`.
        phase: "forward", "backward", or "loss" for what lies between the model's outputs and the loss.
        op: name of the operation, "" where a value was bad from the start.
        layer: path of the module, "" for the model itself.
        line: where the program called it: file, line and function.
        evidence: the values that show it, in words.
        source: what was bad from the start: "input 0", "parameter head.weight"; "" where an operation did it.
        reads: what the operation read that came from outside: "parameter head.weight", "input 0"; "" where nothing did.
        scale: the loss scale of the step.
        finite_scale: the largest power-of-two fraction of it that is finite, where that was looked for.
        underflow: whether the operation was undone by a value too small for its format.
        constant: a finite constant that the operation made infinite, with the sign of the infinity; 0 where none was.
    """

    kind: Kind
    phase: str = "forward"
    op: str = ""
    layer: str = ""
    line: str = ""
    evidence: str = ""
    source: str = ""
    reads: str = ""
    scale: float = 1.0
    finite_scale: float | None = None
    underflow: bool = False
    constant: float = 0.0

    def __str__(self) -> str:
        home = "the loss, outside of the model" if self.phase == "loss" else self.layer or "the model itself"
        where = self.source or (f"{self.op} in {home}" if self.op else home)
        at = f" ({self.line})" if self.line else ""
        small = ", a value too small for its format" if self.underflow else ""
        lower = f"; finite at a loss scale of {self.finite_scale:g}" if self.finite_scale is not None else ""
        reads = f", which read {self.reads}" if self.reads else ""
        phase = "" if self.phase == "loss" and not self.source else f", {self.phase}"  # said in `home` already
        return f"{self.kind}{small}: {where}{reads}{phase}{at}: {self.evidence}{lower}".rstrip(": ")

    @property
    def place(self) -> tuple[str, str, str, str]:
        """What two findings of the same fault have in common."""
        return self.kind.value, self.layer, self.op, self.source

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for logs."""
        return {**asdict(self), "kind": self.kind.value}


class Action(StrEnum):
    """What can be done about a broken step."""

    SKIP = "skip"
    LOWER = "lower_scale"
    RAISE = "raise"
    GIVE_BACK = "give_back"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Move:
    """One decision. `scale` belongs to `LOWER`, `reason` says why in words."""

    action: Action
    reason: str
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """One layer rule that the guard added to the policy.

    Attributes:
        layer: the module's path, "" for the model itself.
        ops: the ops that compute in float32 there; empty: all of them.
        since: the step at which it was raised or last tried.
        wait: steps from then until it is tried in its own format.
    """

    layer: str
    ops: tuple[str, ...] = ()
    since: int = 0
    wait: int = _GIVE_BACK_AFTER

    @property
    def key(self) -> str:
        """What is told apart: the layer, and the ops."""
        return f"{self.layer}|{','.join(self.ops)}"

    def covers(self, layer: str, op: str) -> bool:
        """Whether an op of the catalogue, in a layer of this path, computes in float32 by it."""
        if self.ops:
            return layer == self.layer and op in self.ops
        return not self.layer or layer == self.layer or layer.startswith(f"{self.layer}.")


@dataclass(frozen=True, slots=True)
class GuardState:
    """All that the guard remembers.

    Attributes:
        raised: what is raised now, in the order in which it was.
        waits: the next wait of each layer that was ever raised, in steps.
        overflows: overflows of the backward in a row.
        helpless: steps in a row that no remedy helped.
        warned: whether the loss scale's warning has been given since it was last high enough.
        bad_losses: losses in a row that were not finite while their gradients were.
    """

    raised: tuple[Raised, ...] = ()
    waits: Mapping[str, int] = field(default_factory=FrozenMap)
    overflows: int = 0
    helpless: int = 0
    warned: bool = False
    bad_losses: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a checkpoint or JSON."""
        raised = [{**asdict(r), "ops": list(r.ops)} for r in self.raised]
        return {
            "raised": raised,
            "waits": dict(self.waits),
            "overflows": self.overflows,
            "helpless": self.helpless,
            "warned": self.warned,
            "bad_losses": self.bad_losses,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GuardState:
        """The state that `to_dict` gave: every decision from there on is what it would have been.

        Raises:
            PolicyError: it is not such a state.
        """
        try:
            raised = tuple(
                Raised(str(r["layer"]), tuple(map(str, r["ops"])), int(r["since"]), int(r["wait"]))
                for r in data["raised"]
            )
            waits = FrozenMap({str(key): int(wait) for key, wait in data["waits"].items()})
            counts = int(data["overflows"]), int(data["helpless"])
            return cls(raised, waits, *counts, bool(data["warned"]), int(data.get("bad_losses", 0)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PolicyError(f"Guard state {data!r} cannot be read: was it saved by Amp.state_dict()?") from error


def worth_a_look(state: GuardState, loss_finite: bool, scale: float, scaled: bool, config: GuardConfig) -> bool:
    """Whether a broken step is more than the loss scale finding its level.

    Args:
        state: before the step.
        loss_finite: whether the loss was finite: then only the backward broke.
        scale: the loss scale of the step.
        scaled: whether the loss scale can be lowered by itself.
        config: the guard's.
    """
    if not loss_finite or not scaled:
        return True
    return state.overflows >= config.patience or scale <= config.warn_scale_below


def healthy(state: GuardState) -> GuardState:
    """After a step that was taken."""
    calm = not (state.overflows or state.helpless or state.bad_losses)
    return state if calm else replace(state, overflows=0, helpless=0, bad_losses=0)


def loss_broke(state: GuardState) -> tuple[GuardState, bool]:
    """After a step that was taken although its loss was not finite, as all gradients were; whether to look into it.

    A program that goes on like this is looked into at the first two such steps (the second of which may be traced
    while it runs), and then ever more rarely: it is not slowed down for good by what it seems to mean.
    """
    after = replace(healthy(state), bad_losses=state.bad_losses + 1)
    return after, after.bad_losses & (after.bad_losses - 1) == 0


def ordinary(state: GuardState) -> GuardState:
    """After an overflow that was left to the loss scale."""
    return replace(state, overflows=state.overflows + 1)


def decide(state: GuardState, finding: Finding, config: GuardConfig) -> tuple[GuardState, Move]:
    """What to do about one broken step.

    Returns:
        The state for the next step, and the move. For `RAISE` the front end tries what helps and reports it by
        `raised`, or by `helpless` where nothing does.
    """
    state = replace(state, overflows=state.overflows + 1)
    if finding.kind is Kind.SCALE:
        lower = finding.finite_scale
        return replace(state, helpless=0), Move(Action.LOWER, f"finite at a loss scale of {lower:g}", lower)
    if finding.kind is Kind.RANGE and config.raise_layers:
        return state, Move(Action.RAISE, "finite in float32")
    state, stop = helpless(state, config)
    if stop:
        return state, Move(Action.STOP, f"{state.helpless} steps in a row were broken, and nothing here can mend it")
    return state, Move(Action.SKIP, f"{finding.kind}: {state.helpless} in a row, stops at {config.stop_after}")


def helpless(state: GuardState, config: GuardConfig) -> tuple[GuardState, bool]:
    """After a step that no remedy helped; whether it is time to stop."""
    after = replace(state, helpless=state.helpless + 1)
    return after, after.helpless >= config.stop_after


def raised(state: GuardState, layer: str, ops: tuple[str, ...], step: int, config: GuardConfig) -> GuardState:
    """After a layer was raised at a step: it waits as long as it has earned, and twice as long the next time."""
    new = Raised(layer, ops, step)
    wait = state.waits.get(new.key, config.give_back_after)
    new = replace(new, wait=wait)
    others = tuple(r for r in state.raised if r.key != new.key)
    waits = FrozenMap({**state.waits, new.key: min(2 * wait, _LONGEST_WAIT)})
    return replace(state, raised=(*others, new), waits=waits, helpless=0, overflows=0)


def due(state: GuardState, step: int) -> tuple[Raised, ...]:
    """The raised layers that have waited long enough to be tried in their own format."""
    return tuple(r for r in state.raised if step - r.since >= r.wait)


def given_back(state: GuardState, one: Raised) -> GuardState:
    """After a layer went back to its own format. Its next wait stays what it has grown to."""
    return replace(state, raised=tuple(r for r in state.raised if r.key != one.key))


def postponed(state: GuardState, one: Raised, step: int) -> GuardState:
    """After a trial showed that a layer still needs float32: it waits twice as long."""
    wait = min(2 * one.wait, _LONGEST_WAIT)
    again = replace(one, since=step, wait=wait)
    waits = FrozenMap({**state.waits, one.key: min(2 * wait, _LONGEST_WAIT)})
    return replace(state, raised=tuple(again if r.key == one.key else r for r in state.raised), waits=waits)
