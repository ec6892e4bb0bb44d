"""Noise per op by running the model, for frameworks without gradients: lower groups of ops, split those that matter.

Lowering every op by itself takes as many runs as there are ops. Most ops matter little, and a group of ops that matters
little together needs no closer look. So start from few groups (layers, say), and always split the group in which the
most noise is still unaccounted for, until the runs are used up or what is left is negligible.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from castwise.errors import PlanError

__all__ = ["Group", "GroupReport", "measure_groups"]

log = logging.getLogger("castwise.risk")


@dataclass(frozen=True, slots=True)
class Group:
    """Ops that were lowered together, and the output noise that this caused."""

    ops: tuple[int, ...]
    noise: float
    """Variance that lowering just these ops adds to the output."""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What was measured: disjoint groups that cover all ops asked about."""

    groups: tuple[Group, ...]
    """The finest groups measured, most noise first."""
    runs: int
    """How often the model was run."""
    together: float
    """Noise of lowering all ops at once."""

    @property
    def additivity(self) -> float:
        """Noise of all ops at once over the sum of the groups': about 1 where roundings are independent."""
        total = sum(group.noise for group in self.groups)
        return self.together / total if total > 0 else math.nan

    def noise(self, op: int) -> float:
        """What one op adds: its group's noise, in equal shares, where it was not measured by itself."""
        for group in self.groups:
            if op in group.ops:
                return group.noise / len(group.ops)
        raise PlanError(f"Op {op} is in no measured group. Pass it to measure_groups.")

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """All ops with their noise."""
        return ((op, group.noise / len(group.ops)) for group in self.groups for op in group.ops)


def measure_groups(
    evaluate: Callable[[frozenset[int]], float],
    groups: Sequence[Sequence[int]],
    budget: int,
    *,
    negligible: float = 0.01,
) -> GroupReport:
    """Find which ops make the noise, in at most ``budget`` runs of the model.

    ``evaluate(ops)`` runs the model with just those ops LOW and returns the mean square of the change of its outputs.
    ``groups`` are the groups to start from, which must not share ops; ops that are neighbours in them stay together
    longest, so list them in execution order. Groups with less than ``negligible`` of the total noise are not split.

    Raises PlanError where the budget does not allow to measure each given group and all of them together, or where a
    run returns something that is no noise.
    """
    pieces = [tuple(group) for group in groups if group]
    everything = [op for piece in pieces for op in piece]
    if len(set(everything)) != len(everything):
        raise PlanError("Groups to measure share an op. Put each op into one group.")
    if budget < len(pieces) + 1:
        raise PlanError(f"{budget} runs cannot measure {len(pieces)} groups and all together. Allow {len(pieces) + 1}.")

    def run(ops: tuple[int, ...]) -> Group:
        noise = float(evaluate(frozenset(ops)))
        if not (math.isfinite(noise) and noise >= 0):
            raise PlanError(
                f"Lowering {len(ops)} ops made an output change of {noise!r}. Leave out ops that overflow: the range "
                "pass finds them."
            )
        return Group(ops, noise)

    together = run(tuple(everything)).noise if everything else 0.0
    order = itertools.count()  # heap entries must not compare groups
    waiting = [(-group.noise, next(order), group) for group in map(run, pieces)]
    heapq.heapify(waiting)
    runs = len(pieces) + bool(everything)
    done: list[Group] = []
    while waiting:
        _, _, group = heapq.heappop(waiting)
        total = sum(entry[2].noise for entry in waiting) + group.noise + sum(finished.noise for finished in done)
        if len(group.ops) == 1 or group.noise <= negligible * total or runs + 2 > budget:
            done.append(group)
            continue
        middle = len(group.ops) // 2
        for half in (group.ops[:middle], group.ops[middle:]):
            part = run(half)
            heapq.heappush(waiting, (-part.noise, next(order), part))
        runs += 2
    log.debug("measured %d groups of %d ops in %d runs", len(done), len(everything), runs)
    return GroupReport(tuple(sorted(done, key=lambda group: -group.noise)), runs, together)
