"""``castwise doctor`` in words: what a trial shows, what falls back, and the report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from castwise.formats import FORMATS
from castwise.hardware import Device, Support

if TYPE_CHECKING:
    from castwise.doctor import DoctorReport, FrameworkReport, Trial

_FASTER = 0.8  # times float32's time: clear of the noise of a shared machine
_AS_FAST = 1.25


def judge(trial: Trial) -> str:
    """What a trial shows, in a few words: ``"faster than fp32 (2.1x)"``, ``"60x slower than fp32"``, …"""
    if not trial.works:
        return {"fails": "does not run", "wrong": "WRONG", "falls back": "falls back"}[trial.outcome]
    timed = trial.relative_time is not None and trial.format != "fp32"
    words = _speed_in_words(trial.relative_time or 1.0) if timed else "works"
    return words + (", sums in the format itself" if trial.outcome == "narrow" else "")


def _speed_in_words(relative_time: float) -> str:
    if relative_time <= _FASTER:
        return f"faster than fp32 ({1 / relative_time:.2g}x)"
    if relative_time <= _AS_FAST:
        return "as fast as fp32"
    return f"{relative_time:.2g}x slower than fp32"


def fallbacks_of(frameworks: Iterable[FrameworkReport], devices: Iterable[Device]) -> tuple[str, ...]:
    """Sentences about what runs otherwise than asked for, or than the table says."""
    table = {device.kind == "cpu": device for device in devices}
    told: dict[tuple[str, str], list[str]] = {}
    for one in frameworks:
        for text in one.fallbacks:
            told.setdefault((text, "{ops}"), [])
        for trial in one.trials:
            device = table.get(trial.device == "cpu")
            native = device is not None and device.support[trial.format] is Support.native
            sentence = _sentence(trial, native)
            if sentence:
                told.setdefault((f"{one.name} on {trial.device}", sentence), []).append(trial.operation)
    return tuple(
        where if not operations else f"{where}: {sentence.format(ops=' and '.join(operations))}"
        for (where, sentence), operations in told.items()
    )


def _sentence(trial: Trial, native: bool) -> str:
    fmt, message = trial.format, trial.message.replace("{", "(").replace("}", ")")
    if trial.outcome == "falls back":
        return f"{fmt} in {{ops}} is {message}."
    if trial.outcome == "wrong":
        return f"{fmt} in {{ops}} is WRONG, {message}. Do not use it."
    if trial.outcome == "fails" and native and fmt != "fp64":
        return f"{fmt} in {{ops}} does not run, though the hardware has it: {message}"
    if FORMATS[fmt].bits > 16 or trial.relative_time is None:
        return ""
    if native and trial.relative_time > _AS_FAST:
        return f"{fmt} in {{ops}} is {trial.relative_time:.2g}x slower than fp32, though the hardware has it."
    if not native and trial.relative_time > _FASTER:
        return f"{fmt} in {{ops}} is emulated: right, at {trial.relative_time:.2g}x the time of fp32."
    if not native:
        return (
            f"{fmt} in {{ops}} took {trial.relative_time:.2g}x the time of fp32, though the table has it as emulated."
        )
    return ""


# --------------------------------------------------------------------------------------------------------------- layout


def format_report(report: DoctorReport) -> str:
    """The report as text for a terminal."""
    parts = [_section("System", report.system), _section("Drivers", report.drivers or {"none found": ""})]
    parts.append(_section("Compilers", report.compilers or {"none found": "torch.compile needs a C++ compiler"}))
    if report.variables:
        parts.append(_section("Environment", report.variables))
    parts += [_device_section(device) for device in report.devices]
    parts += [_framework_section(one) for one in report.frameworks]
    if report.missing:
        parts.append(f"Not installed: {', '.join(report.missing)}\n")
    parts.append("What falls back or is emulated\n" + _bullets(report.fallbacks or ("nothing that was tried",)))
    return "\n".join(parts)


def _section(title: str, rows: Mapping[str, Any]) -> str:
    width = max((len(str(key)) for key in rows), default=0)
    return f"{title}\n" + "".join(f"  {key!s:<{width}}  {value}".rstrip() + "\n" for key, value in rows.items())


def _bullets(lines: Iterable[str]) -> str:
    return "".join(f"  - {line}\n" for line in lines)


def _device_section(device: Device) -> str:
    formats = {support: [fmt for fmt in FORMATS if device.support[fmt] is support] for support in Support}
    rows = {str(support): ", ".join(names) or "-" for support, names in formats.items()}
    best = device.best_16bit()
    rows["best 16-bit"] = str(best) if best else "none: float32 is better"
    return _section(f"By the device table: {device.name}", rows) + _bullets(device.notes)


def _framework_section(one: FrameworkReport) -> str:
    if one.problem:
        return f"{one.name}\n  could not be examined: {one.problem}\n"
    rows = {**one.details, **{f"setting: {key}": value for key, value in one.settings.items()}}
    text = _section(f"{one.name} {one.version}", rows)
    for device in one.devices:
        text += f"  tried on {device}:\n"
        for fmt in FORMATS:
            tried = {t.operation: t for t in one.trials if t.format == fmt and t.device == device}
            text += f"    {fmt:<9} {_trial_text(tried)}\n" if tried else ""
    return text


def _trial_text(tried: Mapping[str, Trial]) -> str:
    words: dict[str, list[str]] = {}
    for operation, trial in tried.items():
        words.setdefault(judge(trial), []).append(operation)
    why = next((trial.message for trial in tried.values() if not trial.works), "")
    return "; ".join(f"{', '.join(ops)}: {word}" for word, ops in words.items()) + (f"  [{why}]" if why else "")
