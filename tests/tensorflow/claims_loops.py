"""Loops: sums in place, TensorLists in 16 bits, how often they run, and what they do to variables."""

from __future__ import annotations

import graphs
import numpy as np
import pytest
import tensorflow as tf

from castwise.tensorflow import autocast, plan

graphs.two_devices()
W = tf.Variable(graphs.weights(32, 32))
X = tf.constant(graphs.weights(8, 64, 32, seed=1, scale=1.0))  # batch, time, features
BF16 = tf.bfloat16


def nodes_of(graph):
    """Nodes of a graph and of its loops."""
    for op in graph.get_operations():
        yield op
        for inner in (getattr(op, name, None) for name in ("_cond_graph", "_body_graph")):
            if inner is not None:
                yield from nodes_of(inner)


def lists_of(fast, *args):
    """Dtypes of the lists' elements, by kind of node."""
    graph = fast.get_concrete_function(*args).graph
    return {
        (op.type, op.get_attr("element_dtype").name)
        for op in nodes_of(graph)
        if op.type.startswith(("TensorList", "EmptyTensorList")) and "element_dtype" in op.node_def.attr
    }


def rows(x, axis):
    """A recurrent loop that reads slices of its input, and its gradient, in one graph."""

    def body(i, h):
        one = x[i] if axis == 0 else x[:, i]
        return i + 1, tf.tanh(one + h @ W)

    with tf.GradientTape() as tape:
        tape.watch(x)
        h = tf.while_loop(lambda i, h: i < 8, body, [0, tf.zeros([x.shape[1 - axis], 32])], maximum_iterations=8)[1]
        loss = tf.reduce_sum(h * h)
    return tape.gradient(loss, [x, W])


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_of_slices_are_summed_in_place_to_the_same_bits(axis):
    fn = tf.function(lambda x: rows(x, axis))
    x = X if axis == 0 else tf.transpose(X, [1, 0, 2])
    fast = autocast(fn, example_inputs=[x])
    kinds = [op.type for op in nodes_of(fast.get_concrete_function(x).graph)]
    assert "StridedSliceGrad" not in kinds and kinds.count("TensorStridedSliceUpdate") == 1
    for ours, theirs in zip(fast(x), fn(x), strict=True):
        assert np.array_equal(ours, theirs)


def test_what_xla_compiles_is_not_summed_in_place():
    fn = tf.function(lambda x: rows(x, 0))
    fast = autocast(fn, "bf16")
    around = tf.function(lambda x: fast(x), jit_compile=True)
    wanted = fn(X)
    for ours, theirs in zip(around(X), wanted, strict=True):
        assert np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()


def kept(x):
    """Products that are kept in a TensorArray and read from it in another loop."""
    first = tf.TensorArray(tf.float32, size=8)
    for i in tf.range(8):
        first = first.write(i, x[i] @ W)
    total = tf.zeros([64, 32])
    for i in tf.range(8):
        total += first.read(i) @ W
    return total


def exact_kept():
    x, w = (one.numpy().astype(np.float64) for one in (X, W))
    return (x @ w @ w).sum(0)


def test_a_list_of_16_bit_products_is_in_16_bits():
    fn = tf.function(kept)
    fast = autocast(fn, "bf16")
    assert {dtype for _, dtype in lists_of(fast, X)} == {"bfloat16"}
    exact = exact_kept()
    error = np.linalg.norm(fast(X) - exact) / np.linalg.norm(exact)
    assert 0 < error < 1e-2
    # One cast of the input, one of the weights, and one up of each product of the second loop: none at the list.
    assert len(graphs.float_casts(graphs.executed(fast, X))) <= 4


def test_a_planned_list_has_the_planned_dtype():
    wide = {("TensorListReserve", "float32"), ("TensorListSetItem", "float32"), ("TensorListGetItem", "float32")}
    fn = tf.function(kept)
    made = plan(fn, X, policy="bfloat16", device="a100", budget=1.0)
    steps = [at for at, op in enumerate(made.problem.graph.ops) if op.id.endswith("TensorListGetItem")]
    assert len(steps) == 1
    for label in (False, True):
        labels = made.labels.copy()
        labels[steps] = label
        fast = autocast(fn, plan=made.relabelled(labels, "tried")) if labels.any() else fn
        found = lists_of(fast, X)
        assert ({dtype for _, dtype in found} == {"bfloat16"}) if label else found == wide
        assert np.linalg.norm(fast(X) - exact_kept()) < 1e-2 * np.linalg.norm(exact_kept())


def test_what_a_gradient_needs_of_a_loop_is_kept_in_16_bits():
    weights = [tf.Variable(graphs.weights(32, 32, seed=seed)) for seed in (3, 4)]

    def fn(x):
        with tf.GradientTape() as tape:

            def body(i, h):
                return i + 1, h + 0.1 * tf.nn.relu(h @ weights[0]) @ weights[1]

            h = tf.while_loop(lambda i, h: i < 6, body, [0, x], maximum_iterations=6)[1]
            loss = tf.reduce_sum(h * h)
        return tape.gradient(loss, weights)

    step = tf.function(fn)
    fast = autocast(step, "bf16")
    found = lists_of(fast, X[0])
    assert ("TensorListPushBack", "bfloat16") in found  # what relu gave
    assert ("TensorListPushBack", "float32") in found  # what the loop carries
    before = [one.numpy() for one in weights]
    exact = gradients_in_64_bits(X[0].numpy(), *before)
    for ours, theirs in zip(fast(X[0]), exact, strict=True):
        assert np.linalg.norm(ours - theirs) < 0.02 * np.linalg.norm(theirs)
    # A tape outside of the rewritten function keeps 16-bit values of its own accord.
    forward = autocast(
        tf.function(
            lambda x: tf.while_loop(
                lambda i, h: i < 6,
                lambda i, h: (i + 1, h + 0.1 * tf.nn.relu(h @ weights[0]) @ weights[1]),
                [0, x],
                maximum_iterations=6,
            )[1]
        ),
        "bf16",
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(forward(X[0]) ** 2)
    for ours, theirs in zip(tape.gradient(loss, weights), exact, strict=True):
        assert np.linalg.norm(ours - theirs) < 0.02 * np.linalg.norm(theirs)


def gradients_in_64_bits(x, *weights):
    with tf.GradientTape() as tape:
        a, b = (tf.constant(one, tf.float64) for one in weights)
        tape.watch([a, b])
        h = tf.constant(x, tf.float64)
        for _ in range(6):
            h = h + 0.1 * tf.nn.relu(h @ a) @ b
        loss = tf.reduce_sum(h * h)
    return [one.numpy() for one in tape.gradient(loss, [a, b])]


def leaves(x):
    made = tf.TensorArray(tf.float32, size=2).unstack([x[0] @ W, x[1] @ W])
    return made.flow  # who reads it is not seen


def late(x):
    """What was read is written again: the list is read before all of it is written."""
    made = tf.TensorArray(tf.float32, size=2, clear_after_read=False).unstack([x[0] @ W, x[1] @ W])
    for _ in tf.range(3):
        made = made.write(0, tf.tanh(made.read(0) @ W))
    return made.stack()


@pytest.mark.parametrize("fn", [leaves, late])
def test_lists_whose_readers_are_not_all_seen_or_that_are_read_too_early_stay_wide(fn):
    made = tf.function(fn)
    fast = autocast(made, "bf16")
    assert {dtype for _, dtype in lists_of(fast, X)} == {"float32"}
    ours, theirs = (
        tf.raw_ops.TensorListStack(input_handle=one, element_shape=[64, 32], element_dtype=tf.float32)
        if one.dtype == tf.variant
        else one
        for one in (fast(X), made(X))
    )
    assert np.abs(ours - theirs).max() < 0.03 * np.abs(theirs).max()


def test_scan_and_map_fn_keep_their_elements_in_16_bits_or_as_they_were():
    fn = tf.function(
        lambda x: (tf.map_fn(lambda row: tf.nn.relu(row @ W), x), tf.scan(lambda h, row: 0.5 * h + row, x))
    )
    fast = autocast(fn, "bf16")
    found = lists_of(fast, X)
    assert ("TensorListSetItem", "bfloat16") in found and ("TensorListSetItem", "float32") in found
    for ours, theirs in zip(fast(X), fn(X), strict=True):
        assert ours.dtype == tf.float32 and np.abs(ours - theirs).max() < 0.02 * np.abs(theirs).max()


def test_how_often_a_loop_runs_is_counted_loop_by_loop():
    def outer(i, h):
        h = tf.while_loop(lambda j, h: j < i + 1, lambda j, h: (j + 1, h + 0.1 * tf.tanh(h @ W)), [0, h])[1]
        return i + 1, h

    def fn(x, steps):
        h = tf.while_loop(lambda i, h: i < steps, outer, [0, x])[1]
        return tf.while_loop(lambda i, h: i < 5, lambda i, h: (i + 1, h * 0.5), [0, h])[1]

    made = plan(tf.function(fn), X[0], tf.constant(4), policy="bfloat16", device="a100")
    graph = made.problem.graph
    runs = {op.id: graph.tensors[op.outputs[0]].shape[0] for op in graph.ops if op.name in ("tanh", "mul", "mm")}
    assert sorted(runs.values()) == [5, 10, 10, 10]  # 1 + 2 + 3 + 4 of the inner loop
    again = plan(tf.function(fn), X[0], tf.constant(4), policy="bfloat16", device="a100", trips=3)
    graph = again.problem.graph
    runs = [graph.tensors[op.outputs[0]].shape[0] for op in graph.ops if op.name in ("tanh", "mul", "mm")]
    assert sorted(runs) == [3, 9, 9, 9]


def test_rounding_what_a_loop_carries_is_priced_in_each_iteration():
    w = tf.constant(graphs.weights(512, 512))
    x = tf.constant(graphs.weights(256, 512, seed=1, scale=1.0))

    def fn(x):
        return tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, h + tf.tanh(h @ w)), [0, x])[1] @ w

    made = plan(tf.function(fn), x, policy="float16", device="t4", budget=1.0)
    low = [op.id for op, label in zip(made.problem.graph.ops, made.labels, strict=True) if label]
    assert "while:body:while/matmul" in low and 0.5 < made.error / made.relative_error < 2.0


@pytest.mark.parametrize("where", ["conditional", "loop"])
def test_an_update_of_a_variable_is_a_result_whose_error_counts(where):
    v = tf.Variable(graphs.weights(512, 512))
    x = tf.constant(graphs.weights(256, 512, seed=1, scale=1.0))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = 1e-2 * tf.reduce_sum(tf.nn.relu(x @ v) @ v)
        update = 0.1 * tape.gradient(loss, v)
        if where == "conditional":
            tf.cond(loss > -1e9, lambda: v.assign_sub(update), lambda: v.read_value())
        else:
            for _ in tf.range(2):
                v.assign_sub(update)

    start = v.numpy()
    made = plan(step, x, policy="float16", device="t4", budget=1.0)
    assert np.array_equal(v.numpy(), start) and made.labels.any()
    # It returns nothing: all of the error is that of the update.
    assert made.error > 0 and 0.4 < made.error / made.relative_error < 2.5
    tight = plan(step, x, policy="float16", device="t4", budget=made.error / 100)
    assert tight.labels.sum() < made.labels.sum() and tight.error <= made.error / 50
