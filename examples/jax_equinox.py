"""Handwritten digits with Equinox, the training step planned as a whole: forward, backward and update.

python examples/jax_equinox.py --policy bfloat16
"""

from __future__ import annotations

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from castwise.jax import Plan, autocast, plan

Batch = tuple[jax.Array, jax.Array]


class Digits(eqx.Module):
    """A perceptron with a residual block."""

    inside: eqx.nn.Linear
    block: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array, width: int = 64) -> None:
        keys = jax.random.split(key, 3)
        self.inside = eqx.nn.Linear(64, width, key=keys[0])
        self.block = eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=keys[1])
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 10, key=keys[2])

    def __call__(self, image: jax.Array) -> jax.Array:
        h = self.inside(image)
        return self.head(self.norm(h + self.block(h)))


def digits() -> tuple[Batch, Batch]:
    """Training and test images as rows of 64 pixels, from 0 to 1, and their labels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = jnp.asarray(data.data[order] / 16.0, jnp.float32)
    labels = jnp.asarray(data.target[order])
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def train(policy: str = "bfloat16", epochs: int = 6, batch_size: int = 100, seconds: float = 20.0) -> dict[str, Any]:
    """Plan a step, train by it, and return the accuracy on the test images and the plan."""
    model = Digits(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adam(2e-3)
    state = optimizer.init(params)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = jax.vmap(eqx.combine(params, static))(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    (images, labels), (test_images, test_labels) = digits()
    gradients = jax.value_and_grad(loss)
    decided: Plan = plan(gradients, params, images[:batch_size], labels[:batch_size], policy=policy, seconds=seconds)
    print(decided.summary())
    planned = autocast(gradients, plan=decided)

    @jax.jit
    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        value, grads = planned(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(epochs):
        for first in range(0, len(images), batch_size):
            part = slice(first, first + batch_size)
            params, state, value = step(params, state, images[part], labels[part])
    logits = jax.vmap(eqx.combine(params, static))(test_images)
    accuracy = float((logits.argmax(-1) == test_labels).mean())
    print(f"accuracy {accuracy:.3f}, loss {float(value):.4f}")
    return {"accuracy": accuracy, "plan": decided, "params": params}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="bfloat16", help="names the low format of the plan, and rules it keeps to")
    parser.add_argument("--epochs", type=int, default=6)
    given = parser.parse_args()
    train(given.policy, given.epochs)
