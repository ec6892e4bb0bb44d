"""The cut against enumeration, with every term of the energy on."""

from __future__ import annotations

import numpy as np
import pytest

from castwise._cut import CutNetwork
from castwise._terms import Terms, Weights

from .oracle import enumerate_labellings, random_case

# Differences from summing in another order.
ROUNDING = 1e-9


def weights(rng: np.random.Generator) -> Weights:
    return Weights(
        1.0, float(rng.choice([0.0, 10.0 ** rng.uniform(-3, 3)])), float(rng.choice([0.0, 10.0 ** rng.uniform(-3, 0)]))
    )


@pytest.mark.parametrize("block", range(10))
def test_minimum_cut_equals_brute_force_on_random_graphs(block: int) -> None:
    for seed in range(block * 250, block * 250 + 250):
        rng = np.random.default_rng(seed)
        case = random_case(rng)
        weighted = weights(rng)
        cut = CutNetwork(Terms.of(case.graph, case.costs, case.risks), case.pins).solve(weighted)
        every = enumerate_labellings(case)
        energies = every.energy(weighted.noise, weighted.bytes)
        best = energies.min()
        slack = ROUNDING * max(1.0, abs(energies).max())
        chosen = energies[(every.labels == cut.labels).all(axis=1)]
        assert len(chosen) == 1, f"seed {seed}: the plan breaks a pin"
        assert chosen[0] <= best + slack, f"seed {seed}: the plan is not optimal"
        assert abs(cut.energy - chosen[0]) <= slack, f"seed {seed}: the cut's value is not the plan's energy"
        assert cut.lower_bound <= best + slack, f"seed {seed}: the bound excludes the optimum"
        assert cut.energy - cut.lower_bound <= slack, f"seed {seed}: the certificate is loose"
