"""What kinds of models can be prepared, saved and loaded, on every Keras backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_models import BACKEND, RNG, array, dense, examples, jax, layers, ops, tf

import castwise.keras as ck
from castwise import LayerRule, Policy, PolicyError, ScalingConfig

# ---- models ----


def test_weights_and_results_are_float32_whatever_the_model_was_made_with():
    keras.config.set_dtype_policy("bfloat16")
    try:
        model = dense()
    finally:
        keras.config.set_dtype_policy("float32")
    assert {w.dtype for w in model.weights} == {"bfloat16"}
    x, y = examples()
    ck.apply(model, "bfloat16")
    assert {w.dtype for w in model.weights} == {"float32"}
    assert model.predict(x, verbose=0).dtype == np.float32
    model.compile("adam", "mse")
    start = model.get_weights()[0].copy()
    model.fit(x, y, verbose=0)
    assert (model.get_weights()[0] != start).any()


class Remembering(layers.Layer):
    """Keeps a variable where Keras does not look for one."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.kept = {"seen": (keras.Variable(np.zeros((), "float32"), trainable=False, name="seen"),)}

    def call(self, x):
        self.kept["seen"][0].assign(self.kept["seen"][0] + ops.sum(x))
        return self.dense(x)


def test_what_a_layer_remembers_from_call_to_call_is_kept_also_where_keras_does_not_list_it():
    x = RNG.standard_normal((4, 3, 5)).astype("float32")
    inputs = keras.Input(batch_shape=(4, 3, 5))
    lstm = layers.LSTM(6, stateful=True)
    model = keras.Model(inputs, Remembering()(lstm(inputs)))
    first, second = array(model(x)), array(model(x))
    total = array(model.layers[-1].kept["seen"][0])
    lstm.reset_state()
    ck.apply(model, "bfloat16")
    ours = [array(model(x)), array(model(x))]
    assert np.abs(first - ours[0]).max() < 0.03 > np.abs(second - ours[1]).max()
    assert np.abs(first - second).max() > 0.01
    assert abs(array(model.layers[-1].kept["seen"][0]) - 2 * total) < 0.05 * (1 + abs(total))
    lstm.reset_state()
    assert (array(model(x)) == ours[0]).all()


class Subclassed(keras.Model):
    """Two outputs, a dropout, batch statistics, a loss of its own, layers in a list."""

    def __init__(self):
        super().__init__()
        self.blocks = [layers.Dense(8, activation="gelu"), layers.Dense(8)]
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.2)
        self.first = layers.Dense(1)
        self.second = layers.Dense(2)

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x)
        x = self.drop(self.norm(x, training=training), training=training)
        self.add_loss(1e-3 * ops.mean(ops.square(x)))
        return {"first": self.first(x), "second": self.second(x)}


def test_a_subclassed_model_with_two_outputs_trains_and_keeps_its_statistics():
    model = Subclassed()
    x, y = examples(16)
    ck.apply(model, "bfloat16", example_inputs=x)
    assert model.first.dtype_policy.name == model.second.dtype_policy.name == "float32"
    assert model.blocks[0].dtype_policy.name == "mixed_bfloat16"
    model.compile("adam", {"first": "mse", "second": "mse"})
    mean = array(model.norm.moving_mean.value).copy()
    target = {"first": y, "second": np.concatenate([y, y], -1)}
    history = model.fit(x, target, epochs=3, batch_size=8, verbose=0).history
    assert all(np.isfinite(history["loss"]))
    assert (array(model.norm.moving_mean.value) != mean).any()
    assert set(model.predict(x, verbose=0)) == {"first", "second"}
    model.evaluate(x, target, verbose=0)
    assert len(model(ops.convert_to_tensor(x), training=True)) == 2
    assert len(model.losses) == 1
    found = ck.record(model, ops.convert_to_tensor(x))
    assert {r.format for r in found.of(layer="blocks.0") if r.rule == "low"} == {"bfloat16"}


class WithOwnStep(keras.Model):
    """A training step of the user's, in the way of each backend."""

    def train_step(self, *given):
        return getattr(self, f"_{BACKEND}")(*given)

    def _torch(self, data):
        import torch

        x, y = data
        self.zero_grad()
        loss = ops.mean((self(x, training=True) - y) ** 2)
        self.optimizer.scale_loss(loss).backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}

    def _tensorflow(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss}

    def _jax(self, state, data):
        trainable, fixed, optimizer, metrics = state
        x, y = data

        def loss_of(trainable, fixed):
            predicted, fixed = self.stateless_call(trainable, fixed, x, training=True)
            loss = ops.mean((predicted - y) ** 2)
            with keras.StatelessScope(state_mapping=list(zip(self.optimizer.variables, optimizer, strict=True))):
                return self.optimizer.scale_loss(loss), (loss, fixed)

        (_, (loss, fixed)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, fixed)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, fixed, optimizer, metrics)


def test_a_training_step_of_ones_own_is_scaled_and_skipped():
    inputs = keras.Input((4,))
    model = WithOwnStep(inputs, layers.Dense(1, name="out")(layers.Dense(8, name="hidden")(inputs)))
    ck.apply(model, Policy(format="float16", scaling=ScalingConfig(init_scale=8.0)))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = examples(16)
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, batch_size=4, epochs=6, verbose=0)
    assert model.evaluate(x, y, verbose=0) < before
    assert (model.optimizer.state.steps, model.optimizer.state.skipped) == (24, 0)
    model.fit(np.full_like(x, np.inf), y, batch_size=8, verbose=0)
    assert (model.optimizer.state.skipped, model.optimizer.state.scale) == (2, 2.0)
    found = ck.record(model, ops.convert_to_tensor(x))
    assert {r.format for r in found.of(layer="hidden") if r.rule == "low"} == {"float16"}


def test_masks_reach_the_loss():
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Embedding(5, 8, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.Dense(1, name="out")(layers.LSTM(4, return_sequences=True)(x)))
    tokens = np.array([[1, 2, 0, 0], [3, 4, 1, 2]], "int32")
    model.compile("sgd", "mse")
    want = model.evaluate(tokens, np.ones((2, 4, 1), "float32"), verbose=0)
    ck.apply(model, "bfloat16")
    assert model.evaluate(tokens, np.ones((2, 4, 1), "float32"), verbose=0) == pytest.approx(want, rel=2e-2)


def test_apply_float32_takes_everything_back():
    model = dense()
    x, _ = examples()
    want = model.predict(x, verbose=0)
    ck.apply(model, "float16")
    model.compile("adam", "mse")
    ck.apply(model, "float32")
    np.testing.assert_array_equal(model.predict(x, verbose=0), want)
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    assert not {"call", "fit", "compile"} & set(vars(model))
    assert all("call" not in vars(layer) for layer in model.layers)
    with pytest.raises(PolicyError, match="apply"):
        ck.record(model, ops.convert_to_tensor(x))


def test_a_model_made_with_a_map_of_policies_follows_the_new_one(tmp_path):
    kinds = keras.dtype_policies
    policies = kinds.DTypePolicyMap(keras.DTypePolicy("mixed_float16"), {"x": keras.DTypePolicy("float32")})
    model = ck.apply(dense(dtype=policies), "bfloat16")
    found = ck.record(model, ops.ones((2, 4)))
    assert {r.format for r in found.of(layer="hidden") if r.rule == "low"} == {"bfloat16"}
    model.save(tmp_path / "m.keras")
    assert keras.models.load_model(tmp_path / "m.keras").get_layer("hidden").dtype_policy.name == "mixed_bfloat16"


def test_measured_risk_keeps_a_layer_that_leaves_the_range_in_float32():
    inputs = keras.Input((4,))
    x = layers.Dense(4, kernel_initializer=keras.initializers.Constant(300.0), name="large")(inputs)
    x = layers.Rescaling(1e-5)(x)
    model = keras.Model(inputs, layers.Dense(1, name="out")(x))
    data = np.full((2, 4), 100.0, "float32")
    assert not np.isfinite(ck.apply(model, "float16").predict(data, verbose=0)).all()
    ck.apply(model, "float16", example_inputs=data)
    assert np.isfinite(model.predict(data, verbose=0)).all()
    assert model.get_layer("large").dtype_policy.name == "float32"
    ck.apply(model, "float32")
    assert all("call" not in vars(layer) for layer in model.layers), "nothing of the measuring is left"


def test_a_rule_that_matches_no_layer_is_reported(caplog):
    ck.apply(dense(), Policy(format="bfloat16", layers=[LayerRule("hiden", format="float32")]))
    assert "hiden" in caplog.text and "hidden" in caplog.text


# ---- files ----


def test_a_saved_mixed_model_reloads_as_float32_when_asked(tmp_path):
    model = ck.apply(dense(), "bfloat16")
    x, _ = examples()
    model.save(tmp_path / "m.keras")
    by_keras = keras.models.load_model(tmp_path / "m.keras")
    assert by_keras.get_layer("hidden").dtype_policy.name == "mixed_bfloat16", "the file keeps what was decided"
    again = ck.load_model(tmp_path / "m.keras", "float32")
    assert {layer.dtype_policy.name for layer in again.layers} == {"float32"}
    plain = dense()
    plain.set_weights(model.get_weights())
    np.testing.assert_array_equal(again.predict(x, verbose=0), plain.predict(x, verbose=0))


def test_a_saved_model_loads_where_castwise_is_not_installed(tmp_path):
    model = ck.apply(dense(), "float16")
    model.compile("adam", "mse")
    x, y = examples()
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "m.keras")
    code = f"""
import sys
sys.modules["castwise"] = None
import keras, numpy as np
model = keras.models.load_model({str(tmp_path / "m.keras")!r})
assert model.get_layer("hidden").dtype_policy.name == "mixed_float16"
assert float(model.optimizer.dynamic_scale.value) == {model.optimizer.state.scale}
model.fit(np.ones((4, 4), "float32"), np.ones((4, 1), "float32"), verbose=0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(tmp_path / "m.keras").is_file()


@pytest.mark.parametrize("saved", ["mixed_float16", "mixed_bfloat16"])
def test_a_file_that_keras_saved_under_another_policy_follows_the_new_one(tmp_path, saved):
    keras.config.set_dtype_policy(saved)
    try:
        model = dense()
        model.compile("adam", "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = examples()
    model.fit(x, y, verbose=0, epochs=4)
    steps = getattr(model.optimizer, "inner_optimizer", model.optimizer).iterations
    model.save(tmp_path / "m.keras")
    for policy in ("float16", "bfloat16", "float32"):
        loaded = ck.load_model(tmp_path / "m.keras", policy)
        assert {w.dtype for w in loaded.weights} == {"float32"}
        scaled = isinstance(loaded.optimizer, ck.LossScaleOptimizer)
        assert scaled == (policy == "float16") == isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
        assert (loaded.optimizer.inner_optimizer if scaled else loaded.optimizer).iterations == steps
        loaded.fit(x, y, verbose=0)
        if policy == "float32":
            assert {layer.dtype_policy.name for layer in loaded.layers} == {"float32"}
            continue
        found = ck.record(loaded, ops.convert_to_tensor(x))
        assert {r.format for r in found.of(layer="hidden") if r.rule == "low"} == {policy}


def test_arguments_of_fit_may_be_given_by_place():
    model = ck.apply(dense(), "float16")
    model.compile("sgd", "mse")
    seen = []
    model.fit(*examples(), 4, 1, 0, [keras.callbacks.LambdaCallback(on_train_end=lambda logs: seen.append(logs))])
    assert len(seen) == 1 and model.optimizer.state.steps == 2
