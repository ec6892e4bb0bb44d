"""Functions of many kinds, each ``f(params, x) -> array``, and a census of the products in a jaxpr."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Params = dict[str, jax.Array]
Function = Callable[[Params, jax.Array], jax.Array]

_KEYS = jax.random.split(jax.random.key(0), 8)
PARAMS: Params = {
    "w1": jax.random.normal(_KEYS[0], (8, 8)) * 0.3,
    "w2": jax.random.normal(_KEYS[1], (8, 8)) * 0.3,
    "stack": jax.random.normal(_KEYS[2], (3, 8, 8)) * 0.3,
    "bias": jax.random.normal(_KEYS[3], (8,)),
    "table": jax.random.normal(_KEYS[4], (5, 8)),
    "kernel": jax.random.normal(_KEYS[5], (3, 2, 4)) * 0.3,
}
X = jax.random.normal(_KEYS[6], (4, 8))


def mlp(p: Params, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ p["w1"] + p["bias"]) @ p["w2"]


def gelu_log_softmax(p: Params, x: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(jax.nn.gelu(x @ p["w1"]) @ p["w2"])


def nested_jit(p: Params, x: jax.Array) -> jax.Array:
    layer = jax.jit(lambda w, h: jnp.tanh(h @ w))
    return layer(p["w2"], layer(p["w1"], x))


def conv_norm(p: Params, x: jax.Array) -> jax.Array:
    images = x.reshape(1, 16, 2)
    h = lax.conv_general_dilated(images, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    h = (h - h.mean((0, 1))) * lax.rsqrt(h.var((0, 1)) + 1e-5)
    return jnp.maximum(h, 0).reshape(8, 8) @ p["w1"]


def attention(p: Params, x: jax.Array) -> jax.Array:
    q, k, v = x @ p["w1"], x @ p["w2"], x @ p["stack"][0]
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), q @ k.T / np.sqrt(8.0), -1e9)
    return jax.nn.softmax(scores) @ v


def sdpa(p: Params, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("td,de->te", x, w).reshape(1, 4, 2, 4) for w in p["stack"])
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(4, 8) @ p["w1"]


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    h = x @ p["w1"]
    h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
    return (h * p["bias"]) @ p["w2"]


def scan(p: Params, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (jnp.tanh(c @ p["w1"]), None), x, None, length=3)[0]


def scan_over_layers(p: Params, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = h + jax.nn.silu(h @ w)
        return h, h.mean()

    h, means = lax.scan(layer, x, p["stack"])
    return h + means.sum()


def scan_with_constant(p: Params, x: jax.Array) -> jax.Array:
    constant = np.linspace(0.5, 1.5, 64, dtype=np.float32).reshape(8, 8)
    return lax.scan(lambda c, _: ((c @ p["w1"]) @ constant * 0.2, None), x, None, length=2)[0]


def cond(p: Params, x: jax.Array) -> jax.Array:
    return lax.cond(x.sum() > 0, lambda a: a @ p["w1"], lambda a: 2 * a, x) @ p["w2"]


def switch(p: Params, x: jax.Array) -> jax.Array:
    branches = [lambda a: a @ p["w1"], lambda a: jnp.exp(a @ p["w2"]), lambda a: a]
    return lax.switch(jnp.argmax(x[0, :3]), branches, x)


def while_loop(p: Params, x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ p["w1"])), (0, x))[1]


def while_with_products_in_its_test(p: Params, x: jax.Array) -> jax.Array:
    def go_on(state: tuple[Any, jax.Array]) -> jax.Array:
        return (state[0] < 3) & (jnp.abs(state[1] @ p["w2"]).max() > 0.0)

    return lax.while_loop(go_on, lambda s: (s[0] + 1, jnp.tanh(s[1] @ p["w1"])), (0, x))[1]


def fori(p: Params, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["stack"][i]), x)


def remat(p: Params, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda a: jnp.tanh(a @ p["w1"]) @ p["w2"])(x)


def remat_with_policy(p: Params, x: jax.Array) -> jax.Array:
    block = jax.checkpoint(
        lambda a: jnp.sin(a @ p["w1"]) @ p["w2"], policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    return block(block(x))


@jax.custom_vjp
def _product(a: jax.Array, w: jax.Array) -> jax.Array:
    return a @ w


_product.defvjp(lambda a, w: (a @ w, (a, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def custom_vjp(p: Params, x: jax.Array) -> jax.Array:
    return _product(x, p["w1"]) @ p["w2"]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _power(a: jax.Array, w: jax.Array, n: int) -> jax.Array:
    return (a @ w) ** n


def _power_forward(a: jax.Array, w: jax.Array, n: int) -> tuple[jax.Array, Any]:
    y = a @ w
    return y**n, (a, w, y)


def _power_backward(n: int, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, w, y = saved
    g = g * n * y ** (n - 1)
    return g @ w.T, a.T @ g


_power.defvjp(_power_forward, _power_backward)


def custom_vjp_with_static_argument(p: Params, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, w: (jnp.tanh(_power(c, w, 2)), None), x, p["stack"])[0]


@jax.custom_jvp
def _activation(a: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(a @ w)


@_activation.defjvp
def _activation_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (a, w), (da, dw) = primals, tangents
    y = a @ w
    return jnp.sin(y), jnp.cos(y) * (da @ w + a @ dw)


def custom_jvp(p: Params, x: jax.Array) -> jax.Array:
    return _activation(x, p["w1"]) @ p["w2"]


def vmap_inside(p: Params, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda row: jnp.tanh(row @ p["w1"]) @ p["w2"])(x)


def grad_inside(p: Params, x: jax.Array) -> jax.Array:
    return jax.grad(lambda a: jnp.sum(jnp.tanh(a @ p["w1"]) @ p["w2"]))(x)


def jvp_inside(p: Params, x: jax.Array) -> jax.Array:
    return jax.jvp(lambda a: jnp.tanh(a @ p["w1"]) @ p["w2"], (x,), (x,))[1]


def shard_map(p: Params, x: jax.Array) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    inner = jax.shard_map(
        lambda w, a: lax.psum(jnp.tanh(a @ w).sum(), "data") + a @ w,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
    )
    return inner(p["w1"], x) @ p["w2"]


def sharded_contraction(p: Params, x: jax.Array) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    inner = jax.shard_map(
        lambda a, w: lax.psum(a @ w, "model"), mesh=mesh, in_specs=(P(None, "model"), P("model", None)), out_specs=P()
    )
    return inner(x, p["w1"])


def solve(p: Params, x: jax.Array) -> jax.Array:
    return jnp.linalg.solve(p["w1"] + 4 * jnp.eye(8), x.T).T @ p["w2"]


def iterative_solve(p: Params, x: jax.Array) -> jax.Array:
    matrix = p["w1"] @ p["w1"].T + 4 * jnp.eye(8)
    return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x[0])[0] @ p["w2"]


def dropout(p: Params, x: jax.Array) -> jax.Array:
    h = x @ p["w1"]
    keep = jax.random.bernoulli(jax.random.key(1), 0.5, h.shape)
    return jnp.where(keep, h / 0.5, 0.0) @ p["w2"]


def embedding(p: Params, x: jax.Array) -> jax.Array:
    return p["table"][jnp.argmax(x[:, :5], -1)] @ p["w1"]


def numpy_constant(p: Params, x: jax.Array) -> jax.Array:
    return (x * np.sqrt(2.0)) @ p["w1"] @ p["w2"]


def cache_update(p: Params, x: jax.Array) -> jax.Array:
    cache = jnp.zeros((6, 8)).at[1:5].set(x @ p["w1"])
    return lax.dynamic_update_slice(cache, x[:1] @ p["w2"], (5, 0)) @ p["w2"]


def scatter_add(p: Params, x: jax.Array) -> jax.Array:
    return jnp.zeros((3, 8)).at[jnp.array([0, 2, 2, 1])].add(x @ p["w1"]) @ p["w2"]


def einsum_experts(p: Params, x: jax.Array) -> jax.Array:
    gates = jax.nn.softmax(x @ p["w1"][:, :3])
    top, which = lax.top_k(gates, 2)
    weights = jnp.einsum("tk,tke->te", top, jax.nn.one_hot(which, 3))
    return jnp.einsum("te,tef->tf", weights, jnp.einsum("td,edf->tef", x, p["stack"]))


def recurrent(p: Params, x: jax.Array) -> jax.Array:
    def cell(state: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[Any, jax.Array]:
        h, c = state
        gates = row @ p["w1"] + h @ p["w2"]
        c = jax.nn.sigmoid(gates) * c + jnp.tanh(gates)
        h = jax.nn.sigmoid(gates) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(cell, (jnp.zeros(8), jnp.zeros(8)), x)[1]


FUNCTIONS: list[Function] = [
    mlp,
    gelu_log_softmax,
    nested_jit,
    conv_norm,
    attention,
    sdpa,
    layer_norm,
    scan,
    scan_over_layers,
    scan_with_constant,
    cond,
    switch,
    while_loop,
    while_with_products_in_its_test,
    fori,
    remat,
    remat_with_policy,
    custom_vjp,
    custom_vjp_with_static_argument,
    custom_jvp,
    vmap_inside,
    grad_inside,
    jvp_inside,
    shard_map,
    sharded_contraction,
    solve,
    iterative_solve,
    dropout,
    embedding,
    numpy_constant,
    cache_update,
    scatter_add,
    einsum_experts,
    recurrent,
]
NO_REVERSE_MODE = frozenset({while_loop, while_with_products_in_its_test})


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds, at any depth of tuples in its parameters."""
    for held in eqn.params.values():
        for one in held if isinstance(held, tuple | list) else (held,):
            if hasattr(one, "jaxpr") and hasattr(one.jaxpr, "eqns"):
                yield one.jaxpr
            elif hasattr(one, "eqns"):
                yield one


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner jaxprs included. Linear solvers are passed over: they stay wide."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "custom_linear_solve":
            for inner in inner_jaxprs(eqn):
                yield from equations(inner)


def _wanted_low(eqn: Any) -> bool:
    """Whether the preset wants a product low: not an outer product, nor one that was written with full precision."""
    precision = eqn.params.get("precision")
    if precision is not None and lax.Precision.HIGHEST in precision:
        return False
    if eqn.primitive.name != "dot_general":
        return True
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return bool(np.prod([eqn.invars[0].aval.shape[axis] for axis in contracted]) > 1)


def products(jaxpr: Any) -> collections.Counter[str]:
    """How many products there are by the dtypes of their inputs ("bfloat16" or "float32,bfloat16")."""
    found: collections.Counter[str] = collections.Counter()
    for eqn in equations(jaxpr):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general") and _wanted_low(eqn):
            found[",".join(sorted({str(v.aval.dtype) for v in eqn.invars[:2]}))] += 1
    return found
