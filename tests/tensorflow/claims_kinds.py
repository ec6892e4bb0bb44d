"""Kinds of functions that people write: what they take and return, and what they do besides computing."""

from __future__ import annotations

from collections import namedtuple

import graphs
import numpy as np
import pytest
import tensorflow as tf

from castwise.tensorflow import autocast, plan

graphs.two_devices()
W = tf.Variable(graphs.weights(16, 16))
X = tf.constant(graphs.weights(4, 16, seed=1, scale=1.0))
Pair = namedtuple("Pair", "first second")
TABLE = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.0)
GENERATOR = tf.random.Generator.from_seed(1)


def same(ours, theirs, tolerance=0.03):
    """Whether two results have the same structure, dtypes and shapes, and nearly the same numbers."""
    tf.nest.assert_same_structure(ours, theirs, expand_composites=True)
    for one, other in zip(
        tf.nest.flatten(ours, expand_composites=True), tf.nest.flatten(theirs, expand_composites=True), strict=True
    ):
        if one is None:
            continue
        assert one.dtype == other.dtype and one.shape == other.shape
        if one.dtype.is_floating:
            one, other = (tensor.numpy().astype(np.float64) for tensor in (one, other))
            assert np.abs(one - other).max() <= tolerance * max(1e-30, np.abs(other).max())
        else:
            assert np.array_equal(one, other)


def nested(x):
    return {"pair": Pair(x @ W, [tf.argmax(x, -1), None]), "name": tf.constant("a"), "number": (1, 2.5)}


def ragged(x):
    rows = tf.RaggedTensor.from_row_lengths(x, [1, 3])
    return rows.with_values(rows.values @ W), tf.reduce_sum(rows, 1) @ W


def sparse(x):
    kept = tf.sparse.from_dense(tf.nn.relu(x))
    return tf.sparse.sparse_dense_matmul(kept, W), tf.sparse.map_values(lambda v: v * 2.0, kept)


def branches(x):
    def one():
        return x @ W, tf.constant(1), tf.constant("a"), tf.cast(x, tf.float64)

    def other():
        return x, tf.constant(2), tf.constant("b"), tf.cast(x, tf.float64) * 2

    return tf.cond(tf.reduce_sum(x) > 0, one, other), tf.switch_case(tf.size(x) % 3, [one, other, one])


def higher_order(x):
    return (
        tf.map_fn(lambda row: (tf.argmax(row), tf.reduce_sum(row)), x @ W, fn_output_signature=(tf.int64, tf.float32)),
        tf.scan(lambda total, row: 0.5 * total + row, x @ W),
        tf.foldl(lambda total, row: total + row, x),
        tf.vectorized_map(lambda row: tf.linalg.matvec(W, row), x),
    )


def in_python(x):
    doubled = tf.py_function(lambda v: v * 2.0, [x @ W], tf.float32)
    return doubled + tf.numpy_function(lambda v: v.astype(np.float32) + 1, [x @ W], tf.float32)


def text(x):
    words = tf.strings.join([tf.constant(["1,2", "3,4"]), "5"])
    return words, tf.strings.to_number(tf.strings.split(words, ",").to_tensor()) @ tf.ones((2, 2)), x @ W


def random(x):
    drawn = tf.random.uniform([4, 16], seed=3), GENERATOR.normal([4, 16]), tf.random.stateless_normal([4], [1, 2])
    return drawn, tf.nn.dropout(x @ W, 0.5, seed=7)


def table(x):
    keys = tf.constant(list("abcd"))
    TABLE.insert(keys, tf.reduce_sum(x @ W, -1))
    return TABLE.lookup(keys), TABLE.size()


def spectrum(x):
    return tf.abs(tf.signal.fft(tf.cast(x @ W, tf.complex64)))


@pytest.mark.parametrize(
    "fn",
    [nested, ragged, sparse, branches, higher_order, in_python, text, random, table, spectrum],
    ids=lambda f: f.__name__,
)
def test_it_returns_what_the_function_returns(fn):
    def seeded(function):
        tf.random.set_seed(1)
        GENERATOR.reset_from_seed(1)
        return function(X)

    original = tf.function(fn)
    wanted = seeded(original)
    same(seeded(autocast(original, "bf16")), wanted)
    made = plan(original, X, policy="bfloat16", device="a100", budget=1.0)
    same(seeded(autocast(original, plan=made)), wanted)


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_it_takes_composite_tensors(kind):
    if kind == "ragged":
        given = tf.RaggedTensor.from_row_lengths(X, [1, 3])
        fn = tf.function(lambda rows: rows.with_values(rows.values @ W))
    else:
        given = tf.sparse.from_dense(tf.nn.relu(X))
        fn = tf.function(lambda rows: tf.sparse.to_dense(rows) @ W)
    same(autocast(fn, "bf16")(given), fn(given))
    same(autocast(fn, plan=plan(fn, given, policy="bfloat16", device="a100", budget=1.0))(given), fn(given))


def test_gradients_of_ones_own_second_derivatives_and_forward_derivatives():
    @tf.custom_gradient
    def clipped(x):
        return x @ W, lambda d, variables=None: (
            tf.clip_by_norm(d, 1.0) @ tf.transpose(W),
            [tf.matmul(x, d, transpose_a=True)],
        )

    def first(fn):
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = fn(X)
        return tape.gradient(y, X)

    fn = tf.function(lambda x: tf.tanh(clipped(x)))
    same(first(autocast(fn, "bf16")), first(fn))
    fn = tf.function(lambda x: tf.reduce_sum(tf.tanh(x @ W) ** 2))
    fast = autocast(fn, "bf16")

    def second(fn):
        with tf.GradientTape() as outer:
            outer.watch(X)
            gradient = first(fn)
        return outer.gradient(gradient, X)

    same(second(fast), second(fn), 0.1)

    def forward(fn):
        with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as found:
            y = fn(X)
        return found.jvp(y)

    same(forward(fast), forward(fn))


def test_an_open_batch_size_is_traced_once():
    fn = tf.function(lambda x: tf.nn.softmax(x @ W), input_signature=[tf.TensorSpec([None, 16])])
    fast = autocast(fn, "bf16")
    for rows in (4, 1, 3):
        same(fast(X[:rows]), fn(X[:rows]))
    assert fast.experimental_get_tracing_count() == 1
