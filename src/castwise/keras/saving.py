"""Loading models, with the policy that the caller asks for and not the one that the file was saved under."""

from __future__ import annotations

import json
import os
import zipfile
from typing import Any

from castwise.scaling import ScaleState, ScalingConfig

from ._internals import keras
from .apply import apply
from .scaling import ASSET, LossScaleOptimizer

__all__ = ["load_model"]


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
    model = keras.models.load_model(path, **arguments)
    model = apply(model, policy)
    kept = _kept_state(path)
    optimizer = getattr(model, "optimizer", None)
    if kept is not None and isinstance(optimizer, LossScaleOptimizer) and optimizer.built:
        optimizer.restore(ScaleState.from_dict(kept["state"]))
    return model


def saved_scaling(path: str | os.PathLike[str]) -> ScalingConfig | None:
    """The knobs of the loss scale that a file was trained with; None where Castwise did not write it."""
    kept = _kept_state(path)
    return None if kept is None else ScalingConfig(**kept["config"])


def _kept_state(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(ASSET):
                kept: dict[str, Any] = json.loads(archive.read(name))
                return kept
    return None
