"""A Keras task for `castwise study`: the scanned digits of scikit-learn, on whichever backend Keras has.

KERAS_BACKEND=jax castwise study examples/keras_study.py:Digits
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits


class Digits:
    """Handwritten digits, 8 by 8 pixels, a small convolutional network."""

    framework, metric, direction, margin = "keras", "accuracy", "higher", 0.01
    steps, seeds = 150, 3

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        images = (images[order] / 16.0).astype("float32").reshape(-1, 8, 8, 1)
        labels = labels[order].astype("int32")
        self.train, self.test = (images[:-360], labels[:-360]), (images[-360:], labels[-360:])

    def model(self, seed: int) -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="edges"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.1),
                keras.layers.Dense(10, name="digits"),
            ]
        )

    def optimizer(self, model: keras.Model) -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(3e-3)

    def batches(self, seed: int) -> Iterator[Any]:
        images, labels = self.train
        while True:
            order = np.random.permutation(len(labels))
            for start in range(0, len(order) - 63, 64):
                chosen = order[start : start + 64]
                yield images[chosen], labels[chosen]

    def loss(self, model: keras.Model, batch: Any, training: bool) -> Any:
        logits = model(batch[0], training=training)
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(batch[1], logits, from_logits=True))

    def validation(self) -> Iterator[Any]:
        yield self.test

    def evaluate(self, model: keras.Model) -> float:
        images, labels = self.test
        answers = keras.ops.convert_to_numpy(model(keras.ops.convert_to_tensor(images), training=False)).argmax(-1)
        return float((answers == labels).mean())
