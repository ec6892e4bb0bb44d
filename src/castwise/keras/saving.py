"""Loading models, with the policy that the caller asks for and not the one that the file was saved under."""

from __future__ import annotations

import json
import os
import zipfile
from typing import Any

from castwise.scaling import ScaleState

from ._internals import keras
from .apply import apply
from .scaling import ASSET, LossScaleOptimizer

__all__ = ["load_model"]

_SCALED = "mixed_float16"


def load_model(path: str | os.PathLike[str], policy: Any = "float32", **arguments: Any) -> Any:
    """A model from a ``.keras`` file, prepared with a policy. ``keras.models.load_model`` alone keeps the file's.

    Args:
        path: of the file, whoever saved it.
        policy: as for ``apply``. Where it scales the loss and the file holds the state of a loss scale, training goes
            on from that state.
        arguments: of ``keras.models.load_model``.

    Raises:
        PolicyError: the policy makes no sense.
    """
    model = apply(_as_it_was_saved(path, arguments), policy)
    kept = _kept_state(path)
    optimizer = getattr(model, "optimizer", None)
    if kept is not None and isinstance(optimizer, LossScaleOptimizer) and optimizer.built:
        optimizer.restore(kept)
    return model


def _as_it_was_saved(path: str | os.PathLike[str], arguments: dict[str, Any]) -> Any:
    """The model, with the optimizer that it had.

    Under a global ``"mixed_float16"`` Keras scales the loss of what it compiles, and says so nowhere in the file: it
    fails to load what it saved under one where that policy is not set again.
    """
    try:
        return keras.models.load_model(path, **arguments)
    except ValueError:
        if keras.config.dtype_policy().name == _SCALED or not _mentions(path, _SCALED):
            raise
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(_SCALED)
    try:
        return keras.models.load_model(path, **arguments)
    finally:
        keras.config.set_dtype_policy(before)


def _mentions(path: str | os.PathLike[str], policy: str) -> bool:
    """Whether a layer of the file's model has a dtype policy of this name."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return f'"{policy}"'.encode() in archive.read("config.json")


def _kept_state(path: str | os.PathLike[str]) -> ScaleState | None:
    """The state of the loss scale that the file's model was trained with; None where Castwise did not write it."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(ASSET):
                return ScaleState.from_dict(json.loads(archive.read(name)))
    return None
