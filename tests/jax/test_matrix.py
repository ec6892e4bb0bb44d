"""Every kind of function, under every transformation that plain JAX has for it."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import check_jaxpr

from castwise.jax import autocast

_spec = importlib.util.spec_from_file_location(
    "castwise_jax_functions", pathlib.Path(__file__).with_name("functions.py")
)
assert _spec is not None and _spec.loader is not None
functions = sys.modules.setdefault("castwise_jax_functions", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(functions)
PARAMS, X = functions.PARAMS, functions.X
XS = jnp.stack([X, X * 0.5])

# Relative to the largest element of the fp32 answer. bfloat16 keeps 8 binary digits, and the functions are a few
# products deep.
TOLERANCE = 4e-2


def grad(f):
    return jax.grad(lambda p, x: jnp.sin(f(p, x)).sum())


TRANSFORMS = {
    "plain": (lambda f: f, X),
    "jit": (jax.jit, X),
    "grad": (grad, X),
    "vmap": (lambda f: jax.vmap(f, (None, 0)), XS),
}


def transforms_of(f):
    """The transformations that plain JAX has for f: it has no reverse mode for while loops."""
    return [name for name in TRANSFORMS if name != "grad" or f not in functions.NO_REVERSE_MODE]


@functools.cache
def answers(f, low):
    """What f gives under each transformation. Compiled as one program, since compiling is what takes the time."""
    g = autocast(f, "bfloat16") if low else f
    names = [name for name in transforms_of(f) if name != "plain"]
    together = jax.jit(lambda p, x, xs: [TRANSFORMS[n][0](g)(p, xs if n == "vmap" else x) for n in names])
    found = dict(zip(names, together(PARAMS, X, XS), strict=True))
    return found | {"plain": g(PARAMS, X) if low else found["jit"]}


CASES = [pytest.param(f, name, id=f"{f.__name__}-{name}") for f in functions.FUNCTIONS for name in transforms_of(f)]


@pytest.mark.parametrize(("f", "transform"), CASES)
def test_products_are_low_everywhere_and_the_answer_is_close(f, transform):
    transformed, x = TRANSFORMS[transform]
    jaxpr = jax.make_jaxpr(transformed(autocast(f, "bfloat16")))(PARAMS, x).jaxpr
    check_jaxpr(jaxpr)
    census = functions.products(jaxpr)
    assert set(census) == {"bfloat16"}, census

    mine, theirs = answers(f, True)[transform], answers(f, False)[transform]
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
        assert float(jnp.abs(a - b).max()) <= TOLERANCE * max(1e-3, float(jnp.abs(b).max()))
    assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True))
