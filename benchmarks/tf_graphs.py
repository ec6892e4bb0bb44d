"""TensorFlow graphs: float32, Grappler's bfloat16 rewrite, Keras' mixed_bfloat16, and Castwise's plan and preset.

    python benchmarks/tf_graphs.py [--seconds 2] [--models mlp convnet transformer rnn]

Of each model one training step (forward, backward, SGD) as one graph. Shown are the median step of runs that take
turns, relative to float32; the float casts in the graph that TensorFlow ran after its own optimisers; and the relative
error of the loss's gradients against float64. "castwise auto" is what
``castwise.tensorflow.autocast(step, example_inputs=...)`` chooses on this machine; "castwise plan" the same when asked
for bfloat16; "castwise bf16" is the preset, which ignores costs; "planned, A100" a plan for a device that computes it.

Grappler rewrites to bfloat16 where oneDNN is enabled, which TensorFlow does by itself only on CPUs with AVX-512: it is
enabled here. ``TF_ENABLE_ONEDNN_OPTS=0`` leaves it off, and Grappler then rewrites nothing.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ["KERAS_BACKEND"] = "tensorflow"
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "tensorflow"))

import graphs
import keras
import numpy as np
import tensorflow as tf
import weak_cases

from castwise.tensorflow import autocast, plan

GRAPPLER = "grappler bf16"
DEVICE = "a100"
KINDS = (GRAPPLER, "keras", "castwise auto", "castwise plan", "castwise bf16", "planned, A100")
SEED, IN_A_ROW = 0, 4


def optimise(kind: str) -> None:
    """Have Grappler rewrite what runs from now on, or not: TensorFlow asks at each call."""
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision_onednn_bfloat16": kind == GRAPPLER})


def medians(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The median seconds of each; they take turns of a few calls in any order, of which the first does not count."""
    order = np.random.default_rng(SEED)
    taken: dict[str, list[float]] = {kind: [] for kind in runs}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or min(map(len, taken.values())) < 3 * IN_A_ROW:
        for kind in order.permutation(list(runs)):
            run = runs[kind]
            optimise(kind)
            run()
            for _ in range(IN_A_ROW):
                begun = time.perf_counter()
                run()
                taken[kind].append(time.perf_counter() - begun)
    optimise("")
    return {kind: float(np.median(every)) for kind, every in taken.items()}


def show(name: str, kind: str, median: float, wide: float, casts: int, error: float) -> None:
    print(
        f"{name:12} {kind:14} {1e3 * median:8.2f} ms {median / wide:6.2f} x {casts:4d} casts  {error:.2e}", flush=True
    )


class WhileRNN(keras.layers.Layer):
    """A recurrent layer as a while loop of the user's own."""

    def __init__(self, width: int, **named: Any) -> None:
        super().__init__(**named)
        self.width = width

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1], self.width), name="w")
        self.u = self.add_weight(shape=(self.width, self.width), name="u", initializer="orthogonal")

    def call(self, x: Any) -> Any:
        steps = x.shape[1]
        ahead = tf.transpose(tf.matmul(x, self.w.value), [1, 0, 2])
        u = tf.convert_to_tensor(self.u.value)
        h = tf.zeros_like(ahead[0])

        def body(i: Any, h: Any) -> Any:
            return i + 1, h + 0.1 * tf.tanh(ahead[i] + tf.matmul(h, u))

        return tf.while_loop(lambda i, h: i < steps, body, [0, h], maximum_iterations=steps)[1]


def mlp() -> tuple[Any, Any]:
    layers = [keras.layers.Dense(256, activation="gelu") for _ in range(3)]
    return keras.Sequential([keras.Input((128,)), *layers, keras.layers.Dense(10, dtype="float32")]), (64, 128)


def convnet() -> tuple[Any, Any]:
    model = keras.Sequential([keras.Input((16, 16, 8))])
    for width in (16, 32):
        model.add(keras.layers.Conv2D(width, 3, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.ReLU())
        model.add(keras.layers.MaxPooling2D())
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(10, dtype="float32"))
    return model, (16, 16, 16, 8)


def transformer() -> tuple[Any, Any]:
    x = inputs = keras.Input((16, 64))
    for _ in range(2):
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 16)(h, h)
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(64)(keras.layers.Dense(256, activation="gelu")(h))
    x = keras.layers.Dense(10, dtype="float32")(keras.layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, x), (16, 16, 64)


def rnn() -> tuple[Any, Any]:
    model = keras.Sequential([keras.Input((24, 64)), WhileRNN(128), keras.layers.Dense(10, dtype="float32")])
    return model, (32, 24, 64)


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "mlp": mlp,
    "convnet": convnet,
    "transformer": transformer,
    "rnn": rnn,
}


def step_of(make: Callable[[], tuple[Any, Any]], policy: str) -> tuple[Any, Any, Any, Any]:
    """A training step that returns its gradients, its arguments, and what it trains."""
    keras.utils.set_random_seed(SEED)
    keras.config.set_dtype_policy(policy)
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    model, shape = make()
    keras.config.set_dtype_policy("float32")
    random = np.random.default_rng(SEED)
    dtype = tf.float64 if policy == "float64" else tf.float32
    x = tf.constant(random.standard_normal(shape), dtype)
    labels = tf.constant(random.integers(0, 10, shape[0]))
    variables = [variable.value for variable in model.trainable_variables]

    def step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.cast(model(x, training=True), dtype)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, variables)
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(1e-3 * grad)
        return [loss, *grads]

    return step, (x, labels), model, variables


def exact_gradients(make: Callable[[], tuple[Any, Any]], start: list[Any]) -> list[Any]:
    """Gradients of the first step in float64, from the same weights."""
    step, args, model, _ = step_of(make, "float64")
    for variable, value in zip(model.variables, start, strict=True):
        variable.assign(value)
    return [one.numpy() for one in tf.function(step)(*args)][1:]


def measure(name: str, seconds: float, kinds: Sequence[str]) -> None:
    """Print the table of one model."""
    make = MODELS[name]
    runs: dict[str, Callable[[], Any]] = {}
    casts: dict[str, int] = {}
    errors: dict[str, float] = {}
    start: list[Any] = []
    exact: list[Any] = []
    for kind in ("float32", *kinds):
        step, args, model, _ = step_of(make, "mixed_bfloat16" if kind == "keras" else "float32")
        if not start:
            start = [variable.numpy() for variable in model.variables]
            exact = exact_gradients(make, start)
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        fn = tf.function(step)
        if kind == "castwise auto":
            fn = autocast(fn, example_inputs=args)
        elif kind == "castwise plan":
            fn = autocast(fn, plan=plan(fn, *args, policy="bfloat16"))
        elif kind == "castwise bf16":
            fn = autocast(fn, "bfloat16")
        elif kind == "planned, A100":
            fn = autocast(fn, plan=plan(fn, *args, policy="bfloat16", device=DEVICE))
        optimise(kind)
        casts[kind] = len(graphs.float_casts(graphs.executed(fn, *args)))
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        found = [tf.cast(one, tf.float64).numpy() for one in fn(*args)][1:]
        off = sum(float(np.square(a - b).sum()) for a, b in zip(found, exact, strict=True))
        errors[kind] = float(np.sqrt(off / sum(float(np.square(b).sum()) for b in exact)))
        runs[kind] = functools.partial(fn, *args)
    found = medians(runs, seconds)
    for kind in runs:
        show(name, kind, found[kind], found["float32"], casts[kind], errors[kind])


def measure_case(name: str, seconds: float) -> None:
    """Print the table of one of the cases that lists of ops get wrong, planned for a device with bfloat16."""
    case = weak_cases.CASES[name]()
    runs: dict[str, Callable[[], Any]] = {}
    casts: dict[str, int] = {}
    errors: dict[str, float] = {}
    for kind in ("float32", GRAPPLER, "castwise bf16", "planned, A100"):
        fn = tf.function(case.function)
        if kind == "castwise bf16":
            fn = autocast(fn, "bfloat16")
        elif kind == "planned, A100":
            fn = autocast(fn, plan=plan(fn, *case.inputs, policy="bfloat16", device=DEVICE))
        optimise(kind)
        casts[kind] = len(graphs.float_casts(graphs.executed(fn, *case.inputs)))
        errors[kind] = case.error(fn(*case.inputs))
        runs[kind] = functools.partial(fn, *case.inputs)
    found = medians(runs, seconds)
    for kind in runs:
        show(name, kind, found[kind], found["float32"], casts[kind], errors[kind])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing, per model")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="beside float32")
    parser.add_argument("--cases", action="store_true", help="small cases instead of models: result errors")
    args = parser.parse_args()
    print(f"{'model':12} {'kind':14} {'step':>11} {'of fp32':>8} {'casts':>10}  error")
    for name in weak_cases.CASES if args.cases else args.models:
        if args.cases:
            measure_case(name, args.seconds)
        else:
            measure(name, args.seconds, args.kinds)


if __name__ == "__main__":
    main()
