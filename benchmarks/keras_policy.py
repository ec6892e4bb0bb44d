"""Keras' own mixed_bfloat16 and Castwise's policies: time of a training step and error, per backend.

    python benchmarks/keras_policy.py                    every backend that is installed, each in its own process
    KERAS_BACKEND=jax python benchmarks/keras_policy.py --here

The versions of each model have the same weights and see the same batch: float32, float32 once more, Keras'
mixed_bfloat16, Castwise's ``auto`` (what it takes for this machine) and Castwise's bfloat16. They are timed in turn, in
a random order each round. Times are medians; a ratio is the median over rounds of what two versions took in the same
round, so that a machine that is slower for a while slows both. The error is that of ``predict``, relative to float32's
results. ``auto`` holds where it is no slower than float32 and than Keras' own policy, within what float32 differs from
itself, at an error no larger than that of Keras' policy.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import subprocess
import sys
import time

BACKENDS = ("torch", "jax", "tensorflow")
ROUNDS = 60
SECONDS = 2.0  # for each version: one that is very slow is timed in fewer rounds
LEAST_SPREAD = 0.02  # of a median ratio; more where float32 differs more from itself


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="run in this process, on Keras' backend")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed steps of each version")
    parser.add_argument("--models", default="dense,conv,transformer")
    options = parser.parse_args()
    if options.here:
        run(options.models.split(","), options.rounds)
        return
    for backend in BACKENDS:
        if importlib.util.find_spec(backend) is None:
            print(f"{backend}: not installed")
            continue
        command = [sys.executable, __file__, "--here", "--rounds", str(options.rounds), "--models", options.models]
        subprocess.run(command, env={**os.environ, "KERAS_BACKEND": backend}, check=True)


def run(names: list[str], rounds: int) -> None:
    import keras
    import numpy as np

    import castwise.keras as ck

    layers = keras.layers
    rng = np.random.default_rng(0)

    def dense():
        inputs = x = keras.Input((512,))
        for _ in range(3):
            x = layers.Dense(512, activation="relu")(x)
        return keras.Model(inputs, layers.Dense(10)(x)), (128, 512)

    def conv():
        inputs = x = keras.Input((32, 32, 3))
        for width in (32, 64):
            x = layers.BatchNormalization()(layers.Conv2D(width, 3, strides=2, padding="same")(x))
            x = layers.Activation("relu")(x)
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))), (32, 32, 32, 3)

    def transformer():
        inputs = x = keras.Input((64, 128))
        for _ in range(2):
            h = layers.LayerNormalization()(x)
            x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(h, h)])
            h = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dense(128)(h)])
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))), (16, 64, 128)

    builders = {"dense": dense, "conv": conv, "transformer": transformer}
    print(f"\nKeras {keras.__version__} on {keras.backend.backend()}, ms of a training step")
    print(f"{'model':<12} {'version':<22} {'ms':>9} {'x float32':>10} {'x Keras':>8} {'error':>9}")
    for name in names:
        versions, shape, weights = {}, (), None
        for version in VERSIONS:
            if version.startswith("Keras"):
                keras.config.set_dtype_policy("mixed_bfloat16")
            model, shape = builders[name]()
            keras.config.set_dtype_policy("float32")
            if version.startswith("Castwise"):
                ck.apply(model, version.split()[1])
            weights = weights or model.get_weights()
            model.set_weights(weights)
            model.compile(keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            versions[version] = model
        x = rng.standard_normal(shape).astype("float32")
        y = rng.integers(0, 10, shape[0])
        want = np.asarray(versions["float32"].predict_on_batch(x), "float32")
        errors = {}
        for version, model in versions.items():
            got = np.asarray(keras.ops.convert_to_numpy(model.predict_on_batch(x)), "float32")
            errors[version] = float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))
            model.train_on_batch(x, y)
        show(name, timed(versions, lambda model, x=x, y=y: model.train_on_batch(x, y), rounds), errors)
        taken = sorted({layer.dtype_policy.name for layer in versions["Castwise auto"].layers})
        print(f"{name:<12} auto took {', '.join(taken)}", flush=True)


VERSIONS = ("float32", "float32 again", "Keras mixed_bfloat16", "Castwise auto", "Castwise bfloat16")


def timed(versions, step, rounds):
    """Version -> seconds of each round in which it ran."""
    times = {version: {} for version in versions}
    names, order = list(versions), random.Random(0)
    for number in range(rounds):
        order.shuffle(names)  # a step leaves caches and clocks to the one after it: no version always follows another
        for version in names:
            if sum(times[version].values()) > SECONDS:
                continue
            start = time.perf_counter()
            step(versions[version])
            times[version][number] = time.perf_counter() - start
    return times


def show(name, times, errors):
    """Print one model's rows, and whether ``auto`` holds."""

    def ratio(version, other):
        both = times[version].keys() & times[other].keys()
        return statistics.median(times[version][number] / times[other][number] for number in both)

    for version in VERSIONS:
        middle = 1e3 * statistics.median(times[version].values())
        to_float32, to_keras = ratio(version, "float32"), ratio(version, "Keras mixed_bfloat16")
        print(f"{name:<12} {version:<22} {middle:9.2f} {to_float32:10.2f} {to_keras:8.2f} {errors[version]:9.1e}")
    bound = 1.0 + max(abs(ratio("float32 again", "float32") - 1.0), LEAST_SPREAD)
    fast = ratio("Castwise auto", "float32") <= bound and ratio("Castwise auto", "Keras mixed_bfloat16") <= bound
    right = errors["Castwise auto"] <= errors["Keras mixed_bfloat16"]
    print(f"{name:<12} auto {'holds' if fast and right else 'DOES NOT HOLD'} (within {bound:.2f})", flush=True)


if __name__ == "__main__":
    main()
