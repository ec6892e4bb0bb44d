"""Why a step of a prepared model broke: its forward is repeated on training data, layer by layer.

The step itself ran inside one compiled program, in which nothing can be asked. So each innermost layer is run on what
the float32 model hands it, in float32 and by the policy. The first that loses what float32 keeps is the guilty one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from castwise.guard import Finding, Kind

from ._internals import keras
from ._measure import float32_layers, judged

__all__ = ["batches_of", "examine"]

_MOST_BATCHES = 64


def batches_of(x: Any, batch_size: int | None) -> Iterator[Any]:
    """The inputs of the first batches of what ``fit`` was given: arrays, or an iterable of ``(x, y, …)`` batches."""
    leaves = keras.tree.flatten(x)
    if leaves and all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in leaves):
        size = batch_size or 32
        for start in itertools.islice(range(0, int(leaves[0].shape[0]), size), _MOST_BATCHES):
            yield keras.tree.map_structure(lambda leaf, start=start: leaf[start : start + size], x)
        return
    if isinstance(x, keras.utils.PyDataset):
        yield from (_inputs(x[place]) for place in range(min(len(x), _MOST_BATCHES)))
    elif isinstance(x, Iterable) and not isinstance(x, Iterator):  # what can be read once belongs to the training
        yield from map(_inputs, itertools.islice(iter(x), _MOST_BATCHES))


def examine(root: Any, batches: Iterable[Any], scale: float) -> Finding:
    """What breaks the forward on the first batch that breaks it; ``Kind.SCALE`` where none does."""
    looked = 0
    for batch in batches:
        looked += 1
        found = _on_batch(root, batch, scale)
        if found is not None:
            return found
    if not looked:
        return Finding(kind=Kind.UNKNOWN, phase="forward", evidence="the training data can be read only once")
    evidence = f"the forward of {looked} batches is finite, so it is the gradients that leave the format"
    return Finding(kind=Kind.SCALE, phase="backward", evidence=evidence, scale=scale, finite_scale=scale / 2)


def _on_batch(root: Any, batch: Any, scale: float) -> Finding | None:
    if not all(map(_finite, keras.tree.flatten(batch))):
        return Finding(kind=Kind.DATA, source="input", evidence="the input holds infinite or NaN values", scale=scale)
    for path, (original, args, kwargs, wide) in float32_layers(root, batch).items():
        if not all(map(_finite, keras.tree.flatten(wide))):
            evidence = "its results are not finite in float32 either"
            return Finding(kind=Kind.BROKEN, layer=path, evidence=evidence, scale=scale)
        why = judged(root, path, original, args, kwargs, wide, range_only=True)
        if why:
            return Finding(kind=Kind.RANGE, layer=path, evidence=why, scale=scale)
    return None


def _finite(value: Any) -> bool:
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return array.dtype.kind not in "fV" or bool(np.isfinite(array.astype("float64")).all())


def _inputs(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) else batch
