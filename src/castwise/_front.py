"""Fastest plans for given noise: the speed-accuracy front, and the best plan within a noise budget.

The minimum cut weighs noise with a price λ. Sweeping λ finds the plans on the lower convex hull of (noise, cost), and
the sweep need not guess prices: between two neighbouring plans, the price at which both are equally good either turns
up a plan in between that is better than both, or proves that the hull has none. A budget is met by the same bisection,
always on the side where the budget lies. Plans off the hull, in the gap between its corners, are left to the MILP.

*Cost* here is what is not noise: seconds, plus saved bytes at their price μ.
"""

from __future__ import annotations

import heapq
import logging
import math
from dataclasses import dataclass, replace

from castwise._energy import Score
from castwise._graph_index import Bools
from castwise._milp import solve_exactly
from castwise._problem import Problem
from castwise._terms import Weights
from castwise.errors import PlanError

__all__ = ["EXACT_OPS", "Point", "front", "within_budget"]

log = logging.getLogger("castwise.plan")

EXACT_OPS = 1000
"""Free ops up to which the gap that the convex hull leaves under a budget is closed by a MILP, within EXACT_SECONDS."""
EXACT_SECONDS = 20.0

# A plan counts as better than the line between two others if it is by more than this, relative to their cost: less is
# the rounding of sums.
_BETTER = 1e-9
# Every step finds a new corner of the hull or ends the search; steps home in on the budget much faster than that.
_MOST_STEPS = 60
# The price of noise is raised by this factor, at most so often, until only noise counts.
_RAISE, _MOST_RAISES = 1e3, 12
_NO_NOISE = 1e-12
_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Point:
    """One plan, and what is known of the plans around it."""

    labels: Bools
    score: Score
    cost: float
    """Seconds, plus saved bytes at their price."""
    lam: float
    """The price of noise at which this plan is the best."""
    gap: float
    """How much better, in cost or energy, a plan of the same kind could at most be."""

    @property
    def noise(self) -> float:
        return self.score.noise


def at_price(problem: Problem, lam: float, mu: float) -> Point:
    """The plan of least seconds + λ noise + μ bytes."""
    return _point(problem, Weights(1.0, lam, mu), mu)


def _least_noise(problem: Problem, mu: float) -> Point:
    """A plan with the least noise that pins allow, whatever its cost."""
    return _point(problem, Weights(0.0, 1.0, 0.0), mu)


def _most_exact(problem: Problem, fastest: Point, mu: float) -> Point:
    """The cheapest plan with the least noise, and a price at which it is the best."""
    least = _least_noise(problem, mu)
    spread = fastest.noise - least.noise
    found, lam = fastest, max(fastest.cost, least.cost, _TINY) / max(spread, _TINY)
    for _ in range(_MOST_RAISES):
        if found.noise <= least.noise * (1 + _BETTER):
            break
        found = at_price(problem, lam, mu)
        lam *= _RAISE
    return found


def _point(problem: Problem, weights: Weights, mu: float) -> Point:
    cut = problem.network.solve(weights)
    scored = problem.score(cut.labels)
    return Point(cut.labels, scored, scored.energy(Weights(1.0, 0.0, mu)), weights.noise, cut.energy - cut.lower_bound)


def _price(fast: Point, exact: Point) -> float | None:
    """The price of noise at which two plans are equally good, or None where one is better at any price."""
    if fast.noise <= exact.noise or fast.cost >= exact.cost:
        return None
    return (exact.cost - fast.cost) / (fast.noise - exact.noise)


def _beats(found: Point, lam: float, neighbour: Point) -> bool:
    """Whether a plan is better than ``neighbour`` at the price ``lam``, beyond rounding."""
    before, after = neighbour.cost + lam * neighbour.noise, found.cost + lam * found.noise
    return before - after > _BETTER * abs(before)


def front(problem: Problem, points: int, mu: float) -> list[Point]:
    """At most ``points`` corners of the convex hull, from the fastest plan to the one with the least noise.

    The widest gap is always filled next, by the fall in noise (in orders of magnitude) times the rise in cost.
    """
    fastest = at_price(problem, 0.0, mu)
    exactest = _most_exact(problem, fastest, mu)
    corners = [fastest, exactest]
    spread = max(exactest.cost - fastest.cost, _TINY)
    smallest = _NO_NOISE * max(fastest.noise, _TINY)

    def width(left: Point, right: Point) -> float:
        fall = math.log(max(left.noise, smallest) / max(right.noise, smallest))
        return fall * (right.cost - left.cost) / spread

    waiting = [(-width(fastest, exactest), 0, fastest, exactest)]
    count = 0
    while waiting and len(corners) < points:
        _, _, left, right = heapq.heappop(waiting)
        lam = _price(left, right)
        if lam is None or not _beats(middle := at_price(problem, lam, mu), lam, left):
            continue
        corners.append(middle)
        for pair in ((left, middle), (middle, right)):
            count += 1
            heapq.heappush(waiting, (-width(*pair), count, *pair))
    return _undominated(corners)


def _undominated(corners: list[Point]) -> list[Point]:
    """Corners by rising cost and falling noise, without those that another one betters in both."""
    kept: list[Point] = []
    for corner in sorted(corners, key=lambda point: (point.cost, point.noise)):
        if not kept or corner.noise < kept[-1].noise:
            kept.append(corner)
    return kept


def within_budget(problem: Problem, budget: float, mu: float, known: Bools | None = None) -> Point:
    """The cheapest plan whose noise is at most ``budget``. Its ``gap`` says how far from the cheapest it can be.

    ``known`` are labels that are within the budget and that the result must not be dearer than.

    Raises PlanError where even the plan of least noise is over the budget.
    """
    fast = at_price(problem, 0.0, mu)
    if fast.noise <= budget:
        return fast
    exact = _most_exact(problem, fast, mu)
    if exact.noise > budget:
        exact = _least_noise(problem, mu)
    if exact.noise > budget:
        raise PlanError(
            f"No plan has a noise of {budget:.3g} or less: what is pinned to {problem.fmt} makes {exact.noise:.3g}. "
            "Raise the budget or drop the rules that pin."
        )
    bound, lam = fast.cost - fast.gap, 0.0
    for _ in range(_MOST_STEPS):
        price = _price(fast, exact)
        if price is None:
            break
        lam, middle = price, at_price(problem, price, mu)
        # Lagrange: no plan within the budget costs less than the least of cost + λ (noise − budget) over all plans.
        bound = max(bound, middle.cost + lam * (middle.noise - budget) - middle.gap)
        if not _beats(middle, lam, fast):
            break
        fast, exact = (fast, middle) if middle.noise <= budget else (middle, exact)
    best = replace(exact, lam=lam)
    if known is not None:
        scored = problem.score(known)
        rival = Point(known, scored, scored.energy(Weights(1.0, 0.0, mu)), lam, 0.0)
        best = rival if rival.noise <= budget and rival.cost < best.cost else best
    best = replace(best, gap=max(best.cost - bound, 0.0))
    return _closed(problem, best, budget, mu) if best.gap > _BETTER * abs(best.cost) else best


def _closed(problem: Problem, best: Point, budget: float, mu: float) -> Point:
    """The best plan off the hull where the graph is small enough to look for it, else ``best`` itself."""
    free = int((problem.pinned < 0).sum())
    if free > EXACT_OPS:
        log.debug("%d free ops: the plan may cost %.3g more than the best within the budget", free, best.gap)
        return best
    found = solve_exactly(problem.terms, problem.pinned, budget, mu, at_most=best.cost, seconds=EXACT_SECONDS)
    if found is None:
        return best
    scored = problem.score(found.labels)
    cost = scored.energy(Weights(1.0, 0.0, mu))
    if scored.noise <= budget and cost < best.cost:
        best = Point(found.labels, scored, cost, best.lam, cost - (best.cost - best.gap))
    return replace(best, gap=min(best.gap, max(best.cost - found.lower_bound, 0.0)))
