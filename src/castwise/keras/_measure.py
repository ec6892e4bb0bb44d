"""What example inputs tell: which layers cannot bear the format, and whether it is worth having at all.

Each layer is run twice on the same float32 inputs, as the model hands them to it: once in float32, once by the policy.
What comes out differently is that layer's own doing. A layer is raised where values that float32 has are lost to the
format's range, or where its relative error is many times what rounding its inputs and results alone would give.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ._internals import children, keras, unlocked
from ._state import entered

__all__ = [
    "as_written",
    "faster_than_float32",
    "float32_layers",
    "judged",
    "layers_during",
    "lost_and_noise",
    "risky_layers",
]

# Units of the format's rounding error. A product of a few hundred terms whose inputs are rounded stays within four;
# sixteen is four bits lost, which no layer of the usual kinds does on values it was made for. A judgement.
_ROUNDINGS = 16
_REPEATS = 5
_MARGIN = 0.97  # of float32's time: a gain that is smaller than a few percent is not seen again on another day


def risky_layers(root: Any, example_inputs: Any) -> dict[str, str]:
    """Path -> why, for the innermost layers that the format does not suit."""
    seen = float32_layers(root, example_inputs)
    return {path: why for path, what in seen.items() if (why := judged(root, path, *what))}


def float32_layers(root: Any, example_inputs: Any) -> dict[str, tuple[Any, Any, Any, Any]]:
    """Path -> call, arguments and result of each innermost layer, in a call of the model in float32."""
    from .apply import arguments

    args, kwargs = arguments(root.model, example_inputs)
    return layers_during(root, lambda: root.model.call.__wrapped__(*args, **kwargs))


def layers_during(root: Any, run: Callable[[], Any]) -> dict[str, tuple[Any, Any, Any, Any]]:
    """The same, while something else runs the model."""
    seen: dict[str, tuple[Any, Any, Any, Any]] = {}
    names = {id(layer): path for path, layer in root.paths.items() if path and not children(layer)}
    with as_written(root), _watched(root, names, seen), entered(root, ""):
        run()
    return seen


@contextlib.contextmanager
def as_written(root: Any) -> Iterator[None]:
    """Inside, a prepared model computes as its code says, in float32."""
    kept, root.backend = root.backend, _AsWritten()
    try:
        yield
    finally:
        root.backend = kept


class _watched:
    """Inside, the layers of a model note what they are called with and what they return."""

    def __init__(self, root: Any, names: dict[int, str], seen: dict[str, Any]) -> None:
        self.root, self.names, self.seen = root, names, seen
        self.before: list[tuple[Any, Callable[..., Any]]] = []

    def __enter__(self) -> None:
        for path, layer in self.root.paths.items():
            self.before.append((layer, layer.call))
            if id(layer) in self.names:
                _swap(layer, self._noting(path, layer.call.__wrapped__))
            elif path:
                _swap(layer, layer.call.__wrapped__)

    def __exit__(self, *error: object) -> None:
        for layer, call in self.before:
            _swap(layer, call)

    def _noting(self, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.seen.setdefault(path, (original, args, kwargs, result))
            return result

        return call


def _swap(layer: Any, call: Callable[..., Any]) -> None:
    with unlocked(layer):
        layer.call = call


def judged(
    root: Any, path: str, original: Callable[..., Any], args: Any, kwargs: Any, wide: Any, *, range_only: bool = False
) -> str:
    """Why the format does not suit a layer, with these arguments; "" where it does."""
    fmt = root.policy.low_format
    lost, noise = lost_and_noise(root, path, original, args, kwargs, wide)
    if lost:
        return f"{100 * lost:.3g} % of its results leave the range of {fmt.long_name}"
    if noise > _ROUNDINGS * fmt.eps and not range_only:
        return f"its relative error in {fmt.long_name} is {noise:.2g}"
    return ""


def lost_and_noise(
    root: Any, path: str, original: Callable[..., Any], args: Any, kwargs: Any, wide: Any
) -> tuple[float, float]:
    """What a layer does to its results by the policy, on the arguments that it has in float32.

    Returns:
        The share of values that float32 has and the format has not, and the relative error of the others: of the
        result that fares worst.
    """
    backend = type(root.backend)(root)

    def layer(*inner: Any, **named: Any) -> Any:
        with backend.layer(path), entered(root, path):
            return original(*inner, **named)

    with entered(root, ""):
        low = backend.run(layer, args, kwargs)
    lost = noise = 0.0
    for have, want in zip(keras.tree.flatten(low), keras.tree.flatten(wide), strict=True):
        if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(want.dtype)):
            continue
        got, exact = _array(have), _array(want)
        finite = np.isfinite(exact)
        kept = finite & np.isfinite(got)
        lost = max(lost, float((finite & ~kept).mean()) if exact.size else 0.0)
        size = float(np.sqrt(np.mean(exact[kept] ** 2))) if kept.any() else 0.0
        error = float(np.sqrt(np.mean((got[kept] - exact[kept]) ** 2))) if kept.any() else 0.0
        noise = max(noise, error / size if size else 0.0)
    return lost, noise


def _array(value: Any) -> Any:
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(value, "float32")), np.float64)


def faster_than_float32(root: Any, example_inputs: Any) -> bool:
    """Whether the model's prediction, compiled as Keras compiles it, takes less time by the policy."""
    x = example_inputs[0] if isinstance(example_inputs, tuple) else example_inputs
    timed: dict[bool, list[float]] = {True: [], False: []}
    step = {by_policy: _predicting(root, by_policy) for by_policy in (True, False)}
    for repeat in range(_REPEATS + 1):
        for by_policy, predict in step.items():
            start = time.perf_counter()
            predict(x)
            if repeat:
                timed[by_policy].append(time.perf_counter() - start)
    return min(timed[True]) < _MARGIN * min(timed[False])


def _predicting(root: Any, by_policy: bool) -> Callable[[Any], Any]:
    model = root.model

    def predict(x: Any) -> Any:
        kept = root.backend
        if not by_policy:
            root.backend = _AsWritten()
        model.predict_function = functions.get("f")
        try:
            result = model.predict_on_batch(x)
        finally:
            functions["f"], model.predict_function, root.backend = model.predict_function, None, kept
        return result

    functions: dict[str, Any] = {}
    return predict


class _AsWritten:
    """A backend that changes nothing."""

    def run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def layer(self, path: str) -> Any:
        return contextlib.nullcontext()
