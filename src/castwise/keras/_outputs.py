"""Which layers give a model's outputs: their results are what a loss or a user reads, so they stay float32."""

from __future__ import annotations

import logging
from typing import Any

from ._internals import children, keras, unlocked

__all__ = ["output_layers"]

log = logging.getLogger("castwise.keras")


def output_layers(model: Any, paths: dict[str, Any], example_inputs: Any) -> list[str]:
    """Their paths. A subclassed model shows them when it runs, so example inputs are needed there."""
    by_id = {id(layer): path for path, layer in paths.items()}
    layers = _of_graph(model)
    if layers is None and example_inputs is not None:
        layers = _of_run(model, paths, example_inputs)
    if layers is None:
        log.warning(
            "%s: which layers give its outputs is not known before it has run, so none is kept in float32 for that. "
            "Pass example_inputs to castwise.keras.apply, or name them: LayerRule('head', format='float32').",
            model.name,
        )
        return []
    return list(dict.fromkeys(by_id[id(layer)] for layer in layers if by_id.get(id(layer))))


def _of_graph(model: Any) -> list[Any] | None:
    """The layers at the ends of a functional or sequential model, through models inside of it."""
    try:
        outputs = keras.tree.flatten(model.outputs)
    except (AttributeError, ValueError):
        return None
    found: list[Any] = []
    for output in outputs:
        history = getattr(output, "_keras_history", None)
        operation = history.operation if history is not None else None
        if not isinstance(operation, keras.Layer):
            continue  # an op of keras.ops: no layer rule reaches it, the catalogue decides
        inner = _of_graph(operation) if children(operation) else None
        found += inner if inner else [operation]
    return found


def _of_run(model: Any, paths: dict[str, Any], example_inputs: Any) -> list[Any]:
    """The layers whose own results come out of a call unchanged, the innermost of each."""
    from .apply import arguments

    results: dict[int, Any] = {}
    kept: list[Any] = []
    originals: list[tuple[Any, Any]] = []

    def watching(layer: Any, call: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            for leaf in keras.tree.flatten(result):
                kept.append(leaf)
                results.setdefault(id(leaf), layer)
            return result

        return watched

    for path, layer in paths.items():
        if path and "call" not in vars(layer):
            originals.append((layer, None))
            with unlocked(layer):
                layer.call = watching(layer, layer.call)
    try:
        args, kwargs = arguments(model, example_inputs)
        outputs = keras.tree.flatten(model(*args, **kwargs))
    finally:
        for layer, _ in originals:
            with unlocked(layer):
                object.__delattr__(layer, "call")
    return [results[id(output)] for output in outputs if id(output) in results]
