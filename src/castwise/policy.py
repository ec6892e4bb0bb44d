"""Policy: what the user asks for, as a value.

A policy says which format to use, where to deviate from the catalogue, and how to scale the loss. It is frozen data:
made once, checked completely when it is made, shared freely, and written to TOML and read back without change. It holds
no framework types and no lists of ops; ``decide`` (in ``_decide.py``) joins it with the catalogue, one op at a time.

    policy = Policy(format="float16", ops={"softmax": "high"}, layers=[LayerRule("**.head", format="float32")])
    policy = policy.resolve(castwise.detect())      # per-device overrides applied, "auto" settled
    decide(policy, entry, layer="decoder.head")     # Decision(rule, fmt, reason)

Every error names the key it is about, as a path (``layers[2].format``), and says what to do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from castwise import _globs, _policy_text
from castwise._decide import Decision, decide, is_wide
from castwise._files import write_text
from castwise._frozen import FrozenMap
from castwise._policy_checks import check_bool, checked_format, checked_ops, device_named, refuse_low
from castwise.catalogue import Rule, default_rule
from castwise.errors import FormatError, PolicyError, did_you_mean
from castwise.formats import FORMATS, FP32, NumberFormat, parse_format, widest
from castwise.guard import GuardConfig
from castwise.presets import PRESETS
from castwise.scaling import ScalingConfig

if TYPE_CHECKING:
    from castwise.hardware import Device

__all__ = [
    "WEIGHTS",
    "Decision",
    "GuardConfig",
    "LayerRule",
    "Policy",
    "Rule",
    "decide",
    "default_rule",
]

log = logging.getLogger("castwise.policy")

#: How low-format weights are kept, if any are: by fp32 masters, a 16-bit remainder, stochastic rounding, Kahan sums.
WEIGHTS = ("auto", "master", "split", "stochastic", "kahan")
_RULES = tuple(rule.value for rule in Rule)
# A format with fewer exponent bits than float32 loses small gradients, so its loss is scaled unless the user says no.
_FULL_RANGE_EXPONENT_BITS = FP32.exponent_bits


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What to do differently inside some modules.

    Attributes:
        match: a glob on module paths; it covers what is inside a matched module too (see ``_globs.py`` for its syntax:
            ``*`` within a segment, ``**`` for any number of segments).
        format: the format inside; ``None`` leaves the policy's. float32 or wider: all arithmetic there is done in it,
            whatever the policy's own ``ops`` say. Narrower: it replaces the policy's format.
        ops: as ``Policy.ops``, for the ops inside; these win over ``format``.
    """

    match: str
    format: str | None = field(default=None, kw_only=True)
    ops: Mapping[str, str] = field(default_factory=FrozenMap, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            raise PolicyError(f"match: {self.match!r} is not a glob. Write a module path such as 'encoder.layers.*'.")
        _globs.check(self.match)
        if self.format is not None:
            object.__setattr__(self, "format", checked_format("format", self.format).long_name)
        object.__setattr__(self, "ops", checked_ops(self.ops))
        if self.format is None and not self.ops:
            raise PolicyError(
                f"match: the rule for {self.match!r} says nothing. Give it a 'format' or 'ops', or drop it."
            )
        if self.format is not None and is_wide(parse_format(self.format)):
            refuse_low(self.ops, f"the rule's own format is {self.format}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Which formats to compute in. A format may be spelt in any common way, and is stored by its long name.

    Attributes:
        format: the narrow format (``"float16"``, ``"bfloat16"``, ``"float8_e4m3fn"``, …); a wide one (``"float32"``,
            ``"float64"``) turns narrowing off; ``"auto"`` is settled by ``resolve``.
        ops: deviations from the catalogue. Keys: an op's catalogue name (``"softmax"``), a class (``"class:norm"``) or
            a custom op with its namespace (``"mylib::attention"``); a name wins over a class. Values: ``"low"``,
            ``"high"``, ``"widest"`` (leave the inputs, mixed ones go to the widest) or a format.
        layers: rules for parts of the model; they win over ``ops``, later ones over earlier ones.
        devices: what to change on some devices: a kind (``"cpu"``), architecture (``"sm_75"``) or product (``"t4"``)
            -> any keys but ``devices``. Applied in that order; ``ops`` and single knobs of ``scaling`` and ``guard``
            are added, ``layers`` appended, the rest replaced.
        scaling: the knobs of loss scaling, where the loss is scaled.
        scaling_enabled: whether it is; ``None``: where a format in use has a smaller range than float32 (float16, fp8).
        weights: how weights that are stored in 16 bits are kept from losing small updates; one of ``WEIGHTS``.
        communication: format of gradients between devices; ``None``: as they are.
        guard: what is watched, and what is done by itself when a step breaks.
        tf32: whether products that stay float32 may round their inputs to TF32 where the hardware does so.
        strict: a layer rule that matches no layer is an error, not a warning.
    """

    format: str = "auto"
    ops: Mapping[str, str] = field(default_factory=FrozenMap)
    layers: Sequence[LayerRule] = ()  # kept as a tuple
    devices: Mapping[str, Mapping[str, object]] = field(default_factory=FrozenMap)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    scaling_enabled: bool | None = None
    weights: str = "auto"
    communication: str | None = None
    guard: GuardConfig = field(default_factory=GuardConfig)
    tf32: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.format != "auto":
            object.__setattr__(self, "format", checked_format("format", self.format).long_name)
        object.__setattr__(self, "ops", checked_ops(self.ops))
        object.__setattr__(self, "layers", _checked_layers(self.layers))
        if self.communication is not None:
            object.__setattr__(self, "communication", checked_format("communication", self.communication).long_name)
        if self.weights not in WEIGHTS:
            raise PolicyError(
                f"weights: {self.weights!r} is not known.{did_you_mean(str(self.weights), WEIGHTS)} "
                f"Choose one of {', '.join(WEIGHTS)}."
            )
        for key in ("tf32", "strict"):
            check_bool(key, getattr(self, key))
        self._check_scaling()
        self._check_contradictions()
        object.__setattr__(self, "devices", self._checked_devices())

    # ---- making one ----

    @classmethod
    def preset(cls, name: str) -> Policy:
        """A named policy: one of ``presets.PRESETS`` in any case, or any spelling of a format.

        Raises:
            PolicyError: no such preset or format; the nearest are suggested.
        """
        by_folded = {preset.casefold(): settings for preset, settings in PRESETS.items()}
        settings = by_folded.get(name.strip().casefold())
        if settings is not None:
            return cls.from_dict(settings)
        try:
            return cls(format=parse_format(name).long_name)
        except FormatError:
            raise PolicyError(
                f"There is no preset {name!r}.{did_you_mean(name, [*PRESETS, *FORMATS])} Name a preset "
                f"({', '.join(PRESETS)}), a number format, or a policy file that ends in .toml."
            ) from None

    @classmethod
    def coerce(cls, value: object) -> Policy:
        """The policy that ``value`` means: a policy, preset or format by name, a ``.toml`` path, a mapping, a dtype.

        Raises:
            PolicyError: it means none, or the policy itself is wrong.
        """
        if isinstance(value, Policy):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if isinstance(value, os.PathLike) or (isinstance(value, str) and value.strip().casefold().endswith(".toml")):
            return cls.load(value)
        if isinstance(value, str):
            return cls.preset(value)
        return cls(format=checked_format("format", value).long_name)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Policy:
        """A policy from plain data, laid out as in TOML. Raises ``PolicyError`` that names the key."""
        return _policy_text.from_dict(data)

    def to_dict(self) -> dict[str, object]:
        """Plain data (for JSON, TOML), laid out as in TOML: the format, and whatever differs from the defaults."""
        return _policy_text.to_dict(self)

    @classmethod
    def from_toml(cls, text: str) -> Policy:
        """A policy from TOML. Raises ``PolicyError`` that names the line or the key."""
        return _policy_text.from_toml(text)

    def to_toml(self, comment: str = "") -> str:
        """The policy as TOML, which ``from_toml`` reads back to an equal policy, with ``comment`` above it."""
        return _policy_text.to_toml(self, comment)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy file. Raises ``PolicyError`` that names the file, and the line or key."""
        return _policy_text.load(Path(path))

    def save(self, path: str | os.PathLike[str], comment: str = "") -> Path:
        """Write the policy to a TOML file, atomically, and return its path."""
        return write_text(path, self.to_toml(comment))

    # ---- asking it ----

    def resolve(self, device: Device | None) -> Policy:
        """This policy on ``device``: overrides applied, ``"auto"`` settled; what is settled already stays.

        ``"auto"`` becomes the 16-bit format that the device computes natively, else float32. Emulated formats are never
        chosen by themselves. Without a device nothing is known to be native: no overrides, and float32.

        Where that makes everything float32, rules that ask for "low", loss scaling and kept weights have nothing to act
        on any more and are dropped.
        """
        resolved = self
        for key in self._device_keys(device) if device is not None else []:
            resolved = _policy_text.with_override(resolved, self.devices[key])
        if resolved.format == "auto":
            best = device.best_16bit() if device is not None else None
            resolved = _policy_text.with_override(resolved, {"format": (best or FP32).long_name})
            log.info("format 'auto' is %s on %s", resolved.format, device.name if device else "an unknown device")
        return _policy_text.with_override(resolved, {}) if resolved.devices else resolved

    def format_on(self, device: Device | None) -> str:
        """The format that is asked for on ``device``, as it was spelt; may be ``"auto"``."""
        asked = self.format
        for key in self._device_keys(device) if device is not None else []:
            asked = str(self.devices[key].get("format", asked))
        return asked

    def in_format(self, format: str) -> Policy:
        """This policy in another format, on every device: formats that ``devices`` names give way, rules stay."""
        said = {name: {k: v for k, v in more.items() if k != "format"} for name, more in self.devices.items()}
        return replace(self, format=format, devices={name: more for name, more in said.items() if more})

    @property
    def low_format(self) -> NumberFormat:
        """What "low" means outside of layer rules. Raises ``PolicyError`` while the format is ``"auto"``."""
        if self.format == "auto":
            raise PolicyError("format: 'auto' is not a format yet. Call policy.resolve(device) first.")
        return parse_format(self.format)

    @property
    def high_format(self) -> NumberFormat:
        """What "high" means: float32, or the policy's own format where that is wider."""
        fmt = FP32 if self.format == "auto" else parse_format(self.format)
        return widest(FP32, fmt) if is_wide(fmt) else FP32

    @property
    def formats_in_use(self) -> frozenset[NumberFormat]:
        """Every format that this policy may compute in by its own rules, float32 aside; ``"auto"`` counts for none."""
        spelt = {self.format, *self.ops.values()}
        for rule in self.layers:
            spelt.update([rule.format] if rule.format is not None else [], rule.ops.values())
        return frozenset(parse_format(word) for word in spelt - {"auto", *_RULES})

    @property
    def uses_scaling(self) -> bool:
        """Whether the loss is scaled. Raises ``PolicyError`` where that depends on a format that is still "auto"."""
        if self.scaling_enabled is not None:
            return self.scaling_enabled
        if any(fmt.exponent_bits < _FULL_RANGE_EXPONENT_BITS for fmt in self.formats_in_use):
            return True
        return self.low_format.exponent_bits < _FULL_RANGE_EXPONENT_BITS

    @property
    def effective_scaling(self) -> ScalingConfig:
        """``scaling``, switched on or off as ``uses_scaling`` says: what a front end hands to the state machine."""
        return _policy_text.enabled_as(self.scaling, self.uses_scaling)

    def match_layers(self, paths: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        """Which of a model's modules each layer rule covers.

        Args:
            paths: the paths of all modules, ``""`` for the model itself (in torch, the names of ``named_modules()``).

        Returns:
            For each layer rule, in order, the paths it covers.

        Raises:
            PolicyError: with ``strict``, a rule covers nothing. Without, that is logged as a warning. Both name the
                nearest paths.
        """
        known = tuple(paths)
        covered = tuple(tuple(path for path in known if _globs.covers(rule.match, path)) for rule in self.layers)
        for index, (rule, found) in enumerate(zip(self.layers, covered, strict=True)):
            if found:
                continue
            near = ", ".join(map(repr, _globs.suggest(rule.match, known))) or "none, the model has no modules"
            message = f"layers[{index}].match: {rule.match!r} matches no layer of the model. Nearest: {near}."
            if self.strict:
                raise PolicyError(f"{message} Correct it or drop the rule.")
            log.warning("%s The rule has no effect.", message)
        return covered

    # ---- checks ----

    def _check_scaling(self) -> None:
        if not isinstance(self.scaling, ScalingConfig):
            raise PolicyError(
                f"scaling: {self.scaling!r} is not a ScalingConfig. Write scaling=ScalingConfig(init_scale=...)."
            )
        if not isinstance(self.guard, GuardConfig):
            raise PolicyError(
                f"guard: {self.guard!r} is not a GuardConfig. Write guard=GuardConfig(warn_scale_below=...)."
            )
        if self.scaling_enabled is not None:
            check_bool("scaling.enabled", self.scaling_enabled)
        if not self.scaling.enabled:
            if self.scaling_enabled:
                raise PolicyError(
                    "scaling.enabled: scaling_enabled is True, but scaling is ScalingConfig(enabled=False). Drop one."
                )
            object.__setattr__(self, "scaling_enabled", False)
        # One place says whether the loss is scaled, so that equal policies are equal however they were written.
        if self.scaling.enabled != (self.scaling_enabled is not False):
            object.__setattr__(
                self, "scaling", _policy_text.enabled_as(self.scaling, self.scaling_enabled is not False)
            )

    def _check_contradictions(self) -> None:
        if self.format != "auto" and is_wide(parse_format(self.format)):
            why = f"the policy's format is {self.format}"
            refuse_low(self.ops, why)
            for index, rule in enumerate(self.layers):
                if rule.format is None:
                    refuse_low(rule.ops, why, f"layers[{index}].")
        if self.format == "auto" or any(not is_wide(fmt) for fmt in self.formats_in_use):
            return
        if self.scaling_enabled:
            raise PolicyError(
                f"scaling.enabled: true, but the format is {self.format}, which needs no loss scaling. "
                f"Drop it, or set format = 'float16'."
            )
        if self.weights != "auto":
            raise PolicyError(
                f"weights: {self.weights!r} is for weights kept in 16 bits, but the format is {self.format}. "
                f"Drop it, or choose a 16-bit format."
            )

    def _checked_devices(self) -> FrozenMap[str, FrozenMap[str, object]]:
        if not self.devices:
            return FrozenMap()
        checked: dict[str, FrozenMap[str, object]] = {}
        for key, override in self.devices.items():
            device_named(key)
            checked[key] = _policy_text.checked_override(self, key, override)
        return FrozenMap(checked)

    def _device_keys(self, device: Device) -> list[str]:
        """The overrides that speak about ``device``, the general ones first: kind, architecture, product."""
        levels: tuple[list[str], list[str], list[str]] = ([], [], [])
        for key in self.devices:
            named = device_named(key)
            if named is None:
                levels[0].extend([key] * (key == device.kind))
            elif named.key == named.arch == device.arch:
                levels[1].append(key)
            elif named.key == device.key:
                levels[2].append(key)
        return [key for level in levels for key in level]


def _checked_layers(layers: object) -> tuple[LayerRule, ...]:
    if isinstance(layers, (str, Mapping)) or not isinstance(layers, Iterable):
        raise PolicyError(
            f"layers: {layers!r} is not a list of rules. Write layers=[LayerRule('head', format='float32')]."
        )
    rules = tuple(layers)
    for index, rule in enumerate(rules):
        if not isinstance(rule, LayerRule):
            raise PolicyError(
                f"layers[{index}]: {rule!r} is not a LayerRule. Write LayerRule('head', format='float32')."
            )
    return rules
