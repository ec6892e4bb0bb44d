"""What holds on every Keras backend. Run by `test_backends.py` in a process of its own for each, as Keras has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import castwise.keras as ck
from castwise import LayerRule, Policy, PolicyError, ScaleStalledError, ScalingConfig

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":  # two devices, for what is distributed; asked for before the backend starts
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
elif BACKEND == "jax":
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
layers, ops = keras.layers, keras.ops
RNG = np.random.default_rng(0)


def _array(value):
    return np.asarray(ops.convert_to_numpy(ops.cast(value, "float32")))


def _data(n=8, width=4):
    x = RNG.standard_normal((n, width)).astype("float32")
    return x, x[:, :1] * 2 + 1


def _dense(*, dtype=None):
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, activation="relu", name="hidden", dtype=dtype), layers.Dense(1, name="out")]
    )


class WithConstant(layers.Layer):
    """Adds a float32 constant to a product, as layers with a table or a mask of their own do."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")
        self.table = np.linspace(0, 1, shape[-1], dtype="float32")

    def call(self, x):
        return ops.softmax(ops.matmul(x, self.kernel) + ops.convert_to_tensor(self.table))


class Of(layers.Layer):
    """A layer that applies a function: no trainable weights, no rounding of its own."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


def _after_a_product(inner, width=4):
    """A model whose `inner` layer is handed values that a narrow product has made: `scale` times the inputs."""
    eye = layers.Dense(width, use_bias=False, kernel_initializer="identity", name="eye")
    inputs = keras.Input((width,))
    return keras.Model(inputs, Of(lambda x: x * 1.0, name="out")(inner(eye(inputs))))


# ---- loss scaling ----


def test_200_bad_batches_then_a_good_one_leave_finite_weights_and_a_clear_message():
    model = ck.apply(_dense(), "float16")
    model.compile("adam", "mse")
    x, y = _data()
    bad = np.full_like(x, np.inf)
    for _ in range(200):
        model.train_on_batch(bad, y)
    assert model.optimizer.state.skipped == 200
    assert model.optimizer.state.scale == 1.0
    with pytest.raises(ScaleStalledError, match=r"(?s)Training has stalled.*What to do next"):
        model.optimizer.check()
    before = [w.copy() for w in model.get_weights()]
    model.train_on_batch(x, y)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True)), "the good batch was a step"
    assert not model.optimizer.stalled


def test_collapse_stops_fit_with_the_reason():
    model = ck.apply(_dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=4.0)))
    model.compile("sgd", "mse")
    x, y = _data(64)
    with pytest.raises(ScaleStalledError, match="Training has stalled"):
        model.fit(np.full_like(x, np.nan), y, batch_size=2, verbose=0)


def test_layer_level_float16_is_scaled():
    policy = Policy(format="float32", layers=[LayerRule("hidden", format="float16")])
    model = ck.apply(_dense(), policy)
    model.compile("adam", "mse")
    assert isinstance(model.optimizer, ck.LossScaleOptimizer)
    x, y = _data()
    model.fit(x, y, verbose=0)
    assert model.optimizer.state.steps == 1
    model = ck.apply(model, "bfloat16")
    assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_the_scale_grows_after_good_steps_and_no_further_than_its_cap():
    optimizer = ck.LossScaleOptimizer("sgd", growth_interval=2, init_scale=8.0, max_scale=32.0)
    model = _dense()
    model.compile(optimizer, "mse")
    x, y = _data()
    seen = []
    for _ in range(8):
        model.train_on_batch(x, y)
        seen.append(optimizer.state.scale)
    assert seen == [8, 16, 16, 32, 32, 32, 32, 32]


def test_gradients_are_divided_by_the_scale_they_were_multiplied_by():
    x, y = _data()
    plain, scaled = _dense(), _dense()
    scaled.set_weights(plain.get_weights())
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    scaled.compile(ck.LossScaleOptimizer(keras.optimizers.SGD(0.1), growth_interval=1, init_scale=4.0), "mse")
    for _ in range(3):
        plain.train_on_batch(x, y)
        scaled.train_on_batch(x, y)
    for a, b in zip(plain.get_weights(), scaled.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_loop_without_fit_steps_and_skips():
    model = _dense()
    optimizer = ck.LossScaleOptimizer(keras.optimizers.SGD(0.5), init_scale=4.0)
    good = [ops.ones(w.shape) * 4.0 for w in model.trainable_variables]
    start = model.get_weights()
    optimizer.apply(good, model.trainable_variables)
    for before, after in zip(start, model.get_weights(), strict=True):
        np.testing.assert_allclose(after, before - 0.5, atol=1e-6)
    kept = model.get_weights()
    optimizer.apply([g * np.inf for g in good], model.trainable_variables)
    assert all((a == b).all() for a, b in zip(kept, model.get_weights(), strict=True))
    assert (optimizer.state.steps, optimizer.state.skipped, optimizer.state.scale) == (2, 1, 2.0)


def test_gradient_accumulation_leaves_out_bad_micro_batches():
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = _dense()
    model.compile(ck.LossScaleOptimizer(inner), "mse")
    x, y = _data()
    start = model.get_weights()[0].copy()
    model.train_on_batch(x, y)
    model.train_on_batch(np.full_like(x, np.nan), y)
    assert (model.get_weights()[0] == start).all(), "one good micro-batch of two: no step yet"
    model.train_on_batch(x, y)
    assert (model.get_weights()[0] != start).any()
    assert model.optimizer.state.skipped == 1


def test_the_loss_scale_is_saved_and_loaded(tmp_path):
    model = ck.apply(_dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=8.0, hysteresis=3)))
    model.compile("adam", "mse")
    x, y = _data()
    model.train_on_batch(x, y)
    model.train_on_batch(np.full_like(x, np.inf), y)
    want = model.optimizer.state
    assert want.hysteresis_left == 2
    model.save(tmp_path / "m.keras")
    again = ck.load_model(
        tmp_path / "m.keras", Policy(format="float16", scaling=ScalingConfig(init_scale=8.0, hysteresis=3))
    )
    assert again.optimizer.state == want
    assert again.optimizer.inner_optimizer.iterations == 1
    by_keras = keras.models.load_model(tmp_path / "m.keras").optimizer
    assert type(by_keras) is keras.optimizers.LossScaleOptimizer
    assert float(by_keras.dynamic_scale.value) == want.scale


def test_an_unknown_knob_is_named():
    with pytest.raises(PolicyError, match=r"scaling.growth_intervall.*growth_interval"):
        ck.LossScaleOptimizer("adam", growth_intervall=3)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="MirroredStrategy is TensorFlow's: 'castwise[tensorflow]'")
def test_replicas_of_a_mirrored_strategy_scale_and_skip_together():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = ck.apply(_dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=8.0, growth_interval=2)))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = _data(16)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert (model.optimizer.state.steps, model.optimizer.state.scale) == (4, 32.0)
    x[0] = np.inf
    before = model.get_weights()
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    assert (model.optimizer.state.skipped, model.optimizer.state.scale) == (1, 16.0)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.skipif(BACKEND != "jax", reason="Keras distributes by data on JAX alone: 'castwise[jax]'")
def test_keras_distribution_on_jax_scales_and_skips_together():
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=jax.devices()))
    try:
        model = ck.apply(_dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=8.0, growth_interval=2)))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        x, y = _data(16)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        assert (model.optimizer.state.steps, model.optimizer.state.scale) == (4, 32.0)
        x[0] = np.inf
        model.fit(x[:8], y[:8], batch_size=8, verbose=0)
        assert (model.optimizer.state.skipped, model.optimizer.state.scale) == (1, 16.0)
    finally:
        keras.distribution.set_distribution(None)


# ---- values ----


@pytest.mark.parametrize(
    ("inner", "want"),
    [
        (lambda: layers.UnitNormalization(), lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)),
        (lambda: Of(lambda x: ops.var(x, axis=-1, keepdims=True)), lambda x: x.var(-1, keepdims=True)),
        (
            lambda: Of(lambda x: ops.logsumexp(x, axis=-1, keepdims=True)),
            lambda x: np.log(np.exp(x - x.max()).sum(-1, keepdims=True)) + x.max(),
        ),
    ],
    ids=["UnitNormalization", "var", "logsumexp"],
)
def test_sums_of_squares_and_exponentials_of_300s_are_right_in_float16(inner, want):
    model = ck.apply(_after_a_product(inner()), "float16")
    x = np.array([[300.0, -300.0, 300.0, 299.0]], "float32")
    assert ck.record(model, ops.convert_to_tensor(x))[0].format == "float16"
    np.testing.assert_allclose(model.predict(x, verbose=0), want(x.astype("float64")), rtol=2e-3)


def test_logsumexp_of_70000_values_is_right_in_float16():
    model = ck.apply(_after_a_product(Of(lambda x: ops.logsumexp(ops.tile(x, (1, 17500)), axis=-1))), "float16")
    np.testing.assert_allclose(model.predict(np.zeros((1, 4), "float32"), verbose=0), np.log(70000), rtol=1e-3)


def test_multi_head_attention_in_float16_runs_on_cpu():
    inputs = keras.Input((5, 8))
    x = layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, layers.Dense(2, name="out")(x))
    data = RNG.standard_normal((2, 5, 8)).astype("float32")
    want = model.predict(data, verbose=0)
    ck.apply(model, "float16")
    np.testing.assert_allclose(model.predict(data, verbose=0), want, atol=5e-3)
    model.compile("adam", "mse")
    model.fit(data, np.zeros((2, 5, 2), "float32"), verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_bfloat16_with_a_float32_constant_in_call_runs():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, name="out")(WithConstant(name="custom")(layers.Dense(4)(inputs))))
    x, y = _data()
    want = model.predict(x, verbose=0)
    ck.apply(model, "mixed_bfloat16")
    np.testing.assert_allclose(model.predict(x, verbose=0), want, atol=5e-2)
    model.compile("adam", "mse")
    model.fit(x, y, verbose=0)


def test_formats_inside_attention_and_a_custom_layer_are_the_policys():
    inputs = keras.Input((5, 8))
    x = layers.MultiHeadAttention(2, 4, dropout=0.1, name="attention")(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(2, name="out")(WithConstant(name="custom")(x)))
    policy = Policy(format="bfloat16", layers=[LayerRule("attention.key", format="float32")])
    found = ck.record(ck.apply(model, policy), ops.ones((2, 5, 8)))
    products = {"einsum", "matmul", "mm", "bmm", "scaled_dot_product_attention"}

    def formats(layer):
        return {r.format for r in found.ops if r.op in products and r.layer == layer}

    assert formats("attention.query") == formats("attention.value") == formats("custom") == {"bfloat16"}
    assert formats("attention.key") == {"float32"}
    assert formats("attention") == {"bfloat16"}, "the two products of attention itself"
    assert formats("out") == {"float32"}
    softmax = [r for r in found.of(layer="custom") if r.op in ("softmax", "exp")]
    assert softmax and all(r.format == "float32" for r in softmax)


def test_an_op_rule_reaches_inside_a_layer():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, name="out")(WithConstant(name="custom")(inputs)))
    rules = {"matmul": "high", "mm": "high", "einsum": "high"}
    found = ck.record(ck.apply(model, Policy(format="bfloat16", ops=rules)), ops.ones((2, 4)))
    assert set(found.by_format) == {"float32"}


# ---- models ----


def test_weights_and_results_are_float32_whatever_the_model_was_made_with():
    keras.config.set_dtype_policy("bfloat16")
    try:
        model = _dense()
    finally:
        keras.config.set_dtype_policy("float32")
    assert {w.dtype for w in model.weights} == {"bfloat16"}
    x, y = _data()
    ck.apply(model, "bfloat16")
    assert {w.dtype for w in model.weights} == {"float32"}
    assert model.predict(x, verbose=0).dtype == np.float32
    model.compile("adam", "mse")
    start = model.get_weights()[0].copy()
    model.fit(x, y, verbose=0)
    assert (model.get_weights()[0] != start).any()


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
    x, y = _data(16)
    ck.apply(model, "bfloat16", example_inputs=x)
    assert model.first.dtype_policy.name == model.second.dtype_policy.name == "float32"
    assert model.blocks[0].dtype_policy.name == "mixed_bfloat16"
    model.compile("adam", {"first": "mse", "second": "mse"})
    mean = _array(model.norm.moving_mean.value).copy()
    target = {"first": y, "second": np.concatenate([y, y], -1)}
    history = model.fit(x, target, epochs=3, batch_size=8, verbose=0).history
    assert all(np.isfinite(history["loss"]))
    assert (_array(model.norm.moving_mean.value) != mean).any()
    assert set(model.predict(x, verbose=0)) == {"first", "second"}
    model.evaluate(x, target, verbose=0)
    assert len(model(ops.convert_to_tensor(x), training=True)) == 2
    assert len(model.losses) == 1
    found = ck.record(model, ops.convert_to_tensor(x))
    assert {r.format for r in found.of(layer="blocks.0") if r.rule == "low"} == {"bfloat16"}


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
    model = _dense()
    x, _ = _data()
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
    model = ck.apply(_dense(dtype=policies), "bfloat16")
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
    ck.apply(_dense(), Policy(format="bfloat16", layers=[LayerRule("hiden", format="float32")]))
    assert "hiden" in caplog.text and "hidden" in caplog.text


# ---- files ----


def test_a_saved_mixed_model_reloads_as_float32_when_asked(tmp_path):
    model = ck.apply(_dense(), "bfloat16")
    x, _ = _data()
    model.save(tmp_path / "m.keras")
    by_keras = keras.models.load_model(tmp_path / "m.keras")
    assert by_keras.get_layer("hidden").dtype_policy.name == "mixed_bfloat16", "the file keeps what was decided"
    again = ck.load_model(tmp_path / "m.keras", "float32")
    assert {layer.dtype_policy.name for layer in again.layers} == {"float32"}
    plain = _dense()
    plain.set_weights(model.get_weights())
    np.testing.assert_array_equal(again.predict(x, verbose=0), plain.predict(x, verbose=0))


def test_a_saved_model_loads_where_castwise_is_not_installed(tmp_path):
    model = ck.apply(_dense(), "float16")
    model.compile("adam", "mse")
    x, y = _data()
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


# ---- one line ----


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
def test_one_line_prepares_every_model_that_is_made_after_it(name):
    ck.set_global_policy(name)
    try:
        assert keras.config.dtype_policy().name == name
        model = _dense()
        model.compile("adam", "mse")
        assert isinstance(model.optimizer, ck.LossScaleOptimizer) == (name == "mixed_float16")
        x, y = _data()
        model.fit(x, y, verbose=0)
        found = ck.record(model, ops.convert_to_tensor(x))
    finally:
        ck.set_global_policy("float32")
    assert {r.format for r in found.of(layer="hidden") if r.rule == "low"} == {name.removeprefix("mixed_")}
    assert {w.dtype for w in model.weights} == {"float32"}
    assert _dense().dtype_policy.name == "float32"


# ---- watching ----


def _overflowing():
    inputs = keras.Input((4,))
    x = layers.Dense(4, kernel_initializer=keras.initializers.Constant(300.0), trainable=False, name="large")(inputs)
    x = layers.Rescaling(1e-5, name="small")(x)
    return keras.Model(inputs, layers.Dense(1, name="out")(x))


def test_the_guard_raises_the_layer_that_overflows_between_steps_and_training_goes_on(tmp_path):
    model = ck.apply(_overflowing(), "float16")
    model.compile("sgd", "mse")
    x = np.full((64, 4), 100.0, "float32") * RNG.uniform(0.9, 1.1, (64, 4)).astype("float32")
    watch = ck.Watch(tmp_path / "run.jsonl", every=4)
    model.fit(x, np.ones((64, 1), "float32"), batch_size=4, epochs=2, verbose=0, callbacks=[watch])
    names = [event.name for event in watch.events]
    assert "raise" in names and names.index("finding") < names.index("raise")
    assert next(e for e in watch.events if e.name == "raise").message.startswith("layer 'large'")
    state = model.optimizer.state
    assert 0 < state.skipped < 8 and state.steps == 32, "steps were skipped until it was raised, and none after"
    assert np.isfinite(model.predict(x, verbose=0)).all()


def test_watch_writes_what_trainers_log(tmp_path):
    records = []
    model = ck.apply(_dense(), "bfloat16")
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    x, y = _data(64)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[ck.Watch(records.append, tmp_path / "run.jsonl", every=8)])
    assert [r["step"] for r in records] == [8, 16]
    assert records[0]["train/grad_norm"] > 0 and records[0]["perf/steps_per_second"] > 0
    assert records[1]["train/loss_scale"] == 1.0 and records[1]["train/learning_rate"] == pytest.approx(1e-2)
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2
    assert isinstance(model.optimizer, keras.optimizers.Adam), "watched, and as it was"
    assert model.optimizer.iterations == 16


def test_bad_data_is_told_apart_from_a_small_range():
    model = ck.apply(_dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=2.0)))
    model.compile("sgd", "mse")
    x, y = _data(64)
    x[:] = np.nan
    watch = ck.Watch(every=4)
    with pytest.raises((ScaleStalledError, RuntimeError)):
        model.fit(x, y, batch_size=1, verbose=0, callbacks=[watch])
    assert any("bad input data" in event.message for event in watch.events)


# ---- studies ----


def test_a_study_takes_a_keras_task(tmp_path):
    pytest.importorskip("sklearn", reason="the task's digits come with scikit-learn: 'castwise[study]'")
    from castwise.study import study

    task = f"{Path(os.environ['CASTWISE_EXAMPLES']) / 'keras_study.py'}:Digits"
    results = study(task, precisions=["fp16"], steps=4, seeds=1, out=tmp_path, report=False)
    assert set(results["arms"]) == {"fp32", "fp16"}
    again = study(task, precisions=["fp16"], steps=4, seeds=1, out=tmp_path, report=False, resume=True)
    assert again["arms"]["fp16"] == results["arms"]["fp16"]


def test_a_run_of_a_study_goes_on_where_it_was_saved():
    pytest.importorskip("sklearn", reason="the task's digits come with scikit-learn: 'castwise[study]'")
    from castwise.study.arms import Arm
    from castwise.study.keras_backend import KerasRun
    from castwise.study.protocol import load_task

    spec = load_task(f"{Path(os.environ['CASTWISE_EXAMPLES']) / 'keras_study.py'}:Digits")
    arm = Arm("fp16", Policy(format="float16"))
    run = KerasRun(spec, arm, 0)
    run.advance(2)
    state = run.save()
    want, _ = run.advance(2)
    other = KerasRun(spec, arm, 0)
    other.load(state)
    found, _ = other.advance(2)
    assert found.grad_norms == want.grad_norms and found.loss == want.loss
    assert found.direction > 0.99
    assert {layer.kind for layer in run.layers()} >= {"norm", "head", "other"}
    assert all(blame.overflow == 0 for blame in run.blame())
