"""Four graphs in which lists of ops cast or round too much: what each computes, its inputs, its result in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import graphs
import numpy as np
import tensorflow as tf

STEPS = 150


@dataclass(frozen=True)
class Case:
    """One graph; ``exact`` is what its last result is."""

    function: Callable[..., Any]
    inputs: Sequence[Any]
    exact: Any

    def error(self, found: Any) -> float:
        """The relative error of the last result."""
        last = tf.nest.flatten(found)[-1].numpy().astype(np.float64)
        return float(np.linalg.norm(last - self.exact) / np.linalg.norm(self.exact))


def _wide(*tensors: Any) -> list[Any]:
    return [tensor.numpy().astype(np.float64) for tensor in tensors]


def tiny_product() -> Case:
    """A 1×4 product between two exponentials."""
    w, x = tf.constant(graphs.weights(4, 4)), tf.constant(graphs.weights(1, 4, seed=1))
    exact = np.exp(np.exp(_wide(x)[0]) @ _wide(w)[0])
    return Case(lambda x: tf.exp(tf.exp(x) @ w), [x], exact)


def side_input() -> Case:
    """An exponential that is added between two products."""
    w1, w2 = (tf.constant(graphs.weights(512, 512, seed=seed)) for seed in (2, 3))
    x, side = tf.constant(graphs.weights(256, 512, seed=4, scale=1.0)), tf.constant(graphs.weights(256, 512, seed=5))
    one, other, a, b = _wide(x, side, w1, w2)
    return Case(lambda x, side: (x @ w1 + tf.exp(side)) @ w2, [x, side], (one @ a + np.exp(other)) @ b)


def loop_carry() -> Case:
    """A loop each step of which adds less than half an ulp of bfloat16: a carry that is rounded never moves."""
    w, h = tf.constant(graphs.weights(32, 32, seed=6)), tf.ones((8, 32))

    def function(h: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            return i + 1, h + 1e-3 * tf.sigmoid(h @ w)

        return tf.while_loop(lambda i, h: i < STEPS, body, [0, h])[1]

    exact, wide = _wide(h, w)
    for _ in range(STEPS):
        exact = exact + 1e-3 / (1 + np.exp(-(exact @ wide)))
    return Case(function, [h], exact)


def logits() -> Case:
    """Logits that go into cross-entropy."""
    w1 = tf.constant(graphs.weights(128, 128, seed=7))
    w2 = tf.constant(graphs.weights(128, 32, seed=8, scale=4.0))
    x, labels = tf.constant(graphs.weights(64, 128, seed=9, scale=1.0)), np.arange(64) % 32

    def function(x: Any) -> Any:
        out = tf.nn.relu(x @ w1) @ w2
        return out, tf.nn.sparse_softmax_cross_entropy_with_logits(tf.constant(labels), out)

    one, a, b = _wide(x, w1, w2)
    exact = np.maximum(one @ a, 0) @ b
    top = exact.max(-1, keepdims=True)
    loss = (np.log(np.exp(exact - top).sum(-1, keepdims=True)) + top)[:, 0] - exact[np.arange(64), labels]
    return Case(function, [x], loss)


CASES: dict[str, Callable[[], Case]] = {
    "tiny product": tiny_product,
    "side input": side_input,
    "loop carry": loop_carry,
    "logits": logits,
}
