"""Handwritten digits with Keras, in mixed precision, on whichever backend Keras has.

    KERAS_BACKEND=jax python examples/keras_digits.py --policy bfloat16

The data are the 1,797 scanned digits that come with scikit-learn. The model is trained twice from the same weights, in
float32 and by the policy; both accuracies are printed, with what each kind of operation was computed in.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import castwise.keras


def network() -> keras.Model:
    """A small convolutional network."""
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="edges")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Conv2D(32, 3, strides=2, activation="relu", name="shapes")(x)
    x = keras.layers.Dense(64, activation="relu", name="hidden")(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(10, name="digits")(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="float16", help="a policy's, preset's or format's name")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    data = train_test_split(images, labels.astype("int32"), test_size=360, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = data

    keras.utils.set_random_seed(0)
    weights = network().get_weights()
    for policy in ("float32", options.policy):
        keras.utils.set_random_seed(1)
        model = network()
        model.set_weights(weights)
        castwise.keras.apply(model, policy, example_inputs=train_x[:32])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
        watch = castwise.keras.Watch(every=50)
        model.fit(train_x, train_y, batch_size=64, epochs=options.epochs, verbose=0, callbacks=[watch])
        loss_value, accuracy = model.evaluate(test_x, test_y, verbose=0)
        print(f"{keras.backend.backend()}, {policy}: accuracy {accuracy:.3f}, loss {loss_value:.4f}")
    if options.policy != "float32":
        print(castwise.keras.record(model, keras.ops.convert_to_tensor(test_x[:8])).by_format)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "digits.keras"
            model.save(path)
            again = castwise.keras.load_model(path, "float32")
            agree = np.mean(again.predict(test_x, verbose=0).argmax(-1) == model.predict(test_x, verbose=0).argmax(-1))
            print(f"saved, and loaded as float32: {100 * agree:.1f} % of the answers are the same")


if __name__ == "__main__":
    main()
