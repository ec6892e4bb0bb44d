"""The planner's energy as data: what an op costs by itself, and what ops share.

Every term of the energy has one of three shapes, and a minimum cut can represent each of them exactly:

- an op's own cost, which depends on its label alone;
- a *low demand*: something is paid once where its owner is HIGH and any of its members is LOW. The down-cast of a
  tensor (owner: who writes it, members: who reads it), the noise of that rounding (for each reader one demand by
  itself, where readers were priced one by one), and the bytes of a 16-bit copy that is saved for backward (members: who
  saves it, paid whoever owns it) are low demands;
- a *high demand*, its mirror image: paid once where its owner is LOW and any of its members is HIGH. Up-casts, and the
  bytes of an fp32 copy that is saved for backward.

Amounts are kept in three columns, (seconds, noise, saved bytes), and weighted when a cut is made: a sweep over the
weights rebuilds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from castwise._graph_index import Bools, Floats, GraphIndex, Ints
from castwise.formats import FORMATS

if TYPE_CHECKING:
    from castwise.cost import Costs
    from castwise.graph import Graph
    from castwise.risk import Risks

__all__ = [
    "HIGH",
    "HIGH_BYTES",
    "LOW",
    "LOW_BYTES",
    "NOBODY",
    "Demands",
    "Roles",
    "Terms",
    "Weights",
    "wide_of",
    "widths_of",
]

HIGH, LOW = False, True
"""The two labels, as they stand in arrays of labels: ``labels[op]`` is true where the op computes in 16 bits."""

HIGH_BYTES, LOW_BYTES = 4, 2
"""Bytes per element of fp32 (and tf32, which is stored as fp32) and of a 16-bit format."""


def wide_of(fmt: str) -> str:
    """What HIGH means where LOW means ``fmt``: fp32 beside a 16-bit format, fp64 beside fp32."""
    return "fp64" if fmt == "fp32" else "fp32"


def widths_of(fmt: str) -> tuple[int, int]:
    """Bytes per element where a tensor is HIGH, and where it is LOW, in ``fmt``."""
    return FORMATS[wide_of(fmt)].bytes, FORMATS[fmt].bytes


NOBODY = -1
"""In place of an owner: the demand is paid whenever a member makes it."""


class Weights(NamedTuple):
    """What a second, a unit of noise and a saved byte are worth in the energy that a cut minimises."""

    time: float = 1.0
    noise: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Demands:
    """Shared costs of one direction, low or high. Members are (demand, op) pairs."""

    amount: Floats
    """[demands, 3] seconds, noise and bytes, paid at most once each."""
    owner: Ints
    """[demands] the op whose label can spare the cost, or NOBODY."""
    always: Bools
    """[demands] paid whatever the members' labels, as if there were one more member outside the graph."""
    demand: Ints
    member: Ints

    @classmethod
    def join(cls, parts: list[Demands]) -> Self:
        """All demands of ``parts``, renumbered, without those that cost nothing or that nobody can make."""
        offsets = np.cumsum([0, *(len(part.owner) for part in parts)])
        amount = np.concatenate([part.amount for part in parts])
        always = np.concatenate([part.always for part in parts])
        demand = np.concatenate([part.demand + offset for part, offset in zip(parts, offsets, strict=False)])
        member = np.concatenate([part.member for part in parts])
        possible = always | (np.bincount(demand, minlength=len(always)) > 0)
        keep = possible & amount.any(axis=1)
        number = np.cumsum(keep) - 1
        pairs = keep[demand]
        owner = np.concatenate([part.owner for part in parts])
        return cls(amount[keep], owner[keep], always[keep], number[demand[pairs]], member[pairs])

    def made(self, labels: Bools, wanted: bool) -> Ints:
        """[demands] how many members have the label ``wanted``."""
        return np.bincount(self.demand[labels[self.member] == wanted], minlength=len(self.owner)) + self.always


@dataclass(frozen=True)
class Terms:
    """The whole energy of a graph under given costs and risks."""

    fixed: Floats
    """[3] what is paid whatever the labels."""
    own_high: Floats
    """[ops, 3] what each op pays by itself where it is HIGH, and"""
    own_low: Floats
    """[ops, 3] where it is LOW; infinite seconds where it cannot be."""
    low_demands: Demands
    high_demands: Demands

    @classmethod
    def of(cls, graph: Graph, costs: Costs, risks: Risks) -> Self:
        """The energy of ``graph``; ``costs`` and ``risks`` must be for the same 16-bit format."""
        index, roles = graph.index, Roles.of(graph, costs.fmt)
        low_demands = _down_casts(index, roles, costs, risks)
        high_demands = [_up_casts(index, roles, costs)]
        fixed = 0.0
        if graph.training:
            low_copies, high_copies, fixed = _saved_copies(index, roles, costs)
            low_demands.append(low_copies)
            high_demands.append(high_copies)
        return cls(
            fixed=np.array([0.0, 0.0, fixed]),
            own_high=_amounts(index.ops, seconds=costs.high),
            own_low=_amounts(index.ops, seconds=costs.low, noise=risks.op_noise),
            low_demands=Demands.join(low_demands),
            high_demands=Demands.join(high_demands),
        )

    def flips(self, labels: Bools) -> tuple[Floats, Floats]:
        """What flipping each op alone would change: its own cost, and what it shares with others. Both [ops, 3]."""
        sign = np.where(labels == LOW, -1.0, 1.0)[:, None]
        own = sign * (self.own_low - self.own_high)
        shared = np.zeros_like(own)
        for demands, label in ((self.low_demands, LOW), (self.high_demands, HIGH)):
            _add_flips(shared, demands, labels, label)
        return own, shared


def _add_flips(change: Floats, demands: Demands, labels: Bools, wanted: bool) -> None:
    """Add to ``change`` what flipping each op does to ``demands``, which members labelled ``wanted`` make."""
    made = demands.made(labels, wanted)
    owned = demands.owner != NOBODY
    owner_pays = ~owned | (labels[demands.owner] != wanted)
    for owner_flips, sign in ((owner_pays, -1.0), (~owner_pays, 1.0)):
        rows = owned & owner_flips & (made > 0)
        np.add.at(change, demands.owner[rows], sign * demands.amount[rows])
    asks = labels[demands.member] == wanted
    payable = owner_pays[demands.demand]
    last = payable & asks & (made[demands.demand] == 1)
    first = payable & ~asks & (made[demands.demand] == 0)
    for rows, sign in ((last, -1.0), (first, 1.0)):
        np.add.at(change, demands.member[rows], sign * demands.amount[demands.demand[rows]])


@dataclass(frozen=True, slots=True)
class Roles:
    """What each tensor can be, given which 16-bit format the plan chooses."""

    movable: Bools
    """[tensors] can be in either format: produced in fp32 or in the plan's 16-bit format, not in a third one."""
    arrives_low: Bools
    """[tensors] comes from outside the graph and is in the 16-bit format already."""
    leaves_high: Bools
    """[tensors] the caller must get it in fp32."""
    leaves_low: Bools
    """[tensors] the caller must get it in the 16-bit format."""

    @classmethod
    def of(cls, graph: Graph, fmt: str) -> Self:
        formats = [tensor.format for tensor in graph.tensors]
        low = np.array([name == fmt for name in formats], bool)
        wide = ("fp64",) if wide_of(fmt) == "fp64" else ("fp32", "tf32")
        high = np.array([name in wide for name in formats], bool)
        index = graph.index
        given = index.producer == NOBODY
        return cls(low | high, low & given, high & index.keeps_format, low & index.keeps_format)


def _amounts(
    rows: int, *, seconds: Floats | float = 0.0, noise: Floats | float = 0.0, size: Floats | float = 0.0
) -> Floats:
    amounts = np.empty((rows, 3))
    amounts[:, 0], amounts[:, 1], amounts[:, 2] = seconds, noise, size
    return amounts


def _down_casts(index: GraphIndex, roles: Roles, costs: Costs, risks: Risks) -> list[Demands]:
    """Rounding of fp32 tensors for low readers: its noise, and its time where a kernel of its own must do it."""
    roundable = roles.movable & ~roles.arrives_low
    reads = index.reads.keep(roundable[index.reads.tensor])
    in_kernel = index.fused[reads.op]
    seconds = np.where(index.of_producer(index.fused, missing=False), 0.0, costs.down)
    # All readers ask for the rounding, only those outside fused kernels for the cast. Where those are the same, one
    # demand carries both, which spares the cut a node.
    outside = roles.leaves_low & roundable
    split = reads.keep(in_kernel).any(index.tensors)
    all_readers = _amounts(index.tensors, seconds=np.where(split, 0.0, seconds), noise=risks.cast_noise)
    some_readers = _amounts(index.tensors, seconds=np.where(split, seconds, 0.0))
    demands = [
        Demands(all_readers, index.producer, outside, reads.tensor, reads.op),
        Demands(some_readers, index.producer, outside, reads.tensor[~in_kernel], reads.op[~in_kernel]),
    ]
    if len(risks.read_noise):
        noise = risks.read_noise[roundable[index.reads.tensor]]
        never, number = np.zeros(len(noise), bool), np.arange(len(noise))
        each = Demands(_amounts(len(noise), noise=noise), index.producer[reads.tensor], never, number, reads.op)
        demands.append(each)
    return demands


def _up_casts(index: GraphIndex, roles: Roles, costs: Costs) -> Demands:
    """Widening of 16-bit tensors for high readers that cannot read them as they are, and for the caller."""
    widened = roles.movable & (roles.arrives_low | (index.producer != NOBODY))
    reads = index.reads.keep(widened[index.reads.tensor] & ~index.promoted & ~index.fused[index.reads.op])
    seconds = np.where(index.of_producer(index.fused, missing=False), 0.0, costs.up)
    amount = _amounts(index.tensors, seconds=seconds)
    return Demands(amount, index.producer, widened & roles.leaves_high, reads.tensor, reads.op)


def _saved_copies(index: GraphIndex, roles: Roles, costs: Costs) -> tuple[Demands, Demands, float]:
    """Bytes kept for backward: of 16-bit copies, of fp32 copies, and of tensors whose format is not the plan's choice.

    A stored tensor exists anyway, in the format it is stored in, and so does its low copy where that is kept.
    """
    high_width, low_width = widths_of(costs.fmt)
    low_bytes = np.where(index.stored & (costs.kept | roles.arrives_low), 0.0, low_width * index.elements)
    high_bytes = np.where(index.stored & ~roles.arrives_low, 0.0, high_width * index.elements)
    saves = index.saves.keep(roles.movable[index.saves.tensor])
    nobody, never = np.full(index.tensors, NOBODY), np.zeros(index.tensors, bool)
    low, high = (
        Demands(_amounts(index.tensors, size=size), nobody, never, saves.tensor, saves.op)
        for size in (low_bytes, high_bytes)
    )
    fixed = index.saves.any(index.tensors) & ~roles.movable & ~index.stored
    return low, high, float((index.elements * index.itemsize)[fixed].sum())
