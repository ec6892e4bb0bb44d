"""The arithmetic behind ``castwise.formats``: arrays of float32 or float64 rounded to a narrower format, exactly.

With ``q`` the spacing of the format's grid around ``x`` and ``p`` the bits of the significand of the dtype ``x`` comes
in, adding and then subtracting ``2 ** (p - 1) * q`` leaves ``x`` rounded to a multiple of ``q``, half to even, because
that is what the processor's own addition does. ``q`` is read off the exponent bits, never below the spacing of the
format's subnormals. Where the format has the exponent range of the dtype (bfloat16 and tf32 from float32) that sum
could overflow; there, integer arithmetic on the bits rounds.

Work is done in pieces that stay in the processor's cache, which makes long arrays about twice as fast as whole-array
passes, and keeps the extra memory small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from castwise.errors import FormatError

if TYPE_CHECKING:
    from castwise.formats import NumberFormat

__all__ = ["PIECE", "Floats", "as_floats", "cut", "nearest", "stochastic"]

Floats = NDArray[np.floating[Any]]
_Integers = NDArray[np.signedinteger[Any]]

_LARGEST_EXACT_INTEGER = 2**53  # in float64
PIECE = 1 << 15  # values: with their temporaries they fit a second-level cache of 512 KiB


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a dtype's bits are laid out."""

    dtype: type[np.floating[Any]]
    integer: type[np.signedinteger[Any]]  # of the same size, to look at the bits
    exponent_bits: int
    mantissa_bits: int

    @property
    def precision(self) -> int:
        """Bits of the significand, the implied one included."""
        return self.mantissa_bits + 1

    @property
    def max(self) -> float:
        return float(np.finfo(self.dtype).max)

    def within(self, fmt: NumberFormat) -> bool:
        """Whether every value of this dtype is one of ``fmt``'s, so that there is nothing to round."""
        return fmt.exponent_bits >= self.exponent_bits and fmt.mantissa_bits >= self.mantissa_bits

    def exponents(self, magnitude: Floats, fmt: NumberFormat) -> _Integers:
        """The exponent bits of ``magnitude``, where they stand in the dtype, all other bits zero.

        Clipped from below, so that subnormals of ``fmt`` get the spacing of its smallest normals, and from above,
        because of anything beyond the first power of two that ``fmt`` lacks only "beyond" matters.
        """
        bias = 2 ** (self.exponent_bits - 1) - 1
        low = self.integer((fmt.min_exponent + bias) << self.mantissa_bits)
        high = self.integer((fmt.max_exponent + 1 + bias) << self.mantissa_bits)
        top: _Integers = magnitude.view(self.integer) & self.integer(
            ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        )
        np.clip(top, low, high, out=top)
        return top

    def power(self, exponents: _Integers, plus: int) -> Floats:
        """``2 ** (e + plus)``, exactly, for exponent bits that stand for ``e``."""
        shifted: _Integers = exponents + self.integer(plus << self.mantissa_bits)
        return shifted.view(self.dtype)


_LAYOUTS = {
    np.dtype(np.float32): _Layout(np.float32, np.int32, exponent_bits=8, mantissa_bits=23),
    np.dtype(np.float64): _Layout(np.float64, np.int64, exponent_bits=11, mantissa_bits=52),
}


def as_floats(x: ArrayLike) -> tuple[Floats, tuple[int, ...]]:
    """``x`` flattened, as float32 or float64 without loss, and its shape.

    Raises:
        FormatError: ``x`` is not real numbers, or some of them are not float64 values.
    """
    array = np.asarray(x)
    kind = array.dtype.kind
    if kind in "biu" or array.dtype.newbyteorder("=") == np.float64:
        wide: type[np.floating[Any]] = np.float64
    elif np.can_cast(array.dtype, np.float32, "safe"):
        wide = np.float32
    else:
        raise FormatError(f"Cannot round values of dtype {array.dtype}: give an array of float32 or float64.")
    if kind in "iu" and array.size and max(int(array.max()), -int(array.min())) > _LARGEST_EXACT_INTEGER:
        raise FormatError("Cannot round integers beyond 2**53 exactly: convert them to float64 first.")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.ascontiguousarray(array, dtype=wide).reshape(-1), array.shape


def cut(values: Floats) -> Iterator[Floats]:
    """A flat array as views of at most ``PIECE`` values."""
    for start in range(0, values.size, PIECE):
        yield values[start : start + PIECE]


def nearest(values: Floats, fmt: NumberFormat, saturate: bool, out: Floats) -> None:
    """Write ``values`` (flat, float32 or float64) rounded to nearest even into ``out`` (same size and dtype)."""
    layout = _LAYOUTS[values.dtype]
    for source, target in zip(cut(values), cut(out), strict=True):
        if layout.within(fmt):
            np.copyto(target, source)
        elif fmt.exponent_bits == layout.exponent_bits:
            _drop_bits(source, fmt, layout, target, None)
        else:
            _add_and_subtract(source, fmt, layout, target)
        if saturate:
            limit = layout.dtype(min(fmt.max, layout.max))
            np.copyto(target, np.copysign(limit, source), where=np.abs(source) > limit)


def stochastic(values: Floats, fmt: NumberFormat, saturate: bool, rng: np.random.Generator, out: Floats) -> None:
    """Write ``values`` (flat, float32 or float64) rounded stochastically into ``out`` (same size and dtype)."""
    layout = _LAYOUTS[values.dtype]
    if layout.within(fmt):
        return nearest(values, fmt, saturate, out)
    for source, target in zip(cut(values), cut(out), strict=True):
        if fmt.exponent_bits == layout.exponent_bits:
            _drop_bits(source, fmt, layout, target, rng)
        else:
            _step_up_or_not(source, fmt, layout, target, rng)
        out_of_range = ~(np.abs(source) <= fmt.max)  # NaN too
        if out_of_range.any():
            rounded = np.empty_like(source)
            nearest(source, fmt, saturate, rounded)
            np.copyto(target, rounded, where=out_of_range)
    return None


def _add_and_subtract(values: Floats, fmt: NumberFormat, layout: _Layout, out: Floats) -> None:
    """Round to nearest even by letting an addition drop the bits."""
    magnitude = np.abs(values)
    shift = layout.power(layout.exponents(magnitude, fmt), layout.precision - 1 - fmt.mantissa_bits)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        np.add(magnitude, shift, out=out)
        np.subtract(out, shift, out=out)
        np.copyto(out, np.inf if fmt.has_infinity else np.nan, where=out > fmt.max)
    np.copysign(out, values, out=out)


def _drop_bits(
    values: Floats, fmt: NumberFormat, layout: _Layout, out: Floats, rng: np.random.Generator | None
) -> None:
    """Round within an exponent range that both formats share: add to the bits that go, then clear them.

    A carry out of the mantissa raises the exponent, and out of the largest exponent it gives the bits of infinity.
    Without ``rng`` to nearest even; with it, stochastically.
    """
    dropped = layout.mantissa_bits - fmt.mantissa_bits
    bits, result = values.view(layout.integer), out.view(layout.integer)
    if rng is None:
        np.right_shift(bits, dropped, out=result)
        result &= 1
        result += layout.integer((1 << (dropped - 1)) - 1)
    else:
        result[...] = rng.integers(0, 1 << dropped, bits.size, dtype=layout.integer)
    result += bits
    result &= layout.integer(-1 << dropped)
    np.copyto(out, values, where=np.isnan(values))


def _step_up_or_not(values: Floats, fmt: NumberFormat, layout: _Layout, out: Floats, rng: np.random.Generator) -> None:
    """Round toward zero, then one step of the grid away from it with the probability that the dropped part asks for."""
    magnitude = np.abs(values)
    step = layout.power(layout.exponents(magnitude, fmt), -fmt.mantissa_bits)
    with np.errstate(invalid="ignore"):  # infinities and NaN, which the caller replaces
        steps = magnitude / step  # exact: step is a power of two, and the quotient is in range
        np.floor(steps, out=out)
        out += _happens(steps - out, layout, rng)
        out *= step
    np.copysign(out, values, out=out)


def _happens(probability: Floats, layout: _Layout, rng: np.random.Generator) -> NDArray[np.bool_]:
    """True with exactly the given probabilities, each in [0, 1).

    A random number of as many bits as the significand is compared with as many leading bits of the probability. Where
    they are equal the next bits decide: rare, except for probabilities too small for their first bits to show.
    """
    unit = layout.dtype(2.0**layout.precision)
    scaled = probability * unit
    leading = np.floor(scaled)
    drawn = rng.random(probability.shape, dtype=layout.dtype) * unit  # Generator draws multiples of 1 / unit
    happens: NDArray[np.bool_] = drawn < leading
    undecided = (drawn == leading) & (scaled > leading)
    if undecided.any():
        happens[undecided] = _happens((scaled - leading)[undecided], layout, rng)
    return happens
