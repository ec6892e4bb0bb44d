"""Devices: which formats each computes natively, by emulation or not at all, and how fast.

"Supported" is not "fast": a T4 accepts bfloat16, and computes it in float32 with conversions around. What is accepted
but has no arithmetic of its own is marked ``emulated`` here, and ``Device.best_16bit`` never chooses it. The facts are
data, in ``hardware.toml``, and every number there names its source; how a running machine is recognised is in
``_detect.py``.

    device = get_device("t4")
    device.support["bf16"]      # Support.emulated
    device.best_16bit()         # FP16
    detect()                    # the accelerator of this machine, else its CPU
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from typing import Any

from castwise._frozen import FrozenMap
from castwise.errors import HardwareError, did_you_mean
from castwise.formats import BF16, FORMATS, FP16, FP32, NumberFormat, parse_format

__all__ = ["KINDS", "Device", "Support", "detect", "detected", "devices", "find_device", "get_device"]

KINDS = ("cpu", "cuda", "rocm", "mps", "xpu", "tpu", "npu")
"""The kinds of device, as the frameworks' device types are named (``cuda`` in torch is ``rocm`` here on AMD GPUs)."""

_TERA = 1e12
_GIGA = 1e9
_GIB = 2**30  # memory is sold in GB and made in GiB: an "80 GB" card has 80 GiB
_OTHER_PRODUCT = r"\s+(?:ti|super|d|laptop|mobile|max-q|pro|max|ultra|nvl)\b"
_NO_STRINGS: FrozenMap[str, str] = FrozenMap()
_NO_FLOATS: FrozenMap[str, float] = FrozenMap()
_NO_INTS: FrozenMap[str, int] = FrozenMap()


class Support(StrEnum):
    """How a device computes a format."""

    native = "native"  # arithmetic for it in hardware
    emulated = "emulated"  # accepted, and converted around wider arithmetic: right values, no speed
    none = "none"  # no kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device, or a whole instruction set or chip generation, as a value.

    Attributes:
        key: its name in the table and on the command line, such as ``"t4"`` or ``"cpu_avx2"``.
        name: its name for people.
        vendor: who makes it.
        kind: one of ``KINDS``.
        arch: instruction set or chip generation, such as ``"sm_75"``, ``"gfx90a"`` or ``"cpu_avx2"``.
        support: how it computes each format, by the format's short name; every format has an entry.
        peak: FLOP/s of dense matrix products by format; only figures that someone states.
        bandwidth: bytes/s of its memory, or ``None`` where not known.
        memory: bytes of its memory, or ``None`` where not known.
        multiple_of: what every dimension of a product should be a multiple of, by format, for the matrix units.
        flops_per_cycle: of a CPU: floating-point operations per clock cycle and core, by format.
        sources: who says so, by ``"support"``, ``"peak.fp16"``, ``"bandwidth"``, ``"multiple_of.bf16"``, …
        notes: what the numbers cannot say.
        aliases: other names that ``get_device`` accepts.
    """

    key: str
    name: str
    vendor: str
    kind: str
    arch: str
    support: Mapping[str, Support]
    peak: Mapping[str, float] = _NO_FLOATS
    bandwidth: float | None = None
    memory: int | None = None
    multiple_of: Mapping[str, int] = _NO_INTS
    flops_per_cycle: Mapping[str, float] = _NO_FLOATS
    sources: Mapping[str, str] = _NO_STRINGS
    notes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise HardwareError(f"{self.key}.kind: {self.kind!r} is no kind of device. Use one of {', '.join(KINDS)}.")
        for name in ("support", "peak", "multiple_of", "flops_per_cycle", "sources"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

    def __str__(self) -> str:
        return self.name

    def supports(self, fmt: object) -> Support:
        """How the device computes a format, given in any spelling. Raises ``FormatError`` for an unknown one."""
        return self.support.get(parse_format(fmt).name, Support.none)

    def native(self, fmt: object) -> bool:
        """Whether the device has arithmetic of its own for the format. Raises ``FormatError`` for an unknown one."""
        return self.supports(fmt) is Support.native

    def gains(self, fmt: object) -> bool:
        """Whether the format is native and not known to be slower than float32 here."""
        low, wide = self.peak.get(parse_format(fmt).name), self.peak.get(FP32.name)
        return self.native(fmt) and (low is None or wide is None or low >= wide)

    def best_16bit(self) -> NumberFormat | None:
        """The 16-bit format to train in on this device, or ``None`` if float32 is better.

        bf16 where it gains, since it needs no loss scaling; else fp16 where that gains. An emulated format is never
        chosen.
        """
        for fmt in (BF16, FP16):
            if self.gains(fmt):
                return fmt
        return None


# -------------------------------------------------------------------------------------------------------------- look-up


def devices() -> Mapping[str, Device]:
    """All devices of the table by key: products, and the instruction sets and chip generations they belong to."""
    return _table().by_key


def get_device(name: str) -> Device:
    """The device of a key or alias, without regard to case, spaces, ``-`` and ``_`` (``"T4"``, ``"rtx-4090"``).

    Raises:
        HardwareError: no device has that name; the message suggests the nearest.
    """
    table = _table()
    key = table.names.get(_plain(name))
    if key is None:
        raise HardwareError(
            f"Unknown device {name!r}.{did_you_mean(name, table.spellings)} "
            f"`castwise advise --list-devices` prints all; in Python: castwise.devices()."
        )
    return table.by_key[key]


def find_device(runtime_name: str, kind: str | None = None) -> Device | None:
    """The product a runtime means by a name such as ``"Tesla T4"`` or ``"NVIDIA A100-SXM4-80GB"``; ``None`` if unknown.

    The most specific spelling decides, so that an L40S is no L4 and an A100 no A10; an "RTX 3090 Ti" or a "Laptop GPU"
    is another product than the one whose name it begins with.
    """
    table, name = _table(), runtime_name.casefold()
    matching = [
        (len(pattern), key)
        for pattern, key in table.patterns
        if kind in (None, table.by_key[key].kind)
        and re.search(rf"(?<![a-z0-9]){re.escape(pattern)}(?![a-z0-9]|{_OTHER_PRODUCT})", name)
    ]
    return table.by_key[max(matching)[1]] if matching else None


def detect(kind: str | None = None) -> Device:
    """The device of this machine.

    Args:
        kind: which kind to look for; ``None`` for the first accelerator that an installed framework can use, else the
            CPU. ``"cpu"`` is answered without importing any framework; other kinds import torch or jax if installed.

    Returns:
        The table's entry, with memory (and for a CPU the peak rates) as found on this machine. A product that the table
        lacks comes as its chip generation.

    Raises:
        HardwareError: ``kind`` is no kind of device, or this machine shows none of that kind.
    """
    from castwise import _detect

    if kind is not None and kind not in KINDS:
        raise HardwareError(f"Unknown device kind {kind!r}.{did_you_mean(kind, KINDS)} Use one of {', '.join(KINDS)}.")
    found = _detect.find(kind)
    if found is None:
        raise HardwareError(
            f"This machine shows no {kind} device to an installed framework. `castwise doctor` says what it shows; "
            f"name a device of the table instead, for example get_device('t4')."
        )
    return found


@functools.cache
def detected(kind: str) -> Device | None:
    """What `detect` answers for a kind, asked once; None where this machine shows none, or the table lacks it."""
    try:
        return detect(kind)
    except HardwareError:
        return None


# ---------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class _Table:
    by_key: FrozenMap[str, Device]
    names: Mapping[str, str]  # plain spelling -> key
    spellings: tuple[str, ...]  # as written, for suggestions
    patterns: tuple[tuple[str, str], ...]  # runtime spelling -> key


def _plain(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name.casefold())


@functools.cache
def _table() -> _Table:
    text = (files("castwise") / "hardware.toml").read_text(encoding="utf-8")
    return read_table(tomllib.loads(text))


def read_table(data: Mapping[str, Any]) -> _Table:
    """Check the parsed ``hardware.toml`` and make its devices. Raises ``HardwareError`` naming the table and key."""
    unknown = set(data) - {"sources", "arch", "device"}
    if unknown:
        raise HardwareError(f"hardware.toml: unknown table {sorted(unknown)[0]!r}. Use sources, arch and device.")
    archs: Mapping[str, Mapping[str, Any]] = data["arch"]
    made: dict[str, Device] = {}
    names: dict[str, str] = {}
    patterns: dict[str, str] = {}
    for key, row in [*archs.items(), *data["device"].items()]:
        made[key] = _device(key, row, archs, data["sources"])
        for name in (key, *row.get("aliases", ()), *row.get("also", ())):
            if names.setdefault(_plain(name), key) != key:
                raise HardwareError(f"hardware.toml: {name!r} names both {names[_plain(name)]} and {key}. Keep one.")
        for pattern in row.get("match", ()):
            if patterns.setdefault(pattern, key) != key:
                raise HardwareError(f"hardware.toml: {pattern!r} matches both {patterns[pattern]} and {key}. Keep one.")
    spellings = tuple(name for key, device in made.items() for name in (key, *device.aliases))
    return _Table(FrozenMap(made), names, spellings, tuple(patterns.items()))


_KEYS = frozenset(
    {"name", "vendor", "kind", "arch", "also", "aliases", "match", "support", "peak", "bandwidth", "memory"}
    | {"multiple_of", "flops_per_cycle", "source", "sources", "notes"}
)


_Row = Mapping[str, Any]


def _device(key: str, row: _Row, archs: Mapping[str, _Row], texts: Mapping[str, str]) -> Device:
    unknown = sorted(set(row) - _KEYS)
    if unknown:
        raise HardwareError(f"hardware.toml: {key}.{unknown[0]} is not a key.{did_you_mean(unknown[0], _KEYS)}")
    arch_key = row.get("arch", key)
    if arch_key not in archs:
        raise HardwareError(f"hardware.toml: {key}.arch: no [arch.{arch_key}].{did_you_mean(arch_key, archs)}")
    base = archs[arch_key]
    support = {**base["support"], **row.get("support", {})}
    multiple_of = {**base.get("multiple_of", {}), **row.get("multiple_of", {})}
    per_cycle = {**base.get("flops_per_cycle", {}), **row.get("flops_per_cycle", {})}
    peak = {name: value * _TERA for name, value in row.get("peak", {}).items()}
    for place, formats in {"support": support, "multiple_of": multiple_of, "peak": peak}.items():
        _check_formats(f"{key}.{place}", formats)
    numbers = [f"peak.{name}" for name in peak]
    numbers += [f"multiple_of.{name}" for name in multiple_of] + [f"flops_per_cycle.{name}" for name in per_cycle]
    numbers += [name for name in ("bandwidth", "memory") if name in row]
    numbers += ["support", *(name for name in row.get("sources", {}) if name.startswith("support."))]
    own_notes = tuple(row.get("notes", ()))
    general = () if base is row else base.get("notes", ())
    inherited = tuple(note for note in general if not note.startswith("No peak rates"))
    return Device(
        key=key,
        name=row["name"],
        vendor=row.get("vendor", base["vendor"]),
        kind=row.get("kind", base["kind"]),
        arch=arch_key,
        support={fmt: Support(support[fmt]) for fmt in FORMATS},
        peak=peak,
        bandwidth=row["bandwidth"] * _GIGA if "bandwidth" in row else None,
        memory=int(row["memory"] * _GIB) if "memory" in row else None,
        multiple_of=multiple_of,
        flops_per_cycle=per_cycle,
        sources={number: _source(key, number, row, base, texts) for number in numbers},
        notes=own_notes + inherited,
        aliases=(*row.get("aliases", ()), *row.get("also", ())),
    )


def _check_formats(place: str, formats: Iterable[str]) -> None:
    wrong = sorted(set(formats) - set(FORMATS))
    if wrong:
        raise HardwareError(f"hardware.toml: {place}.{wrong[0]} is not a format.{did_you_mean(wrong[0], FORMATS)}")
    if place.endswith(".support") and set(formats) != set(FORMATS):
        missing = sorted(set(FORMATS) - set(formats))
        raise HardwareError(f"hardware.toml: {place} lacks {', '.join(missing)}. Say native, emulated or none.")


def _source(key: str, number: str, row: _Row, base: _Row, texts: Mapping[str, str]) -> str:
    """The text of a number's source: the most specific statement, the product's before its chip generation's."""
    group, _, fmt = number.partition(".")
    stated = fmt in row.get(group, {}) if fmt else group in row  # else the number is inherited from the arch
    places = (row, base) if stated else (base,)
    for place in places:
        named = place.get("sources", {})
        found = named.get(number) or named.get(group) or place.get("source")
        if found:
            if found not in texts:
                raise HardwareError(f"hardware.toml: {key}: {number}: no source {found!r}. Add it to [sources].")
            return texts[found]
    raise HardwareError(f"hardware.toml: {key}.{number} has no source. Name one in {key}.source or {key}.sources.")
