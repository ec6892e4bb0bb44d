"""Products that a 16-bit preset leaves wide, why, and that the report says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from castwise.jax import autocast, report

W, X = jnp.eye(8) + 0.1, jnp.ones((4, 8))


def test_the_angles_of_rotary_embeddings_keep_their_digits():
    frequencies = 10000.0 ** (-np.arange(4, dtype=np.float32) / 4)

    def angles(x):
        positions = jnp.arange(600, dtype=jnp.float32)
        return jnp.sin(jnp.einsum("t,f->tf", positions, frequencies)) * x

    ours, exact = autocast(angles, "bfloat16")(jnp.ones(4)), angles(jnp.ones(4))
    assert float(jnp.abs(ours - exact).max()) < 1e-5
    [op] = report(angles, jnp.ones(4), policy="bfloat16").wide_products
    assert "single term" in op.reason


@pytest.mark.parametrize("precision", [jax.lax.Precision.HIGHEST, "highest"])
def test_a_product_that_was_written_with_full_precision_keeps_it(precision):
    def f(w, x):
        return jnp.matmul(x, w, precision=precision) @ w

    told = report(f, W, X, policy="bfloat16")
    assert [op.inputs for op in told.ops if op.primitive == "dot_general"] == [("fp32", "fp32"), ("bf16", "bf16")]
    assert "precision=HIGHEST" in told.wide_products[0].reason


def test_the_derivative_of_a_linear_solver_is_low_and_its_solution_as_exact_as_before():
    def f(matrix, right):
        return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, right)[0]

    right = jnp.linspace(1.0, 2.0, 8)
    assert np.array_equal(jax.jit(autocast(f, "bfloat16"))(W, right), jax.jit(f)(W, right))
    ours, exact = (jax.grad(lambda m, g=g: jnp.sin(g(m, right)).sum())(W) for g in (autocast(f, "bfloat16"), f))
    off = float(jnp.abs(ours - exact).max() / jnp.abs(exact).max())
    assert 0 < off < 1e-2
