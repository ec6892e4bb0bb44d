"""Checking a converted model again, on any machine: types, structure, and its numbers against the fp32 model."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import numpy as np
import onnx

from castwise.onnx._emulate import emulated
from castwise.onnx._errors import ConversionError
from castwise.onnx._evaluate import Outcome, OutputError, compare, infer, worst
from castwise.onnx._normalise import normalise
from castwise.onnx._run import Runner
from castwise.onnx._samples import Array, Feed, Samples, made_up
from castwise.onnx._source import Source, read
from castwise.onnx._stamp import STAMP, digest

__all__ = ["Verification", "verify"]


@dataclass(frozen=True)
class Verification:
    """What a converted model does, compared with the model it was made from."""

    outputs: tuple[OutputError, ...]
    tolerance: float | None
    """What was asked for, else what the model was converted for; None where neither is known."""
    differences: tuple[str, ...]
    """What differs between how the model was made and how it was checked, in words."""
    samples: int
    calibrated: bool

    @property
    def error(self) -> float:
        """The largest error of any output: max |difference| / max(1, max |fp32 value|)."""
        return max((output.error for output in self.outputs), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether the tolerance is kept; with none, whether everything is finite that is finite in fp32."""
        return self.error <= (self.tolerance if self.tolerance is not None else float("1e308"))


def verify(
    model: onnx.ModelProto | str | os.PathLike[str] | bytes,
    against: onnx.ModelProto | str | os.PathLike[str] | bytes,
    *,
    calibration: object = None,
    tolerance: float | None = None,
) -> Verification:
    """Compare a converted model with the one it was made from, computing its 16-bit roundings exactly.

    Raises ConversionError where either is not valid, their inputs or outputs differ, or nothing here runs them.
    """
    converted, original = read(model), read(against)
    low = infer(normalise(converted.skeleton, converted.name, []))
    reference = infer(normalise(original.skeleton, original.name, []))
    differences, asked = _stamped(converted, original)
    for what, ours, theirs in (
        ("outputs", _names(low.graph.output), _names(reference.graph.output)),
        ("inputs", _names(_inputs(low, converted)), _names(_inputs(reference, original))),
    ):
        if ours != theirs:
            raise ConversionError(
                f"{converted.name} has the {what} {ours}, {original.name} has {theirs}. Give the model it is from."
            )
    try:
        first, second = Runner(emulated(reference), _arrays(original)), Runner(emulated(low), _arrays(converted))
        samples = _samples(reference, original, calibration, first)
        total: Outcome | None = None
        for feed in samples:
            outcome = compare(first.outputs, first.run(feed), second.run(feed))
            total = outcome if total is None else worst(total, outcome)
    except RuntimeError as error:
        raise ConversionError(
            f"The models cannot be run here: {error}. Install onnxruntime, or give other inputs."
        ) from error
    assert total is not None
    wanted = tolerance if tolerance is not None else asked
    return Verification(total.outputs, wanted, tuple(differences), len(samples), calibration is not None)


def _samples(model: onnx.ModelProto, source: Source, calibration: object, runner: Runner) -> Samples | list[Feed]:
    inputs = _inputs(model, source)
    if calibration is not None:
        return Samples(calibration, inputs, frozenset())

    def runs(feed: Feed) -> bool:
        try:
            runner.run(feed)
        except RuntimeError:
            return False
        return True

    feed = made_up(inputs, runs)
    if feed is None:
        raise ConversionError("No inputs could be made up that the model runs on. Give calibration data.")
    return [feed]


def _inputs(model: onnx.ModelProto, source: Source) -> list[onnx.ValueInfoProto]:
    held = set(source.weights) | {tensor.name for tensor in model.graph.initializer}
    return [info for info in model.graph.input if info.name not in held]


def _names(infos: object) -> list[str]:
    return [info.name for info in infos]  # type: ignore[attr-defined]


def _arrays(source: Source) -> dict[str, Array]:
    return {
        name: array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else np.asarray(array)
        for name, array in source.weights.items()
    }


def _stamped(converted: Source, original: Source) -> tuple[list[str], float | None]:
    """What the converted model's stamp says that is different here, and the tolerance it was converted for."""
    entry = next((e.value for e in converted.skeleton.metadata_props if e.key == STAMP), None)
    if entry is None:
        return [f"{converted.name} carries no record of how it was converted"], None
    try:
        data = json.loads(entry)
        made = dict(data["fingerprint"])
        tolerance = data["settings"]["tolerance"]
    except (ValueError, KeyError, TypeError):
        return [f"{converted.name}'s record of how it was converted cannot be read"], None
    found = []
    if data.get("digest") != digest(converted.skeleton):
        found.append(f"{converted.name} was changed after it was converted")
    if made.get("source") not in (None, digest(original.skeleton)):
        found.append(f"{converted.name} was converted from another model than {original.name}")
    if made.get("onnx") != onnx.__version__:
        found.append(f"converted with onnx {made.get('onnx')}, checked with {onnx.__version__}")
    return found, None if tolerance in (None, "None") else float(tolerance)
