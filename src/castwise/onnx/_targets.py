"""Runtimes that a model can be converted for: what they compute in 16 bits, and what that does to a plan.

The lists are data (``targets.toml``), each with its source. An operator without a kernel stays fp32, unless the runtime
would run it anyway, in fp32 between casts of its own: then lowering it is the user's choice, which ``auto`` does not
make.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from castwise.cost import Costs, roofline
from castwise.errors import FormatError, did_you_mean
from castwise.formats import parse_format
from castwise.hardware import Device, Support, detect, get_device
from castwise.onnx._capture import Captured
from castwise.onnx._errors import ConversionError

__all__ = ["TARGETS", "Target", "advice", "choose_formats", "costs", "get", "lacking"]

TARGETS = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "openvino")
_PLANNED = ("fp16", "bf16")
_USUAL_DEVICE = "a100"
"""The device that prices ``auto`` where no target is named: one with units for both 16-bit formats."""


@dataclass(frozen=True)
class Target:
    """A runtime. ``kernels`` holds, by format, what targets.toml says of it."""

    name: str
    runtime: str
    device: Device
    source: str
    note: str
    optional: bool
    kernels: Mapping[str, Mapping[str, Any]]

    def has_kernel(self, op_type: str, opset: int, fmt: str) -> bool:
        """Whether it computes an operator of ONNX in a 16-bit format, in the version of ``opset``."""
        said = self.kernels[fmt]
        if opset < dict(said.get("from", {})).get(op_type, 0):
            return False
        if "has" in said:
            return op_type in str(said["has"]).split()
        return op_type not in str(said["lacks"]).split()


def get(name: str) -> Target:
    """A target by name. Raises ConversionError where there is none."""
    if name not in TARGETS:
        raise ConversionError(
            f"target: {name!r} is not known.{did_you_mean(name, TARGETS)} Choose one of {', '.join(TARGETS)}."
        )
    data = _data()[name]
    device = detect("cpu") if data["device"] == "here" else get_device(data["device"])
    kernels = {fmt: data[fmt] for fmt in _PLANNED}
    return Target(name, data["runtime"], device, data["source"], data["note"], data["optional"], kernels)


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("castwise.onnx").joinpath("targets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def choose_formats(format: str, target: Target | None) -> tuple[str, ...]:
    """The 16-bit formats to plan in, by their short names, the first one first.

    ``"auto"``: those that the device computes natively. fp16 comes first: it has eight times the precision, and what
    leaves its range is measured and kept in fp32. Only where that happens has bf16 a plan to offer.
    """
    if format == "auto":
        device = target.device if target is not None else get_device(_USUAL_DEVICE)
        return tuple(fmt for fmt in _PLANNED if device.supports(fmt) is Support.native) or _PLANNED[:1]
    try:
        name = parse_format(format).name
    except FormatError as error:
        raise ConversionError(f"format: {error}") from error
    if name not in _PLANNED:
        raise ConversionError(f"format: ONNX models are planned in float16 or bfloat16, not in {format!r}. Choose one.")
    return (name,)


def lacking(target: Target | None, captured: Captured, auto: bool) -> dict[int, str]:
    """Ops that a plan for the target leaves in fp32 because it has no kernel for them, and why."""
    if target is None or (target.optional and not auto):
        return {}
    return _without_kernel(target, captured)


def _without_kernel(target: Target, captured: Captured) -> dict[int, str]:
    opset = captured.tree.opsets.get("", 0)
    missing = {}
    for position, op in enumerate(captured.graph.ops):
        node = captured.nodes.get(op.id)
        if node is not None and not target.has_kernel(node.op_type, opset, captured.fmt):
            missing[position] = f"{target.name} has no {captured.fmt} kernel of {node.op_type} in opset {opset}"
    return missing


def costs(target: Target | None, captured: Captured, missing: Mapping[int, str]) -> Costs:
    """Seconds of each op and cast on the target, as its device's data sheet predicts them."""
    device = target.device if target is not None else get_device(_USUAL_DEVICE)
    if not device.native(captured.fmt):
        return _not_worth_it(device, captured)
    predicted = roofline(captured.graph, device, captured.fmt)
    low = predicted.low.copy()
    low[list(missing)] = float("inf")
    unavailable = {**predicted.unavailable, **missing}
    return Costs(
        predicted.fmt, predicted.high, low, predicted.down, predicted.up, predicted.kept, predicted.device, unavailable
    )


def _not_worth_it(device: Device, captured: Captured) -> Costs:
    """Costs that leave everything in fp32."""
    ops, tensors = len(captured.graph.ops), len(captured.graph.tensors)
    reason = f"{device.name} computes {captured.fmt} no faster than fp32"
    free = np.zeros(tensors)
    low = np.full(ops, np.inf)
    unavailable = dict.fromkeys(range(ops), reason)
    stored = np.asarray(captured.graph.index.stored)
    return Costs(captured.fmt, np.zeros(ops), low, free, free, stored, device.name, unavailable)


def advice(target: Target | None, captured: Captured, low: int) -> list[str]:
    """What to know about running the result on the target; ``low`` products were lowered."""
    if target is None:
        return []
    notes = [f"{target.runtime}: {target.note}"] if target.note else []
    slow = sum(captured.graph.ops[i].id in set(captured.products()) for i in _without_kernel(target, captured))
    if target.optional and slow and low:
        notes.append(
            f"{slow} of {len(captured.products())} products have no {captured.fmt} kernel there and will not be faster"
        )
    if target.device.kind == "cpu" and target.device.supports(captured.fmt) is not Support.native:
        notes.append(f"{target.device.name} has no {captured.fmt} arithmetic: expect smaller weights, not more speed")
    return notes
