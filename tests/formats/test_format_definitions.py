"""What each format can hold, and what its names are."""

from __future__ import annotations

import itertools
import pickle

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
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
    parse_format,
    round_to_nearest,
    widest,
)

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
}
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
any_format = st.sampled_from(list(FORMATS.values()))


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_limits_are_those_torch_states(name: str) -> None:
    fmt, info = FORMATS[name], torch.finfo(TORCH_DTYPES[name])
    assert (fmt.max, fmt.smallest_normal, fmt.eps, fmt.bits) == (info.max, info.tiny, info.eps, info.bits)


@formats
def test_limits_are_those_of_the_dtype_that_stores_it(fmt: NumberFormat) -> None:
    if (
        fmt is TF32
    ):  # stored as float32, so its own limits come from NVIDIA's description: 8 exponent bits, 10 of mantissa
        assert (fmt.max, fmt.smallest_normal) == ((2 - 2**-10) * 2.0**127, 2.0**-126)
        assert (fmt.smallest_subnormal, fmt.eps, fmt.bytes) == (2.0**-136, 2.0**-10, 4)
        return
    info = ml_dtypes.finfo(fmt.numpy_dtype)
    assert fmt.max == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.eps == float(info.eps)
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.nexp, info.nmant)
    assert fmt.bytes == info.bits // 8


@formats
def test_bits_are_sign_exponent_and_mantissa(fmt: NumberFormat) -> None:
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits


@formats
def test_only_e4m3_has_no_infinity_and_says_which_variant_it_is(fmt: NumberFormat) -> None:
    with np.errstate(over="ignore"):
        beyond = np.array([np.inf]).astype(fmt.numpy_dtype).astype(np.float64)[0]
    assert np.isinf(beyond) == fmt.has_infinity == (fmt is not FP8_E4M3)
    assert fmt.variant


def test_the_eight_bit_formats_are_the_ocp_ones() -> None:
    assert (FP8_E4M3.max, FP8_E4M3.long_name) == (448.0, "float8_e4m3fn")
    assert (FP8_E5M2.max, FP8_E5M2.long_name) == (57344.0, "float8_e5m2")
    assert "FN" in FP8_E4M3.variant
    assert "OCP" in FP8_E5M2.variant


@formats
def test_a_format_is_a_value(fmt: NumberFormat) -> None:
    assert pickle.loads(pickle.dumps(fmt)) == fmt
    assert FORMATS[str(fmt)] is fmt
    with pytest.raises(AttributeError):
        fmt.bits = 3  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------------- names

SPELLINGS: list[tuple[object, NumberFormat]] = [
    *[(fmt, fmt) for fmt in FORMATS.values()],
    *[(fmt.name, fmt) for fmt in FORMATS.values()],
    *[(fmt.long_name, fmt) for fmt in FORMATS.values()],
    *[(dtype, FORMATS[name]) for name, dtype in TORCH_DTYPES.items()],
    *[(str(dtype), FORMATS[name]) for name, dtype in TORCH_DTYPES.items()],
    *[(fmt.numpy_dtype, fmt) for fmt in FORMATS.values() if fmt is not TF32],
    *[(fmt.numpy_dtype.type, fmt) for fmt in FORMATS.values() if fmt is not TF32],
    *[(jnp.bfloat16, BF16), (jnp.float16, FP16), (jnp.float8_e4m3fn, FP8_E4M3), (jnp.dtype("bfloat16"), BF16)],
    *[("mixed_bfloat16", BF16), ("mixed_float16", FP16), ("bf16-mixed", BF16), ("16-mixed", FP16), ("BF16", BF16)],
    *[("half", FP16), ("torch.half", FP16), ("float", FP32), ("single", FP32), ("double", FP64), (float, FP64)],
    *[("jnp.bfloat16", BF16), ("jax.numpy.float16", FP16), ("tf.bfloat16", BF16), ("np.float32", FP32)],
    *[("e4m3", FP8_E4M3), ("fp8_e4m3fn", FP8_E4M3), ("float8_e4m3fn", FP8_E4M3), ("FLOAT8E5M2", FP8_E5M2)],
    *[("tf32", TF32), ("TensorFloat-32", TF32), (" bfloat16 ", BF16)],
]


@pytest.mark.parametrize(("spelling", "fmt"), SPELLINGS, ids=[repr(spelling)[:40] for spelling, _ in SPELLINGS])
def test_every_common_spelling_means_its_format(spelling: object, fmt: NumberFormat) -> None:
    assert parse_format(spelling) is fmt


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("bflaot16", "Did you mean 'bfloat16'"),
        ("fp17", "Did you mean"),
        ("", "Castwise knows fp64, fp32"),
        (None, "Unknown number format None"),
        (16, "Unknown number format 16"),
        (torch.int8, "Unknown number format torch.int8"),
        (np.dtype("int32"), "int32"),
        ("mymodel.bf16", "mymodel.bf16"),
        ("fp8", "fp8_e4m3 .* or fp8_e5m2"),
        ("float8_e4m3", "variant with infinities"),
        (ml_dtypes.float8_e4m3, "variant with infinities"),
        (torch.float8_e4m3fnuz, "another bias"),
        (torch.float8_e5m2fnuz, "another bias"),
        (ml_dtypes.float8_e4m3b11fnuz, "another bias"),
    ],
)
def test_what_is_not_a_known_format_is_refused_with_advice(spelling: object, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        parse_format(spelling)


@given(st.text(max_size=12))
def test_any_text_is_a_format_or_a_format_error(text: str) -> None:
    try:
        assert parse_format(text) in FORMATS.values()
    except FormatError as error:
        assert repr(text) in str(error)


# --------------------------------------------------------------------------------------------------------------- widest


@pytest.mark.parametrize(("one", "other"), [*itertools.product(["fp64", "fp32", "bf16", "fp16"], repeat=2)])
def test_widest_promotes_as_torch_does(one: str, other: str) -> None:
    promoted = torch.promote_types(TORCH_DTYPES[one], TORCH_DTYPES[other])
    assert widest(FORMATS[one], FORMATS[other]) is parse_format(promoted)


def test_widest_of_formats_that_do_not_hold_each_other_is_one_that_tensors_are_stored_in() -> None:
    assert widest(FP16, BF16) is FP32
    assert widest(FP8_E4M3, FP8_E5M2) is FP16
    assert widest(FP8_E4M3, BF16) is BF16
    assert widest(TF32, BF16, FP16) is TF32


def test_widest_of_nothing_is_an_error() -> None:
    with pytest.raises(FormatError, match="at least one"):
        widest()


@given(st.lists(any_format, min_size=1, max_size=4), st.randoms())
def test_widest_holds_all_and_does_not_depend_on_their_order(given_formats: list[NumberFormat], random) -> None:
    result = widest(*given_formats)
    assert all(result.holds(fmt) for fmt in given_formats)
    shuffled = random.sample(given_formats, len(given_formats))
    assert widest(*shuffled) is result


@pytest.mark.parametrize(("outer", "inner"), [*itertools.product(FORMATS.values(), repeat=2)], ids=str)
def test_holds_says_whether_every_value_survives(outer: NumberFormat, inner: NumberFormat) -> None:
    if inner.bits <= 16:
        codes = np.arange(2**inner.bits, dtype=f"u{inner.bytes}")
        with np.errstate(invalid="ignore"):  # signalling NaNs are among them
            values = codes.view(inner.numpy_dtype).astype(np.float64)
        values = values[np.isfinite(values)]
    else:  # too many to list: the ends of the range and of the precision decide
        values = np.array([inner.max, inner.smallest_normal, inner.smallest_subnormal, 1 + inner.eps])
    survives = round_to_nearest(values, outer) == values
    assert outer.holds(inner) == survives.all()
