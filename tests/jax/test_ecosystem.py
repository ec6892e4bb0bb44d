"""Flax, Equinox, Haiku, optax and orbax: layer rules reach their modules, and scales go where states go."""

from __future__ import annotations

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from castwise.errors import PolicyError
from castwise.jax import (
    LossScale,
    autocast,
    named_layers,
    report,
    skip_bad_steps,
    value_and_grad,
    with_loss_scale,
)
from castwise.policy import Policy

optax = pytest.importorskip("optax")

X = jnp.ones((2, 8))


def linen():
    flax = pytest.importorskip("flax.linen")

    class Net(flax.Module):
        @flax.compact
        def __call__(self, x):
            return flax.Dense(4, name="head")(flax.relu(flax.Dense(8, name="encoder")(x)))

    net = Net()
    params = net.init(jax.random.key(0), X)
    return lambda x: net.apply(params, x)


def haiku():
    hk = pytest.importorskip("haiku")
    net = hk.without_apply_rng(
        hk.transform(lambda x: hk.Linear(4, name="head")(jax.nn.relu(hk.Linear(8, name="encoder")(x))))
    )
    params = net.init(jax.random.key(0), X)
    return lambda x: net.apply(params, x)


def nnx():
    flax = pytest.importorskip("flax.nnx")

    class Net(flax.Module):
        def __init__(self):
            self.encoder, self.head = (flax.Linear(8, n, rngs=flax.Rngs(0)) for n in (8, 4))

        def __call__(self, x):
            return self.head(flax.relu(self.encoder(x)))

    net = Net()
    return lambda x: named_layers(net)(x)


def equinox():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        encoder: eqx.nn.Linear
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(jax.nn.relu(self.encoder(x)))

    net = Net(*(eqx.nn.Linear(8, n, key=jax.random.key(n)) for n in (8, 4)))
    return lambda x: jax.vmap(named_layers(net))(x)


@pytest.mark.parametrize("make", [linen, haiku, nnx, equinox])
def test_layer_rules_reach_modules(make):
    policy = Policy.coerce({"format": "bfloat16", "layers": [{"match": "**.head", "format": "float32"}]})
    told = report(autocast(make(), policy), X)
    formats = {
        "head" if "head" in op.layer.split(".") else "encoder": op.inputs[0]
        for op in told.ops
        if op.primitive == "dot_general"
    }
    assert formats == {"encoder": "bf16", "head": "fp32"}


def layers_of_products(f, *args):
    return [op.layer for op in report(f, *args, policy="bfloat16").ops if op.primitive == "dot_general"]


def test_equinox_layers_in_lists_have_the_paths_of_their_fields_and_the_gradients_of_the_model():
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(8, 4, 8, 1, key=jax.random.key(0))
    model = {"parts": [mlp, mlp.layers[1]]}

    def f(model, x):
        first, second = named_layers(model)["parts"]
        return jax.vmap(first)(x), jax.vmap(second)(x)

    found = [path.replace(".eqx.nn.MLP", "").replace(".eqx.nn.Linear", "") for path in layers_of_products(f, model, X)]
    assert found == ["parts.0.layers.0", "parts.0.layers.1", "parts.1"]
    params, rest = eqx.partition(mlp, eqx.is_inexact_array)
    grads = jax.grad(lambda p: jax.vmap(named_layers(eqx.combine(p, rest)))(X).sum())(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)


def test_nnx_layers_have_paths_and_statistics_reach_the_model():
    flax = pytest.importorskip("flax.nnx")

    class Block(flax.Module):
        def __init__(self, rngs):
            self.up, self.norm = flax.Linear(8, 8, rngs=rngs), flax.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.up(x))

    class Net(flax.Module):
        def __init__(self, rngs):
            self.blocks = flax.List([Block(rngs), Block(rngs)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    graph, state = flax.split(Net(flax.Rngs(0)))

    def f(state, x):
        net = flax.merge(graph, state)
        return named_layers(net)(x), flax.state(net)

    assert layers_of_products(f, state, X) == ["blocks.0.up", "blocks.1.up"]
    _, after = jax.jit(autocast(f, "bfloat16"))(state, X)
    changed = [not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (state, after)), strict=True)]
    assert any(changed) and not all(changed)


def test_a_model_without_modules_is_told_what_to_write():
    with pytest.raises(PolicyError, match="named_scope"):
        named_layers({"w": X})


def adam_state(state):
    return jax.tree.leaves(state)


def test_a_bad_step_changes_neither_parameters_nor_the_optimizer_s_state():
    optimizer = skip_bad_steps(optax.adam(0.1))
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    updates, state = optimizer.update({"w": jnp.ones(3)}, state, params)
    bad, after = optimizer.update({"w": jnp.array([1.0, jnp.nan, 1.0])}, state, params)
    assert not jnp.any(bad["w"]) and jnp.any(updates["w"])
    for a, b in zip(adam_state(after.inner), adam_state(state.inner), strict=True):
        assert np.array_equal(a, b)
    assert int(after.skipped) == 1


def test_an_optimizer_with_a_loss_scale_trains_like_one_without():
    def train(optimizer, scaled):
        params = {"w": jnp.arange(3.0)}
        state = optimizer.init(params)

        def step(carry, _):
            params, state = carry
            factor = state.loss_scale.scale_value if scaled else 1.0
            grads = jax.grad(lambda p: factor * jnp.square(p["w"] - 2).sum())(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), None, length=20)[0][0]["w"]

    scaled = train(with_loss_scale(optax.adam(0.1), LossScale(init_scale=1024.0)), True)
    assert jnp.allclose(scaled, train(optax.adam(0.1), False), rtol=1e-5)


def test_a_scan_over_steps_grows_the_scale_and_skips_the_bad_ones():
    gradients = value_and_grad(lambda w, x: (w * x).sum())
    batches = jnp.ones((8, 3)).at[2].set(jnp.inf)

    def step(carry, x):
        w, scale = carry
        (_, grads), scale, finite = gradients(scale, w, x)
        return (jnp.where(finite, w - 0.1 * grads, w), scale), finite

    start = (jnp.ones(3), LossScale(init_scale=8.0, growth_interval=3))
    (w, scale), finite = jax.jit(lambda: jax.lax.scan(step, start, batches))()
    assert finite.tolist() == [True, True, False, True, True, True, True, True]
    assert jnp.allclose(w, 1 - 0.7) and float(scale.scale_value) == 8.0


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("how", ["shard_map", "pmap"])
def test_one_bad_device_is_a_bad_step_for_all(how):
    gradients = value_and_grad(lambda w, x: (w * x).sum(), axis_name="data")
    batch = jnp.stack([jnp.ones(3), jnp.full(3, jnp.inf)])

    def step(scale, x):
        _, scale, finite = gradients(scale, jnp.ones(3), x.reshape(3))
        return scale.scale_value[None], finite[None]

    if how == "pmap":
        values, finite = jax.pmap(step, axis_name="data", in_axes=(None, 0))(LossScale(init_scale=8.0), batch)
    else:
        mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
        values, finite = jax.jit(mapped)(LossScale(init_scale=8.0), batch)
    assert np.asarray(values).ravel().tolist() == [4.0, 4.0]
    assert not np.asarray(finite).any()


def test_a_scale_survives_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    scale = LossScale(init_scale=64.0, min_scale=2.0).adjust(jnp.asarray(False))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "scale", scale)
    with ocp.StandardCheckpointer() as saver:
        again = saver.restore(tmp_path / "scale", jax.eval_shape(lambda: scale))
    assert again.to_dict() == scale.to_dict() and again.config == scale.config


def example(name):
    path = pathlib.Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_flax_example_learns_digits_in_float16_with_float32_masters():
    pytest.importorskip("sklearn")
    pytest.importorskip("flax")
    done = example("jax_flax").train("float16", epochs=2)
    assert done["accuracy"] > 0.9
    assert {leaf.dtype for leaf in jax.tree.leaves(done["params"])} == {jnp.dtype("float32")}


def test_the_equinox_example_learns_digits_by_a_plan():
    pytest.importorskip("sklearn")
    pytest.importorskip("equinox")
    done = example("jax_equinox").train("bfloat16", epochs=2, seconds=0.5)
    assert done["accuracy"] > 0.85 and done["plan"].error is not None
