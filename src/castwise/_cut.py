"""The plan of least energy, as a minimum cut.

HIGH is the source's side of the cut and LOW the sink's. An op's own costs are its arcs to the two terminals. A low
demand is an arc from its owner to an auxiliary node that infinite arcs force to LOW's side as soon as one member is
there; a high demand is the same with all arcs turned round. Every arc that a cut must pay for is thus one term of the
energy, so the least cut is the best plan: the energy is submodular, and nothing is approximated.

scipy's maximum flow wants 32-bit integers. Capacities are scaled to use that range and rounded *down*, so that the flow
found is a flow of the true capacities as well: its value is a lower bound on every plan's energy, and the distance to
the plan found certifies how far that plan can be from the optimum. Where the distance is not negligible, the true
capacities that the flow leaves over are scaled up and the flow is continued in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castwise._graph_index import Bools, Floats, Ints
from castwise._terms import LOW, NOBODY, Demands, Terms, Weights

__all__ = ["FREE", "Cut", "CutNetwork"]

FREE = -1
"""In an array of pins: the label is the planner's choice. Otherwise the label itself, 0 for HIGH and 1 for LOW."""

_SOURCE, _SINK, _FIRST_NODE = 0, 1, 2  # HIGH is the source's side
_DROPPED = -1

# The largest integer capacity. An arc and its reverse may both be infinite, and what one has left can reach the sum of
# both, which must fit in 31 bits.
_LARGEST = 2**30 - 2
# Certified distance to the optimum, relative to the energy at stake, at which a plan counts as optimal.
_NEGLIGIBLE = 1e-9
_MOST_PASSES = 4


@dataclass(frozen=True, slots=True)
class Cut:
    """The labels of least energy, their energy, and a proof of how good they are."""

    labels: Bools
    """[ops] true where LOW. Of plans with equal energy, one with the fewest ops LOW."""
    energy: float
    lower_bound: float
    """No labelling that respects the pins has less energy than this."""


@dataclass(frozen=True, slots=True)
class _Arcs:
    """Arcs as they are collected, several of which may join the same two nodes."""

    tail: Ints
    head: Ints
    amount: Floats
    """[arcs, 3] seconds, noise and bytes."""
    infinite: Bools

    @classmethod
    def finite(cls, tail: Ints, head: Ints, amount: Floats) -> _Arcs:
        return cls(tail, head, amount, np.zeros(len(tail), bool))

    @classmethod
    def implied(cls, tail: Ints, head: Ints) -> _Arcs:
        return cls(tail, head, np.zeros((len(tail), 3)), np.ones(len(tail), bool))


class CutNetwork:
    """The network of one energy and one set of pins, ready to be cut under any weights."""

    def __init__(self, terms: Terms, pins: NDArray[np.int8]) -> None:
        self._terms, self._pins = terms, pins
        free = pins == FREE
        self._node = np.where(free, _FIRST_NODE + np.cumsum(free) - 1, np.where(pins == LOW, _SINK, _SOURCE))
        self._nodes = _FIRST_NODE + int(free.sum())
        self._free = np.flatnonzero(free)
        parts = [self._own_arcs()]
        parts += self._demand_arcs(terms.low_demands, home=_SOURCE, away=_SINK)
        parts += self._demand_arcs(terms.high_demands, home=_SINK, away=_SOURCE)
        self._lay_out(parts)

    def _own_arcs(self) -> _Arcs:
        """Paid where LOW: an arc from the source. Paid where HIGH: an arc to the sink. Paid anyway: source to sink."""
        nodes = self._node[self._free]
        source, sink = np.full(len(nodes), _SOURCE), np.full(len(nodes), _SINK)
        pinned = np.where(self._pins[:, None] == LOW, self._terms.own_low, self._terms.own_high)[self._pins != FREE]
        anyway = self._terms.fixed + pinned.sum(axis=0)
        amount = np.concatenate([self._terms.own_low[self._free], self._terms.own_high[self._free], anyway[None]])
        return _Arcs.finite(np.r_[source, nodes, _SOURCE], np.r_[nodes, sink, _SINK], amount)

    def _demand_arcs(self, demands: Demands, home: int, away: int) -> list[_Arcs]:
        """The arcs of demands that are paid where the owner is at ``home`` and some member is ``away``."""
        count = len(demands.owner)
        owner = np.where(demands.owner == NOBODY, home, self._node[demands.owner])
        member = self._node[demands.member]
        granted = demands.always | (np.bincount(demands.demand[member == away], minlength=count) > 0)
        open_pairs = (member != home) & ~granted[demands.demand] & (owner != away)[demands.demand]
        demand, member = demands.demand[open_pairs], member[open_pairs]
        sizes = np.bincount(demand, minlength=count)

        trigger = np.where(granted, away, _DROPPED)  # the node that is away as soon as the demand is made
        single = sizes[demand] == 1
        trigger[demand[single]] = member[single]  # one member triggers by itself: no auxiliary node
        several = np.flatnonzero(sizes > 1)
        trigger[several] = self._nodes + np.arange(len(several))
        self._nodes += len(several)

        paid = (trigger != _DROPPED) & (owner != away) & (trigger != owner)
        auxiliary = trigger[demand[~single]]
        if home == _SOURCE:
            arcs = [(owner[paid], trigger[paid]), (auxiliary, member[~single])]
        else:
            arcs = [(trigger[paid], owner[paid]), (member[~single], auxiliary)]
        return [_Arcs.finite(*arcs[0], demands.amount[paid]), _Arcs.implied(*arcs[1])]

    def _lay_out(self, parts: list[_Arcs]) -> None:
        """Merge arcs between the same nodes and give every arc its reverse, in compressed rows sorted by node."""
        tail, head = (np.concatenate([getattr(part, side) for part in parts]) for side in ("tail", "head"))
        amount = np.concatenate([part.amount for part in parts])
        infinite = np.concatenate([part.infinite for part in parts])
        keys, slot = np.unique(np.r_[self._key(tail, head), self._key(head, tail)], return_inverse=True)
        slot = slot[: len(tail)]
        self._amount = np.column_stack([np.bincount(slot, column, len(keys)) for column in amount.T])
        self._infinite = np.bincount(slot, infinite, len(keys)) > 0
        self._tail, self._head = keys // self._nodes, keys % self._nodes
        self._columns = self._head.astype(np.int32)
        self._rows = np.searchsorted(self._tail, np.arange(self._nodes + 1)).astype(np.int32)
        self._reverse = np.argsort(self._key(self._head, self._tail))  # at the slot of (i, j), the slot of (j, i)
        nodes = self._node[self._free]
        self._from_source = np.searchsorted(keys, self._key(np.full_like(nodes, _SOURCE), nodes))
        self._to_sink = np.searchsorted(keys, self._key(nodes, np.full_like(nodes, _SINK)))
        self._through = int(np.searchsorted(keys, _SOURCE * self._nodes + _SINK))

    def _key(self, tail: Ints, head: Ints) -> Ints:
        return tail * self._nodes + head

    def solve(self, weights: Weights) -> Cut:
        """The plan of least weighted energy."""
        capacity, constant = self._capacities(weights)
        best, best_side = np.inf, np.zeros(self._nodes, bool)
        for side in self._uniform_sides():
            if (value := self._cut_value(capacity, side)) < best:
                best, best_side = value, side
        stake = gap = best
        flow, left = 0.0, capacity
        for _ in range(_MOST_PASSES):
            if gap <= _NEGLIGIBLE * stake:
                break
            pushed, left, side = self._push(left, gap)
            flow += pushed
            if (value := self._cut_value(capacity, side)) < best:
                best, best_side = value, side
            gap = max(best - flow, 0.0)
        labels = np.where(self._pins == FREE, best_side[self._node], self._pins == LOW)
        return Cut(labels, float(constant + best), float(constant + best - gap))

    def _capacities(self, weights: Weights) -> tuple[Floats, float]:
        """Capacities of all arcs, and the energy that no cut can avoid, which they leave out."""
        capacity = self._amount @ np.array(weights)
        constant = float(capacity[self._through])
        capacity[self._through] = 0.0
        unavoidable = np.minimum(capacity[self._from_source], capacity[self._to_sink])
        capacity[self._from_source] -= unavoidable
        capacity[self._to_sink] -= unavoidable
        capacity[self._infinite] = np.inf
        return capacity, constant + float(unavoidable.sum())

    def _uniform_sides(self) -> tuple[Bools, Bools]:
        """All HIGH and all LOW, as far as pins allow: two cuts that pass no infinite arc."""
        high, low = np.zeros(self._nodes, bool), np.ones(self._nodes, bool)
        high[_SINK], low[_SOURCE] = True, False
        return high, low

    def _cut_value(self, capacity: Floats, side: Bools) -> float:
        """What a cut costs: the arcs from HIGH's side to LOW's."""
        return float(capacity[~side[self._tail] & side[self._head]].sum())

    def _push(self, capacity: Floats, most: float) -> tuple[float, Floats, Bools]:
        """Push flow through ``capacity``, of which at most ``most`` can pass.

        Returns the flow's value, the capacities left over, and which nodes are on LOW's side of the cut found.
        """
        from scipy.sparse import csr_array  # slow to import
        from scipy.sparse.csgraph import maximum_flow

        scale = _LARGEST / most
        whole = np.floor(np.minimum(capacity, most) * scale).astype(np.int32)
        whole[np.isinf(capacity)] = _LARGEST + 1
        shape = (self._nodes, self._nodes)
        result = maximum_flow(csr_array((whole, self._columns, self._rows), shape=shape), _SOURCE, _SINK)
        flow = self._aligned(result.flow)
        left = np.maximum(capacity - flow / scale, 0.0)
        return result.flow_value / scale, left, self._reaches_sink(whole - flow)

    def _aligned(self, flow: Any) -> NDArray[np.int32]:
        """The flow on each arc of the network, in the network's own order."""
        same_layout = np.array_equal(flow.indices, self._columns)  # scipy keeps it: all reverse arcs are there already
        return np.asarray(flow.data if same_layout else flow[self._tail, self._head]).ravel()

    def _reaches_sink(self, left: NDArray[np.int32]) -> Bools:
        """Which nodes have a path of unfilled arcs to the sink: the smallest LOW side of all minimum cuts."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order

        open_arcs = left[self._reverse] > 0  # row j, column i: an unfilled arc from i to j
        rows = np.r_[0, np.cumsum(open_arcs)][self._rows]
        columns = self._columns[open_arcs]
        backward = csr_array((np.ones(len(columns), np.int8), columns, rows), shape=(self._nodes, self._nodes))
        side = np.zeros(self._nodes, bool)
        side[breadth_first_order(backward, _SINK, return_predecessors=False)] = True
        return side
