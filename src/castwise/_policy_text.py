"""Policies as plain data and as TOML, and back, exactly.

TOML is read by ``tomllib``; the standard library has no writer, and the few shapes a policy needs (strings, numbers,
booleans, tables, one list of tables) are written here rather than by another dependency of the core.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise._frozen import FrozenMap
from castwise.catalogue import Rule
from castwise.errors import CastwiseError, PolicyError, did_you_mean
from castwise.formats import FP32, parse_format
from castwise.scaling import ScalingConfig

if TYPE_CHECKING:
    from castwise.policy import Policy

__all__ = ["checked_override", "from_dict", "from_toml", "load", "to_dict", "to_toml", "toml_key", "with_override"]

_PLAIN_KEYS = ("format", "weights", "communication", "tf32", "strict", "ops")
_KEYS = ("format", "weights", "communication", "tf32", "strict", "ops", "scaling", "guard", "layers", "devices")
_LAYER_KEYS = ("match", "format", "ops")
_SCALING_KEYS = tuple(field.name for field in dataclasses.fields(ScalingConfig))
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # which TOML does not take in a comment


# ---- plain data ----


def from_dict(data: Mapping[str, object]) -> Policy:
    """See ``Policy.from_dict``."""
    from castwise.policy import Policy

    table = _table("", data, _KEYS, "policy = {'format': 'float16'}")
    fields: dict[str, Any] = {key: table[key] for key in _PLAIN_KEYS if key in table}
    if "layers" in table:
        fields["layers"] = _layers(table["layers"])
    if "scaling" in table:
        fields |= _scaling(table["scaling"])
    if "guard" in table:
        fields["guard"] = _guard(table["guard"])
    if "devices" in table:
        fields["devices"] = _table("devices", table["devices"], None, "[devices.t4]")
    return Policy(**fields)


def to_dict(policy: Policy) -> dict[str, object]:
    """See ``Policy.to_dict``."""
    default = type(policy)()
    out: dict[str, object] = {"format": policy.format}
    for key in _PLAIN_KEYS:
        value = getattr(policy, key)
        if value != getattr(default, key):
            out[key] = _thawed(value)
    scaling: dict[str, object] = {} if policy.scaling_enabled is None else {"enabled": policy.scaling_enabled}
    scaling |= _changed(enabled_as(policy.scaling, True), default.scaling)
    guard = _changed(policy.guard, default.guard)
    out |= {key: value for key, value in (("scaling", scaling), ("guard", guard)) if value}
    if policy.layers:
        out["layers"] = [_layer_to_dict(rule.match, rule.format, rule.ops) for rule in policy.layers]
    if policy.devices:
        out["devices"] = _thawed(policy.devices)
    return out


def enabled_as(scaling: ScalingConfig, enabled: bool) -> ScalingConfig:
    """``scaling`` with its own switch set."""
    return dataclasses.replace(scaling, enabled=enabled)


def _layer_to_dict(match: str, fmt: str | None, ops: Mapping[str, str]) -> dict[str, object]:
    out: dict[str, object] = {"match": match}
    if fmt is not None:
        out["format"] = fmt
    return out | ({"ops": dict(ops)} if ops else {})


def _changed(value: Any, default: Any) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if getattr(value, name) != getattr(default, name)}


def _layers(value: object) -> tuple[object, ...]:
    from castwise.policy import LayerRule

    if isinstance(value, (str, Mapping)) or not isinstance(value, (list, tuple)):
        raise PolicyError(f"layers: {value!r} is not a list of rules. Write one [[layers]] table for each.")
    rules = []
    for index, item in enumerate(value):
        where = f"layers[{index}]"
        table = _table(where, item, _LAYER_KEYS, "[[layers]] with match = 'head'")
        if "match" not in table:
            raise PolicyError(f"{where}.match: missing. Say which layers the rule is for: match = '**.head'.")
        rules.append(_prefixed(f"{where}.", partial(LayerRule, **dict[str, Any](table))))
    return tuple(rules)


def _scaling(value: object) -> dict[str, object]:
    table = dict(_table("scaling", value, _SCALING_KEYS, "[scaling]"))
    enabled = table.pop("enabled", "auto")
    if not isinstance(enabled, bool) and enabled != "auto":
        raise PolicyError(
            f"scaling.enabled: {enabled!r} is not known. Write true, false, or 'auto' to leave it to the format."
        )
    config = ScalingConfig(**table, enabled=enabled is not False)  # type: ignore[arg-type]
    return {"scaling": config, "scaling_enabled": None if enabled == "auto" else enabled}


def _guard(value: object) -> object:
    from castwise.policy import GuardConfig

    keys = tuple(field.name for field in dataclasses.fields(GuardConfig))
    table = _table("guard", value, keys, "[guard]")
    return _prefixed("guard.", lambda: GuardConfig(**table))  # type: ignore[arg-type]


def _table(where: str, value: object, keys: tuple[str, ...] | None, example: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where or 'policy'}: {value!r} is not a table. Write {example}.")
    for key in value:
        if keys is not None and key not in keys:
            path = f"{where}.{key}" if where else str(key)
            raise PolicyError(f"{path}: unknown key.{did_you_mean(str(key), keys)} Known here: {', '.join(keys)}.")
    return value


def _prefixed(prefix: str, make: Callable[[], Any]) -> Any:
    """Call ``make``; an error that starts with a key gets the path to that key in front."""
    try:
        return make()
    except CastwiseError as error:
        raise PolicyError(f"{prefix}{error}") from None


def _thawed(value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    return [_thawed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _frozen(value: object) -> Any:
    if isinstance(value, Mapping):
        return FrozenMap({key: _frozen(item) for key, item in value.items()})
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


# ---- overrides ----


def with_override(policy: Policy, override: Mapping[str, object]) -> Policy:
    """``policy`` without its devices, ``override`` on top: ops are added, layers appended, the rest is replaced."""
    merged = to_dict(policy)
    merged.pop("devices", None)
    fmt = override.get("format", "auto")
    if fmt != "auto" and parse_format(fmt).holds(FP32):
        merged = _without_low(policy)
    for key, value in _thawed(override).items():
        if key in ("ops", "scaling", "guard") and isinstance(value, Mapping):
            merged[key] = {**_thawed(merged.get(key, {})), **value}
        elif key == "layers" and isinstance(value, list):
            merged[key] = [*_thawed(merged.get(key, [])), *value]
        else:
            merged[key] = value
    return from_dict(merged)


def _without_low(policy: Policy) -> dict[str, object]:
    """The policy's data, as far as it still means something when the policy's format becomes a wide one."""
    from castwise.policy import LayerRule

    def raised(ops: Mapping[str, str]) -> dict[str, str]:
        return {key: Rule.HIGH.value if value == Rule.LOW else value for key, value in ops.items()}

    layers = [LayerRule(rule.match, ops=raised(rule.ops)) if rule.format is None else rule for rule in policy.layers]
    wide = dataclasses.replace(policy, format="auto", ops=raised(policy.ops), layers=tuple(layers), devices={})
    kept = {key: value for key, value in to_dict(wide).items() if key != "format"}
    if all(fmt.holds(FP32) for fmt in wide.formats_in_use):
        kept.pop("weights", None)
        if policy.scaling_enabled:
            kept["scaling"] = {**_thawed(kept["scaling"]), "enabled": "auto"}
    return kept


def checked_override(policy: Policy, device: str, override: object) -> FrozenMap[str, object]:
    """One device's override in canonical spelling, after it has been tried on ``policy``.

    Raises:
        PolicyError: an unknown key, a wrong value, or a contradiction, with the path ``devices.NAME.…``.
    """
    where = f"devices.{toml_key(device)}"
    table = _table(where, override, tuple(key for key in _KEYS if key != "devices"), "[devices.t4]")
    for key, value in table.items():
        if value is None:
            raise PolicyError(f"{where}.{key}: None cannot be written to a file. Leave the key out, or give a value.")
    # Knobs are checked with the policy's, below: alone, an init_scale might lie outside of limits that the policy sets.
    without_knobs = {key: value for key, value in table.items() if key not in ("scaling", "guard")}
    alone = to_dict(_prefixed(f"{where}.", lambda: from_dict({"format": "auto", **without_knobs})))
    # Empty tables and lists add nothing; TOML could not even write an empty list of tables.
    canonical = {key: alone.get(key, value) for key, value in table.items() if value not in ({}, [], ())}
    plain = dataclasses.replace(policy, devices={})
    _prefixed(f"{where}.", lambda: with_override(plain, canonical))
    return FrozenMap({key: _frozen(value) for key, value in canonical.items()})


# ---- TOML ----


def from_toml(text: str) -> Policy:
    """See ``Policy.from_toml``."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # beside TOML's own errors: thousands of digits, or of brackets
        raise PolicyError(f"policy: not valid TOML: {error}. Correct that place.") from None
    return from_dict(data)


def load(path: Path) -> Policy:
    """See ``Policy.load``."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a byte-order mark in front, which TOML has not
    except FileNotFoundError:
        raise PolicyError(
            f"{path}: there is no such policy file. Check the path, or write one with policy.save()."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: cannot be read as a policy: {error}. Give a TOML file in UTF-8.") from None
    return _prefixed(f"{path}: ", lambda: from_toml(text))  # type: ignore[no-any-return]


def to_toml(policy: Policy, comment: str = "") -> str:
    """See ``Policy.to_toml``."""
    lines = [f"# {_CONTROL.sub(' ', line)}".rstrip() for line in comment.splitlines()]
    _write_table(lines, "", to_dict(policy))
    return "\n".join(lines) + "\n"


def toml_key(key: str) -> str:
    """``key`` as TOML writes it: bare where it can be, quoted where not."""
    return key if _BARE_KEY.fullmatch(key) else _toml_value(key)


def _write_table(lines: list[str], path: str, table: Mapping[str, Any]) -> None:
    """Append a table's own values, then its sub-tables: TOML reads what follows a header as part of it."""
    nested = {key: value for key, value in table.items() if isinstance(value, (dict, list))}
    lines.extend(f"{toml_key(key)} = {_toml_value(value)}" for key, value in table.items() if key not in nested)
    for key, value in nested.items():
        inner = f"{path}{toml_key(key)}"
        for item in value if isinstance(value, list) else [value]:
            if isinstance(value, list):
                lines.extend(["", f"[[{inner}]]"])
            elif not item or not all(isinstance(part, dict) for part in item.values()):
                lines.extend(["", f"[{inner}]"])  # a table of tables needs no header of its own
            _write_table(lines, f"{inner}.", item)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is and TOML forbids.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return repr(value)
