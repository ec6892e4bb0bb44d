"""Plans between float64 and float32, for functions that are no networks."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import lu_factor, lu_solve

from castwise.jax import report

_spec = importlib.util.spec_from_file_location("castwise_jax_plans", pathlib.Path(__file__).with_name("test_plan.py"))
assert _spec is not None and _spec.loader is not None
plans = sys.modules.setdefault("castwise_jax_plans", importlib.util.module_from_spec(_spec))
if not hasattr(plans, "solved"):
    _spec.loader.exec_module(plans)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def system(size=24):
    rng = np.random.default_rng(0)
    return jnp.asarray(np.eye(size) * 4 + rng.normal(size=(size, size)) / 2), jnp.asarray(rng.normal(size=(size, 2)))


def refined(matrix, right):
    factors = lu_factor(matrix)

    def step(_, x):
        return x + lu_solve(factors, right - matrix @ x)

    return jax.lax.fori_loop(0, 3, step, lu_solve(factors, right))


def test_refinement_is_factored_in_fp32_and_its_residual_computed_in_fp64():
    plan, closed, arrays = plans.solved(refined, *system(), fmt="fp32", budget=1e-12)
    formats = {op.name: plan.formats[op.id] for op in plan.problem.graph.ops}
    assert formats["linalg_lu"] == "fp32" and formats["triangular_solve"] == "fp32" and formats["matmul"] == "fp64"
    assert "noise" in str(plan.explain(next(op.id for op in plan.problem.graph.ops if op.name == "matmul")))
    assert plans.Trial(closed, arrays, None).error(plan) < 1e-12
    assert not plans.differences(plan, refined, *system())
    low = [op for op in report(refined, *system(), plan=plan).ops if op.primitive == "lu"]
    assert low[0].inputs == ("fp32",)


def test_a_time_step_keeps_its_sum_wide_where_the_budget_needs_it():
    def heat(u):
        def step(v, _):
            change = jnp.roll(v, 1) - 2 * v + jnp.roll(v, -1)
            return v + 1e-3 * change, None

        return jax.lax.scan(step, u, None, length=50)[0]

    u = jnp.asarray(np.sin(np.linspace(0, 6, 64)) + 2)
    plan, closed, arrays = plans.solved(heat, u, fmt="fp32", budget=1e-9)
    assert 0 < plan.labels.sum() < len(plan.labels)
    assert plans.Trial(closed, arrays, None).error(plan) < 3e-9
    loose, _, _ = plans.solved(heat, u, fmt="fp32", budget=1e-5)
    assert plan.labels.sum() < loose.labels.sum()


def test_float64_functions_are_left_alone_unless_float32_is_asked_for():
    matrix, right = system()
    decided = plans.plan_of(lambda a, b: a @ b, matrix, right, policy="auto")
    assert not decided.labels.any()
