"""Regions within larger programs: what tracing them costs, and regions inside regions."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from castwise.jax import autocast

WIDTH, LAYERS = 16, 24
PARAMS = [
    {name: jax.random.normal(jax.random.key(at), (WIDTH, WIDTH)) * 0.2 for at, name in enumerate("qkvoud")}
    for _ in range(LAYERS)
]
X = jnp.ones((8, WIDTH))


def block(p, x):
    h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x + jax.nn.softmax((h @ p["q"]) @ (h @ p["k"]).T / 4.0) @ (h @ p["v"]) @ p["o"]
    return x + jax.nn.gelu(x @ p["u"]) @ p["d"]


def deep(params, x):
    for p in params:
        x = block(p, x)
    return (x**2).mean()


def seconds_of_tracing(f):
    start = time.process_time()
    jax.make_jaxpr(f)(PARAMS, X)
    return time.process_time() - start


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["forward", "grad"])
def test_tracing_a_deep_region_costs_at_most_twice_what_the_function_costs(transform):
    plain, region = [], []
    for _ in range(12):  # in turn, as the machine may be busy: the least of each is what it costs
        plain.append(seconds_of_tracing(transform(lambda p, x: deep(p, x))))
        region.append(seconds_of_tracing(transform(autocast(lambda p, x: deep(p, x), "bfloat16"))))
        if len(plain) > 4 and min(region) <= 2 * min(plain):
            break
    assert min(region) <= 2 * min(plain)


def dtypes_of_products(f, *args):
    found = set()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.add(str(eqn.invars[0].aval.dtype))
            for held in eqn.params.values():
                inner = getattr(held, "jaxpr", held)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(f)(*args).jaxpr)
    return found


W = PARAMS[0]["q"]


@pytest.mark.parametrize(
    "inner",
    [
        lambda g: g,
        jax.jit,
        lambda g: lambda w, x: jax.grad(lambda a: g(a, x).sum())(w),
        lambda g: lambda w, x: jax.vmap(g, (None, 0))(w, x[None]),
        lambda g: jax.checkpoint(g),
        lambda g: lambda w, x: jax.grad(jax.jit(lambda a: g(a, x).sum()))(w),
    ],
    ids=["plain", "jit", "grad", "vmap", "checkpoint", "grad of jit"],
)
def test_a_region_inside_a_region_keeps_its_own_policy(inner):
    region = autocast(lambda w, x: jnp.tanh(x @ w) @ w, "float16")
    around = autocast(lambda w, x: inner(region)(w, x), "bfloat16")
    assert dtypes_of_products(around, W, X) == {"float16"}
    wide = autocast(lambda w, x: inner(autocast(lambda a, b: b @ a, "float32"))(w, x), "bfloat16")
    assert dtypes_of_products(wide, W, X) == {"float32"}


def test_a_region_that_was_traced_before_keeps_its_policy_inside_a_region_too():
    compiled = jax.jit(jax.grad(lambda w, x: autocast(lambda a, b: b @ a, "float32")(w, x).sum()))
    compiled(W, X)
    assert dtypes_of_products(autocast(compiled, "bfloat16"), W, X) == {"float32"}


def test_scopes_of_layers_survive_in_a_differentiated_region():
    def named(w, x):
        with jax.named_scope("encoder"):
            h = x @ w
        with jax.named_scope("decoder"):
            return (h @ w).sum()

    jaxpr = jax.make_jaxpr(jax.grad(autocast(named, "bfloat16")))(W, X).jaxpr
    stacks = [str(eqn.source_info.name_stack) for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert any("encoder" in stack for stack in stacks) and any("decoder" in stack for stack in stacks)
    assert not any("encoder" in stack and "decoder" in stack for stack in stacks)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        lambda f: jax.grad(lambda w, x: f(w, x).sum()),
        lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, x])),
    ],
    ids=["plain", "grad", "vmap"],
)
def test_a_region_outside_of_jit_compiles_once(transform):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    run = transform(autocast(lambda w, x: jnp.tanh(jax.nn.softmax(x @ w) @ w), "bfloat16"))
    for _ in range(2):  # the second time, what is around the region is compiled for its results
        run(W, X)
    before = len(compiled)
    assert before
    run(W, X)
    assert len(compiled) == before
