"""``castwise advise``: which format to train in, with or without loss scaling, and why.

The order of the reasons is the order of their weight. Hardware comes first: what a device does not compute natively is
not chosen, however well it would suit. Then what the model needs, range or mantissa; then where it will be deployed;
then in which format its weights were trained. ``advise`` is a pure function of those four, so that each reason can be
tested without the hardware it speaks of.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from castwise import _advice_text
from castwise._extras import require
from castwise._gemm import GemmRates, measured_rates
from castwise._load import LoadError, build_model, is_object_spec, load_object
from castwise._traits import ModelTraits, Need, Reading, ShapeMiss, misaligned, need_of, read_model, traits_of
from castwise.errors import HardwareError, did_you_mean
from castwise.formats import BF16, FP16, FP32, TF32, NumberFormat
from castwise.hardware import Device, Support, detect, devices, get_device

__all__ = [
    "DEPLOYMENTS",
    "Advice",
    "Reason",
    "add_advise_arguments",
    "advise",
    "deployment_reasons",
    "hardware_reasons",
    "main_advise",
    "measured_reasons",
    "pretrained_reasons",
]

DEPLOYMENTS = ("tensorrt", "onnxruntime", "edge")

# A native format whose products were measured slower than this, relative to float32's, is not chosen for speed.
_NOT_SLOWER = 0.95


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason: ``topic`` is ``hardware``, ``measured``, ``model``, ``deployment``, ``pretrained`` or ``shapes``."""

    topic: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to train in, and why.

    Attributes:
        device: what it is for.
        model: what was seen of the model, or ``None`` where none was given.
        deploy: one of ``DEPLOYMENTS``, or ``None``.
        format: the format for the ops that may run low; ``FP32`` where no 16-bit format is worth it.
        loss_scaling: whether to scale the loss.
        reasons: in the order of their weight.
        measured: this machine's rates, where ``device`` is this machine's.
        misses: dimensions that the matrix units would rather have otherwise.
    """

    device: Device
    model: ModelTraits | None
    deploy: str | None
    format: NumberFormat
    loss_scaling: bool
    reasons: tuple[Reason, ...]
    measured: GemmRates | None = None
    misses: tuple[ShapeMiss, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The advice as plain lists and dicts, for JSON."""
        return {
            "device": self.device.key,
            "model": self.model.name if self.model else None,
            "deploy": self.deploy,
            "format": self.format.name,
            "loss_scaling": self.loss_scaling,
            "reasons": [asdict(reason) for reason in self.reasons],
            "support": {fmt: str(support) for fmt, support in self.device.support.items()},
            "measured": {fmt: dict(sides) for fmt, sides in self.measured.rates.items()} if self.measured else None,
            "misaligned": [asdict(miss) for miss in self.misses],
        }


def advise(
    device: Device,
    *,
    model: ModelTraits | None = None,
    deploy: str | None = None,
    measured: GemmRates | None = None,
) -> Advice:
    """Choose a format.

    Args:
        device: what to train on.
        model: what ``traits_of`` saw of the model, if there is one.
        deploy: where the model will run: one of ``DEPLOYMENTS``.
        measured: rates measured on this very device.

    Raises:
        HardwareError: ``deploy`` is unknown.
    """
    if deploy is not None and deploy not in DEPLOYMENTS:
        raise HardwareError(
            f"Unknown deployment {deploy!r}.{did_you_mean(deploy, DEPLOYMENTS)} Use {', '.join(DEPLOYMENTS)}."
        )
    readings = read_model(model) if model else ()
    need = need_of(readings)
    candidates = [fmt for fmt in (BF16, FP16) if device.gains(fmt) and not _measured_slow(measured, fmt)]
    order = preference(need, deploy, model.pretrained if model else None)
    fmt = next((fmt for fmt in order if fmt in candidates), FP32)
    multiple = device.multiple_of.get(fmt.name)
    misses = misaligned(model.layers, multiple) if model and multiple else ()
    reasons = [
        *hardware_reasons(device),
        *measured_reasons(device, measured),
        *model_reasons(readings, need, fmt),
        *deployment_reasons(deploy, fmt, need),
        *pretrained_reasons(model, fmt),
        *shape_reasons(device, fmt, misses),
    ]
    return Advice(
        device=device,
        model=model,
        deploy=deploy,
        format=fmt,
        loss_scaling=fmt is FP16,
        reasons=tuple(reasons),
        measured=measured,
        misses=misses,
    )


def preference(need: Need, deploy: str | None, pretrained: NumberFormat | None) -> tuple[NumberFormat, NumberFormat]:
    """Which of the two 16-bit formats to take first where a device computes both.

    What the model needs decides; else weights that were trained in bf16 stay there; else an engine that takes fp16 more
    widely gets fp16; else bf16, which needs no loss scaling.
    """
    if need is Need.mantissa:
        return FP16, BF16
    if need is Need.range or pretrained is BF16:
        return BF16, FP16
    if deploy in ("tensorrt", "onnxruntime"):
        return FP16, BF16
    return BF16, FP16


def _measured_slow(measured: GemmRates | None, fmt: NumberFormat) -> bool:
    relative = measured.relative(fmt.name) if measured else None
    return relative is not None and relative[0] < _NOT_SLOWER


# ------------------------------------------------------------------------------------------------------------- reasons


def hardware_reasons(device: Device) -> list[Reason]:
    """What the device computes natively, and what not, in 16 bits and around them."""
    lines = [f"{fmt} {_support_in_words(device, fmt)}" for fmt in (BF16, FP16)]
    if not any(device.native(fmt) for fmt in (BF16, FP16)):
        lines.append("so no 16-bit format is faster than float32 here; `castwise study` can still emulate what they do")
    if device.native("fp8_e4m3"):
        lines.append(
            f"fp8 {_support_in_words(device, 'fp8_e4m3')}: for inputs of products, and only where a policy says so"
        )
    if device.native(TF32):
        lines.append(
            f"tf32 {_support_in_words(device, TF32)}: it speeds up what stays float32 where a policy allows it"
        )
    return [Reason("hardware", line) for line in lines]


def _support_in_words(device: Device, fmt: object) -> str:
    support = device.supports(fmt)
    if support is Support.emulated:
        return (
            "is emulated: accepted, and computed in wider arithmetic; it saves memory and no time, so it is not chosen"
        )
    if support is Support.none:
        return "has no kernels here"
    rate, plain = device.peak.get(str(fmt)), device.peak.get(FP32.name)
    if rate is None:
        return "is native"
    beside = f", {rate / plain:.3g}x fp32" if plain else ""
    slower = "; no faster than fp32, so it is not chosen" if plain and rate < plain else ""
    return f"is native: {rate / 1e12:.4g} TFLOP/s of dense products{beside}{slower}"


def measured_reasons(device: Device, measured: GemmRates | None) -> list[Reason]:
    """How the formats compared with float32 when they were timed, and where that contradicts the table."""
    reasons = []
    for fmt in (BF16, FP16):
        relative = measured.relative(fmt.name) if measured else None
        if measured is None or relative is None:
            continue
        ratio, side = relative
        text = f"{fmt} products {side} wide ran at {ratio:.3g}x the speed of fp32's ({measured.how})"
        if device.native(fmt) and ratio < _NOT_SLOWER:
            text += ", though the table has it as native: not chosen"
        elif not device.native(fmt) and ratio > 1 / _NOT_SLOWER:
            text += ", though the table has it as emulated: see what `castwise doctor` finds"
        reasons.append(Reason("measured", text))
    return reasons


def model_reasons(readings: tuple[Reading, ...], need: Need, fmt: NumberFormat) -> list[Reason]:
    """What the model's structure and names say, and what to do where the hardware gives it the other format."""
    reasons = [Reason("model", reading.text) for reading in readings]
    if need is Need.mantissa and fmt is BF16:
        text = "it wants mantissa and gets bf16: keep the last layers in fp32; `castwise study` says if that is enough"
        reasons.append(Reason("model", text))
    if need is Need.range and fmt is FP16:
        text = "it wants range and gets fp16: scale the loss, and keep in fp32 the layers whose values pass 65504"
        reasons.append(Reason("model", text))
    return reasons


def deployment_reasons(deploy: str | None, fmt: NumberFormat, need: Need = Need.either) -> list[Reason]:
    """What the place where the model will run takes, and what that means for a model trained in ``fmt``."""
    if deploy is None:
        return []
    says = {
        "tensorrt": "TensorRT takes FP16 on every GPU with fast FP16, BF16 from compute capability 8.0 on",
        "onnxruntime": "ONNX Runtime takes FP16 widely (its CPU provider computes it in FP32), BF16 in few operators",
        "edge": "edge devices differ: Jetson takes FP16 (Orin BF16 too), many NPUs and microcontrollers neither, only "
        "INT8; the format of training does not decide the one of deployment",
    }
    lines = [says[deploy]]
    if fmt is not FP16 and deploy != "edge":
        lines.append(
            f"trained in {fmt}, the model has never met fp16's range: before it is deployed in FP16, compare its "
            f"outputs with fp32's on real inputs"
            + (", and keep in fp32 the layers whose values pass 65504" if need is Need.range else "")
        )
    return [Reason("deployment", line) for line in lines]


def pretrained_reasons(model: ModelTraits | None, fmt: NumberFormat) -> list[Reason]:
    """What the format that the weights were trained in means for continuing in ``fmt``."""
    reasons = []
    if model is not None and model.pretrained is BF16:
        text = {
            FP16: "its weights were trained in bf16, where nothing stopped values from growing past 65504: fp16 is "
            "risky. Watch the first steps, and keep in fp32 the layers that overflow",
            BF16: "its weights were trained in bf16: bf16 keeps the range they are used to",
        }.get(fmt, "its weights were trained in bf16: float32 holds all of their values")
        reasons.append(Reason("pretrained", text))
    if model is not None and model.pretrained is FP16 and fmt is BF16:
        text = "its weights were trained in fp16: bf16 drops 3 of their 11 significant bits wherever it computes"
        reasons.append(Reason("pretrained", text))
    low = [name for name in (BF16.name, FP16.name) if model is not None and model.dtypes.get(name)]
    if low:
        stored = " and ".join(low)
        text = f"its parameters are stored in {stored}: train on float32 copies, or small updates are rounded away"
        reasons.append(Reason("pretrained", text))
    return reasons


def shape_reasons(device: Device, fmt: NumberFormat, misses: tuple[ShapeMiss, ...]) -> list[Reason]:
    """That some dimensions do not suit the matrix units."""
    if not misses:
        return []
    multiple = device.multiple_of[fmt.name]
    text = f"{len(misses)} dimensions are no multiple of {multiple}, which the matrix units want in {fmt}"
    if device.kind == "cuda":
        text += "; since cuBLAS 11 and cuDNN 7.6.3 they still run there, less efficiently"
    return [Reason("shapes", text)]


# -------------------------------------------------------------------------------------------------------- command line


def load_traits(spelled: str) -> ModelTraits:
    """The traits of a built-in task's model, or of ``path/to/file.py:Name``.

    Raises:
        LoadError: it cannot be loaded or built; MissingExtraError: a built-in task needs an extra.
    """
    if is_object_spec(spelled):
        return traits_of(build_model(load_object(spelled), spelled), name=spelled.rpartition(":")[2])
    built_in: Mapping[str, str] = importlib.import_module("castwise.study.protocol").BUILT_IN
    if spelled not in built_in:
        raise LoadError(
            f"There is no built-in task {spelled!r}.{did_you_mean(spelled, built_in)} Built in: {', '.join(built_in)}; "
            f"or name a model as path/to/file.py:Name."
        )
    module, _, name = built_in[spelled].partition(":")
    require("torch", extra="study")  # the built-in tasks are torch's
    return traits_of(build_model(getattr(importlib.import_module(module), name), spelled), name=spelled)


def _is_task(spelled: str) -> bool:
    """Whether ``castwise study`` would take it: a model alone has no batches to train on."""
    return not is_object_spec(spelled) or callable(getattr(load_object(spelled), "batches", None))


def add_advise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``castwise advise`` to a parser."""
    parser.add_argument(
        "task", nargs="?", metavar="TASK", help="a built-in task (digits, text) or path/to/file.py:Model"
    )
    parser.add_argument("--device", help="a device of the table, such as t4 or a100 (default: this machine's)")
    parser.add_argument("--deploy", choices=DEPLOYMENTS, help="where the model will run")
    parser.add_argument("--no-measure", action="store_true", help="do not time products on this machine")
    parser.add_argument("--refresh", action="store_true", help="time again instead of using what was measured before")
    parser.add_argument("--list-devices", action="store_true", help="print the devices of the table and stop")
    parser.add_argument("--json", action="store_true", help="print the advice as JSON")


def main_advise(args: argparse.Namespace) -> int:
    """Run ``castwise advise``; returns 0."""
    if args.list_devices:
        print(_advice_text.list_devices(devices().values()))
        return 0
    device = get_device(args.device) if args.device else detect()
    model = load_traits(args.task) if args.task else None
    here = not args.device and not args.no_measure
    advice = advise(
        device,
        model=model,
        deploy=args.deploy,
        measured=measured_rates(device, refresh=args.refresh) if here else None,
    )
    task = args.task if args.task and _is_task(args.task) else None
    print(json.dumps(advice.to_dict(), indent=2) if args.json else _advice_text.format_advice(advice, task))
    return 0
