"""The global policy, watched runs and studies, on every Keras backend."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_models import BACKEND, RNG, dense, examples, layers, ops

import castwise.keras as ck
from castwise import Policy, ScaleStalledError, ScalingConfig

# ---- one line ----


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
def test_one_line_prepares_every_model_that_is_made_after_it(name):
    ck.set_global_policy(name)
    try:
        assert keras.config.dtype_policy().name == name
        model = dense()
        model.compile("adam", "mse")
        assert isinstance(model.optimizer, ck.LossScaleOptimizer) == (name == "mixed_float16")
        x, y = examples()
        model.fit(x, y, verbose=0)
        found = ck.record(model, ops.convert_to_tensor(x))
    finally:
        ck.set_global_policy("float32")
    assert {r.format for r in found.of(layer="hidden") if r.rule == "low"} == {name.removeprefix("mixed_")}
    assert {w.dtype for w in model.weights} == {"float32"}
    assert dense().dtype_policy.name == "float32"


def test_a_layer_that_was_made_with_a_dtype_of_its_own_keeps_it_under_a_global_policy():
    ck.set_global_policy("mixed_bfloat16")
    try:
        model = dense(dtype="float32")
        model(ops.ones((2, 4)))
        found = ck.record(model, ops.ones((2, 4)))
        assert {r.format for r in found.of(layer="hidden")} == {"float32"}
    finally:
        ck.set_global_policy("float32")


def test_a_model_with_a_compile_of_its_own_and_one_that_is_never_compiled_follow_a_global_policy():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = layers.Dense(4), layers.Dense(1)

        def call(self, x):
            return self.out(self.hidden(x))

        def compile(self, *args, more, **kwargs):
            super().compile(*args, **kwargs)
            self.more = more

    x, y = examples()
    ck.set_global_policy("mixed_float16")
    try:
        model, late, plain = Own(), dense(), dense()
    finally:
        ck.set_global_policy("float32")
    model.compile("sgd", "mse", more=3)
    model.fit(x, y, verbose=0)
    assert model.more == 3 and isinstance(model.optimizer, ck.LossScaleOptimizer)
    late.predict(x, verbose=0)
    for found in (ck.record(model, ops.convert_to_tensor(x)), ck.record(late, ops.convert_to_tensor(x))):
        assert {r.format for r in found.of(layer="hidden") if r.rule == "low"} == {"float16"}
    plain.compile("sgd", "mse", auto_scale_loss=False)
    assert not isinstance(plain.optimizer, keras.optimizers.LossScaleOptimizer)


def test_a_global_policy_leaves_nothing_in_keras_once_nothing_carries_it():
    ck.set_global_policy("mixed_bfloat16")
    model = dense()
    ck.set_global_policy("float32")
    other = dense()
    other.compile("sgd", "mse")
    assert isinstance(other.optimizer, keras.optimizers.SGD) and "compile" not in vars(other)
    assert "call" not in vars(other), "made after the policy was gone"
    model(ops.ones((2, 4)))
    assert "call" in vars(model), "made while it was there"
    del model
    gc.collect()
    assert not {"compile", "predict", "__call__"} & set(vars(keras.Model))


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
    model = ck.apply(dense(), "bfloat16")
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    x, y = examples(64)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[ck.Watch(records.append, tmp_path / "run.jsonl", every=8)])
    assert [r["step"] for r in records] == [8, 16]
    assert records[0]["train/grad_norm"] > 0 and records[0]["perf/steps_per_second"] > 0
    assert records[1]["train/loss_scale"] == 1.0 and records[1]["train/learning_rate"] == pytest.approx(1e-2)
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2
    assert isinstance(model.optimizer, keras.optimizers.Adam), "watched, and as it was"
    assert model.optimizer.iterations == 16


@pytest.mark.skipif(BACKEND != "torch", reason="the writer is torch's; what it is given is the same everywhere")
def test_tensorboards_writer_takes_what_is_watched(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="tensorboard")
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="its writer comes with torch")
    model = ck.apply(dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=8.0)))
    model.compile("sgd", "mse")
    x, y = examples(32)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[ck.Watch(writer, every=4)])
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss_scale")] == [(4, 8.0), (8, 8.0)]
    assert all(event.value > 0 for event in events.Scalars("train/grad_norm"))
    assert {"train/skipped_steps", "perf/steps_per_second"} <= set(events.Tags()["scalars"])


def test_bad_data_is_told_apart_from_a_small_range():
    model = ck.apply(dense(), Policy(format="float16", scaling=ScalingConfig(init_scale=2.0)))
    model.compile("sgd", "mse")
    x, y = examples(64)
    x[:] = np.nan
    watch = ck.Watch(every=4)
    with pytest.raises((ScaleStalledError, RuntimeError)):
        model.fit(x, y, batch_size=1, verbose=0, callbacks=[watch])
    assert any("bad input data" in event.message for event in watch.events)


# ---- studies ----


@pytest.mark.skipif(BACKEND != "torch", reason="the other backends compile for long; single runs are tried on each")
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
