"""Number formats: what each can hold, and exact rounding to it.

Everything else in Castwise asks this module what a cast would do to a value, so the answers must be exact. Two ways to
go wrong are avoided on purpose:

- *Double rounding.* float64 -> float32 -> bfloat16 is not float64 -> bfloat16. Values are rounded once, from the dtype
  they come in; the casts of NumPy and ml_dtypes, some of which pass through float32, only serve to check the result.
- *Flushed subnormals.* What is below the smallest normal number is rounded to the format's subnormal grid, not to zero.

The arithmetic is in ``_rounding.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from castwise import _rounding
from castwise._rounding import Floats
from castwise.errors import FormatError, did_you_mean

__all__ = [
    "BF16",
    "FORMATS",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "FP64",
    "TF32",
    "NumberFormat",
    "RangeShares",
    "parse_format",
    "range_shares",
    "round_stochastic",
    "round_to_nearest",
    "widest",
]


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A binary floating-point format: a sign bit, ``exponent_bits``, ``mantissa_bits`` stored (a leading 1 is implied).

    Compare formats with ``==``; print one to get its short name.
    """

    name: str  # short, as Castwise writes it: "fp16"
    long_name: str  # as frameworks write the dtype: "float16"
    bits: int  # that carry information: 19 for tf32
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool  # False: the top exponent holds numbers, and only its all-ones mantissa is NaN (OCP "FN")
    variant: str  # the definition this is, since "fp8" alone names several

    def __str__(self) -> str:
        """The short name, so that a format can be put into a message as it is."""
        return self.name

    @property
    def bias(self) -> int:
        """What is added to an exponent when it is stored."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def max_exponent(self) -> int:
        """Exponent (base 2) of the largest finite values: they are below ``2 ** (max_exponent + 1)``."""
        return self.bias if self.has_infinity else self.bias + 1

    @property
    def min_exponent(self) -> int:
        """Exponent (base 2) of the smallest normal value."""
        return 1 - self.bias

    @property
    def max(self) -> float:
        """Largest finite value."""
        last_mantissa = 2**self.mantissa_bits - (1 if self.has_infinity else 2)
        return math.ldexp(2**self.mantissa_bits + last_mantissa, self.max_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with full precision."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value, and the spacing of all values below ``2 * smallest_normal``."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value; rounding moves a normal value by at most half of it, relatively."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def bytes(self) -> int:
        """Bytes one value takes in memory: 4 for tf32, which is stored as float32."""
        return self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype (ml_dtypes' where NumPy has none) that stores this format; float32 for tf32."""
        return _STORED_AS[self.name]

    def holds(self, other: NumberFormat) -> bool:
        """Whether every finite value of ``other`` is a value of this format, so that casting to it changes nothing."""
        return (
            self.mantissa_bits >= other.mantissa_bits
            and self.max >= other.max
            and self.smallest_subnormal <= other.smallest_subnormal
        )


FP64 = NumberFormat("fp64", "float64", 64, 11, 52, True, "IEEE 754 binary64")
FP32 = NumberFormat("fp32", "float32", 32, 8, 23, True, "IEEE 754 binary32")
TF32 = NumberFormat("tf32", "tensorfloat32", 19, 8, 10, True, "NVIDIA TensorFloat-32")
BF16 = NumberFormat("bf16", "bfloat16", 16, 8, 7, True, "bfloat16 (upper half of IEEE 754 binary32)")
FP16 = NumberFormat("fp16", "float16", 16, 5, 10, True, "IEEE 754 binary16")
FP8_E5M2 = NumberFormat("fp8_e5m2", "float8_e5m2", 8, 5, 2, True, "OCP FP8 E5M2 (with infinities)")
FP8_E4M3 = NumberFormat(
    "fp8_e4m3", "float8_e4m3fn", 8, 4, 3, False, "OCP FP8 E4M3 (FN: no infinities, one NaN per sign)"
)

FORMATS: Mapping[str, NumberFormat] = MappingProxyType(
    {fmt.name: fmt for fmt in (FP64, FP32, TF32, BF16, FP16, FP8_E5M2, FP8_E4M3)}
)
"""Every format Castwise knows, by short name, from wide to narrow."""

_STORED_AS: Mapping[str, np.dtype[Any]] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "tf32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}

# ---------------------------------------------------------------------------------------------------------------- names

_OTHER_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "fp64": ("f64", "double"),
    "fp32": ("f32", "float", "single"),
    "tf32": ("tf32", "tensorfloat_32"),
    "bf16": ("brain_float", "bf16_mixed", "bf16_true"),
    "fp16": ("f16", "half", "16_mixed", "16_true"),
    "fp8_e5m2": ("float8e5m2", "f8e5m2", "e5m2"),
    "fp8_e4m3": ("fp8_e4m3fn", "float8e4m3fn", "f8e4m3fn", "e4m3fn", "e4m3"),
}
_SPELLINGS: Mapping[str, NumberFormat] = {
    spelling: fmt for name, fmt in FORMATS.items() for spelling in (name, fmt.long_name, *_OTHER_SPELLINGS[name])
}
# Formats that exist, look alike, and are not the ones above: a silent match would round to the wrong grid.
_LOOK_ALIKES: Mapping[str, str] = {
    "fp8": "names two formats: say fp8_e4m3 (for values) or fp8_e5m2 (for gradients)",
    "float8": "names two formats: say float8_e4m3fn (for values) or float8_e5m2 (for gradients)",
    "float8_e4m3": "is the variant with infinities (largest value 240): hardware and OCP use float8_e4m3fn",
    "float8_e4m3fnuz": "has another bias and no negative zero: Castwise has OCP's variant, float8_e4m3fn",
    "float8_e5m2fnuz": "has another bias and no infinities: Castwise has OCP's variant, float8_e5m2",
    "float8_e4m3b11fnuz": "has another bias and no negative zero: Castwise has OCP's variant, float8_e4m3fn",
}

_MODULES = frozenset({"torch", "np", "numpy", "jnp", "jax.numpy", "ml_dtypes", "tf", "tf.dtypes", "tensorflow"})


def parse_format(spelling: object) -> NumberFormat:
    """The format that a name or a framework's dtype object means.

    Args:
        spelling: a ``NumberFormat``; a name in any common spelling, in any case (``"bf16"``, ``"bfloat16"``,
            ``"torch.bfloat16"``, ``"mixed_bfloat16"``, ``"bf16-mixed"``, ``"half"``); or a dtype of NumPy, ml_dtypes,
            torch, JAX or TensorFlow, or a Keras dtype policy. ``"float"`` is float32, as in torch; the Python type
            ``float`` is float64, as in NumPy.

    Raises:
        FormatError: nothing known is spelt so. Eight-bit variants other than OCP's are refused, not approximated.
    """
    if isinstance(spelling, NumberFormat):
        return spelling
    if spelling is float:
        return FP64
    text = _text_of(spelling)
    found = _SPELLINGS.get(text) or _SPELLINGS.get(text.removeprefix("mixed_"))
    if found is not None:
        return found
    shown = repr(spelling)
    if text in _LOOK_ALIKES:
        raise FormatError(f"Number format {shown} {_LOOK_ALIKES[text]}.")
    raise FormatError(
        f"Unknown number format {shown}.{did_you_mean(text, _SPELLINGS)} Castwise knows {', '.join(FORMATS)}."
    )


def _text_of(spelling: object) -> str:
    """The name in ``spelling`` without its framework: "torch.bfloat16" and jnp.bfloat16 both give "bfloat16"."""
    if isinstance(spelling, str):
        text = spelling
    else:
        # dtypes and policies have a name, scalar types (np.float16, jnp.bfloat16) a __name__; torch's have neither.
        name = getattr(spelling, "name", None) or getattr(spelling, "__name__", None)
        text = name if isinstance(name, str) else str(spelling)
    text = text.strip().casefold()
    module, _, last = text.rpartition(".")
    return (last if module in _MODULES else text).replace("-", "_")


def widest(*formats: NumberFormat) -> NumberFormat:
    """The narrowest format that holds every value of all those given: what an op that promotes its inputs computes in.

    ``widest(FP16, BF16)`` is FP32, as in torch and JAX: neither holds the other. tf32 is an input format of matrix
    units, not one that tensors are stored in, so it is the answer only where it was given.

    Raises:
        FormatError: no format was given.
    """
    if not formats:
        raise FormatError("widest() needs at least one number format.")
    for candidate in formats:
        if all(candidate.holds(other) for other in formats):
            return candidate
    stored = [fmt for fmt in FORMATS.values() if fmt is not TF32]
    return next(fmt for fmt in reversed(stored) if all(fmt.holds(other) for other in formats))


# ----------------------------------------------------------------------------------------------------------- rounding


def round_to_nearest(x: ArrayLike, fmt: NumberFormat | str, *, saturate: bool = False) -> Floats:
    """``x`` rounded to the nearest value of ``fmt``, ties to the even neighbour: an exact cast there and back.

    The rounding is that of IEEE 754 (roundTiesToEven) and of the OCP FP8 specification, subnormals included. A
    magnitude that rounds beyond ``fmt.max`` becomes infinite, or NaN in fp8_e4m3, which has no infinity. NaN stays NaN,
    and the sign of zero is kept. Frameworks differ beyond ``fmt.max``: torch's CPU cast to float8_e4m3fn is the
    saturating one, JAX's is not.

    Args:
        x: any shape; float32 or float64. Integers and Python numbers are taken as float64, narrower floats as float32.
        fmt: the format to round to, or its name in any spelling.
        saturate: magnitudes beyond ``fmt.max``, infinities included, become ``fmt.max`` instead.

    Returns:
        A new array of ``x``'s shape, float32 or float64 as described, whose values all lie on ``fmt``'s grid.

    Raises:
        FormatError: ``x`` is not real numbers, or has more precision than float64; or there is no such format.
    """
    fmt = parse_format(fmt)
    values, shape = _rounding.as_floats(x)
    out = np.empty_like(values)
    _rounding.nearest(values, fmt, saturate, out)
    return out.reshape(shape)


def round_stochastic(
    x: ArrayLike, fmt: NumberFormat | str, rng: np.random.Generator, *, saturate: bool = False
) -> Floats:
    """``x`` rounded to one of its two neighbours in ``fmt``, each with the probability that makes the mean exact.

    Unbiased for every ``x`` with ``abs(x) <= fmt.max``, subnormals and what is below the smallest of them included: as
    many random bits are drawn as the distance needs. A value of ``fmt`` never moves. Beyond ``fmt.max`` there is no
    upper neighbour: there, and for infinities and NaN, the result is that of ``round_to_nearest``, so infinity stays
    infinity (NaN in fp8_e4m3), and what is in range never becomes infinite.

    Args:
        x: as for ``round_to_nearest``.
        fmt: the format to round to, or its name in any spelling.
        rng: where the randomness comes from; the same state gives the same result.
        saturate: as for ``round_to_nearest``.

    Returns:
        A new array of ``x``'s shape, float32 or float64 as for ``round_to_nearest``.

    Raises:
        FormatError: ``x`` is not real numbers, or has more precision than float64; or there is no such format.
    """
    fmt = parse_format(fmt)
    values, shape = _rounding.as_floats(x)
    out = np.empty_like(values)
    _rounding.stochastic(values, fmt, saturate, rng, out)
    return out.reshape(shape)


@dataclass(frozen=True, slots=True)
class RangeShares:
    """How much of an array falls out of a format's range.

    Shares are between 0 and 1, and 0 where there is nothing to count.
    """

    overflow: float  # of the finite values: round beyond the format's max
    underflow: float  # of the finite nonzero values: round to zero
    subnormal: float  # of the finite nonzero values: round to a nonzero subnormal, so keep fewer mantissa bits
    count: int  # finite values, the denominator of overflow
    nonzero: int  # finite nonzero values, the denominator of underflow and subnormal
    nonfinite: int  # values that were infinite or NaN before any rounding; in none of the shares


def range_shares(x: ArrayLike, fmt: NumberFormat | str) -> RangeShares:
    """What rounding ``x`` to the nearest values of ``fmt`` would lose at the ends of its range.

    Args:
        x: as for ``round_to_nearest``.
        fmt: the format to round to, or its name in any spelling.

    Raises:
        FormatError: ``x`` is not real numbers, or has more precision than float64; or there is no such format.
    """
    fmt = parse_format(fmt)
    values, _ = _rounding.as_floats(x)
    buffer = np.empty(min(_rounding.PIECE, values.size), values.dtype)
    finite = finite_after = nonzero = nonzero_after = normal_after = 0
    for piece in _rounding.cut(values):
        rounded = buffer[: piece.size]
        _rounding.nearest(piece, fmt, False, rounded)
        finite += int(np.count_nonzero(np.isfinite(piece)))
        finite_after += int(np.count_nonzero(np.isfinite(rounded)))
        nonzero += int(np.count_nonzero(piece))
        nonzero_after += int(np.count_nonzero(rounded))
        normal_after += int(np.count_nonzero(~(np.abs(rounded) < fmt.smallest_normal)))
    nonfinite = values.size - finite
    in_play = nonzero - nonfinite
    return RangeShares(
        overflow=(finite - finite_after) / max(finite, 1),
        underflow=(nonzero - nonzero_after) / max(in_play, 1),
        subnormal=(nonzero_after - normal_after) / max(in_play, 1),
        count=finite,
        nonzero=in_play,
        nonfinite=nonfinite,
    )
