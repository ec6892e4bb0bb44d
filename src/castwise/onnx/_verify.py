"""Checking a converted model again, on any machine: types, structure, and its numbers against the fp32 model."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from castwise.onnx import _targets
from castwise.onnx._emulate import emulated, is_narrow
from castwise.onnx._errors import ConversionError
from castwise.onnx._evaluate import Outcome, OutputError, compare, infer, uncompared, worst
from castwise.onnx._normalise import normalise
from castwise.onnx._run import Runner
from castwise.onnx._samples import Array, Feed, Samples, made_up
from castwise.onnx._scopes import build_tree
from castwise.onnx._slots import ELEMENT
from castwise.onnx._source import Source, read
from castwise.onnx._stamp import STAMP, VERSION, digest, versions

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
    fingerprint: Mapping[str, str]
    """What the model was made from, for and with: its own record of that; empty where it carries none."""

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
    target: str | None = None,
) -> Verification:
    """Compare a converted model with the one it was made from, computing its 16-bit roundings exactly.

    ``target`` names the runtime that it is for here: where it was made for another one, what that one lacks is said.

    Raises ConversionError where either is not valid, their inputs or outputs differ, or nothing here runs them.
    """
    converted, original = read(model), read(against)
    low = infer(normalise(converted.skeleton, converted.name, []))
    reference = infer(normalise(original.skeleton, original.name, []))
    made, differences, asked = _stamped(converted, original)
    differences += _elsewhere(low, made, target) if target is not None else []
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
    differences += uncompared(total.outputs)
    wanted = tolerance if tolerance is not None else asked
    return Verification(total.outputs, wanted, tuple(differences), len(samples), calibration is not None, made)


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


def _stamped(converted: Source, original: Source) -> tuple[dict[str, str], list[str], float | None]:
    """A converted model's fingerprint, what is different here, and the tolerance it was converted for."""
    entry = next((e.value for e in converted.skeleton.metadata_props if e.key == STAMP), None)
    if entry is None:
        return {}, [f"{converted.name} carries no record of how it was converted"], None
    try:
        data = json.loads(entry)
        made = {str(key): str(value) for key, value in dict(data["fingerprint"]).items()}
        tolerance = data["settings"]["tolerance"]
        asked = None if tolerance in (None, "None") else float(tolerance)
    except (ValueError, KeyError, TypeError):
        return {}, [f"{converted.name}'s record of how it was converted cannot be read"], None
    found = []
    if data.get("digest") != digest(converted.skeleton):
        found.append(f"{converted.name} was changed after it was converted")
    if made.get("source") not in (None, digest(original.skeleton)):
        found.append(f"{converted.name} was converted from another model than {original.name}")
    here = versions()
    for key in sorted(key for key in {*made, *here} if key.endswith(VERSION)):
        if made.get(key) != here.get(key):
            name = key.removesuffix(VERSION)
            found.append(
                f"converted with {_version(name, made.get(key))}, checked with {_version(name, here.get(key))}"
            )
    return made, found, asked


def _version(name: str, version: str | None) -> str:
    return f"{name} {version}" if version is not None else f"no {name}"


def _elsewhere(model: onnx.ModelProto, made: Mapping[str, str], target: str) -> list[str]:
    """What is different where a model runs on another target than it was made for."""
    asked, found = _targets.get(target), []
    if made.get("target", "") != target:
        found.append(f"converted for {made.get('target') or 'no target'}, checked for {target}")
    formats = {int(elem): fmt for fmt, elem in ELEMENT.items()}
    tree = build_tree(model, {})
    lacking: Counter[tuple[str, str]] = Counter()
    for node in tree.nodes():
        fmt = next((formats[v.elem] for v in node.outputs if v is not None and is_narrow(v.elem)), None)
        exempt = node.domain or node.bodies or node.op_type in ("Cast", "Constant")
        if fmt is not None and not exempt and not asked.has_kernel(node.op_type, tree.opsets.get("", 0), fmt):
            lacking[node.op_type, fmt] += 1
    for (op_type, fmt), count in sorted(lacking.items()):
        found.append(f"{target} has no {fmt} kernel of {op_type}, which {count} of the nodes are")
    return found
