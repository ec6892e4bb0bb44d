"""What a function writes into Flax nnx modules reaches the modules that the caller has."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from castwise.errors import PolicyError
from castwise.jax import autocast

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

X = jax.random.normal(jax.random.key(0), (4, 8))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.norm, self.down = (
            nnx.Linear(8, 8, rngs=rngs),
            nnx.BatchNorm(8, rngs=rngs),
            nnx.Linear(8, 3, rngs=rngs),
        )
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(jax.nn.relu(self.norm(self.up(x)))))


def loss_of(net, x):
    return jnp.square(net(x)).mean()


def step_of(loss):
    def step(net, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(net, x)
        optimizer.update(net, grads)
        return value

    return step


def trained(step):
    net = Net()
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    losses = [float(step(net, optimizer, X)) for _ in range(3)]
    statistics, counts = nnx.state(net, nnx.BatchStat), nnx.state(net, nnx.RngCount)
    return losses, jax.tree.leaves(statistics), jax.tree.leaves(counts)


@pytest.mark.parametrize(
    "step",
    [
        nnx.jit(step_of(autocast(loss_of, "bfloat16"))),
        autocast(step_of(loss_of), "bfloat16"),
    ],
    ids=["the loss is a region", "the step is a region"],
)
def test_statistics_dropout_and_optimizer_advance_as_under_nnx_jit(step):
    losses, statistics, counts = trained(step)
    wanted = trained(nnx.jit(step_of(loss_of)))
    assert np.allclose(losses, wanted[0], rtol=2e-2)
    for ours, theirs in zip(statistics, wanted[1], strict=True):
        assert np.allclose(ours, theirs, atol=2e-2) and ours.dtype == theirs.dtype
    assert list(map(int, counts)) == list(map(int, wanted[2])) == [3]


def test_a_variable_that_is_given_twice_and_written_to_is_refused():
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    with pytest.raises(PolicyError, match=r"BatchStat.*nnx\.split"):
        autocast(lambda norms, x: norms[0](norms[1](x)), "bfloat16")([norm, norm], X)
    norm.eval()
    autocast(lambda norms, x: norms[0](norms[1](x)), "bfloat16")([norm, norm], X)


def test_variables_that_a_function_adds_are_not_lost_in_silence(caplog):
    def f(net, x):
        net.seen = nnx.Intermediate(x)
        return net(x)

    with caplog.at_level(logging.WARNING, "castwise.jax"):
        autocast(f, "bfloat16")(Net(), X)
    assert "Intermediate" in caplog.text
