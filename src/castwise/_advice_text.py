"""``castwise advise`` as text for a terminal: the advice first, then one reason a line, then the numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from castwise._traits import count_in_words
from castwise.formats import FORMATS, FP32
from castwise.hardware import Device, Support

if TYPE_CHECKING:
    from castwise.advise import Advice

_MISSES_SHOWN = 8


def format_advice(advice: Advice, task: str | None = None) -> str:
    """The advice as text; ``task`` is how the model was named on the command line."""
    parts = [_head(advice), _conclusion(advice), _reasons(advice), _support(advice.device)]
    parts += [_measured(advice), _misses(advice), _next(advice, task)]
    return "\n".join(part for part in parts if part)


def _head(advice: Advice) -> str:
    device, model = advice.device, advice.model
    lines = [f"Device  {device.name} ({device.key})"]
    if model is not None:
        kinds = ", ".join(f"{number} {kind.replace('_', ' ')}" for kind, number in model.kinds.items())
        lines.append(
            f"Model   {model.name}: {count_in_words(model.parameters)} parameters" + (f"; {kinds}" if kinds else "")
        )
    if advice.deploy:
        lines.append(f"Deploy  {advice.deploy}")
    return "\n".join(lines) + "\n"


def _conclusion(advice: Advice) -> str:
    if advice.format is FP32:
        return "Advice  train in float32: no 16-bit format is worth it here.\n"
    scaling = "with loss scaling" if advice.loss_scaling else "without loss scaling"
    return f"Advice  train in {advice.format.long_name}, {scaling}.\n"


def _reasons(advice: Advice) -> str:
    width = max(len(reason.topic) for reason in advice.reasons)
    return "Why\n" + "".join(f"  {reason.topic:<{width}}  {reason.text}\n" for reason in advice.reasons)


def _support(device: Device) -> str:
    lines = ["Formats on this device"]
    for support in Support:
        names = [fmt for fmt in FORMATS if device.support[fmt] is support]
        if names:
            lines.append(f"  {support!s:<9} {', '.join(names)}")
    return "\n".join([*lines, *(f"  note: {note}" for note in device.notes)]) + "\n"


def _measured(advice: Advice) -> str:
    if advice.measured is None:
        return ""
    lines = [f"Measured here, in GFLOP/s of square products ({advice.measured.how})"]
    for fmt, rates in advice.measured.rates.items():
        lines.append(f"  {fmt:<5} " + "  ".join(f"{side}: {rate / 1e9:.3g}" for side, rate in sorted(rates.items())))
    return "\n".join(lines) + "\n"


def _misses(advice: Advice) -> str:
    if not advice.misses:
        return ""
    lines = ["Dimensions to pad"]
    for miss in advice.misses[:_MISSES_SHOWN]:
        lines.append(f"  {miss.path} ({miss.kind}): {miss.dim} {miss.size} -> {miss.padded}")
    if len(advice.misses) > _MISSES_SHOWN:
        lines.append(f"  … and {len(advice.misses) - _MISSES_SHOWN} more")
    return "\n".join(lines) + "\n"


def _next(advice: Advice, task: str | None) -> str:
    if advice.format is FP32:
        lines = ['  Amp(model, optimizer, policy="float32")']
    else:
        lines = [f'  Amp(model, optimizer, policy="{advice.format.long_name}")']
    lines.append(f"  castwise study {task or 'TASK'}   # proves it on your task: float32 beside the 16-bit formats")
    return "Next\n" + "\n".join(lines)


def list_devices(devices: Iterable[Device]) -> str:
    """One line per device: key, best 16-bit format, name."""
    rows = [(device.key, str(device.best_16bit() or "fp32"), device.name) for device in devices]
    width = max(len(key) for key, _, _ in rows)
    return "\n".join(f"{key:<{width}}  {best:<4}  {name}" for key, best, name in sorted(rows))
