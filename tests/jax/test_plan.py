"""Plans of JAX functions: what is executed is what was decided, and what was predicted is what happens."""

from __future__ import annotations

import collections
import importlib.util
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import check_jaxpr

from castwise._terms import wide_of
from castwise.cost import Costs, MeasuredCosts
from castwise.errors import PlanError, PolicyError
from castwise.jax import Plan, autocast, planning, prepare, report
from castwise.jax import plan as plan_of
from castwise.jax._evaluate import count_trips
from castwise.jax._measure import measured_costs, versions
from castwise.jax._plan import structure_of
from castwise.jax._risk import measured_risks
from castwise.jax._try import Trial
from castwise.jax.autocast import _Region, region_call
from castwise.jax.capture import OUT, capture
from castwise.plan import solve
from castwise.policy import Policy
from castwise.risk import Risks

_spec = importlib.util.spec_from_file_location(
    "castwise_jax_functions", pathlib.Path(__file__).with_name("functions.py")
)
assert _spec is not None and _spec.loader is not None
functions = sys.modules.setdefault("castwise_jax_functions", importlib.util.module_from_spec(_spec))
if not hasattr(functions, "PARAMS"):
    _spec.loader.exec_module(functions)
PARAMS, X = functions.PARAMS, functions.X


def traced(f, *args):
    region = _Region(f, "bfloat16")
    arrays, traceable = region.prepared(args, {})
    return region_call(traceable.traced(arrays)[0].jaxpr).params["jaxpr"], arrays


def solved(f, *args, fmt="bf16", low_takes=0.5, budget=None, policy=None, risks=True):
    """A plan by costs that are given: every operation takes 1 in the wide format and `low_takes` in the low one."""
    closed, arrays = traced(f, *args)
    trips = count_trips(closed.jaxpr, closed.consts, arrays)
    captured = capture(closed, fmt, trips)
    ops, tensors = len(captured.graph.ops), len(captured.graph.tensors)
    casts = np.full(tensors, 0.01)
    costs = Costs(fmt, np.ones(ops), np.full(ops, low_takes), casts, casts, np.zeros(tensors, bool), "a machine")
    if risks:
        priced = measured_risks(captured, [arrays], trips)
    else:
        priced = Risks.from_sensitivities(captured.graph, fmt, np.zeros(tensors))
    noise = None if budget is None else budget**2 * priced.reference
    wanted = policy or Policy(format={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[fmt])
    made = solve(captured.graph, costs, priced, wanted, budget=noise, versions=versions())
    return Plan.of(made, structure=structure_of(closed.jaxpr), rounded=frozenset()), closed, arrays


DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def differences(plan, f, *args):
    """Operations that are executed in other formats than the plan's."""
    found = []
    casts = {op.id for op in plan.problem.graph.ops if op.name == "convert"}
    for op in report(f, *args, plan=plan).ops:
        if op.path not in plan.formats or op.path in casts:
            continue
        written = plan.formats.get(op.path + OUT, plan.formats[op.path])
        read, gives = set(op.inputs), set(op.outputs)
        if read - {plan.formats[op.path]} or gives - {written}:
            found.append((op.path, op.primitive, plan.formats[op.path], written, read, gives))
    return found


@pytest.mark.parametrize("f", functions.FUNCTIONS, ids=lambda f: f.__name__)
def test_the_formats_that_are_executed_are_the_plan_s(f):
    plan, closed, _ = solved(f, PARAMS, X, risks=False)
    rng = np.random.default_rng(3)
    pinned = np.zeros(len(plan.labels), bool)
    pinned[list(plan.problem.pins)] = True
    for number in range(3):
        labels = np.where(pinned, plan.labels, rng.random(len(pinned)) < 0.5)
        shuffled = plan.relabelled(labels, "at random") if number else plan
        assert not differences(shuffled, f, PARAMS, X)
        rewritten = shuffled.rewriter().whole(closed.jaxpr)
        check_jaxpr(rewritten)
        assert [v.aval.dtype for v in rewritten.outvars] == [v.aval.dtype for v in closed.jaxpr.outvars]


PRICED = [
    functions.mlp,
    functions.attention,
    functions.scan_over_layers,
    functions.while_loop,
    functions.fori,
    functions.switch,
    functions.custom_vjp,
    functions.grad_inside,
    functions.recurrent,
    functions.einsum_experts,
]


@pytest.mark.parametrize("f", PRICED, ids=lambda f: f.__name__)
def test_the_error_of_a_plan_is_the_one_that_was_predicted(f):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    plan, closed, arrays = solved(f, PARAMS, x, budget=1.0)
    assert plan.labels.any()
    measured = Trial(closed, arrays, None).error(plan)
    assert plan.relative_error / 3 <= measured <= plan.relative_error * 3


def test_a_budget_is_kept_by_leaving_what_matters_most_wide():
    loose, closed, arrays = solved(functions.mlp, PARAMS, X, budget=1e-1)
    tight, _, _ = solved(functions.mlp, PARAMS, X, budget=1.5e-3)
    assert 0 < tight.labels.sum() < loose.labels.sum()
    assert Trial(closed, arrays, None).error(tight) < 3e-3


def test_products_get_a_wide_result_where_only_wide_operations_read_it():
    def f(w, x):
        return jnp.exp(x @ w)

    plan, _, _ = solved(f, PARAMS["w1"], X, policy=Policy(format="bfloat16", ops={"exp": "high"}), budget=1.0)
    assert plan.formats["0"] == "bf16"
    [op] = [op for op in report(f, PARAMS["w1"], X, plan=plan).ops if op.primitive == "dot_general"]
    assert set(op.inputs) == {"bf16"} and op.outputs == (plan.formats["0" + OUT],)


def test_a_plan_goes_with_other_batch_sizes_and_not_with_other_functions():
    plan, _, _ = solved(functions.mlp, PARAMS, X)
    planned = autocast(functions.mlp, plan=plan)
    double = jnp.concatenate([X, X])
    assert jnp.allclose(planned(PARAMS, double), functions.mlp(PARAMS, double), atol=0.1)
    with pytest.raises(PlanError, match="made for another function"):
        autocast(functions.attention, plan=plan)(PARAMS, X)
    with pytest.raises(PolicyError, match="Both policy and plan"):
        autocast(functions.mlp, "bfloat16", plan=plan)


@pytest.mark.parametrize("f", [functions.mlp, functions.scan_over_layers, functions.custom_vjp, functions.remat])
def test_planned_functions_can_be_transformed_like_others(f):
    plan, _, _ = solved(f, PARAMS, X, risks=False)
    planned = autocast(f, plan=plan)

    def loss(g):
        return lambda p: jnp.sin(g(p, X)).sum()

    ours, theirs = jax.jit(jax.grad(loss(planned)))(PARAMS), jax.grad(loss(f))(PARAMS)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype and jnp.allclose(a, b, atol=6e-2 * max(1.0, float(jnp.abs(b).max())))
    census = functions.products(jax.make_jaxpr(jax.grad(loss(planned)))(PARAMS).jaxpr)
    assert set(census) == {"bfloat16"}
    both = jax.vmap(planned, (None, 0))(PARAMS, jnp.stack([X, X]))
    assert jnp.allclose(both[0], planned(PARAMS, X), atol=2e-2)


def test_a_plan_survives_a_file(tmp_path):
    plan, _, _ = solved(functions.mlp, PARAMS, X)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.to_dict() == plan.to_dict()
    assert np.array_equal(autocast(functions.mlp, plan=again)(PARAMS, X), autocast(functions.mlp, plan=plan)(PARAMS, X))
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(PlanError, match=r"no\.json"):
        Plan.load(tmp_path / "no.json")


def test_rules_of_the_policy_hold_in_plans_and_are_the_reason_given():
    def f(p, x):
        with jax.named_scope("encoder"):
            h = jnp.tanh(x @ p["w1"])
        with jax.named_scope("head"):
            return h @ p["w2"]

    policy = Policy.coerce({"format": "bfloat16", "layers": [{"match": "head", "format": "float32"}]})
    plan, _, _ = solved(f, PARAMS, X, policy=policy, budget=1.0)
    by_layer = {op.layer: plan.formats[op.id] for op in plan.problem.graph.ops if op.name == "matmul"}
    assert by_layer == {"encoder": "bf16", "head": "fp32"}
    assert "head" in str(plan.explain("head"))


def test_a_while_loop_is_priced_for_as_many_iterations_as_it_has():
    def f(x):
        return jax.lax.while_loop(lambda s: s[0] < 7, lambda s: (s[0] + 1, jnp.cos(s[1]) * 1.1), (0, x))[1]

    closed, arrays = traced(f, X)
    trips = count_trips(closed.jaxpr, closed.consts, arrays)
    assert list(trips.values()) == [7]
    captured = capture(closed, "bf16", trips)
    assert {captured.times[op.id] for op in captured.graph.ops if op.name == "cos"} == {7}


def test_planning_on_this_machine_is_never_slower_than_what_was_given():
    def step(p, x):
        return jax.value_and_grad(lambda q: jnp.square(functions.mlp(q, x)).mean())(p)

    plan = plan_of(step, PARAMS, X, policy="bfloat16", seconds=5.0)
    assert not plan.labels.any() or plan.seconds["planned"] <= plan.seconds["as written"]
    value, grads = jax.jit(autocast(step, plan=plan))(PARAMS, X)
    assert jnp.isfinite(value) and jax.tree.structure(grads) == jax.tree.structure(PARAMS)


def test_a_plan_for_another_device_is_predicted_from_its_data_sheet():
    plan = plan_of(functions.mlp, PARAMS, jnp.ones((4096, 8)), policy="auto", device="a100")
    assert plan.fmt == "bf16" and plan.problem.costs.device and not plan.seconds
    assert wide_of(plan.fmt) == "fp32" and plan.error is not None


def test_auto_plans_nothing_where_the_device_computes_in_no_low_format():
    plan = plan_of(functions.mlp, PARAMS, X, policy="float32")
    assert not plan.labels.any()
    assert np.array_equal(autocast(functions.mlp, plan=plan)(PARAMS, X), jax.jit(functions.mlp)(PARAMS, X))


def test_planning_inside_jit_says_where_to_plan():
    with pytest.raises(PlanError, match="outside of jit"):
        jax.jit(lambda x: plan_of(functions.mlp, PARAMS, x, policy="bfloat16"))(X)


def test_operations_that_were_not_timed_cost_what_others_of_their_kind_do(tmp_path, caplog):
    def products(*sizes):
        return lambda x: sum(jnp.sin(x[:, :n] @ x[:n, :n]).sum() for n in sizes)

    x = jnp.ones((64, 64))
    table = MeasuredCosts(tmp_path / "times.json")
    low = "bf16"
    known = capture(traced(products(64), x)[0], low)
    measured_costs(known, "a machine", seconds=60.0, table=table)
    half = capture(traced(products(64, 32), x)[0], low)
    found = measured_costs(half, "a machine", seconds=0.0, table=table).costs
    times = {
        op.id: (op.flops, found.high[at], found.low[at], found.measured[at]) for at, op in enumerate(half.graph.ops)
    }
    large, small = sorted(
        (times[i] for i, eqn in half.eqns.items() if eqn.primitive.name == "dot_general"), reverse=True
    )
    assert large[3] and not small[3]
    assert small[1] / large[1] == pytest.approx(small[0] / large[0], rel=1e-3)
    assert "were timed" in caplog.text


def test_a_plan_that_lowers_nothing_compiles_to_the_same_program():
    plan, _, _ = solved(functions.scan_over_layers, PARAMS, X, low_takes=2.0)
    assert not plan.labels.any()

    def instructions(f):
        text = jax.jit(f).lower(PARAMS, X).compile().as_text()
        return collections.Counter(re.findall(r"= (\S+) ([a-z\-]+)\(", text))

    assert instructions(autocast(functions.scan_over_layers, plan=plan)) == instructions(functions.scan_over_layers)


def test_a_plan_is_tried_beside_plainer_ones_and_the_fastest_is_kept(monkeypatch):
    ready = prepare(functions.mlp, PARAMS, X, policy="bfloat16", seconds=5.0)
    tried = []

    def seconds(self, plans):
        tried.extend(plans)
        shares = [1.0, *(0.5 if one is tried[-1] else 0.9 for one in plans)]
        return shares, shares

    monkeypatch.setattr(Trial, "seconds", seconds)
    found = planning._tried(ready, ready.solve(), timed=True, seconds=60.0)
    assert len(tried) > 1 and all(one.error is not None for one in tried)
    assert np.array_equal(found.labels, tried[-1].labels) and found.seconds == {"as written": 1.0, "planned": 0.5}


def test_a_plan_that_the_backend_cannot_run_is_not_taken(monkeypatch):
    ready = prepare(functions.mlp, PARAMS, X, policy="bfloat16", seconds=5.0)
    whole = Trial._compiled

    def compiled(self, plan, *, with_loss):
        def refused(arrays):
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such kernel")

        return whole(self, plan, with_loss=with_loss) if plan is None else refused

    monkeypatch.setattr(Trial, "_compiled", compiled)
    assert not planning._tried(ready, ready.solve(), timed=True, seconds=60.0).labels.any()
