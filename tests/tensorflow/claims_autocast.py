"""A rewritten function is called, differentiated, trained, compiled and saved as the one that it was made from."""

from __future__ import annotations

import graphs
import numpy as np
import pytest
import tensorflow as tf

from castwise.errors import PolicyError
from castwise.policy import LayerRule, Policy
from castwise.tensorflow import autocast, plan

graphs.two_devices()
W = tf.Variable(graphs.weights(16, 16), name="w")
B = tf.Variable(np.zeros(16, np.float32), name="b")
X = tf.constant(graphs.weights(4, 16, seed=1, scale=1.0))


@tf.function
def layer(x):
    return tf.nn.silu(x @ W + B)  # silu has a gradient of its own


@tf.function
def everything(x, steps=3, *, scale=1.0):
    h = layer(x)
    h = tf.cond(tf.reduce_sum(h) > 0, lambda: h @ W, lambda: h * 2.0)
    _, h = tf.while_loop(lambda i, h: i < steps, lambda i, h: (i + 1, h + 0.01 * tf.tanh(h @ W)), [0, h])
    kept = tf.TensorArray(tf.float32, size=2)
    for i in tf.range(2):
        kept = kept.write(i, h @ W)
    return {"last": h * scale, "kept": kept.stack(), "index": tf.argmax(h, -1)}


def near(ours, theirs, tolerance=0.03):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.abs(ours - theirs).max() <= tolerance * max(1e-30, np.abs(theirs).max())


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_results_have_the_dtypes_and_nearly_the_values_of_the_function_as_written(policy):
    wanted = everything(X, scale=2.0)
    fast = autocast(everything, policy)
    found = fast(X, scale=2.0)
    for name in ("last", "kept"):
        assert found[name].dtype == tf.float32 and found[name].shape == wanted[name].shape
        assert near(found[name], wanted[name])
        assert not np.array_equal(found[name], wanted[name])  # something was rounded
    assert found["index"].dtype == tf.int64
    assert graphs.in_16_bits(graphs.executed(fast, X), "MatMul") > 0


def test_a_tape_outside_and_one_inside_give_the_gradients_of_the_function_as_written():
    def gradients(fn):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(fn(X)["kept"] ** 2)
        return tape.gradient(loss, [W, B])

    fast = autocast(everything, "bf16")
    wanted = gradients(everything)
    for ours, theirs in zip(gradients(fast), wanted, strict=True):
        assert ours.dtype == tf.float32 and near(ours, theirs, 0.06)
    inside = tf.function(lambda: gradients(fast))()
    for ours, theirs in zip(inside, wanted, strict=True):
        assert near(ours, theirs, 0.06)


def test_a_training_step_in_one_graph_moves_variables_as_it_did():
    momentum = tf.Variable(tf.zeros_like(W))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(everything(x)["kept"] ** 2)
        [grad] = tape.gradient(loss, [W])
        momentum.assign(0.9 * momentum + grad)
        W.assign_sub(0.1 * momentum)
        return loss, tf.reduce_sum(W)  # read after it was changed

    start = W.numpy()
    wanted = step(X)
    moved = W.numpy() - start
    W.assign(start)
    momentum.assign(tf.zeros_like(W))
    found = autocast(step, "bf16")(X)
    ours = W.numpy() - start
    W.assign(start)
    assert W.dtype == tf.float32 and near(ours, moved, 0.06) and near(found[0], wanted[0])
    assert near(found[1], np.sum(start + ours), 1e-5)


def test_a_variable_that_is_read_twice_and_in_a_loop_is_cast_once():
    @tf.function
    def f(x):
        h = layer(layer(x))
        _, h = tf.while_loop(lambda i, h: i < 5, lambda i, h: (i + 1, h + layer(h)), [0, h])
        return h

    fast = autocast(f, "bf16")
    concrete = fast.get_concrete_function(X)
    casts = [op for op in concrete.graph.get_operations() if op.type == "Cast" and op.inputs[0].shape == W.shape]
    assert len(casts) == 1
    [loop] = [op for op in concrete.graph.get_operations() if op.type == "StatelessWhile" or op.type == "While"]
    assert not any(op.type == "Cast" and op.inputs[0].shape == W.shape for op in loop._body_graph.get_operations())
    assert near(fast(X), f(X))


def test_a_variable_that_a_loop_changes_is_read_in_each_iteration():
    counter = tf.Variable(graphs.weights(16, 16))

    @tf.function
    def f(x):
        for _ in tf.range(3):
            x = tf.tanh(x @ counter)
            counter.assign(counter * 0.5)
        return x

    start = counter.numpy()
    wanted, ended = f(X), counter.numpy()
    counter.assign(start)
    assert near(autocast(f, "bf16")(X), wanted)
    assert np.array_equal(counter.numpy(), ended)


def test_side_effects_happen_in_their_order():
    log = tf.Variable(tf.zeros(0), shape=[None])

    @tf.function
    def f(x):
        log.assign(tf.concat([log, [1.0]], 0))
        y = layer(x)
        tf.debugging.assert_less(tf.reduce_max(y), 1e6)
        log.assign(tf.concat([log, [2.0]], 0))
        tf.cond(tf.reduce_sum(y) > -1e9, lambda: log.assign(tf.concat([log, [3.0]], 0)), lambda: log.read_value())
        return y + tf.reduce_sum(log)

    wanted = f(X)
    log.assign(tf.zeros(0))
    fast = autocast(f, "bf16")
    assert near(fast(X), wanted) and log.numpy().tolist() == [1, 2, 3]
    with pytest.raises(tf.errors.InvalidArgumentError):
        fast(X * 1e9)


def test_it_stands_in_for_concrete_functions_and_signatures(tmp_path):
    concrete = everything.get_concrete_function(tf.TensorSpec([None, 16], tf.float32, name="x"))
    fast = autocast(concrete, "bf16")
    assert near(fast(X)["last"], concrete(X)["last"]) and near(fast(x=X)["last"], concrete(X)["last"])
    module = tf.Module()
    module.w, module.b = W, B
    module.f = tf.function(
        lambda x: {"y": everything(x)["last"]}, input_signature=[tf.TensorSpec([None, 16], tf.float32, name="x")]
    )
    tf.saved_model.save(module, tmp_path / "a", signatures=module.f)
    loaded = tf.saved_model.load(tmp_path / "a")
    signature = loaded.signatures["serving_default"]
    served = autocast(signature, "bf16")
    assert near(served(x=X)["y"], signature(x=X)["y"]) and not np.array_equal(served(x=X)["y"], signature(x=X)["y"])
    module.f = autocast(module.f, "bf16")
    tf.saved_model.save(module, tmp_path / "b", signatures=module.f)
    again = tf.saved_model.load(tmp_path / "b")
    assert np.array_equal(again.signatures["serving_default"](x=X)["y"], served(x=X)["y"])


def test_xla_compiles_what_it_compiled():
    compiled = tf.function(lambda x: tf.tanh(layer(x)) @ W, jit_compile=True)
    fast = autocast(compiled, "bf16")
    assert near(fast(X), compiled(X)) and not np.array_equal(fast(X), compiled(X))
    assert fast._jit_compile

    @tf.function
    def around(x):
        return compiled(x) * 2.0

    assert near(autocast(around, "bf16")(X), around(X))
    inner = autocast(around, "bf16").get_concrete_function(X).graph
    assert any(op.type.endswith("PartitionedCall") for op in inner.get_operations())  # still a function of its own


def test_retracing_for_other_shapes_and_keyword_arguments():
    fast = autocast(everything, "bf16")
    assert fast(X[:2])["last"].shape == (2, 16)
    assert near(fast(X, steps=1)["last"], everything(X, steps=1)["last"])


def test_layer_rules_find_name_scopes():
    @tf.function
    def f(x):
        with tf.name_scope("head"):
            return x @ W

    kept = Policy(format="bfloat16", layers=(LayerRule("head", format="float32"),))
    assert np.array_equal(autocast(f, kept)(X), f(X)) and not np.array_equal(autocast(f, "bf16")(X), f(X))
    with pytest.raises(PolicyError, match="heat"):
        strict = Policy(format="bfloat16", layers=(LayerRule("heat", format="float32"),), strict=True)
        autocast(f, strict)(X)


def test_where_nothing_is_to_be_lowered_the_function_itself_comes_back():
    assert autocast(everything, "fp32") is everything


def test_misuse_says_what_to_do():
    with pytest.raises(PolicyError, match="SavedModel"):
        autocast(3, "bf16")
    with pytest.raises(PolicyError, match="float16, bfloat16"):
        autocast(everything, "float8_e4m3fn")
    with pytest.raises(PolicyError, match=r"example_inputs=\[x\]"):
        autocast(everything, example_inputs=X)
    with pytest.raises(PolicyError, match="example_inputs are for policy 'auto'"):
        autocast(everything, "bf16", example_inputs=[X])
    with pytest.raises(PolicyError, match="SavedModel"):
        plan(3, X)
