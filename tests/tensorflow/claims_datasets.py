"""Loops over a dataset inside a function are looked into; what prepares data stays as it was written."""

from __future__ import annotations

import graphs
import numpy as np
import tensorflow as tf

from castwise import LayerRule, Policy
from castwise.tensorflow import autocast, plan

graphs.two_devices()
RNG = np.random.default_rng(0)
W = tf.Variable(RNG.normal(size=(16, 16)).astype("f") / 4)
DATA = tf.data.Dataset.from_tensor_slices(RNG.normal(size=(12, 16)).astype("f")).batch(4)


@tf.function
def looped(data):
    total = tf.zeros([4, 16])
    for batch in data:
        with tf.name_scope("inner"):
            total += tf.tanh(batch @ W) @ W
    return total


@tf.function
def reduced(data):
    return data.reduce(tf.zeros([16]), lambda s, batch: s + tf.reduce_sum(tf.tanh(batch @ W) @ W, 0))


@tf.function
def prepared(data):
    return next(iter(data.map(lambda x: tf.tanh(x @ W))))


def far(ours, theirs):
    return float(tf.reduce_max(tf.abs(ours - theirs)))


def test_products_in_a_loop_over_a_dataset_run_in_16_bits_and_results_keep_their_dtype():
    for fn in (looped, reduced):
        fast = autocast(fn, "bfloat16")(DATA)
        assert fast.dtype == tf.float32
        assert 1e-4 < far(fast, fn(DATA)) < 0.1


def test_a_layer_rule_reaches_into_a_loop_over_a_dataset():
    policy = Policy(format="bfloat16", layers=[LayerRule("inner", format="float32")])
    assert far(autocast(looped, policy)(DATA), looped(DATA)) == 0


def test_logits_of_a_loss_stay_wide_in_a_loop_over_a_dataset_too():
    @tf.function
    def losses(data):
        total = 0.0
        for batch in data:
            labels = tf.zeros([4], tf.int32)
            total += tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, batch @ W))
        return total

    assert far(autocast(losses, "bfloat16")(DATA), losses(DATA)) == 0


def test_training_in_a_loop_over_a_dataset_moves_variables_as_it_did():
    weight = tf.Variable(W)

    @tf.function
    def train(data):
        steps, loss = 0, 0.0
        for batch in data:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.nn.relu(batch @ weight) @ weight) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            steps += 1
        return steps, loss

    start = tf.identity(weight)
    train(DATA)
    wanted = weight - start
    weight.assign(start)
    steps, loss = autocast(train, "bfloat16")(DATA)
    assert (steps, loss.dtype) == (3, tf.float32)
    assert 0 < far(weight - start, wanted) < 0.1 * float(tf.reduce_max(tf.abs(wanted)))


def test_what_prepares_data_and_what_is_planned_keep_loops_over_datasets_as_written():
    assert far(autocast(prepared, "bfloat16")(DATA), prepared(DATA)) == 0
    decided = plan(looped, DATA, policy="bfloat16", device="a100")
    assert far(autocast(looped, plan=decided)(DATA), looped(DATA)) == 0


def test_frozen_functions_take_and_give_what_they_did():
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    spec = tf.TensorSpec([None, 16], name="features")
    frozen = convert_variables_to_constants_v2(tf.function(lambda x: tf.nn.relu(x @ W)).get_concrete_function(spec))
    wrapped = tf.compat.v1.wrap_function(lambda: tf.import_graph_def(frozen.graph.as_graph_def(), name=""), [])
    pruned = wrapped.prune({"x": frozen.inputs[0].name}, {"y": frozen.outputs[0].name})
    x = tf.constant(RNG.normal(size=(8, 16)).astype("f"))
    (wanted,) = frozen(x)
    (ours,) = autocast(frozen, "bfloat16")(features=x)
    assert 0 < far(ours, wanted) < 0.05
    assert far(autocast(pruned, "bfloat16")(x)["y"], ours) == 0
    assert plan(frozen, x, policy="bfloat16", device="a100").problem.graph.ops
