"""Plans of TensorFlow functions: measured here, predicted for a device, kept in files, refused for other functions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import graphs
import numpy as np
import pytest
import tensorflow as tf

import castwise
from castwise.errors import PlanError
from castwise.tensorflow import Plan, autocast, plan

W = tf.Variable(graphs.weights(512, 512))  # large enough that lowering pays on the device that is planned for
X = tf.constant(graphs.weights(256, 512, seed=1, scale=1.0))
PLANNED = {"policy": "float16", "device": "t4"}


@tf.function
def f(x):
    return tf.nn.relu(x @ W) @ W


def test_auto_is_never_slower_as_it_lowers_only_what_this_device_computes():
    fast = autocast(f, example_inputs=[X])
    if not castwise.detect("cpu").native("bf16") and not castwise.detect("cpu").native("fp16"):
        assert fast is f
    else:
        assert np.abs(fast(X) - f(X)).max() < 0.05


def test_a_measured_plan_keeps_what_runs_faster_as_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan(f, X, policy="bfloat16", seconds=1.0)
    kept = tmp_path / "castwise" / "tensorflow_ops.json"
    times = json.loads(kept.read_text())
    slow = {key: seconds * (100 if "| low of" in key else 1) for key, seconds in times["seconds"].items()}
    assert slow != times["seconds"]
    kept.write_text(json.dumps(times | {"seconds": slow}))
    assert not plan(f, X, policy="bfloat16", seconds=1.0).labels.any()  # by the times that are kept
    assert json.loads(kept.read_text())["seconds"] == slow


def test_predicted_noise_is_the_error_that_is_measured():
    made = plan(f, X, **PLANNED, budget=1.0)
    assert made.labels.any() and made.error is not None
    assert 0.5 < made.error / made.relative_error < 2.0


def test_a_budget_is_kept():
    assert plan(f, X, **PLANNED, budget=1e-9).labels.sum() == 0
    with pytest.raises(PlanError, match="makes no sense"):
        plan(f, X, **PLANNED, budget=-0.01)


def test_a_plan_survives_its_file_and_is_refused_for_another_function(tmp_path):
    made = plan(f, X, **PLANNED, budget=1.0)
    made.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.to_dict() == made.to_dict()
    assert np.array_equal(autocast(f, plan=again)(X), autocast(f, plan=made)(X))
    with pytest.raises(PlanError, match="another function"):
        autocast(tf.function(lambda x: tf.exp(x @ W)), plan=again)(X)


def test_a_function_that_trains_is_planned_without_training_it():
    start = W.numpy()

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(f(x) ** 2)
        W.assign_sub(0.1 * tape.gradient(loss, W))
        return loss

    plan(step, X, **PLANNED, budget=1.0)
    assert np.array_equal(W.numpy(), start)


def test_what_draws_random_numbers_is_planned_by_what_is_predicted():
    made = plan(tf.function(lambda x: tf.nn.dropout(tf.nn.relu(x @ W), 0.5) @ W), X, **PLANNED, budget=1.0)
    assert made.labels.any() and made.error is None  # two calls give other numbers, whatever the formats


def test_a_variable_that_grows_is_a_result_like_any_other():
    log = tf.Variable(tf.zeros([0, 512]), shape=[None, 512])

    @tf.function
    def fn(x):
        log.assign(tf.concat([log, tf.nn.relu(x @ W) @ W], 0))

    made = plan(fn, X, **PLANNED, budget=1.0)
    assert log.shape[0] is None and log.numpy().shape[0] == 0
    assert made.labels.any() and 0.5 < made.error / made.relative_error < 2.0


def test_the_example_of_the_readme_runs(capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```py\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "tf.Tensor" in capsys.readouterr().out
