"""What a labelling costs, tensor by tensor, as the model would run it.

This is written from the meaning of a plan, not from the terms that the cut is built from, so that each checks the
other: a plan's reported numbers come from here, and must equal what the cut says it minimised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from castwise._graph_index import Bools, Floats
from castwise._terms import Roles, Weights, widths_of

if TYPE_CHECKING:
    from castwise.cost import Costs
    from castwise.graph import Graph
    from castwise.risk import Risks

__all__ = ["Score", "Usage", "score", "usage"]


@dataclass(frozen=True, slots=True)
class Score:
    """What a plan costs: the three things it trades against each other."""

    seconds: float
    """Predicted time of a step: ops and casts, and in training their backward."""
    noise: float
    """Predicted variance of the output caused by rounding, in the unit of the risks."""
    saved_bytes: float
    """Bytes kept from the forward for the backward pass. Weights and kept low copies exist anyway and do not count."""

    def energy(self, weights: Weights) -> float:
        return weights.time * self.seconds + weights.noise * self.noise + weights.bytes * self.saved_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """In which formats each tensor is needed under given labels. All arrays are over tensors."""

    low: Bools
    """Produced in 16 bits."""
    rounded: Bools
    """Produced in fp32 and read in 16 bits: its values are rounded for those readers."""
    cast_down: Bools
    """Rounded by a cast of its own; a fused kernel does it in passing. Includes copies kept between steps."""
    cast_up: Bools
    """Produced in 16 bits and widened by a cast of its own."""
    saved_low: Bools
    saved_high: Bools


def usage(graph: Graph, fmt: str, labels: Bools) -> Usage:
    """Who needs what: the formats in which each tensor exists when ops are labelled ``labels``."""
    index, roles = graph.index, Roles.of(graph, fmt)
    count = index.tensors
    low = roles.movable & (index.of_producer(labels, missing=False) | roles.arrives_low)
    high = roles.movable & ~low
    in_kernel = index.of_producer(index.fused, missing=False)
    reader_low, reader_fused = labels[index.reads.op], index.fused[index.reads.op]
    wants_high = ~reader_low & ~reader_fused & ~index.promoted
    outside = ~in_kernel
    saver_low = labels[index.saves.op]
    return Usage(
        low=low,
        rounded=high & (index.reads.keep(reader_low).any(count) | roles.leaves_low),
        cast_down=high & outside & (index.reads.keep(reader_low & ~reader_fused).any(count) | roles.leaves_low),
        cast_up=low & outside & (index.reads.keep(wants_high).any(count) | roles.leaves_high),
        saved_low=roles.movable & index.saves.keep(saver_low).any(count),
        saved_high=roles.movable & index.saves.keep(~saver_low).any(count),
    )


def score(graph: Graph, costs: Costs, risks: Risks, labels: Bools) -> Score:
    """What the model costs with ops labelled ``labels`` (true where LOW)."""
    used = usage(graph, costs.fmt, labels)
    seconds = np.where(labels, costs.low, costs.high).sum() + costs.down[used.cast_down].sum()
    noise = risks.op_noise[labels].sum() + risks.rounding(graph, labels, used.rounded).sum()
    saved = saved_bytes(graph, costs, used).sum() if graph.training else 0.0
    return Score(float(seconds + costs.up[used.cast_up].sum()), float(noise), float(saved))


def saved_bytes(graph: Graph, costs: Costs, used: Usage) -> Floats:
    """[tensors] bytes of each tensor that are kept for the backward pass and would not exist otherwise."""
    index, roles = graph.index, Roles.of(graph, costs.fmt)
    exists_low = index.stored & (costs.kept | roles.arrives_low)
    exists_high = index.stored & ~roles.arrives_low
    high_width, low_width = widths_of(costs.fmt)
    per_element = low_width * (used.saved_low & ~exists_low) + high_width * (used.saved_high & ~exists_high)
    other = index.saves.any(index.tensors) & ~roles.movable & ~index.stored
    return index.elements * np.where(other, index.itemsize, per_element)
