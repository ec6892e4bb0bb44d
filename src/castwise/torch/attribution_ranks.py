"""One step, seen from several ranks: what each of them found, made one, so that all decide alike.

A fault may be in the data of one rank alone; the others learn of it by gradients that came from there. Every rank then
repeats its own part of the step, and each repetition is followed by an exchange: from there on all know the same, and
do the same next. Nothing is exchanged in healthy steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from castwise.errors import CastwiseError
from castwise.guard import Finding, Kind

from ._ranks import Ranks
from .attribution_trace import Made, Source

if TYPE_CHECKING:
    from .attribution_replay import Repeat

__all__ = ["Stop", "common_finding", "common_repeat"]


class Stop:
    """Whether a repetition ends after its forward, as one of the ranks has found something in it.

    A backward may exchange values: of layers whose weights or statistics are spread over ranks. Either all run it, or
    none does. Every rank asks once.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self.ranks = ranks
        self.asked = False

    def __call__(self, found: bool) -> bool:
        self.asked = True
        return found if self.ranks is None else self.ranks.any(found)


def common_repeat(ranks: Ranks, repeat: Callable[[Stop], Repeat]) -> Repeat:
    """A repetition on every rank, and on every rank the result of the first one that shows a fault.

    A fault of the forward comes before one of the backward: the backward of the other ranks is none of its causes.

    Raises:
        CastwiseError: it failed on a rank.
    """
    seen: Repeat | None = None
    failed: Exception | None = None
    stop = Stop(ranks)
    try:
        seen = repeat(stop)
    except Exception as error:  # the others wait to hear of it
        failed = error
        if not stop.asked:
            stop(True)
    told = ranks.gather((seen.plain() if seen is not None else None, f"{type(failed).__name__}: {failed}"))
    if failed is not None:
        raise failed
    repeats: list[Repeat] = []
    for rank, (one, error_there) in enumerate(told):
        if one is None:
            raise CastwiseError(f"repeating the step failed on rank {rank}: {error_there}")
        repeats.append(one)
    first = min(repeats, key=lambda one: _order(one.root))
    if first.root is None or all(_place(one.root) == _place(first.root) for one in repeats):
        return first
    return replace(first, root=replace(first.root, rank=repeats.index(first)))


def _place(root: Made | Source | None) -> tuple[str, ...]:
    if isinstance(root, Made):
        return root.phase, root.op, root.layer, root.line
    return (root.kind, root.name) if root is not None else ()


def _order(root: Made | Source | None) -> int:
    """The fault of one rank reaches others by what they receive, and by tensors that nobody knows there."""
    if root is None:
        return 5
    if isinstance(root, Made):
        return (0 if root.phase == "forward" else 2) + root.received
    return {"gradient": 4, "constant": 1}.get(root.kind, 0)


def common_finding(ranks: Ranks, finding: Finding) -> Finding:
    """Of what the ranks have found, what says most; it says on which rank where only some have it."""
    found: Sequence[Finding] = ranks.gather(finding)
    first = min(found, key=lambda one: (one.kind is Kind.UNKNOWN, "is finite" in one.evidence))
    if all(one == first for one in found):
        return first
    return replace(first, evidence=f"on rank {found.index(first)}, {first.evidence}")
