"""JAX tasks whose right answer is known: one needs mantissa, one needs range, one has all that resuming could lose."""

from __future__ import annotations

import random
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

Batch = tuple[np.ndarray, np.ndarray]
Params = dict[str, jax.Array]
_FEATURES = 16


class Classes:
    """Two classes by cross-entropy and Adam, from samples that a formula gives; layers "first", "hidden", "head"."""

    framework = "jax"
    metric, direction, margin = "accuracy", "higher", 0.04
    steps, seeds, evaluate_every, threads = 100, 3, 20, 1

    def samples(self, count: int, seed: int) -> Batch:
        raise NotImplementedError

    def first(self, params: Params, x: jax.Array) -> jax.Array:
        raise NotImplementedError

    def scores(self, params: Params, x: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            h = self.first(params, x)
        with jax.named_scope("hidden"):
            h = jax.nn.relu(h @ params["hidden"])
        with jax.named_scope("head"):
            return h @ params["head"]

    def model(self, seed: int = 0) -> Params:
        keys = jax.random.split(jax.random.key(seed), 2)
        return {
            "hidden": jax.random.normal(keys[0], (_FEATURES, 32)) * 0.35,
            "head": jax.random.normal(keys[1], (32, 2)) * 0.25,
        }

    def optimizer(self, model: Params) -> optax.GradientTransformation:
        return optax.adam(1e-2)

    def batches(self, seed: int = 0) -> Iterator[Batch]:
        while True:
            seed += 1000
            yield self.samples(64, seed)

    def validation(self) -> list[Batch]:
        return [self.samples(512, 7)]

    def loss(self, model: Params, batch: Batch) -> jax.Array:
        scores = self.scores(model, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch[1]).mean()

    def evaluate(self, model: Params) -> jax.Array:
        x, y = self.validation()[0]
        return (self.scores(model, x).argmax(-1) == y).mean()


class Mantissa(Classes):
    """Inputs from 1 to 1.03 carry their information in steps of 2^-9: fp16 holds them, bf16 rounds them together."""

    def samples(self, count: int, seed: int) -> Batch:
        levels = np.random.default_rng(seed).integers(16, size=(count, _FEATURES))
        score = (levels - 7.5) @ np.linspace(-1.0, 1.0, _FEATURES)
        return (1.0 + levels * 2.0**-9).astype(np.float32), (score > 0).astype(np.int32)

    def first(self, params: Params, x: jax.Array) -> jax.Array:
        return ((x @ jnp.eye(_FEATURES)) - 1.0) * 64.0 - 1.0


class Overflow(Classes):
    """The first layer sums features in the tens of thousands, beyond fp16's range; a normalisation brings them back."""

    def samples(self, count: int, seed: int) -> Batch:
        x = np.random.default_rng(seed).normal(size=(count, _FEATURES))
        y = x[:, :4].sum(1) > x[:, 4:8].sum(1)
        return np.clip(x * 20_000.0, -60_000.0, 60_000.0).astype(np.float32), y.astype(np.int32)

    def first(self, params: Params, x: jax.Array) -> jax.Array:
        h = x @ params["mix"]
        return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)

    def model(self, seed: int = 0) -> Params:
        mix = jax.random.normal(jax.random.key(seed + 100), (_FEATURES, _FEATURES))
        return super().model(seed) | {"mix": mix}


class Shuffled:
    """Epochs of seven batches; the order of each comes from a generator that goes on from the epoch before."""

    def __init__(self, seed: int) -> None:
        self._order = np.random.default_rng(seed)
        self._x = np.random.default_rng(99).normal(size=(7 * 16, 12)).astype(np.float32)

    def __iter__(self) -> Iterator[Batch]:
        for part in np.array_split(self._order.permutation(len(self._x)), 7):
            noise = 0.1 * np.random.normal(size=(len(part), 12)) + random.random()
            x = self._x[part] + noise.astype(np.float32)
            yield x, (x @ np.linspace(-1.0, 1.0, 12) > 0).astype(np.int32)


class Awkward:
    """Classify with dropout, accumulation, clipping, a schedule and data that draw from every generator."""

    framework = "jax"
    metric, direction, margin = "accuracy", "higher", 0.05
    steps, seeds, evaluate_every, threads = 100, 3, 10, 1
    clip_norm, accumulate = 1.0, 2

    def model(self, seed: int = 0) -> dict[str, object]:
        keys = jax.random.split(jax.random.key(seed), 2)
        weights = [jax.random.normal(keys[0], (12, 16)) * 0.3, jax.random.normal(keys[1], (16, 2)) * 0.3]
        return {"weights": weights, "columns": np.arange(12)[::-1].copy(), "activation": jax.nn.relu}

    def optimizer(self, model: object) -> optax.GradientTransformation:
        return optax.adamw(optax.cosine_decay_schedule(1e-2, self.steps))

    def batches(self, seed: int = 0) -> Shuffled:
        return Shuffled(seed)

    def scores(self, model: dict[str, object], x: jax.Array, key: jax.Array | None) -> jax.Array:
        first, second = model["weights"]
        h = model["activation"](x[:, model["columns"]] @ first)
        if key is not None:
            h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)
        return h @ second

    def loss(self, model: dict[str, object], batch: Batch, key: jax.Array | None = None) -> jax.Array:
        scores = self.scores(model, batch[0], key)
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch[1]).mean()

    def evaluate(self, model: dict[str, object]) -> jax.Array:
        x, y = next(iter(Shuffled(5)))
        return (self.scores(model, jnp.asarray(x), None).argmax(-1) == y).mean()
