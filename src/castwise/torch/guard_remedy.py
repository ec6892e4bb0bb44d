"""Raising a layer to float32 while training runs, and finding out by replay whether that helps and what it costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from castwise.catalogue import load_catalogue
from castwise.guard import Raised
from castwise.policy import LayerRule, Policy, Rule

from .attribution_capture import Call
from .attribution_replay import Context, Repeat, Replay
from .attribution_trace import Made

__all__ = ["Price", "Remedy", "policy_comment", "rule_for", "with_raised"]

_MOST_LAYERS = 64  # raised for one broken step; a model that needs more is better off in another format


@dataclass(frozen=True, slots=True)
class Price:
    """What float32 costs in a layer's forward: more bytes written, and more seconds, as measured in replays."""

    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.bytes:+,d} bytes and {self.seconds * 1e3:+.3f} ms per forward"


def rule_for(raised: Raised) -> LayerRule:
    """The layer rule of the policy that raises a layer, or some ops in it."""
    match = re.sub(r"([*?\[])", r"[\1]", raised.layer) or "**"
    if raised.ops:
        return LayerRule(match, ops=dict.fromkeys(raised.ops, Rule.HIGH.value))
    return LayerRule(match, format="float32")


def with_raised(policy: Policy, raised: Sequence[Raised]) -> Policy:
    """A policy with the guard's rules after its own."""
    return replace(policy, layers=(*policy.layers, *map(rule_for, raised))) if raised else policy


def policy_comment(raised: Sequence[Raised]) -> str:
    """What to write above a policy whose last layer rules are the guard's."""
    if not raised:
        return "As it was at the end of a run; no layer had to be raised."
    return f"As it was at the end of a run. The guard added the last {len(raised)} layer rules, after overflows."


class Remedy:
    """Looks for the layers whose raising lets a broken call through.

    Args:
        model: the model.
        replay: of that model.
        apply: puts a list of raised layers in force.
        context: gives the region of what is in force.
    """

    def __init__(
        self, model: nn.Module, replay: Replay, apply: Callable[[tuple[Raised, ...]], None], context: Context
    ) -> None:
        self.model, self.replay, self.apply, self.context = model, replay, apply, context
        self._feeds: dict[str, list[str]] = {}

    def find(self, calls: Sequence[Call], before: tuple[Raised, ...]) -> list[Raised] | None:
        """The layers to raise beside those of `before`, in order, or None where raising layers does not help.

        What is found is in force when it returns; else `before` is.
        """
        new: list[Raised] = []
        place = self.broken(calls)
        for _ in range(_MOST_LAYERS):
            if place is None:
                return new
            step = self._helping(calls, place, (*before, *new))
            if step is None:
                break
            raised, place = step
            new = [r for r in new if not _inside(r.layer, raised)] + [raised]
        self.apply(before)
        return None

    def _helping(
        self, calls: Sequence[Call], place: tuple[str, str, str], raised: tuple[Raised, ...]
    ) -> tuple[Raised, tuple[str, str, str] | None] | None:
        """The first candidate that changes where the calls break, and where that is then."""
        for candidate in self.candidates(place[0], place[1]):
            if any(r.key == candidate.key for r in raised):
                continue
            self.apply((*raised, candidate))
            now = self.broken(calls)
            if now != place:
                return candidate, now
        return None

    def broken(self, calls: Sequence[Call]) -> tuple[str, str, str] | None:
        """Layer, op and phase where the calls break under what is in force; None where they do not."""
        for number, call in enumerate(calls):
            repeat = self.replay.traced(call, self.context)
            root, self._feeds = repeat.root, repeat.feeds
            if isinstance(root, Made):
                return root.layer, root.op, root.phase
            # What the loss sends back is none of the model's, and what another call gave may be well by now.
            if root is not None and root.kind != "gradient" and not (number and root.kind == "input"):
                return "", root.kind, "source"
        return None

    def candidates(self, layer: str, op: str) -> Iterator[Raised]:
        """The least first: an op of a block's own forward, the block, what feeds it, and what is around it.

        What feeds it is to blame where it writes its input in place, and where a gradient overflows on its way out.
        """
        try:
            module = self.model.get_submodule(layer)
        except AttributeError:
            return
        entry = load_catalogue().lookup("torch", op.rstrip("_"))
        own = entry.name if entry is not None else ""
        if any(True for _ in module.children()) and own:
            yield Raised(layer, (own,))
        if layer:
            yield Raised(layer)
        yield from (Raised(feeder) for feeder in self._feeds.get(layer, []) if feeder and feeder != layer)
        while layer := layer.rpartition(".")[0]:
            yield Raised(layer)

    def price(self, call: Call, raised: Sequence[Raised], before: tuple[Raised, ...]) -> list[Price]:
        """What each of the newly raised layers costs more than before, for one call."""
        after = self._measured(call, raised)
        self.apply(before)
        earlier = self._measured(call, raised)
        self.apply((*before, *raised))
        return [Price(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, earlier, strict=True)]

    def _measured(self, call: Call, raised: Sequence[Raised]) -> list[tuple[int, float]]:
        repeat: Repeat = self.replay.traced(call, self.context)
        return [(repeat.bytes.get(r.layer, 0), self.replay.layer_seconds(call, self.context, r.layer)) for r in raised]


def _inside(layer: str, raised: Raised) -> bool:
    return not raised.ops and (layer == raised.layer or layer.startswith(f"{raised.layer}."))
