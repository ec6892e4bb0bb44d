"""Which operations compute in which format, and that the values are right, on every Keras backend."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras_models import RNG, Of, WithConstant, after_a_product, examples, layers, ops

import castwise.keras as ck
from castwise import LayerRule, Policy

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
    model = ck.apply(after_a_product(inner()), "float16")
    x = np.array([[300.0, -300.0, 300.0, 299.0]], "float32")
    assert ck.record(model, ops.convert_to_tensor(x))[0].format == "float16"
    np.testing.assert_allclose(model.predict(x, verbose=0), want(x.astype("float64")), rtol=2e-3)


def test_logsumexp_of_70000_values_is_right_in_float16():
    model = ck.apply(after_a_product(Of(lambda x: ops.logsumexp(ops.tile(x, (1, 17500)), axis=-1))), "float16")
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
    x, y = examples()
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
