"""Fronts and budgets against enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from castwise._front import at_price, front, within_budget
from castwise._pins import Cause, Pin
from castwise._problem import Problem
from castwise.cost import Costs
from castwise.errors import PlanError
from castwise.graph import Graph, GraphBuilder
from castwise.risk import Risks

from .oracle import Case, enumerate_labellings, random_case

ROUNDING = 1e-9


def problem_of(case: Case) -> Problem:
    pins = {v: Pin(bool(pin), Cause.POLICY, "a test") for v, pin in enumerate(case.pins) if pin >= 0}
    return Problem(case.graph, case.costs, case.risks, pins)


@pytest.mark.parametrize("block", range(5))
def test_cheapest_plan_within_a_budget_equals_brute_force(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        rng = np.random.default_rng(10_000 + seed)
        case = random_case(rng)
        mu = float(rng.choice([0.0, 0.01]))
        every = enumerate_labellings(case)
        cost = every.energy(0.0, mu)
        budget = float(every.noise.min() + rng.random() ** 2 * (every.noise.max() - every.noise.min())) * (1 + ROUNDING)
        found = within_budget(problem_of(case), budget, mu)
        best = cost[every.noise <= budget].min()
        slack = ROUNDING * 10 * max(1.0, cost.max())
        assert found.noise <= budget, f"seed {seed}: over the budget"
        assert found.cost <= best + slack, f"seed {seed}: {found.cost} where {best} is possible"
        assert found.cost - found.gap <= best + slack, f"seed {seed}: the bound excludes the optimum"


def test_on_large_graphs_the_plan_is_the_cheapest_corner_of_the_hull_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("castwise._front.EXACT_OPS", 0)
    for seed in range(150):
        rng = np.random.default_rng(50_000 + seed)
        case = random_case(rng)
        every = enumerate_labellings(case)
        low, high = every.noise.min(), every.noise.max()
        budget = float(low + rng.random() ** 2 * (high - low)) * (1 + 1e-6)
        found = within_budget(problem_of(case), budget, 0.0)
        corner = min(cost for noise, cost in lower_hull(every.noise, every.seconds) if noise <= budget)
        slack = ROUNDING * 10 * max(1.0, every.seconds.max())
        assert found.noise <= budget
        assert found.cost <= corner + slack, f"seed {seed}"
        assert found.cost - found.gap <= every.seconds[every.noise <= budget].min() + slack, f"seed {seed}"


def test_a_budget_below_what_pins_alone_cause_is_an_error_that_says_so() -> None:
    graph = chain()
    noise = np.array([0.0, 3.0, 5.0])
    risks = Risks.from_sensitivities(graph, "bf16", noise)
    case = Case(graph, free_of_charge(graph), risks, np.array([1, -1], np.int8))
    assert within_budget(problem_of(case), 3.0, 0.0).noise == 3.0
    with pytest.raises(PlanError, match=r"makes 3\. Raise the budget"):
        within_budget(problem_of(case), 2.9, 0.0)


def chain() -> Graph:
    """x, op a, t, op b, y."""
    build = GraphBuilder()
    build.tensor("x", (1,), kind="input")
    build.op("a", "matmul", ["x"], [("t", (1,))])
    build.op("b", "matmul", ["t"], [("y", (1,))], output=True)
    return build.build()


def free_of_charge(graph: Graph) -> Costs:
    """Costs under which fp32 takes a second per op and 16 bits take nothing."""
    ops, tensors = len(graph.ops), len(graph.tensors)
    return Costs("bf16", np.ones(ops), np.zeros(ops), np.zeros(tensors), np.zeros(tensors), np.zeros(tensors, bool))


@pytest.mark.parametrize("block", range(4))
def test_front_is_the_convex_hull_of_all_plans(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        case = random_case(np.random.default_rng(20_000 + seed))
        every = enumerate_labellings(case)
        found = front(problem_of(case), points=4096, mu=0.0)
        hull = lower_hull(every.noise, every.energy(0.0, 0.0))
        scale = max(1.0, every.seconds.max(), every.noise.max())
        assert [(p.noise, p.cost) for p in found] == [
            (pytest.approx(noise, abs=ROUNDING * scale), pytest.approx(cost, abs=ROUNDING * scale))
            for noise, cost in hull
        ], f"seed {seed}"


def lower_hull(noise: np.ndarray, cost: np.ndarray) -> list[tuple[float, float]]:
    """Corners of the lower left convex hull, from the cheapest plan to the one with the least noise."""
    hull: list[tuple[float, float]] = []
    for n, c in sorted(zip(noise.tolist(), cost.tolist(), strict=True)):
        while hull and c >= hull[-1][1] - ROUNDING * max(1.0, abs(c)):  # noisier and no cheaper
            break
        else:
            if hull and n - hull[-1][0] <= ROUNDING * max(1.0, n):  # the same noise, and cheaper
                hull.pop()
            while len(hull) >= 2 and not convex(hull[-2], hull[-1], (n, c)):
                hull.pop()
            hull.append((n, c))
    return hull[::-1]


def convex(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]) > ROUNDING


@pytest.mark.parametrize("points", [2, 5])
def test_front_keeps_to_the_number_of_points_asked_for(points: int) -> None:
    case = random_case(np.random.default_rng(7), ops=12)
    assert len(front(problem_of(case), points=points, mu=0.0)) <= points


def test_every_plan_of_a_front_is_the_best_at_its_price() -> None:
    for seed in range(30):
        case = random_case(np.random.default_rng(30_000 + seed))
        problem = problem_of(case)
        for point in front(problem, points=6, mu=0.0):
            if np.isfinite(point.lam):
                best = at_price(problem, point.lam, 0.0)
                energy = point.cost + point.lam * point.noise
                assert energy == pytest.approx(best.cost + point.lam * best.noise, rel=1e-8, abs=1e-12)
