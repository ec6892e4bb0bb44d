"""Rounding against three oracles: exact rational arithmetic, torch's casts and JAX's casts.

The first is written from the encodings alone (IEEE 754 and OCP FP8: sign, biased exponent, mantissa) and shares no code
with castwise or ml_dtypes: a magnitude is an integer code, codes in rising order are values in rising order, and an
even code has an even mantissa.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from castwise.errors import FormatError
from castwise.formats import (
    BF16,
    FORMATS,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FP64,
    TF32,
    NumberFormat,
    range_shares,
    round_stochastic,
    round_to_nearest,
)

# name: exponent bits, mantissa bits, bias, code of the largest finite value. From the standards, not from castwise.
ENCODINGS = {
    "fp64": (11, 52, 1023, 0x7FEF_FFFF_FFFF_FFFF),
    "fp32": (8, 23, 127, 0x7F7F_FFFF),
    "tf32": (8, 10, 127, (0xFE << 10) | 0x3FF),
    "bf16": (8, 7, 127, 0x7F7F),
    "fp16": (5, 10, 15, 0x7BFF),
    "fp8_e5m2": (5, 2, 15, 0x7B),
    "fp8_e4m3": (4, 3, 7, 0x7E),
}
NARROW = [BF16, FP16, FP8_E5M2, FP8_E4M3]
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
narrow = pytest.mark.parametrize("fmt", NARROW, ids=str)
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])
laws = settings(deadline=None, max_examples=200)


def decode(name: str, code: int) -> Fraction:
    """The value of a positive code; beyond the largest finite one, the value that the code would go on to."""
    _, mantissa_bits, bias, _ = ENCODINGS[name]
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    if exponent == 0:
        return Fraction(mantissa) * Fraction(2) ** (1 - bias - mantissa_bits)
    return Fraction(2**mantissa_bits + mantissa) * Fraction(2) ** (exponent - bias - mantissa_bits)


def neighbours(name: str, magnitude: Fraction) -> tuple[int, int]:
    """The codes below and above a magnitude in range; twice the same code for a value of the format."""
    codes = range(ENCODINGS[name][3] + 2)
    above = bisect.bisect_left(codes, magnitude, key=lambda code: decode(name, code))
    return (above if decode(name, above) == magnitude else above - 1), above


def exact_nearest(name: str, x: float) -> float:
    """Round to nearest, ties to even, in exact rational arithmetic; beyond the range infinity, or NaN without one."""
    beyond = np.nan if name == "fp8_e4m3" else np.inf
    if np.isnan(x):
        return x
    largest = ENCODINGS[name][3]
    magnitude = Fraction(abs(x)) if np.isfinite(x) else decode(name, largest + 1) * 2
    if magnitude >= decode(name, largest + 1):
        return float(np.copysign(beyond, x))
    below, above = neighbours(name, magnitude)
    to_below, to_above = magnitude - decode(name, below), decode(name, above) - magnitude
    code = below if to_below < to_above or (to_below == to_above and below % 2 == 0) else above
    return float(np.copysign(beyond if code > largest else float(decode(name, code)), x))


def assert_same(got: Any, expected: Any) -> None:
    """Equal values, zeros of equal sign, NaN where NaN."""
    got, expected = np.asarray(got), np.asarray(expected, dtype=np.asarray(got).dtype)
    same = (got == expected) & (np.signbit(got) == np.signbit(expected)) | (np.isnan(got) & np.isnan(expected))
    wrong = np.flatnonzero(~same)
    assert not wrong.size, f"{wrong.size} differ: {got.flat[wrong[:5]]} instead of {expected.flat[wrong[:5]]}"


def awkward(fmt: NumberFormat) -> st.SearchStrategy[float]:
    """Floats of all sizes, and ones next to where the rounding of ``fmt`` changes its mind."""
    largest = ENCODINGS[fmt.name][3]

    def beside(code: int, halves: int, ulps: int, negative: bool) -> float:
        x = float(decode(fmt.name, code)) + halves * float(decode(fmt.name, code + 1) - decode(fmt.name, code)) / 2
        for _ in range(abs(ulps)):
            x = float(np.nextafter(x, np.inf * ulps))
        return -x if negative else x

    codes = st.one_of(st.integers(0, largest), st.integers(0, 5), st.integers(largest - 3, largest))
    near = st.builds(beside, codes, st.integers(0, 2), st.integers(-2, 2), st.booleans())
    return st.one_of(st.floats(), near)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt is not FP64], ids=str)
def test_round_to_nearest_even_from_float64_matches_exact_rational_oracle(fmt: NumberFormat) -> None:
    @laws
    @given(awkward(fmt))
    def check(x: float) -> None:
        assert_same(round_to_nearest(np.float64(x), fmt), exact_nearest(fmt.name, x))

    check()


@pytest.mark.parametrize("fmt", [TF32, *NARROW], ids=str)
def test_round_to_nearest_even_from_float32_matches_exact_rational_oracle(fmt: NumberFormat) -> None:
    @laws
    @given(awkward(fmt))
    def check(x: float) -> None:
        with np.errstate(over="ignore"):
            single = np.float32(x)
        assert_same(round_to_nearest(single, fmt), exact_nearest(fmt.name, float(single)))

    check()


def values_of(fmt: NumberFormat, dtype: type) -> np.ndarray:
    """All values of a format, by its bit patterns: every 2**16 of a 16-bit one, every 2**8 of an 8-bit one."""
    codes = np.arange(2**fmt.bits, dtype=f"u{fmt.bytes}")
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        return codes.view(fmt.numpy_dtype).astype(dtype)


@narrow
@dtypes
def test_every_bit_pattern_is_a_fixed_point(fmt: NumberFormat, dtype: type) -> None:
    values = values_of(fmt, dtype)
    assert_same(round_to_nearest(values, fmt), values)
    assert_same(round_stochastic(values, fmt, np.random.default_rng(0)), values)


def test_every_value_of_tf32_is_a_fixed_point() -> None:
    codes = np.arange(2**19, dtype=np.uint32) << 13
    values = codes.view(np.float32)
    assert_same(round_to_nearest(values, TF32), values)
    assert_same(round_stochastic(values, TF32, np.random.default_rng(0)), values)


def between(fmt: NumberFormat, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """For all adjacent values: the midpoint and its neighbours in ``dtype``, and what these must round to."""
    last = ENCODINGS[fmt.name][3]
    step = np.array([float(decode(fmt.name, code)) for code in range(last + 2)])
    low, high = step[:-1], step[1:].copy()
    middle = ((low + high) / 2).astype(dtype)
    high[-1] = np.inf if fmt.has_infinity else np.nan
    even = np.where(np.arange(last + 1) % 2 == 0, low, high)
    x = np.concatenate([middle, np.nextafter(middle, dtype(0)), np.nextafter(middle, dtype(np.inf))])
    expected = np.concatenate([even, low, high]).astype(dtype)
    return np.concatenate([x, -x]), np.concatenate([expected, -expected])


@narrow
@dtypes
def test_between_all_adjacent_values_the_midpoint_goes_to_even_and_its_neighbours_to_their_side(
    fmt: NumberFormat, dtype: type
) -> None:
    x, expected = between(fmt, dtype)
    assert_same(round_to_nearest(x, fmt), expected)


def torch_cast(fmt: NumberFormat) -> Callable[[np.ndarray], np.ndarray]:
    dtype = getattr(torch, fmt.long_name)
    return lambda x: torch.from_numpy(x).to(dtype).to(torch.float32).numpy()


def jax_cast(fmt: NumberFormat) -> Callable[[np.ndarray], np.ndarray]:
    dtype = getattr(jnp, fmt.long_name)
    return lambda x: np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32))


def sample_of_float32() -> np.ndarray:
    """Every 2**12-th bit pattern of float32 with scrambled low bits: all signs, exponents, infinities and NaN."""
    patterns = np.arange(0, 2**32, 2**12, dtype=np.uint32)
    noise = np.random.default_rng(0).integers(0, 2**12, patterns.size, dtype=np.uint32)
    return (patterns + noise).view(np.float32)


@pytest.mark.parametrize("cast", [torch_cast, jax_cast])
@narrow
def test_round_to_nearest_is_the_frameworks_own_cast(fmt: NumberFormat, cast: Callable[..., Any]) -> None:
    # torch's CPU cast to float8_e4m3fn saturates (infinities too), JAX's gives NaN beyond the range.
    saturate = cast is torch_cast and fmt is FP8_E4M3
    frameworks = cast(fmt)
    x = np.concatenate([values_of(fmt, np.float32), between(fmt, np.float32)[0], sample_of_float32()])
    assert_same(round_to_nearest(x, fmt, saturate=saturate), frameworks(x))


def test_float64_is_rounded_once() -> None:
    just_above_a_tie = 1 + 2.0**-8 + 2.0**-40  # float32 would drop the last bit and leave a tie
    assert round_to_nearest(np.float64(just_above_a_tie), BF16) == 1 + 2.0**-7
    assert np.float64(just_above_a_tie).astype(ml_dtypes.bfloat16) == 1  # the cast that goes by way of float32


@narrow
def test_saturating_stops_at_the_largest_value_and_keeps_nan(fmt: NumberFormat) -> None:
    x = np.array([np.inf, -np.inf, 1e30 * fmt.max, -np.nextafter(fmt.max, np.inf), fmt.max, np.nan, 1.0])
    expected = np.array([fmt.max, -fmt.max, fmt.max, -fmt.max, fmt.max, np.nan, 1.0])
    assert_same(round_to_nearest(x, fmt, saturate=True), expected)
    assert_same(round_stochastic(x, fmt, np.random.default_rng(0), saturate=True), expected)


@formats
@dtypes
def test_a_wide_format_changes_nothing_and_gives_a_new_array(fmt: NumberFormat, dtype: type) -> None:
    x = np.array([np.inf, -np.inf, np.nan, -0.0, np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal], dtype)
    for rounded in (round_to_nearest(x, fmt), round_stochastic(x, fmt, np.random.default_rng(0))):
        assert rounded is not x
        assert rounded.dtype == dtype
        if fmt is FP64 or (fmt is FP32 and dtype is np.float32):
            assert_same(rounded, x)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4), (70_000,)])
def test_shape_is_kept_and_the_input_untouched(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32) * np.float32(1e3)
    before = x.copy()
    assert round_to_nearest(x, BF16).shape == shape
    assert round_stochastic(x, BF16, np.random.default_rng(0)).shape == shape
    assert_same(x, before)


def test_views_of_any_stride_and_byte_order_are_read_right() -> None:
    x = np.random.default_rng(0).normal(size=(40, 50))
    expected = round_to_nearest(x, FP16)
    assert_same(round_to_nearest(x.T, FP16), expected.T)
    assert_same(round_to_nearest(x[::-2, 5:], FP16), expected[::-2, 5:])
    assert_same(round_to_nearest(x.astype(">f8"), FP16), expected)


@pytest.mark.parametrize("fmt_in", [FP16, BF16, FP32, FP64], ids=str)
def test_signalling_nans_pass_without_a_warning(fmt_in: NumberFormat) -> None:
    largest = ENCODINGS[fmt_in.name][3]
    first_nan = largest + 2  # between them: infinity
    signalling = np.array([first_nan, first_nan | 1 << (fmt_in.bits - 1)], f"u{fmt_in.bytes}").view(fmt_in.numpy_dtype)
    for fmt in FORMATS.values():
        assert np.isnan(round_to_nearest(signalling, fmt)).all()
        assert np.isnan(round_stochastic(signalling, fmt, np.random.default_rng(0))).all()
        assert range_shares(signalling, fmt).nonfinite == 2


def test_integers_are_taken_as_float64_and_narrow_floats_as_float32() -> None:
    assert_same(round_to_nearest([2049, 2051, 70000], FP16), np.array([2048.0, 2052.0, np.inf]))
    assert round_to_nearest([1, 2], FP16).dtype == np.float64
    for narrow_dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        rounded = round_to_nearest(np.array([1.0625, 1.125], narrow_dtype), FP8_E5M2)
        assert rounded.dtype == np.float32
        assert_same(rounded, np.array([1.0, 1.0], np.float32))


@pytest.mark.parametrize("bad", [np.array(["1.0"]), np.array([1j]), np.array([None]), np.longdouble(1), [2**53 + 1]])
def test_what_cannot_be_rounded_exactly_is_refused(bad: Any) -> None:
    with pytest.raises(FormatError, match="Cannot round"):
        round_to_nearest(bad, FP16)


# ----------------------------------------------------------------------------------------------------------- stochastic


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt is not FP64], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stochastic_rounding_goes_to_a_neighbour(fmt: NumberFormat, dtype: type) -> None:
    @laws
    @given(awkward(fmt), st.integers(0, 2**32))
    def check(x: float, seed: int) -> None:
        with np.errstate(over="ignore"):
            value = dtype(x)
        rounded = round_stochastic(value, fmt, np.random.default_rng(seed))
        if not abs(float(value)) <= fmt.max:
            assert_same(rounded, exact_nearest(fmt.name, float(value)))
            return
        below, above = neighbours(fmt.name, Fraction(abs(float(value))))
        assert Fraction(abs(float(rounded))) in (decode(fmt.name, below), decode(fmt.name, above))
        assert np.signbit(rounded) == np.signbit(value)

    check()


def across_the_range(fmt: NumberFormat, dtype: type) -> np.ndarray:
    """Magnitudes from far below the smallest subnormal up to the largest value, of both signs."""
    rng = np.random.default_rng(1)
    lowest = max(fmt.smallest_subnormal / 16, float(np.finfo(dtype).smallest_subnormal))
    steps = rng.uniform(np.log2(lowest), np.log2(fmt.max), 150)
    subnormal = rng.uniform(0, 4 * fmt.smallest_normal, 50)
    near_the_top = fmt.max * (1 - rng.uniform(0, fmt.eps, 20))
    x = np.concatenate([2**steps, subnormal, near_the_top]).astype(dtype)
    return np.minimum(x, dtype(fmt.max)) * rng.choice(np.array([-1, 1], dtype), x.size)


@pytest.mark.parametrize("fmt", [TF32, *NARROW], ids=str)
@dtypes
def test_stochastic_rounding_is_unbiased_also_where_values_are_subnormal_or_near_the_largest(
    fmt: NumberFormat, dtype: type
) -> None:
    x, draws = across_the_range(fmt, dtype), 4000
    codes = [neighbours(fmt.name, Fraction(abs(float(value)))) for value in x]
    down, up = np.array([[float(decode(fmt.name, code)) for code in pair] for pair in codes]).T
    share = np.divide(np.abs(x) - down, up - down, out=np.zeros(x.size), where=up > down)  # of draws that should go up
    rounded = np.abs(round_stochastic(np.broadcast_to(x, (draws, x.size)), fmt, np.random.default_rng(2)))
    went_up = ((rounded == up) & (up > down)).mean(axis=0)
    spread = np.sqrt(share * (1 - share) / draws)
    assert np.all(went_up[share == 0] == 0)
    moving = (share > 10 / draws) & (share < 1 - 10 / draws)
    z = (went_up[moving] - share[moving]) / spread[moving]
    assert moving.sum() > 100
    assert np.abs(z).max() < 4.5  # of some 200 normal variables: less than 1 in 700 to fail, and the seed is fixed
    assert abs(z.mean()) < 4 / np.sqrt(z.size)
    assert 0.7 < z.var() < 1.4


class _ScriptedRandom:
    """Stands in for a Generator, to give the exact draws that decide a rare case."""

    def __init__(self, *draws: float) -> None:
        self.draws = list(draws)

    def random(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        return np.full(shape, self.draws.pop(0), dtype)


@pytest.mark.parametrize(("second", "goes_up"), [(0.7499, True), (0.7501, False)])
def test_probabilities_smaller_than_one_draw_can_show_take_another_draw(second: float, goes_up: bool) -> None:
    x = np.float32(FP8_E5M2.smallest_subnormal * 0.75 * 2.0**-24)  # must go up in 3 of 2**26 cases
    rng: Any = _ScriptedRandom(0.0, second)
    assert (round_stochastic(x, FP8_E5M2, rng) == FP8_E5M2.smallest_subnormal) == goes_up
    never: Any = _ScriptedRandom(2.0**-24)
    assert round_stochastic(x, FP8_E5M2, never) == 0


def test_draws_are_compared_exactly_so_that_values_of_the_format_stay_and_halves_are_halves() -> None:
    smallest_draw: Any = _ScriptedRandom(0.0)
    assert round_stochastic(np.float32(1.25), FP8_E5M2, smallest_draw) == 1.25
    for draw, expected in [(0.5 - 2.0**-24, 1.25), (0.5, 1.0)]:
        rng: Any = _ScriptedRandom(draw)
        assert round_stochastic(np.float32(1.125), FP8_E5M2, rng) == expected


@formats
@dtypes
def test_stochastic_rounding_leaves_infinity_and_nan_and_never_makes_them_in_range(
    fmt: NumberFormat, dtype: type
) -> None:
    rng = np.random.default_rng(0)
    special = round_stochastic(np.array([np.inf, -np.inf, np.nan], dtype), fmt, rng)
    beyond = np.inf if fmt.has_infinity else np.nan
    assert_same(special, np.array([beyond, -beyond, np.nan]))
    top = min(fmt.max, float(np.finfo(dtype).max))
    almost = np.full(10_000, np.nextafter(dtype(top), dtype(0)))
    assert np.isfinite(round_stochastic(almost, fmt, rng)).all()


@narrow
def test_the_same_random_state_gives_the_same_result(fmt: NumberFormat) -> None:
    x = np.random.default_rng(3).normal(size=100_000).astype(np.float32)
    first, again, other = (round_stochastic(x, fmt, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert_same(first, again)
    assert np.any(first != other)


# --------------------------------------------------------------------------------------------------------- range shares


def test_a_format_may_be_named_in_any_spelling() -> None:
    x = np.array([1.1, 1e9, 1e-9])
    np.testing.assert_array_equal(round_to_nearest(x, "torch.half"), round_to_nearest(x, FP16))
    drawn = [round_stochastic(x, fmt, np.random.default_rng(0)) for fmt in ("half", FP16)]
    np.testing.assert_array_equal(*drawn)
    assert range_shares(x, "fp16") == range_shares(x, FP16)
    with pytest.raises(FormatError, match="Did you mean"):
        round_to_nearest(x, "fp17")


@pytest.mark.parametrize("fmt", [TF32, *NARROW], ids=str)
def test_range_shares_count_what_the_exact_oracle_counts(fmt: NumberFormat) -> None:
    @settings(deadline=None, max_examples=50)
    @given(st.lists(awkward(fmt), max_size=20))
    def check(x: list[float]) -> None:
        pairs = [(value, exact_nearest(fmt.name, value)) for value in x if np.isfinite(value)]
        nonzero = [(value, rounded) for value, rounded in pairs if value != 0]
        overflow = sum(not np.isfinite(rounded) for _, rounded in pairs)
        underflow = sum(rounded == 0 for _, rounded in nonzero)
        subnormal = sum(0 < abs(rounded) < fmt.smallest_normal for _, rounded in nonzero)
        shares = range_shares(np.array(x, np.float64), fmt)
        assert (shares.count, shares.nonzero, shares.nonfinite) == (len(pairs), len(nonzero), len(x) - len(pairs))
        assert shares.overflow == overflow / max(len(pairs), 1)
        assert shares.underflow == underflow / max(len(nonzero), 1)
        assert shares.subnormal == subnormal / max(len(nonzero), 1)

    check()


def test_zeros_do_not_hide_underflow_and_are_not_counted_as_it() -> None:
    gradients = np.zeros(1_000_000, np.float32)
    gradients[::1000] = 1e-9
    gradients[::2000] = 1e-6
    shares = range_shares(gradients, FP16)
    assert (shares.underflow, shares.subnormal, shares.overflow) == (0.5, 0.5, 0.0)
    assert (shares.count, shares.nonzero) == (1_000_000, 1000)


@formats
def test_shares_of_nothing_are_zero(fmt: NumberFormat) -> None:
    for nothing in ([], [np.nan, np.inf]):
        shares = range_shares(np.array(nothing, np.float32), fmt)
        assert (shares.overflow, shares.underflow, shares.subnormal, shares.count) == (0, 0, 0, 0)
        assert shares.nonfinite == len(nothing)
