"""Gradients between ranks in 16 bits or fewer: nothing overflows, nothing that matters vanishes, infinities stay."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from castwise.torch.distributed._packing import BLOCK, Packing

FORMATS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4}  # largest relative rounding error


def gradients(ranks: int, size: float) -> list[list[torch.Tensor]]:
    """For each rank two tensors of very different sizes, which lie in one bucket."""
    draws = torch.Generator().manual_seed(1)
    return [
        [torch.randn(2500, generator=draws) * size, torch.randn(300, generator=draws) * size * 1e-9]
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [1.0, 1e6, 1e-12], ids="{:g}".format)
@pytest.mark.parametrize(
    ("fmt", "wide_sums"), [("float16", True), ("float16", False), ("bfloat16", True), ("bfloat16", False)]
)
def test_gradients_of_any_size_arrive_as_their_mean_to_the_formats_rounding(
    ranks: Any, engine: str, size: float, fmt: str, wide_sums: bool
) -> None:
    given = gradients(2, size)
    found = ranks(2, "averaged", engine, fmt, wide_sums, given)
    largest = [max(float(one[place].abs().max()) for one in given) for place in (0, 1)]
    for place in (0, 1):
        mean = (given[0][place].double() + given[1][place].double()) / 2
        error = (found[0][place].double() - mean).abs().max()
        beside = 2.0**-38 * largest[0]  # of larger gradients that share a power of two
        assert error <= 2.5 * FORMATS[fmt] * largest[place] + beside
        assert torch.equal(found[0][place], found[1][place])


def test_sums_over_many_ranks_do_not_overflow_and_wide_ones_are_rounded_twice_only(ranks: Any) -> None:
    given = [[torch.full((40,), 60000.0)] for _ in range(4)]
    for wide_sums in (True, False):
        assert all(torch.equal(one[0], given[0][0]) for one in ranks(4, "averaged", "ddp", "float16", wide_sums, given))
    draws = torch.Generator().manual_seed(0)
    given = [[torch.rand(4000, generator=draws) + 1.0] for _ in range(4)]
    mean = torch.stack([one[0].double() for one in given]).mean(0)
    error = {
        wide: float((ranks(4, "averaged", "ddp", "bfloat16", wide, given)[0][0].double() / mean - 1).square().mean())
        for wide in (True, False)
    }
    assert error[True] < 0.8 * error[False]


def test_float8_can_be_sent_where_sums_are_wide(ranks: Any) -> None:
    given = gradients(2, 1.0)
    found = ranks(2, "averaged", "ddp", "float8_e4m3fn", True, given)[0][0]
    mean = (given[0][0] + given[1][0]) / 2
    assert float((found - mean).norm() / mean.norm()) < 2 * FORMATS["float8_e4m3fn"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("wide_sums", [True, False])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(
    ranks: Any, engine: str, wide_sums: bool, bad: float
) -> None:
    given = gradients(2, 1.0)
    given[1][0][7] = bad
    for found in ranks(2, "averaged", engine, "float16", wide_sums, given):
        assert not found[0].isfinite().all()


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_training_with_narrow_gradients_follows_float32s(ranks: Any, engine: str, fmt: str) -> None:
    from castwise.policy import Policy

    expected = ranks(2, "curve", engine, Policy(format="float32"))[0]
    for wide_sums in (True, False):
        options = {"wide_sums": wide_sums}
        found = ranks(2, "curve", engine, Policy(format="float32", communication=fmt), **options)[0]
        assert max(abs(a[0] / b[0] - 1) for a, b in zip(found, expected, strict=True)) < 2e-4
        assert found != expected  # they did travel in 16 bits


@hypothesis.given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]),
    exponent=st.integers(-100, 100),
    seed=st.integers(0, 1000),
)
def test_packing_keeps_blocks_of_any_size_to_the_formats_rounding(dtype: torch.dtype, exponent: int, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2 * BLOCK, generator=draws) * 2.0**exponent
    packing = Packing(dtype)
    sent = packing.pack(x)
    assert sent.shape == (3, packing.size(2 * BLOCK)) and sent.dtype is torch.uint8
    found = packing.unpack(sent, 2 * BLOCK)
    assert found.isfinite().all()
    largest = x.view(3, 2, BLOCK).abs().amax(-1, keepdim=True)
    error = (found - x).view(3, 2, BLOCK).abs() / largest
    assert float(error.max()) <= torch.finfo(dtype).eps / 2


def test_packing_passes_zeros_and_what_is_not_finite() -> None:
    x = torch.zeros(1, 2 * BLOCK)
    x[0, 3], x[0, 5] = torch.inf, torch.nan
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2):
        found = Packing(dtype).unpack(Packing(dtype).pack(x), 2 * BLOCK)
        assert torch.equal(found.nan_to_num(7.0, 9.0), x.nan_to_num(7.0, 9.0))
