"""What cannot be planned, or is no plan for a function, is said in words that name it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from castwise.errors import PlanError, PolicyError
from castwise.jax import LossScale, Plan, autocast, plan, value_and_grad

W, X = jnp.eye(8) + 0.1, jnp.ones((4, 8))


def layer(w, x):
    return jnp.tanh(x @ w)


@pytest.fixture(scope="module")
def planned():
    return plan(layer, W, X, policy="bfloat16", seconds=0.5)


@pytest.mark.parametrize(
    ("f", "args", "words"),
    [
        (lambda w, x: jnp.sin(x @ w), (W, X), r"was tanh \(test_plan_refusals\.py:\d+\) and is sin"),
        (layer, (W, X[0]), "array 1 was fp32 of 2 axes and is fp32 of 1"),
        (layer, (W.astype(jnp.bfloat16), X), "array 0 was fp32 of 2 axes and is bf16 of 2"),
        (lambda w: w, (W,), "'layer' was planned for 2 arrays and gets 1"),
    ],
    ids=["operation", "axes", "dtype", "arguments"],
)
def test_a_plan_of_another_function_is_refused_and_the_difference_named(planned, f, args, words):
    with pytest.raises(PlanError, match=words):
        autocast(f, plan=planned)(*args)


def test_a_plan_serves_other_sizes(planned):
    assert autocast(layer, plan=planned)(W, jnp.ones((9, 8))).shape == (9, 8)


@pytest.mark.parametrize("given", ["plan.json", 3, {}])
def test_what_is_no_plan_is_refused_when_it_is_given(given):
    with pytest.raises(PlanError, match=r"castwise\.jax\.Plan\.load"):
        autocast(layer, plan=given)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"bf16"', '"bf17"'),
        lambda text: text.replace('"jax"', '"torch"'),
    ],
    ids=["empty", "cut", "no plan", "unknown format", "of another framework"],
)
def test_a_spoilt_file_is_named(planned, tmp_path, spoil):
    path = tmp_path / "plan.json"
    planned.save(path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("batch", "words"), [((X, W), r"batches\[0\]: has float32\[4, 8\]"), ((W,), r"batches\[0\]: has nothing")]
)
def test_batches_unlike_the_arguments_are_refused(batch, words):
    with pytest.raises(PlanError, match=words):
        plan(layer, W, X, policy="bfloat16", batches=[batch], seconds=0.1)


def test_shapes_without_values_cannot_be_planned():
    with pytest.raises(PlanError, match="real values"):
        plan(layer, W, jax.ShapeDtypeStruct((4, 8), jnp.float32), policy="bfloat16")


@pytest.mark.parametrize("f", [lambda w, x: 0 * (x @ w), lambda w, x: x[:0] @ w], ids=["zeros", "no elements"])
def test_a_function_whose_results_are_nothing_is_planned(f):
    decided = plan(f, W, X, policy="bfloat16", seconds=0.1)
    assert decided.error == 0.0
    assert not autocast(f, plan=decided)(W, X).any()


def test_a_product_with_complex_numbers_is_pinned():
    decided = plan(lambda w, x: jnp.abs((x + 1j) @ w), W, X, policy="bfloat16", device="h100", budget=0.1)
    [product] = [op.id for op in decided.problem.graph.ops if op.name == "matmul"]
    assert "complex64, which is left alone" in str(decided.explain(product))


def test_side_effects_of_planning_are_announced(caplog):
    def f(w, x):
        jax.debug.callback(lambda _: None, x)
        return x @ w

    with caplog.at_level("WARNING", "castwise.jax.plan"):
        plan(f, W, X, policy="bfloat16", device="h100")
    assert "side effects" in caplog.text


def test_gradients_without_a_scale_are_refused():
    with pytest.raises(PolicyError, match="not a LossScale"):
        value_and_grad(lambda w: w.sum())(W)
    assert value_and_grad(lambda w: w.sum())(LossScale(), W)[2]
