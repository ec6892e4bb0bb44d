"""What a policy's keys may hold. Each check names the key it is about and says what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from castwise._frozen import FrozenMap
from castwise._policy_text import toml_key
from castwise.catalogue import FRAMEWORKS, OpClass, Rule, load_catalogue
from castwise.errors import FormatError, HardwareError, PolicyError, did_you_mean, nearest
from castwise.formats import FORMATS, NumberFormat, parse_format

if TYPE_CHECKING:
    from castwise.hardware import Device

__all__ = ["check_bool", "checked_format", "checked_ops", "device_named", "refuse_low"]

_RULES = tuple(rule.value for rule in Rule)


def checked_format(key: str, spelling: object) -> NumberFormat:
    try:
        return parse_format(spelling)
    except FormatError as error:
        raise PolicyError(f"{key}: {error}") from None


def check_bool(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise PolicyError(f"{key}: {value!r} is neither true nor false. Write one of them, without quotes.")


def checked_ops(ops: object) -> FrozenMap[str, str]:
    if not isinstance(ops, Mapping):
        raise PolicyError(f"ops: {ops!r} is not a table. Write ops={{'softmax': 'high'}}.")
    checked: dict[str, str] = {}
    for key, value in ops.items():
        _check_op_key(key)
        word = value.strip().casefold() if isinstance(value, str) else value
        if word in _RULES:
            checked[key] = str(word)
            continue
        try:
            checked[key] = parse_format(value).long_name
        except FormatError:
            raise PolicyError(
                f"ops.{toml_key(key)}: {value!r} is neither a rule nor a format."
                f"{did_you_mean(str(value), [*_RULES, *FORMATS])} "
                f"Write {', '.join(map(repr, _RULES))} or a format such as 'float32'."
            ) from None
    return FrozenMap(checked)


def _check_op_key(key: object) -> None:
    if not isinstance(key, str):
        raise PolicyError(f"ops: the key {key!r} is not text. Write an op's name, 'class:norm', or 'mylib::my_op'.")
    where = f"ops.{toml_key(key)}"
    kind = key.removeprefix("class:")
    classes = [op_class.value for op_class in OpClass]
    if kind != key:
        if kind not in classes:
            raise PolicyError(
                f"{where}: there is no op class {kind!r}.{did_you_mean(kind, classes)} Known: {', '.join(classes)}."
            )
        return
    plain = key.removeprefix("aten::")
    if "::" in plain:
        return  # a custom op: only the framework can know it
    catalogue = load_catalogue()
    if key in catalogue.entries:
        return
    for framework in FRAMEWORKS:
        entry = catalogue.lookup(framework, plain)
        if entry is not None:
            raise PolicyError(f"{where}: that is {framework}'s own name. Write the catalogue's: {entry.name!r}.")
    classes_by_name = {name: f"class:{name}" for name in classes}
    close = [classes_by_name.get(name, name) for name in nearest(plain, [*classes, *catalogue.entries])]
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise PolicyError(
        f"{where}: the catalogue has no such op.{hint} A class of ops is written 'class:norm', a custom op with its "
        f"namespace, 'mylib::my_op'."
    )


def refuse_low(ops: Mapping[str, str], why: str, where: str = "") -> None:
    for key, value in ops.items():
        if value == Rule.LOW:
            raise PolicyError(
                f"{where}ops.{toml_key(key)}: 'low' has no meaning where {why}. Name a format, such as 'float16', "
                f"or drop it."
            )


def device_named(key: str) -> Device | None:
    """The device that an override's key means; ``None`` for a kind of device. Raises ``PolicyError`` for neither."""
    from castwise.hardware import KINDS, get_device  # only policies with overrides need the table

    if key in KINDS:
        return None
    try:
        return get_device(key)
    except HardwareError as error:
        raise PolicyError(f"devices.{toml_key(key)}: {error} Kinds of device: {', '.join(KINDS)}.") from None
