"""Read the catalogue's data files into entries, and say exactly what is wrong with them where something is.

Two files: ``catalogue.toml`` is written by hand and holds judgement; ``catalogue_kernels.toml`` is generated and holds
measurements that change with every torch release. Neither repeats the other.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from castwise._frozen import FrozenMap
from castwise.catalogue import DEVICE_KINDS, FRAMEWORKS, HAZARDS, Catalogue, Mixed, OpClass, OpEntry, Rule
from castwise.errors import CatalogueError, nearest

__all__ = ["MEASURED_FORMATS", "parse_catalogue", "read_catalogue"]

# The low formats whose kernels are measured. In 8 bits torch has a product and its scales, and nothing else.
MEASURED_FORMATS = ("bf16", "fp16")
_SCHEMA = 1
_HERE = Path(__file__).parent
_Choice = TypeVar("_Choice", bound=StrEnum)
_Names = dict[str, tuple[str, ...]]
_SHARED_KEYS = frozenset(
    {"class", "hazard", "rule", "accumulates_wide", "selects", "mixed", "composite", "stores_constant"}
)
_GROUP_KEYS = _SHARED_KEYS | {"why", "plain", "ops"}
_OP_KEYS = _SHARED_KEYS | {"note", *FRAMEWORKS}


def _fail(where: str, problem: str, remedy: str) -> CatalogueError:
    return CatalogueError(f"catalogue entry {where}: {problem}. {remedy}")


def _check_keys(where: str, table: Mapping[str, Any], allowed: frozenset[str]) -> None:
    for key in table:
        if key not in allowed:
            close = nearest(key, sorted(allowed), n=1) or sorted(allowed)
            raise _fail(where, f"unknown key {key!r}", f"Use {' or '.join(close)}.")


def _flag(where: str, table: Mapping[str, Any], key: str, default: bool) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise _fail(where, f"{key} is {value!r}", "Write true or false.")
    return value


def _member(where: str, key: str, kind: type[_Choice], value: object) -> _Choice:
    try:
        return kind(str(value))
    except ValueError:
        raise _fail(where, f"{key} is {value!r}", f"Use one of {', '.join(kind)}.") from None


def _words(where: str, key: str, value: object) -> list[str]:
    if not isinstance(value, str):
        raise _fail(where, f"{key} is {value!r}", "Write one string, its words separated by spaces.")
    return value.split()


@functools.cache
def _by_format(hazards: tuple[str, ...]) -> FrozenMap[str, frozenset[str]]:
    """Which formats a set of hazards endangers: ("range",) -> {"fp16": {"range"}, ...}."""
    formats = dict.fromkeys(fmt for hazard in hazards for fmt in HAZARDS[hazard])
    return FrozenMap({fmt: frozenset(h for h in hazards if fmt in HAZARDS[h]) for fmt in formats})


def _hazards(where: str, value: object) -> FrozenMap[str, frozenset[str]]:
    hazards = _words(where, "hazard", value)
    for hazard in hazards:
        if hazard not in HAZARDS:
            raise _fail(where, f"unknown hazard {hazard!r}", f"Use {' or '.join(HAZARDS)}.")
    return _by_format(tuple(hazards))


def _spellings(where: str, name: str, op: Mapping[str, Any]) -> FrozenMap[str, tuple[str, ...]]:
    if not op:
        return FrozenMap({"torch": (name,)})
    spelt = {"torch": name, **{framework: op[framework] for framework in FRAMEWORKS if framework in op}}
    names = {framework: tuple(words) for framework, text in spelt.items() if (words := _words(where, framework, text))}
    if not names:
        raise _fail(where, "no framework spells it", "Add a spelling, or remove the entry.")
    return FrozenMap(names)


def _attributes(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """What a group or an op that overrides its group says of an entry, checked: all but name, spellings and note."""
    rule = table.get("rule")
    return {
        "op_class": _member(where, "class", OpClass, table.get("class")),
        "hazards": _hazards(where, table.get("hazard", "")),
        "rule": None if rule is None else _member(where, "rule", Rule, rule),
        "accumulates_wide": _flag(where, table, "accumulates_wide", True),
        "selects": _flag(where, table, "selects", False),
        "mixed": _member(where, "mixed", Mixed, table.get("mixed", Mixed.WIDEST)),
        "composite": _flag(where, table, "composite", False),
        "stores_constant": _flag(where, table, "stores_constant", False),
    }


def _entry(name: str, op: Mapping[str, Any], group: Mapping[str, Any], shared: dict[str, Any]) -> OpEntry:
    where = repr(name)
    if not isinstance(op, Mapping):
        raise _fail(where, f"is {op!r}", "Write a table, {} where there is nothing to add.")
    _check_keys(where, op, _OP_KEYS)
    attributes = shared if _SHARED_KEYS.isdisjoint(op) else _attributes(where, {**group, **op})
    return OpEntry(name=name, names=_spellings(where, name, op), note=op.get("note", group["why"]), **attributes)


def _group_entries(group: Mapping[str, Any]) -> Iterator[OpEntry]:
    tables = group.get("ops", {})
    if not isinstance(tables, Mapping):
        raise _fail("group", f"ops is {tables!r}", "Write a [group.ops] table.")
    where = f"group of {next(iter(tables), group.get('plain', 'no op'))!r}"
    _check_keys(where, group, _GROUP_KEYS)
    ops: dict[str, Any] = {}
    for name in [*_words(where, "plain", group.get("plain", "")), *tables]:
        if name in ops:
            raise _fail(f"{name!r}", "is defined twice", "Keep one of the two.")
        ops[name] = tables.get(name, {})
    if not group.get("why"):
        raise _fail(where, "has no reason", "Say why its ops belong together in `why`.")
    shared = _attributes(where, group)
    return (_entry(name, op, group, shared) for name, op in ops.items())


def parse_catalogue(text: str, kernels: str = "") -> Catalogue:
    """Read a catalogue from TOML text, in the layout that the head of ``catalogue.toml`` describes.

    Args:
        text: the entries.
        kernels: the measured gaps, in the layout of ``catalogue_kernels.toml``; none where empty.

    Raises:
        CatalogueError: a text is not TOML, or an entry is not well formed; the message names the entry.
    """
    data = _load("catalogue.toml", text)
    if data.get("schema") != _SCHEMA:
        raise CatalogueError(f"catalogue.toml: schema is {data.get('schema')!r}. This version reads schema {_SCHEMA}.")
    version, gaps = _kernel_gaps(kernels)
    entries: dict[str, OpEntry] = {}
    for group in data.get("group", []):
        for entry in _group_entries(group):
            if entry.name in entries:
                raise _fail(f"{entry.name!r}", "is defined twice", "Keep one of the two.")
            missing = gaps.pop(entry.name, None)
            entries[entry.name] = entry if missing is None else dataclasses.replace(entry, no_kernel=FrozenMap(missing))
    for name in gaps:
        raise _fail(f"{name!r}", "has measured kernels but no entry", "Run tools/generate_no_kernel.py again.")
    return Catalogue(FrozenMap(entries), _index(entries), version)


def _load(file: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"{file} is not valid TOML: {error}. Correct that line.") from error


def _kernel_gaps(text: str) -> tuple[str, dict[str, _Names]]:
    """The torch version measured, and entry name -> device kind -> formats without a kernel."""
    data = _load("catalogue_kernels.toml", text)
    gaps: dict[str, _Names] = {}
    for kind in DEVICE_KINDS:
        for fmt in MEASURED_FORMATS:
            for name in _words("kernels", f"{kind}.{fmt}", data.get(kind, {}).get(fmt, "")):
                lacking = gaps.setdefault(name, {})
                lacking[kind] = (*lacking.get(kind, ()), fmt)
    return str(data.get("torch", "")), gaps


def _index(entries: Mapping[str, OpEntry]) -> FrozenMap[str, Mapping[str, OpEntry]]:
    index: dict[str, dict[str, OpEntry]] = {framework: {} for framework in FRAMEWORKS}
    for entry in entries.values():
        for framework, spellings in entry.names.items():
            for spelling in spellings:
                other = index[framework].setdefault(spelling, entry)
                if other is not entry:
                    problem = f"{framework} spelling {spelling!r} also belongs to {other.name!r}"
                    raise _fail(f"{entry.name!r}", problem, "A spelling belongs to one entry: keep one of the two.")
    return FrozenMap(index)


def read_catalogue() -> Catalogue:
    """The catalogue in the files beside this module."""
    # By path: importlib.resources would take half as long to import as the files take to read.
    texts = (_HERE.joinpath(file).read_text(encoding="utf-8") for file in ("catalogue.toml", "catalogue_kernels.toml"))
    return parse_catalogue(*texts)
