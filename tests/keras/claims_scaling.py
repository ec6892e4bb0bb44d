"""How losses are scaled, and steps skipped, on every Keras backend."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras_models import BACKEND, dense, examples, jax, ops, tf

import castwise.keras as ck
from castwise import LayerRule, Policy, PolicyError, ScaleStalledError, ScalingConfig

# ---- loss scaling ----


def test_200_bad_batches_then_a_good_one_leave_finite_weights_and_a_clear_message():
    model = ck.apply(dense(), "float16")
    model.compile("adam", "mse")
    x, y = examples()
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
    model = ck.apply(dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=4.0)))
    model.compile("sgd", "mse")
    x, y = examples(64)
    with pytest.raises(ScaleStalledError, match="Training has stalled"):
        model.fit(np.full_like(x, np.nan), y, batch_size=2, verbose=0)


def test_layer_level_float16_is_scaled():
    policy = Policy(format="float32", layers=[LayerRule("hidden", format="float16")])
    model = ck.apply(dense(), policy)
    model.compile("adam", "mse")
    assert isinstance(model.optimizer, ck.LossScaleOptimizer)
    x, y = examples()
    model.fit(x, y, verbose=0)
    assert model.optimizer.state.steps == 1
    model = ck.apply(model, "bfloat16")
    assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_the_scale_grows_after_good_steps_and_no_further_than_its_cap():
    optimizer = ck.LossScaleOptimizer("sgd", growth_interval=2, init_scale=8.0, max_scale=32.0)
    model = dense()
    model.compile(optimizer, "mse")
    x, y = examples()
    seen = []
    for _ in range(8):
        model.train_on_batch(x, y)
        seen.append(optimizer.state.scale)
    assert seen == [8, 16, 16, 32, 32, 32, 32, 32]


def test_gradients_are_divided_by_the_scale_they_were_multiplied_by():
    x, y = examples()
    plain, scaled = dense(), dense()
    scaled.set_weights(plain.get_weights())
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    scaled.compile(ck.LossScaleOptimizer(keras.optimizers.SGD(0.1), growth_interval=1, init_scale=4.0), "mse")
    for _ in range(3):
        plain.train_on_batch(x, y)
        scaled.train_on_batch(x, y)
    for a, b in zip(plain.get_weights(), scaled.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_loop_without_fit_steps_and_skips():
    model = dense()
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
    model = dense()
    model.compile(ck.LossScaleOptimizer(inner), "mse")
    x, y = examples()
    start = model.get_weights()[0].copy()
    model.train_on_batch(x, y)
    model.train_on_batch(np.full_like(x, np.nan), y)
    assert (model.get_weights()[0] == start).all(), "one good micro-batch of two: no step yet"
    model.train_on_batch(x, y)
    assert (model.get_weights()[0] != start).any()
    assert model.optimizer.state.skipped == 1


def test_the_loss_scale_is_saved_and_loaded(tmp_path):
    model = ck.apply(dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=8.0, hysteresis=3)))
    model.compile("adam", "mse")
    x, y = examples()
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


@pytest.mark.skipif(BACKEND == "torch", reason="Keras runs one step per execution on torch, and says so")
def test_several_steps_per_execution_scale_skip_and_stop(tmp_path):
    model = ck.apply(dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=8.0, growth_interval=4)))
    model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=4)
    x, y = examples(32)
    records = []
    watch = ck.Watch(records.append, every=8)
    history = model.fit(x, y, batch_size=2, verbose=0, callbacks=[watch]).history
    assert (model.optimizer.state.steps, model.optimizer.state.scale) == (16, 8.0 * 2**4)
    assert history["loss_scale"] == [8.0 * 2**4]
    assert [r["step"] for r in records] == [8, 16]
    x[9] = np.inf
    model.fit(x, y, batch_size=2, verbose=0)
    assert model.optimizer.state.skipped == 1, "one step of an execution, and not the execution"
    assert all(np.isfinite(w).all() for w in model.get_weights())
    with pytest.raises(ScaleStalledError, match="Training has stalled"):
        model.fit(np.full_like(x, np.nan), y, batch_size=2, epochs=4, verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.skipif(BACKEND != "tensorflow", reason="MirroredStrategy is TensorFlow's: 'castwise[tensorflow]'")
def test_replicas_of_a_mirrored_strategy_scale_and_skip_together():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = ck.apply(dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=8.0, growth_interval=2)))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = examples(16)
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
        model = ck.apply(dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=8.0, growth_interval=2)))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        x, y = examples(16)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        assert (model.optimizer.state.steps, model.optimizer.state.scale) == (4, 32.0)
        x[0] = np.inf
        model.fit(x[:8], y[:8], batch_size=8, verbose=0)
        assert (model.optimizer.state.skipped, model.optimizer.state.scale) == (1, 16.0)
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.skipif(BACKEND != "jax", reason="Keras distributes by layout on JAX alone: 'castwise[jax]'")
def test_weights_that_are_spread_over_devices_scale_and_skip_together():
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], devices=[f"cpu:{place}" for place in range(2)])
    layout = keras.distribution.LayoutMap(mesh)
    layout["hidden/kernel"] = (None, "model")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
    try:
        model = ck.apply(dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=8.0, growth_interval=2)))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        x, y = examples(16)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        assert (model.optimizer.state.steps, model.optimizer.state.scale) == (4, 32.0)
        assert len(model.get_layer("hidden").kernel.value.sharding.device_set) == 2
        found = ck.record(model, ops.convert_to_tensor(x))
        assert {r.format for r in found.of(layer="hidden") if r.rule == "low"} == {"float16"}
        x[0] = np.inf
        model.fit(x[:8], y[:8], batch_size=8, verbose=0)
        assert (model.optimizer.state.skipped, model.optimizer.state.scale) == (1, 16.0)
    finally:
        keras.distribution.set_distribution(None)
