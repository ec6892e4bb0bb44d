"""Rewritten functions beside Keras and under MirroredStrategy."""

from __future__ import annotations

import graphs
import keras
import numpy as np
import tensorflow as tf

from castwise.tensorflow import autocast

graphs.two_devices()


def test_a_keras_model_trains_in_a_rewritten_step_and_by_fit_beside_it():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="silu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    x = tf.constant(graphs.weights(32, 8, scale=1.0))
    y = tf.reduce_sum(x, -1, keepdims=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(grads, model.trainable_variables)
        return loss

    fast = autocast(step, "bfloat16")
    losses = [float(fast(x, y)) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0] and int(optimizer.iterations.numpy()) == 60
    assert all(variable.dtype == "float32" for variable in model.variables)
    model.compile("sgd", "mse")
    assert np.isfinite(model.fit(x.numpy(), y.numpy(), verbose=0).history["loss"]).all()


class Rewritten(keras.Model):
    """A model whose training step is rewritten."""

    def train_step(self, data):
        if getattr(self, "fast", None) is None:
            self.fast = autocast(tf.function(super().train_step), "bfloat16")
        return self.fast(data)


def test_fit_trains_with_a_rewritten_training_step():
    random = np.random.default_rng(0)
    x = random.standard_normal((64, 16)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    losses = []
    for kind in (keras.Model, Rewritten):
        keras.utils.set_random_seed(0)
        given = keras.Input((16,))
        out = keras.layers.Dense(1)(keras.layers.Dense(32, activation="gelu")(given))
        model = kind(given, out)
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
        losses.append(model.fit(x, y, batch_size=32, epochs=12, shuffle=False, verbose=0).history["loss"])
        assert int(model.optimizer.iterations.numpy()) == 24
        assert set(model.evaluate(x, y, verbose=0, return_dict=True)) == {"loss", "mae"}
    exact, ours = losses
    assert ours[-1] < 0.5 * ours[0] and ours != exact
    assert all(abs(a - b) < 0.05 * b for a, b in zip(ours, exact, strict=True))


def test_mirrored_variables_train_on_two_devices():
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        w = tf.Variable(graphs.weights(8, 8), aggregation=tf.VariableAggregation.MEAN)
    x = tf.constant(graphs.weights(4, 8, seed=3, scale=1.0))

    @tf.function
    def forward(x):
        return tf.tanh(x @ w) @ w

    def replica(model, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        grad = tape.gradient(loss, w)
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, grad)
        w.assign_sub(0.1 * total)
        return loss

    def step(model):
        return tf.function(lambda: strategy.reduce("MEAN", strategy.run(replica, (model, x)), axis=None))

    start = w.numpy()
    wanted = float(step(forward)())
    moved = w.numpy() - start
    for fast in (step(autocast(forward, "bfloat16")), autocast(step(forward), "bfloat16")):
        w.assign(start)
        assert abs(float(fast()) - wanted) < 0.02 * abs(wanted)
        assert np.abs(w.numpy() - start - moved).max() < 0.05 * np.abs(moved).max()
        assert len({one.numpy().tobytes() for one in strategy.experimental_local_results(w)}) == 1
