"""Small models and data for the claims beside this file, and two devices where a backend can have them on a CPU."""

from __future__ import annotations

import keras
import numpy as np

BACKEND = keras.backend.backend()
tf = jax = None
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


def array(value):
    return np.asarray(ops.convert_to_numpy(ops.cast(value, "float32")))


def examples(n=8, width=4):
    x = RNG.standard_normal((n, width)).astype("float32")
    return x, x[:, :1] * 2 + 1


def dense(*, dtype=None):
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


def after_a_product(inner, width=4):
    """A model whose `inner` layer is handed values that a narrow product has made: `scale` times the inputs."""
    eye = layers.Dense(width, use_bias=False, kernel_initializer="identity", name="eye")
    inputs = keras.Input((width,))
    return keras.Model(inputs, Of(lambda x: x * 1.0, name="out")(inner(eye(inputs))))
