"""The cheapest plan within a noise budget, off the convex hull that a minimum cut can reach.

The same energy as an integer programme for HiGHS, which scipy brings: a binary variable per op, 1 where it is LOW, and
per demand a variable that says whether it is paid. What is paid costs something and is therefore as small as its
members and its owner allow, which is 0 or 1 as soon as the ops' variables are. Two constants stand next to the ops, as
source and sink do in the cut: one that is HIGH and one that is LOW.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castwise._cut import FREE
from castwise._graph_index import Bools, Floats
from castwise._terms import HIGH, LOW, NOBODY, Demands, Terms, Weights

__all__ = ["Exact", "solve_exactly"]

log = logging.getLogger("castwise.plan")

_HALF = 0.5
_TINY = 1e-300
# What summing in another order may change, relative: the known plan itself must stay within the limits.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Exact:
    """A labelling, and a cost below which no labelling within the budget goes."""

    labels: Bools
    lower_bound: float


def solve_exactly(
    terms: Terms, pins: NDArray[np.int8], budget: float, mu: float, *, at_most: float, seconds: float
) -> Exact | None:
    """The labelling of least seconds + μ bytes with noise ≤ ``budget``, as far as HiGHS gets in ``seconds``.

    ``at_most`` is the cost of a known plan: dearer ones are not looked for. Returns None where none was found in time.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import

    ops = len(pins)
    amount = np.concatenate([_own(terms, pins), np.zeros((2, 3)), terms.low_demands.amount, terms.high_demands.amount])
    weights = np.array(Weights(1.0, 0.0, mu))
    constant = float((terms.fixed + terms.own_high.sum(axis=0)) @ weights)
    unit = max(at_most, _TINY)  # HiGHS has absolute tolerances: bring both rows to about 1
    cost, noise = amount @ weights / unit, amount[:, 1] / max(budget, _TINY)

    lower, upper = np.zeros(len(amount)), np.ones(len(amount))
    lower[:ops], upper[:ops] = pins == LOW, pins != HIGH
    lower[ops + LOW], upper[ops + HIGH] = 1.0, 0.0
    whole = np.zeros(len(amount))
    whole[:ops] = pins == FREE
    result = milp(
        cost,
        constraints=[
            LinearConstraint(_paid(terms, ops, len(amount)), lb=0.0),
            LinearConstraint(noise[None], ub=float(budget > 0)),
            LinearConstraint(cost[None], ub=(at_most - constant) / unit + _ROUNDING),
        ],
        bounds=Bounds(lower, upper),
        integrality=whole,
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if result.x is None:
        log.debug("the integer programme found no plan: %s", result.message)
        return None
    return Exact(result.x[:ops] > _HALF, constant + float(result.mip_dual_bound) * unit)


def _own(terms: Terms, pins: NDArray[np.int8]) -> Floats:
    """[ops, 3] what being LOW costs an op more than being HIGH; nothing where it cannot be LOW, which may cost ∞."""
    change = np.zeros_like(terms.own_high)
    possible = pins != HIGH
    change[possible] = terms.own_low[possible] - terms.own_high[possible]
    return change


def _paid(terms: Terms, ops: int, variables: int) -> Any:
    """Rows that say paid − member + owner ≥ 0 for low demands, and paid + member − owner ≥ 0 for high ones."""
    from scipy.sparse import csr_array

    columns, signs, first = [], [], ops + 2
    for demands, wanted in ((terms.low_demands, LOW), (terms.high_demands, HIGH)):
        paid, member, owner = _members(demands, outside=ops + wanted, nobody=ops + (not wanted))
        columns.append(np.column_stack([first + paid, member, owner]))
        signs.append(np.tile([1.0, -1.0, 1.0] if wanted == LOW else [1.0, 1.0, -1.0], (len(paid), 1)))
        first += len(demands.owner)
    column, sign = np.concatenate(columns), np.concatenate(signs)
    starts = np.arange(0, column.size + 1, column.shape[1])
    return csr_array((sign.ravel(), column.ravel(), starts), shape=(len(column), variables))


def _members(demands: Demands, outside: int, nobody: int) -> tuple[NDArray[np.int64], ...]:
    """Demand, member and owner of each pair. ``outside`` is a member of all that is always demanded."""
    always = np.flatnonzero(demands.always)
    demand = np.r_[demands.demand, always]
    member = np.r_[demands.member, np.full(len(always), outside)]
    owner = demands.owner[demand]
    return demand, member, np.where(owner == NOBODY, nobody, owner)
