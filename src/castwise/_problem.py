"""A planning problem with all that is known about it, and the things derived from that once for many plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from castwise._cut import FREE, CutNetwork
from castwise._decide import is_wide
from castwise._energy import Score, score
from castwise._graph_index import Bools
from castwise._pins import Cause, Pin, find_pins
from castwise._terms import HIGH, Terms
from castwise.cost import Costs
from castwise.errors import PlanError
from castwise.formats import parse_format
from castwise.graph import Graph
from castwise.policy import Policy
from castwise.risk import Risks

__all__ = ["Problem"]

_PLANNED = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, eq=False)
class Problem:
    """Which graph is planned, with which costs and risks, and which ops have no choice."""

    graph: Graph
    costs: Costs
    risks: Risks
    pins: Mapping[int, Pin]

    def __post_init__(self) -> None:
        self.costs.check(self.graph)
        self.risks.check(self.graph)
        if self.costs.fmt != self.risks.fmt:
            raise PlanError(f"Costs are for {self.costs.fmt}, risks for {self.risks.fmt}. Make both for one format.")
        if parse_format(self.costs.fmt).name not in _PLANNED:
            raise PlanError(
                f"A plan chooses between fp32 and a 16-bit format, or fp64 and fp32, not {self.costs.fmt}. Use bf16, "
                "fp16 or fp32."
            )

    @classmethod
    def of(cls, graph: Graph, costs: Costs, risks: Risks, policy: Policy) -> Self:
        """The problem that a resolved ``policy`` poses. Its format is that of the costs, or float32: all is pinned.

        Raises PlanError where these do not fit together, PolicyError where a strict policy has rules that cannot hold.
        """
        unpinned = cls(graph, costs, risks, {})
        wanted = policy.low_format
        if is_wide(wanted) and wanted.name != costs.fmt:
            reason = f"format = {policy.format!r}"
            return replace(unpinned, pins=dict.fromkeys(range(len(graph)), Pin(HIGH, Cause.POLICY, reason)))
        if wanted.name != costs.fmt:
            raise PlanError(
                f"The policy's format is {wanted.name}, the costs are for {costs.fmt}. Make costs and risks for the "
                "policy's format, or compare formats with solve_formats."
            )
        return replace(unpinned, pins=find_pins(graph, costs, risks, policy))

    def with_pins(self, pins: Mapping[int, Pin]) -> Self:
        """The same problem with some ops pinned in addition; the new pins win over old ones."""
        return replace(self, pins={**self.pins, **pins})

    @property
    def fmt(self) -> str:
        """The 16-bit format."""
        return self.costs.fmt

    @cached_property
    def terms(self) -> Terms:
        return Terms.of(self.graph, self.costs, self.risks)

    @cached_property
    def pinned(self) -> NDArray[np.int8]:
        """[ops] the label of each pinned op, FREE for the others."""
        pinned = np.full(len(self.graph.ops), FREE, np.int8)
        for position, pin in self.pins.items():
            pinned[position] = pin.low
        return pinned

    @cached_property
    def network(self) -> CutNetwork:
        return CutNetwork(self.terms, self.pinned)

    def score(self, labels: Bools) -> Score:
        return score(self.graph, self.costs, self.risks, labels)
