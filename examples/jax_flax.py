"""Handwritten digits with Flax nnx in mixed precision: float32 masters, a scaled loss, bad steps skipped.

python examples/jax_flax.py --policy float16
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from castwise.jax import LossScale, autocast, skip_bad_steps, value_and_grad

Batch = tuple[jax.Array, jax.Array]


class Digits(nnx.Module):
    """A small convolutional network. Nothing in it knows of precision."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(16 * 16, rngs=rngs)
        self.hidden = nnx.Linear(16 * 16, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        h = nnx.max_pool(nnx.relu(self.conv(images)), (2, 2), (2, 2))
        h = nnx.gelu(self.hidden(self.norm(h.reshape(len(h), -1))))
        return self.head(h)


def digits() -> tuple[Batch, Batch]:
    """Training and test images of 8 × 8 pixels, from 0 to 1, and their labels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = jnp.asarray(data.images[order, :, :, None] / 16.0, jnp.float32)
    labels = jnp.asarray(data.target[order])
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def train(policy: str = "float16", epochs: int = 4, batch_size: int = 100) -> dict[str, Any]:
    """Train, and return the accuracy on the test images, the skipped steps, and the last loss scale."""
    graph, params, rest = nnx.split(Digits(nnx.Rngs(0)), nnx.Param, ...)
    optimizer = skip_bad_steps(optax.adam(3e-3))
    scale, state = LossScale(policy), optimizer.init(params)

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params, rest)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    gradients = value_and_grad(autocast(loss, policy))

    @jax.jit
    def step(scale: LossScale, params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        (value, grads), scale, finite = gradients(scale, params, images, labels)
        updates, state = optimizer.update(grads, state, params, finite=finite)
        return scale, optax.apply_updates(params, updates), state, value

    (images, labels), (test_images, test_labels) = digits()
    for _ in range(epochs):
        for first in range(0, len(images), batch_size):
            part = slice(first, first + batch_size)
            scale, params, state, value = step(scale, params, state, images[part], labels[part])
        scale.check()
    predict = jax.jit(autocast(lambda p, x: nnx.merge(graph, p, rest)(x), policy))
    accuracy = float((predict(params, test_images).argmax(-1) == test_labels).mean())
    print(f"{policy}: accuracy {accuracy:.3f}, loss {float(value):.4f}, {int(state.skipped)} steps skipped, {scale}")
    return {"accuracy": accuracy, "skipped": int(state.skipped), "scale": float(scale.scale_value), "params": params}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="float16", help="float32, bfloat16, float16, or the path of a policy file")
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    train(given.policy, given.epochs)
