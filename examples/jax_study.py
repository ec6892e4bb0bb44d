"""A JAX task for ``castwise study``: handwritten digits with a small convolutional network and dropout.

    castwise study examples/jax_study.py:Digits
    castwise study examples/jax_study.py:Digits --precisions fp16,bf16 --device v100 --out out/jax-digits

Nothing here knows of precision. ``loss`` and ``evaluate`` are pure functions, which the study runs through
``castwise.jax.autocast`` in each precision; the named scopes are the layers that it can keep in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

Batch = tuple[jax.Array, jax.Array]
Params = dict[str, jax.Array]

HELD_OUT = 797


@functools.cache
def data() -> tuple[Batch, Batch]:
    """Training and held-out images of 8 × 8 pixels, from 0 to 1, and their labels."""
    loaded = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    images = (loaded.images[order, :, :, None] / 16.0).astype(np.float32)
    labels = loaded.target[order].astype(np.int32)
    return (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])


def scores(params: Params, images: jax.Array, key: jax.Array | None) -> jax.Array:
    """Class scores (n, 10) of images (n, 8, 8, 1); half of the features are dropped where there is a key."""
    with jax.named_scope("conv"):
        h = jax.lax.conv_general_dilated(
            images, params["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        h = jax.nn.relu(h).reshape(len(images), -1)
    with jax.named_scope("norm"):
        h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    if key is not None:
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2.0 * h, 0.0)
    with jax.named_scope("hidden"):
        h = jax.nn.relu(h @ params["hidden"])
    with jax.named_scope("head"):
        return h @ params["head"] + params["bias"]


class Digits:
    """Classify handwritten digits (8×8 pixels) with a small JAX network."""

    framework = "jax"
    metric, direction, unit = "held-out accuracy", "higher", ""
    margin, loss_margin = 0.01, 0.05
    steps, seeds, threads = 300, 5, 1

    def model(self, seed: int) -> Params:
        """Freshly initialised float32 parameters."""
        shapes = {"conv": (3, 3, 1, 16), "hidden": (256, 64), "head": (64, 10)}
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        weights = {
            name: jax.random.normal(key, shape) * (2.0 / np.prod(shape[:-1])) ** 0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return weights | {"bias": jnp.zeros(10)}

    def optimizer(self, model: Params) -> optax.GradientTransformation:
        """Adam with a cosine schedule over the study's steps."""
        return optax.adam(optax.cosine_decay_schedule(3e-3, self.steps, alpha=0.05))

    def batches(self, seed: int) -> Iterator[Batch]:
        """Batches of 64 images, shuffled anew in each epoch."""
        images, labels = data()[0]
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(len(labels))
            for first in range(0, len(order) - 63, 64):
                part = order[first : first + 64]
                yield images[part], labels[part]

    def loss(self, model: Params, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """Cross-entropy."""
        images, labels = batch
        return optax.softmax_cross_entropy_with_integer_labels(scores(model, images, key), labels).mean()

    def validation(self) -> list[Batch]:
        """The held-out images."""
        return [data()[1]]

    def evaluate(self, model: Params) -> jax.Array:
        """Accuracy on the held-out images."""
        images, labels = data()[1]
        return (scores(model, images, None).argmax(-1) == labels).mean()
