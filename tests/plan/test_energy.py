"""The energy of a labelling against the oracle, and what a flip changes against the energy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castwise._energy import score
from castwise._terms import Terms

from .oracle import enumerate_labellings, random_case

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_score_equals_the_oracle_on_every_labelling_looked_at(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    every = enumerate_labellings(case)
    for row in rng.integers(0, len(every.labels), 4):
        scored = score(case.graph, case.costs, case.risks, every.labels[row])
        assert scored.seconds == pytest.approx(every.seconds[row], rel=1e-12, abs=1e-15)
        assert scored.noise == pytest.approx(every.noise[row], rel=1e-12, abs=1e-15)
        assert scored.saved_bytes == every.saved[row]


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_flips_are_the_differences_of_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    labels = rng.random(len(case.graph.ops)) < 0.5
    own, shared = Terms.of(case.graph, case.costs, case.risks).flips(labels)
    before = score(case.graph, case.costs, case.risks, labels)
    for op in range(len(labels)):
        flipped = labels.copy()
        flipped[op] = not labels[op]
        after = score(case.graph, case.costs, case.risks, flipped)
        change = [after.seconds - before.seconds, after.noise - before.noise, after.saved_bytes - before.saved_bytes]
        assert (own + shared)[op] == pytest.approx(change, rel=1e-9, abs=1e-12)


def test_a_demand_is_paid_once_however_many_ops_make_it() -> None:
    """x is read by three ops: one cast, one rounding, and one 16-bit copy saved for backward."""
    from castwise.cost import Costs
    from castwise.graph import GraphBuilder
    from castwise.risk import Risks

    build = GraphBuilder()
    build.tensor("x", (10,), kind="input", requires_grad=True)
    for name in "abc":
        build.op(name, "matmul", ["x"], [(f"{name}.out", (10,))], saves=["x"], output=True)
    graph = build.build(training=True)
    noise = np.array([7.0, 0.0, 0.0, 0.0])
    down, up = np.array([5.0, 0, 0, 0]), np.zeros(4)
    costs = Costs("bf16", np.zeros(3), np.zeros(3), down, up, np.zeros(4, bool))
    risks = Risks.from_sensitivities(graph, "bf16", noise)
    for low in ([True, False, False], [True, True, True]):
        scored = score(graph, costs, risks, np.array(low))
        assert (scored.seconds, scored.noise) == (5.0, 7.0)
    assert score(graph, costs, risks, np.array([True, True, True])).saved_bytes == 2 * 10
    assert score(graph, costs, risks, np.array([True, False, False])).saved_bytes == 2 * 10 + 4 * 10
