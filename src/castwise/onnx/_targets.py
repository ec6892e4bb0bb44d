"""Runtimes a model can be converted for, and what they compute in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from castwise.cost import Costs, roofline
from castwise.errors import did_you_mean
from castwise.formats import parse_format
from castwise.hardware import Device, get_device
from castwise.onnx._capture import Captured
from castwise.onnx._errors import ConversionError

__all__ = ["TARGETS", "Target", "advice", "choose_format", "costs", "get", "lacking"]


@dataclass(frozen=True)
class Target:
    name: str
    device: Device | None = None


TARGETS = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "openvino")


def get(name: str) -> Target:
    if name not in TARGETS:
        raise ConversionError(
            f"target: {name!r} is not known.{did_you_mean(name, TARGETS)} Choose one of {', '.join(TARGETS)}."
        )
    return Target(name)


def choose_format(format: str, target: Target | None) -> str:
    if format == "auto":
        return "fp16"
    return parse_format(format).name


def lacking(target: Target | None, captured: Captured) -> dict[int, str]:
    return {}


def costs(target: Target | None, captured: Captured, missing: Mapping[int, str]) -> Costs:
    return roofline(captured.graph, get_device("a100"), captured.fmt)


def advice(target: Target | None, captured: Captured, low: int) -> list[str]:
    return []
