"""The record that a converted model carries of how it was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import onnx

from castwise import __version__
from castwise.onnx._run import onnxruntime

__all__ = ["STAMP", "VERSION", "digest", "is_unchanged", "stamp", "versions"]

STAMP = "castwise.conversion"
"""Key of the record among a model's metadata properties."""


VERSION = " version"
"""What the keys of versions in a fingerprint end with."""


def versions() -> dict[str, str]:
    """The versions of what plans and measures here, as they stand in a fingerprint."""
    runtime = onnxruntime()
    found = {"castwise": __version__, "onnx": onnx.__version__}
    if runtime is not None:
        found["onnxruntime"] = str(runtime.__version__)
    return {f"{name}{VERSION}": version for name, version in found.items()}


def digest(skeleton: onnx.ModelProto) -> str:
    """SHA-256 of a skeleton's graph, in hexadecimal."""
    return hashlib.sha256(skeleton.graph.SerializeToString(deterministic=True)).hexdigest()


def stamp(model: onnx.ModelProto, settings: Mapping[str, object], fingerprint: Mapping[str, str]) -> None:
    """Write the record into a skeleton, in place of an older one."""
    kept = [(entry.key, entry.value) for entry in model.metadata_props if entry.key != STAMP]
    del model.metadata_props[:]
    for key, value in kept:
        model.metadata_props.add(key=key, value=value)
    record = {"digest": digest(model), "settings": _plain(settings), "fingerprint": dict(fingerprint)}
    model.metadata_props.add(key=STAMP, value=json.dumps(record, sort_keys=True))


def is_unchanged(model: onnx.ModelProto, settings: Mapping[str, object]) -> bool:
    """Whether a skeleton is a result of these very settings, and nobody has changed it since."""
    entry = next((entry.value for entry in model.metadata_props if entry.key == STAMP), None)
    try:
        data = json.loads(entry) if entry is not None else None
    except ValueError:
        return False
    return isinstance(data, dict) and data.get("settings") == _plain(settings) and data.get("digest") == digest(model)


def _plain(settings: Mapping[str, object]) -> object:
    return json.loads(json.dumps(settings, default=str))
