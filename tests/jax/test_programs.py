"""Programs with parts that a region must know: rules of their own, numbers left alone, tools that hunt NaNs."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from castwise.jax import autocast, report

W = jax.random.normal(jax.random.key(0), (8, 8)) * 0.3
X = jax.random.normal(jax.random.key(1), (4, 8))
XS = jnp.stack([X, X * 0.5])


def assert_close(ours, exact, tolerance=4e-2):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert float(jnp.abs(a - b).max()) <= tolerance * float(jnp.abs(b).max())


# ---- numbers that are left alone ----


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "f",
    [
        lambda w, x: (x + 1j) @ w,
        lambda w, x: lax.dot(x, w, preferred_element_type=jnp.complex64),
        lambda w, x: jax.grad(lambda v: jnp.abs((x + 1j) @ v).sum())(w),
    ],
    ids=["complex by real", "complex result", "gradient"],
)
def test_a_product_with_complex_numbers_is_computed_as_written(f, policy):
    ours, exact = jax.jit(autocast(f, policy))(W, X), jax.jit(f)(W, X)
    assert ours.dtype == exact.dtype and np.array_equal(ours, exact)
    [op, *_] = report(f, W, X, policy=policy).wide_products
    assert "complex64, which is left alone" in op.reason


def test_a_product_with_float64_is_computed_as_written():
    with jax.enable_x64(True):
        w, x = np.asarray(W, np.float64), jnp.asarray(X, jnp.float32)
        for f in (
            lambda w, x: lax.dot(x, w, preferred_element_type=jnp.float64),
            lambda w, x: lax.dot(x, x.T, preferred_element_type=jnp.float64),
        ):
            assert np.array_equal(autocast(f, "bfloat16")(w, x), jax.jit(f)(w, x))


# ---- functions with rules of their own ----


@jax.custom_batching.custom_vmap
def batched_by_rule(x, w):
    return jnp.tanh(x @ w)


@batched_by_rule.def_vmap
def _rule(axis_size, in_batched, x, w):
    first, second = ("b" if batched else "" for batched in in_batched)
    return jnp.tanh(jnp.einsum(f"{first}ij,{second}jk->bik", x, w)), True


def composite(x, w):
    return lax.composite(lambda a, b: jnp.tanh(a @ b), "example.layer")(x, w)


def with_its_own_transpose(x, w):
    return jax.custom_derivatives.linear_call(lambda w, a: a @ w, lambda w, t: t @ w.T, w, x)


@pytest.mark.parametrize("inner", [batched_by_rule, composite, with_its_own_transpose])
def test_products_inside_are_low(inner, formats_of_products):
    def f(w, x):
        return inner(x @ w, w) @ w

    assert formats_of_products(autocast(f, "bfloat16"), W, X) == {"bfloat16"}
    assert_close(jax.jit(autocast(f, "bfloat16"))(W, X), f(W, X))


def test_a_batching_rule_is_low_inside_and_outside_of_vmap(formats_of_products):
    def f(w, x):
        return batched_by_rule(x @ w, w) @ w

    for mapped in (jax.vmap(autocast(f, "bfloat16"), (None, 0)), autocast(jax.vmap(f, (None, 0)), "bfloat16")):
        assert formats_of_products(mapped, W, XS) == {"bfloat16"}
        assert_close(mapped(W, XS), jax.vmap(f, (None, 0))(W, XS))


def test_a_transpose_of_its_own_is_low_in_the_backward_pass(formats_of_products):
    def f(x):
        return with_its_own_transpose(x, W).sum()

    ours = jax.grad(autocast(f, "bfloat16"))
    assert formats_of_products(ours, X) == {"bfloat16"}
    assert_close(ours(X), jax.grad(f)(X))


def test_a_backward_rule_may_ask_python_about_what_is_known_before_it_runs():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x @ W)

    def backward(saved, g):
        x, twice, factor = saved
        g = (g * jnp.cos(x @ W)) @ W.T
        return (2 * g if twice and factor > 1.0 else g,)

    f.defvjp(lambda x: (f(x), (x, True, 1.5)), backward)
    for transform in (lambda g: g, jax.jit):
        ours = jax.grad(transform(lambda x: autocast(f, "bfloat16")(x).sum()))(X)
        assert_close(ours, jax.grad(lambda x: f(x).sum())(X))


def test_a_kernel_keeps_its_formats_and_that_is_said_once(caplog):
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def f(w, x):
        return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 8), jnp.float32), interpret=True)(x, w)

    with caplog.at_level(logging.WARNING, "castwise.jax"):
        first = autocast(f, "bfloat16")(W, X)
        autocast(lambda w, x: 2 * f(w, x), "bfloat16")(W, X)
    assert np.array_equal(first, jax.jit(f)(W, X))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["pallas_call"]


# ---- errors ----


def test_errors_of_tracing_name_the_function_that_the_user_wrote():
    def forward_pass(x):
        return "text"

    with pytest.raises(TypeError, match=r"forward_pass at .*test_programs\.py"):
        autocast(forward_pass, "bfloat16")(X)


@pytest.mark.parametrize(
    ("option", "f", "word"),
    [("jax_debug_nans", lambda x: jnp.log(x @ W), "log"), ("jax_debug_infs", lambda x: jnp.exp(1e4 * (x @ W)), "exp")],
)
def test_jax_stops_at_the_operation_that_makes_a_nan_or_an_infinity(option, f, word):
    jax.config.update(option, True)
    try:
        with pytest.raises(FloatingPointError, match=word):
            autocast(f, "bfloat16")(X)
    finally:
        jax.config.update(option, False)
