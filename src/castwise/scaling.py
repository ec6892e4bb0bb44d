"""The loss-scale state machine: pure data in, pure data out. Every front end wraps this one.

Half precision loses gradients that are too small for it, so the loss is multiplied by a scale before backward and the
gradients are divided by it afterwards. A scale that is too high makes gradients overflow: such a step is skipped, and
the scale lowered; after a long run of good steps it is raised again (Micikevicius et al., "Mixed Precision Training",
arXiv:1710.03740, section 3.2).

    state = initial_state(config)
    for batch in batches:
        scale = state.scale
        gradients = backward(loss(batch) * scale)
        state, outcome = transition(state, all_finite(gradients), config)
        if outcome.stalled:
            raise ScaleStalledError(stalled_message(state, config))
        if outcome.stepped:
            optimizer_step(gradients / scale)

Three things go wrong in scalers that are in use today, and cannot here: the scale never reaches zero, where dividing by
it turns weights into NaN; it never reaches infinity, from which no backoff returns; and a run that makes no progress at
the lowest scale stops with a message, instead of skipping steps for ever.

``advance`` is the whole transition, free of branches on values. ``transition`` runs it on Python numbers; a front end
that must not wait for the device, or that is being traced, runs it on device scalars.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from castwise._rounding import as_floats
from castwise.errors import NonFiniteError, PolicyError, did_you_mean
from castwise.formats import NumberFormat

__all__ = [
    "Outcome",
    "ScaleState",
    "ScalingConfig",
    "advance",
    "gradient_histogram",
    "initial_state",
    "scale_from_histogram",
    "stalled_message",
    "transition",
    "with_knobs",
]

_log = logging.getLogger("castwise.scaling")

# Front ends keep the scale in float32 and multiply by its reciprocal: both must be normal float32 numbers.
_SMALLEST_SCALE = 2.0**-126
_LARGEST_SCALE = 2.0**126


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """The knobs of loss scaling, by torch's names where torch has them.

    With ``dynamic=False`` the scale stays at ``init_scale``, and with ``enabled=False`` at 1; steps with non-finite
    gradients are skipped and counted all the same, and ``patience`` of them in a row stall.

    Raises:
        PolicyError: a value is out of range; the message names the key.
    """

    enabled: bool = True  # False: the loss is not scaled, gradients are still checked
    init_scale: float = 65536.0  # first scale; powers of two make scaling exact
    growth_factor: float = 2.0  # the scale is multiplied by this after growth_interval good steps in a row
    backoff_factor: float = 0.5  # ... and by this after bad ones
    growth_interval: int = 2000  # steps
    hysteresis: int = 1  # bad steps in a row before the scale is lowered; each further one in that row lowers it again
    min_scale: float = 1.0  # the scale never goes below
    max_scale: float = 2.0**24  # ... or above
    patience: int = 10  # skipped steps in a row at min_scale before the run counts as stalled
    dynamic: bool = True  # False: the scale never changes

    def __post_init__(self) -> None:
        """Check every knob, and store whole numbers given for real ones as floats, so that equal means equal."""
        for key in ("enabled", "dynamic"):
            if not isinstance(getattr(self, key), bool):
                raise _bad(key, getattr(self, key), "must be true or false")
        for key in ("growth_interval", "hysteresis", "patience"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _bad(key, value, "must be a whole number of steps, 1 or more")
        for key in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, key)
            # An integer of Python's, or of TOML, may be larger than any float.
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
                raise _bad(key, value, "must be a finite number")
            object.__setattr__(self, key, float(value))
        if not self.growth_factor > 1.0:
            raise _bad("growth_factor", self.growth_factor, "must be above 1; for a constant scale set dynamic = false")
        if not 0.0 < self.backoff_factor < 1.0:
            raise _bad("backoff_factor", self.backoff_factor, "must be between 0 and 1, both excluded")
        if not self.min_scale >= _SMALLEST_SCALE:
            raise _bad("min_scale", self.min_scale, "must be at least 2**-126, so that 1 / scale is finite in float32")
        if not self.max_scale <= _LARGEST_SCALE:
            raise _bad("max_scale", self.max_scale, "must be at most 2**126, so that it is finite in float32")
        if not self.min_scale <= self.max_scale:
            raise _bad("min_scale", self.min_scale, f"must not be above max_scale = {self.max_scale:g}")
        if not self.min_scale <= self.init_scale <= self.max_scale:
            limits = f"[min_scale, max_scale] = [{self.min_scale:g}, {self.max_scale:g}]"
            raise _bad("init_scale", self.init_scale, f"must lie within {limits}; widen the limits or change it")


def with_knobs(base: ScalingConfig, knobs: Mapping[str, Any], hint: str = "") -> ScalingConfig:
    """``base`` with single knobs set, by their names; ``hint`` ends the message where there is no such knob.

    Raises:
        PolicyError: a knob is unknown or out of range.
    """
    known = tuple(field.name for field in fields(ScalingConfig))
    for key in knobs:
        if key not in known:
            raise PolicyError(
                f"scaling.{key}: there is no such knob.{did_you_mean(key, known)} Known: {', '.join(known)}{hint}."
            )
    return replace(base, **knobs) if knobs else base


def _bad(key: str, value: object, must: str) -> PolicyError:
    return PolicyError(f"scaling.{key} = {value!r}: {must}.")


@dataclass(frozen=True, slots=True)
class ScaleState:
    """All that the state machine remembers. Python numbers, or device scalars of those types in a front end."""

    scale: float  # what the next loss is multiplied by
    good_steps: int  # steps with finite gradients since the last change of scale or skip
    hysteresis_left: int  # non-finite steps, in the present row, until the scale is lowered
    floor_skips: int  # steps skipped in a row where a lower scale was not to be had
    steps: int  # steps seen, skipped ones included
    skipped: int  # steps skipped in all

    def to_dict(self) -> dict[str, float | int]:
        """The state as plain numbers, for a checkpoint or JSON; device scalars are fetched."""
        return {field.name: _PLAIN[field.name](getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ScaleState:
        """The state that ``to_dict`` gave: from there on, every transition is what it would have been.

        Raises:
            PolicyError: a key is missing, unknown, or has a value that no run could have left.
        """
        for key in data:
            if key not in _PLAIN:
                raise PolicyError(f"Loss-scale state has an unknown key {key!r}.{did_you_mean(key, _PLAIN)}")
        missing = [key for key in _PLAIN if key not in data]
        if missing:
            raise PolicyError(f"Loss-scale state lacks {', '.join(missing)}: was it saved by castwise?")
        try:
            plain = {key: convert(data[key]) for key, convert in _PLAIN.items()}
        except (TypeError, ValueError, OverflowError) as error:
            raise PolicyError(f"Loss-scale state holds something that is not a number: {dict(data)!r}.") from error
        if not (0.0 < plain["scale"] < math.inf and all(value >= 0 for value in plain.values())):
            raise PolicyError(f"Loss-scale state is impossible: {plain}. Start from initial_state(config) instead.")
        return cls(**plain)


_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "scale": float,
    "good_steps": int,
    "hysteresis_left": int,
    "floor_skips": int,
    "steps": int,
    "skipped": int,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one step."""

    stepped: bool  # whether the optimizer may step
    reason: str  # why, in words for a log line
    stalled: bool  # patience is at an end: stop, and show stalled_message


def initial_state(config: ScalingConfig) -> ScaleState:
    """The state before the first step."""
    scale = config.init_scale if config.enabled else 1.0
    return ScaleState(scale, 0, config.hysteresis, 0, 0, 0)


def transition(state: ScaleState, finite: bool, config: ScalingConfig) -> tuple[ScaleState, Outcome]:
    """What one step does to the scale, and whether the optimizer may step.

    Args:
        state: before the step; ``state.scale`` is the scale the step's loss was multiplied by.
        finite: whether all gradients of the step, still scaled, are finite.
        config: the knobs. They may differ from those the state was made with: the next scale keeps to the new ones.

    Returns:
        The state for the next step, and the outcome. Unscale with the scale of ``state``, not with the new one.
    """
    after, stalled = advance(state, finite, config, _pick)
    return after, Outcome(bool(finite), _reason(state, after, finite, config), bool(stalled))


def _pick(condition: Any, if_true: Any, if_false: Any) -> Any:
    return if_true if condition else if_false


def advance(
    state: ScaleState, finite: Any, config: ScalingConfig, where: Callable[[Any, Any, Any], Any]
) -> tuple[ScaleState, Any]:
    """The transition without branches on values, for Python numbers and for scalars on a device alike.

    Args:
        state: before the step; its fields may be device scalars (float32 for the scale, integers for the rest).
        finite: true where the gradients are finite; a device scalar if ``state`` is on the device.
        config: the knobs, always Python numbers.
        where: picks by a condition: ``jnp.where``, ``torch.where``, or a Python conditional.

    Returns:
        The next state, and whether the run has stalled, both in the kind of number that came in.
    """
    good = where(finite, state.good_steps + 1, 0)
    left = where(finite, config.hysteresis, where(state.hysteresis_left > 1, state.hysteresis_left - 1, 0))
    scale = state.scale
    if config.enabled and config.dynamic:
        grown = where(good >= config.growth_interval, scale * config.growth_factor, scale)
        lowered = where(left < 1, scale * config.backoff_factor, scale)
        scale = where(finite, grown, lowered)
        # In this order NaN, for which every comparison is false, ends at the floor too.
        scale = where(scale >= config.min_scale, scale, config.min_scale)
        scale = where(scale <= config.max_scale, scale, config.max_scale)
        good = where(good >= config.growth_interval, 0, good)
        at_floor = where(state.scale <= config.min_scale, 1, 0)
    else:
        constant = initial_state(config).scale
        scale = where(scale == constant, scale, constant)  # a reloaded state may come from another policy
        at_floor = 1
    floor_skips = where(finite, 0, (state.floor_skips + 1) * at_floor)
    skipped = state.skipped + where(finite, 0, 1)
    after = ScaleState(scale, good, left, floor_skips, state.steps + 1, skipped)
    return after, floor_skips >= config.patience


def _reason(before: ScaleState, after: ScaleState, finite: bool, config: ScalingConfig) -> str:
    if finite:
        if after.scale > before.scale:
            return f"gradients are finite; loss scale raised from {before.scale:g} to {after.scale:g}"
        return "gradients are finite"
    skip = "gradients are not finite, step skipped"
    in_a_row = f"{after.floor_skips} in a row, stops at {config.patience}"
    if not config.enabled:
        return f"{skip} ({in_a_row})"
    if not config.dynamic:
        return f"{skip}; loss scale is fixed at {after.scale:g} ({in_a_row})"
    if after.scale < before.scale:
        return f"{skip}; loss scale lowered from {before.scale:g} to {after.scale:g}"
    if after.floor_skips:
        return f"{skip}; loss scale is at its floor of {after.scale:g} ({in_a_row})"
    return f"{skip}; loss scale kept at {after.scale:g}, lowered after {after.hysteresis_left} more in a row"


def lower_scales(scale: float, config: ScalingConfig) -> list[float]:
    """The scales that backing off reaches from ``scale``, falling; empty where the scale does not change by itself."""
    found: list[float] = []
    while config.enabled and config.dynamic and scale > config.min_scale:
        scale = max(scale * config.backoff_factor, config.min_scale)
        found.append(scale)
    return found


def stalled_message(state: ScaleState, config: ScalingConfig) -> str:
    """What to tell the user when a run has stalled: what happened, the likely causes, and what to do next.

    Args:
        state: the state after the transition that stalled.
        config: the knobs the run used.
    """
    if not config.enabled:
        where, remedy = (
            "without loss scaling",
            "Loss scaling would not help: it is there for gradients that are too small.",
        )
    elif not config.dynamic:
        where = f"at the fixed loss scale of {state.scale:g}"
        remedy = "If a lower scale cures it, the scale was the cause: set scaling.dynamic = true or lower init_scale."
    else:
        where = f"at the lowest loss scale allowed (scaling.min_scale = {config.min_scale:g})"
        remedy = "The loss scale is not the cause: it is as good as off already."
        if config.min_scale > 1.0:
            remedy = "First try scaling.min_scale = 1; if that stalls too, the loss scale is not the cause."
    return f"""\
Training has stalled: the last {state.floor_skips} steps in a row had infinite or NaN gradients {where} and were \
skipped ({state.skipped} of {state.steps} steps in all). {remedy} Likely causes:
  1. The loss is exploding: lower the learning rate, warm it up, clip gradients, or use a larger batch.
  2. The data or the labels hold NaN or infinity, or the loss does: log or division by zero, an empty batch.
  3. A layer overflows in the forward pass (float16 ends at 65504): give it format = "float32" in a layer rule of \
the policy, or use bfloat16.
  4. A mask: filled with a number that the format turns into infinity (-1e9, or float32's minimum, in float16), or a \
row with everything masked, whose softmax is NaN.
  5. The weights are not finite any more: go back to the last good checkpoint.
What to do next: repeat the step that fails, same batch and weights, with policy = "float32". Not finite there either: \
it is 1, 2, 5 or a fully masked row, and no number format will help. Finite there: it is 3 or 4; look for the first \
layer whose inputs are finite and whose output is not."""


# ------------------------------------------------------------------------------------------------------- initial scale

# Gradients grow and shrink by orders of magnitude in the first steps of training; a factor of 16 to spare costs four of
# the exponents that scaling gains, and saves the skips until the scale has come down. A judgement, not a measurement.
_HEADROOM_BITS = 4

_LOWEST_EXPONENT = -1074  # of float64's smallest subnormal, 2**-1074
_EXPONENTS = 1023 - _LOWEST_EXPONENT + 1  # up to float64's largest values, below 2**1024


def gradient_histogram(gradients: Iterable[ArrayLike]) -> dict[int, int]:
    """How many gradient values have each binary exponent: what ``scale_from_histogram`` reads.

    Args:
        gradients: arrays of any shape and float dtype, unscaled, from a float32 step. Gradients of activations
            matter as much as those of weights, since they too are kept in the low format.

    Returns:
        ``{e: count of values with 2**e <= abs(value) < 2**(e + 1)}``, by rising ``e``; zeros are not counted.

    Raises:
        NonFiniteError: a gradient has an infinite or NaN value.
        FormatError: a gradient does not consist of real numbers.
    """
    counts = np.zeros(_EXPONENTS, np.int64)
    for position, gradient in enumerate(gradients):
        values, _ = as_floats(gradient)
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"Gradient {position} of the histogram has infinite or NaN values: take an unscaled float32 step's."
            )
        exponents = np.frexp(values[values != 0.0])[1]  # of a fraction in [0.5, 1)
        counts += np.bincount(exponents - _LOWEST_EXPONENT - 1, minlength=counts.size)
    return {_LOWEST_EXPONENT + int(place): int(counts[place]) for place in np.flatnonzero(counts)}


def scale_from_histogram(
    log2_counts: Mapping[int, int],
    fmt: NumberFormat,
    config: ScalingConfig | None = None,
    *,
    headroom_bits: int = _HEADROOM_BITS,
) -> float:
    """An initial loss scale chosen from gradients that were seen, instead of guessed.

    The largest power of two that keeps the largest gradient below ``fmt.max / 2**headroom_bits`` (arXiv:1710.03740 asks
    for a product "with the maximum absolute gradient value" below 65,504 in float16), but no larger than it takes to
    lift the smallest gradient to ``fmt.smallest_normal``, and not below 1 unless the largest demands it.

    Args:
        log2_counts: of ``gradient_histogram``; exponents with a count of 0 are ignored.
        fmt: the format that gradients are kept in.
        config: its ``min_scale`` and ``max_scale`` bound the result, its ``init_scale`` is the result when all
            gradients are zero; the defaults of ``ScalingConfig`` where not given.
        headroom_bits: how many doublings of the gradients the scale survives.

    Returns:
        The scale: a power of two, or the limit that it hit.
    """
    config = config or ScalingConfig()
    seen = [exponent for exponent, count in log2_counts.items() if count > 0]
    if not seen:
        _log.warning("All gradients are zero: the initial loss scale stays at %g.", config.init_scale)
        return config.init_scale
    highest = fmt.max_exponent - headroom_bits - (max(seen) + 1)
    needed = max(fmt.min_exponent - min(seen), 0)
    limit = round(math.log2(_LARGEST_SCALE))  # keeps the power finite; the config's own limits are within
    wanted = math.ldexp(1.0, max(-limit, min(highest, needed, limit)))
    scale = min(max(wanted, config.min_scale), config.max_scale)
    if scale > wanted:
        _log.warning(
            "Gradients reach 2**%d, which asks for a loss scale of %g in %s; scaling.min_scale = %g is above it, so "
            "the first steps may overflow. Lower min_scale or use a format with more range.",
            max(seen) + 1, wanted, fmt, config.min_scale,
        )  # fmt: skip
    return scale
