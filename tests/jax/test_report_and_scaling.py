"""What a report says, and that the loss scale makes the neutral state machine's transitions under jit."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from castwise.errors import ScaleStalledError
from castwise.jax import LossScale, autocast, report, value_and_grad
from castwise.scaling import ScalingConfig, initial_state, transition


def _model(w, x):
    return jax.nn.log_softmax(jnp.tanh(x @ w))


def test_report_names_every_op_its_format_and_the_reason():
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    told = report(autocast(_model, policy="float16"), w, x)
    by_op = {op.primitive: op for op in told.ops}
    assert set(by_op["dot_general"].inputs) == {"fp16"}
    assert "exp" in by_op and "fp16" not in by_op["exp"].inputs
    assert all(op.reason for op in told.ops)


def test_report_tells_what_a_region_inside_decided():
    inner = autocast(_model, policy="float16")
    told = report(autocast(lambda w, x: inner(w, x @ w), policy="bfloat16"), jnp.ones((4, 4)), jnp.ones((2, 4)))
    products = [op for op in told.ops if op.primitive == "dot_general"]
    assert [set(op.inputs) for op in products] == [{"bf16"}, {"fp16"}]
    assert products[1].reason == "decided by a region of its own"


def test_ten_thousand_random_transitions_under_jit_are_those_of_the_neutral_machine():
    knobs = {"init_scale": 1024.0, "growth_interval": 7, "hysteresis": 2, "min_scale": 4.0, "max_scale": 2.0**20}
    config = ScalingConfig(**knobs)
    finite = np.random.default_rng(0).random(10_000) > 0.3

    @jax.jit
    def run(scale, flags):
        def step(s, flag):
            s = s.adjust(flag)
            return s, s.scale_value

        return jax.lax.scan(step, scale, flags)

    _, scales = run(LossScale(**knobs), jnp.asarray(finite))
    state, want = initial_state(config), []
    for flag in finite:
        state, _ = transition(state, bool(flag), config)
        want.append(state.scale)
    assert np.array_equal(np.asarray(scales), np.asarray(want, np.float32))


def test_a_stalled_scale_says_so_inside_jit_and_raises_outside():
    scale = LossScale(init_scale=2.0, min_scale=1.0, patience=3)
    step = jax.jit(lambda s: s.adjust(jnp.asarray(False)))
    for _ in range(6):
        scale = step(scale)
    assert bool(scale.stalled)
    with pytest.raises(ScaleStalledError, match="stalled"):
        scale.check()


def test_a_scale_survives_pickling():
    scale = LossScale(init_scale=8.0).adjust(jnp.asarray(False))
    again = pickle.loads(pickle.dumps(scale))
    assert float(again.scale_value) == float(scale.scale_value) == 4.0


def test_gradients_are_unscaled_and_bad_ones_reported():
    scale = LossScale(init_scale=1024.0)
    vg = jax.jit(value_and_grad(lambda w, x: (w * x).sum()))
    (value, grads), scale, finite = vg(scale, jnp.ones(3), jnp.full(3, 2.0))
    assert float(value) == 6.0 and bool(finite)
    assert np.array_equal(np.asarray(grads), [2.0, 2.0, 2.0])
    (_, _), after, finite = vg(scale, jnp.ones(3), jnp.asarray([1.0, np.inf, 1.0]))
    assert not bool(finite) and float(after.scale_value) == 512.0
