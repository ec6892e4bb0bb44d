"""Keras' own mixed_bfloat16 and Castwise's policies: time of a training step and error, per backend.

    python benchmarks/keras_policy.py                    every backend that is installed, each in its own process
    KERAS_BACKEND=jax python benchmarks/keras_policy.py --here

Four versions of each model have the same weights and see the same batch: float32, Keras' mixed_bfloat16, Castwise's
``auto`` (what it takes for this machine) and Castwise's bfloat16. Their steps are timed in turn, and the least time of
each counts, so that a busy machine slows all of them alike. The error is that of ``predict``, relative to float32's
results. The last column says whether ``auto`` keeps its promise: no slower than float32 and than Keras' own policy,
within the spread of the clock, at an error no larger.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time

BACKENDS = ("torch", "jax", "tensorflow")
# Two runs of one and the same program differ by this much here; measured on float32 against itself and printed.
ROUNDS = 12


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
    print(f"\nKeras {keras.__version__} on {keras.backend.backend()}: ms of a training step (x of float32), error")
    for name in names:
        versions, shape, weights = {}, (), None
        for version in ("float32", "float32 again", "keras mixed_bfloat16", "castwise auto", "castwise bfloat16"):
            if version.startswith("keras"):
                keras.config.set_dtype_policy("mixed_bfloat16")
            model, shape = builders[name]()
            keras.config.set_dtype_policy("float32")
            if version.startswith("castwise"):
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
        times = {version: [] for version in versions}
        for _ in range(rounds):
            for version, model in versions.items():
                start = time.perf_counter()
                model.train_on_batch(x, y)
                times[version].append(1e3 * (time.perf_counter() - start))
        best = {version: min(values) for version, values in times.items()}
        base = best["float32"]
        cells = [f"{v} {best[v]:.2f} ({best[v] / base:.2f}x, {errors[v]:.1e})" for v in versions]
        spread = max(abs(best["float32 again"] / base - 1.0), 0.03)
        auto, own = best["castwise auto"], best["keras mixed_bfloat16"]
        kept = auto <= base * (1 + spread) and auto <= own * (1 + spread)
        kept = kept and errors["castwise auto"] <= errors["keras mixed_bfloat16"]
        print(f"  {name:<12} {'; '.join(cells)}; auto {'holds' if kept else 'DOES NOT HOLD'}", flush=True)


if __name__ == "__main__":
    main()
