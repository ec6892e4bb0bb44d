"""Masks that are added, constants that are compared, and what ops write beside what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from castwise.torch import autocast, register_op

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOWEST_FP32 = torch.finfo(FP32).min


def scores(size: int = 3) -> Tensor:
    """A low activation, made in the region that is active."""
    torch.manual_seed(0)
    return torch.randn(size, 4) @ torch.randn(4, 4)


# ---- masks and constants ---------------------------------------------------------------------------------------------

ADDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attention, by place": lambda h, m: F.scaled_dot_product_attention(h[None], h[None], h[None], m[None]),
    "attention, by name": lambda h, m: F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=m[None]),
    "baddbmm": lambda h, m: torch.baddbmm(m[None], h[None], h.mT[None]).softmax(-1),
    "baddbmm, by name": lambda h, m: torch.baddbmm(input=m[None], batch1=h[None], batch2=h.mT[None]).softmax(-1),
    "addmm": lambda h, m: torch.addmm(m, h, h.mT).softmax(-1),
    "in place": lambda h, m: (h @ h.mT).add_(m).softmax(-1),
    "+=": lambda h, m: (h @ h.mT).__iadd__(m).softmax(-1),
    "subtracted in place": lambda h, m: (h @ h.mT).sub_(-m).softmax(-1),
}


@pytest.mark.parametrize(("dtype", "constant"), [(FP16, -1e9), (FP16, LOWEST_FP32), (BF16, LOWEST_FP32)])
@pytest.mark.parametrize("how", ADDED)
def test_a_row_that_is_masked_whole_stays_finite_however_the_mask_is_added(
    how: str, dtype: torch.dtype, constant: float
) -> None:
    mask = torch.zeros(3, 3)
    mask[0] = constant
    with autocast("cpu", dtype):
        result = ADDED[how](scores(), mask)
    assert result.isfinite().all()
    assert result.reshape(-1, result.shape[-1])[0].any()


def test_what_overflows_upwards_is_no_mask_and_stays_to_be_seen() -> None:
    wide = torch.full((3, 4), 1e5)
    with autocast("cpu", FP16):
        risen, lowered = scores().add_(wide), scores().sub_(-wide)
        product = torch.addmm(wide, scores(), scores(4))
    assert risen.isposinf().all() and lowered.isposinf().all() and product.isposinf().all()


def test_a_weight_that_is_added_keeps_its_kept_cast() -> None:
    bias, weight = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))
    x = torch.randn(3, 4)
    with autocast("cpu", BF16):
        low = torch.addmm(bias, x, weight)
    assert low.dtype is BF16
    torch.testing.assert_close(low.float(), torch.addmm(bias, x, weight), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("constant", [-1e9, LOWEST_FP32, -(10**9)])
def test_what_was_filled_with_a_constant_is_found_by_it(constant: float) -> None:
    with autocast("cpu", FP16):
        h = scores()
        chosen = h > 0
        filled = h.masked_fill(chosen, constant)
        found = [filled == constant, constant == filled, torch.eq(filled, constant), filled <= constant / 2]
        others = [filled != constant, filled > constant / 2, torch.gt(filled, constant)]
    assert filled.dtype is FP16 and chosen.any() and not chosen.all()
    assert all(torch.equal(f, chosen) for f in found)
    assert all(torch.equal(o, ~chosen) for o in others)


MADE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "tensor": lambda h, c: torch.tensor(c, dtype=h.dtype),
    "as_tensor": lambda h, c: torch.as_tensor(c, dtype=h.dtype),
    "scalar_tensor": lambda h, c: torch.scalar_tensor(c, dtype=h.dtype),
    "new_tensor": lambda h, c: h.new_tensor(c),
    "rsub": lambda h, c: torch.rsub(torch.zeros_like(h), c),
}


@pytest.mark.parametrize("how", MADE)
def test_constants_are_made_as_the_format_can_hold_them(how: str) -> None:
    with autocast("cpu", FP16):
        made, infinite = MADE[how](scores(), -1e9), MADE[how](scores(), float("-inf"))
        assert torch.tensor(10**9) == 10**9 and torch.tensor(1e9).dtype is FP32
    assert made.dtype is FP16 and bool((made == torch.finfo(FP16).min).all())
    assert bool(infinite.isinf().all())


# ---- products that sum nothing ---------------------------------------------------------------------------------------

POSITIONS, RATES = torch.arange(3000.0), torch.linspace(0.1, 1, 4)
OUTER: dict[str, Callable[[], Tensor]] = {
    "i,j->ij": lambda: torch.einsum("i,j->ij", POSITIONS, RATES),
    "i,j": lambda: torch.einsum("i,j", POSITIONS, RATES),
    "lists of indices": lambda: torch.einsum(POSITIONS, [0], RATES, [1]),
    "an index of one value": lambda: torch.einsum("bi,ij->bj", POSITIONS[:, None], RATES[None]),
    "ellipsis": lambda: torch.einsum("...i,i...->...", POSITIONS[:, None, None], RATES[None]),
    "addmm": lambda: torch.addmm(torch.zeros(4), POSITIONS[:, None], RATES[None]),
}


@pytest.mark.parametrize("how", OUTER)
def test_positions_times_frequencies_are_not_rounded_however_they_are_written(how: str) -> None:
    expected = OUTER[how]()
    with autocast("cpu", BF16):
        got = OUTER[how]()
    assert got.dtype is FP32 and torch.equal(got, expected)


@pytest.mark.parametrize(
    "arguments",
    [("ij,jk",), ("ij,jk->ik",), ("ij,kj",), ("i...,i...",), ("...j,jk->...k",), ("ij,ij",)],
    ids=lambda arguments: arguments[0],
)
def test_sums_of_products_run_low(arguments: tuple[str]) -> None:
    x = torch.randn(4, 4)
    with autocast("cpu", BF16):
        assert torch.einsum(*arguments, x, x).dtype is BF16
        assert torch.einsum(*arguments, [x, x]).dtype is BF16


# ---- what is written beside the result -------------------------------------------------------------------------------


def test_lists_of_tensors_are_written_in_place() -> None:
    low, wide = torch.zeros(3, dtype=BF16), torch.ones(3)
    with autocast("cpu", BF16):
        torch._foreach_copy_([low], [wide])
        torch._foreach_add_([low], [wide])
        torch.ops.aten._foreach_mul_.List([low], [wide + 1])
    assert torch.equal(low, torch.full((3,), 4.0, dtype=BF16))


def test_torchs_own_scaler_sees_an_overflow_of_16_bit_gradients() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    with autocast("cpu", BF16):
        scaler.scale((weight * float("inf")).sum()).backward()
        scaler.step(optimizer)
    assert torch.equal(weight, torch.ones(3, dtype=BF16))


def test_results_go_to_several_destinations() -> None:
    x = torch.randn(3, 4)
    order, found = torch.empty(3, 4, dtype=torch.int64), torch.empty(3, 4, dtype=torch.int64)
    with torch.no_grad(), autocast("cpu", FP16):
        h = scores()
        for dtype in (FP16, FP32):
            values = torch.empty(3, 4, dtype=dtype)
            torch.sort(h.softmax(-1), out=(values, order))
            torch.testing.assert_close(values.float(), h.float().softmax(-1).sort()[0], rtol=1e-3, atol=1e-3)
        torch.searchsorted(torch.linspace(-1, 1, 5), h, out=found)
        assert torch.equal(found, torch.searchsorted(torch.linspace(-1, 1, 5), h.float()))
        truth = torch.gt(h, x, out=torch.empty(3, 4, dtype=torch.bool))
    assert torch.equal(truth, h.float() > x)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_norms_with_16_bit_statistics_go_on_counting(kind: Any) -> None:
    low, wide = (kind(4, track_running_stats=True) for _ in range(2))
    low.to(BF16)
    x = torch.randn(8, 4, 5) + 3
    wide(x)
    with autocast("cpu", BF16):
        low(x)
        before = low.running_mean.clone()
        low.eval()(x)
    torch.testing.assert_close(low.running_mean.float(), wide.running_mean, rtol=0.02, atol=0.02)
    assert torch.equal(low.running_mean, before)


# ---- autograd Functions ----------------------------------------------------------------------------------------------


def test_a_subclass_of_a_registered_function_runs_its_own_forward() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]

    register_op(Once, "low")

    class Twice(Once):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    class Thrice(Once):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 3

    register_op(Thrice, "high")
    x = torch.ones(3)
    with autocast("cpu", BF16):
        results = [Once.apply(x), Twice.apply(x), Thrice.apply(x.bfloat16())]
    assert [(r[0].item(), r.dtype) for r in results] == [(1, BF16), (2, BF16), (3, FP32)]
    assert Twice.apply(x)[0] == 2


def test_a_function_with_torchs_decorators_works_once_it_is_registered() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return gradient @ w.mT, x.mT @ gradient

    register_op(Product, "low")
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with autocast("cpu", BF16):
        y = Product.apply(x, w)
    y.float().sum().backward()
    assert y.dtype is BF16 and x.grad is not None and x.grad.dtype is FP32
    torch.testing.assert_close(x.grad, w.sum(1).expand(3, 4), rtol=0.05, atol=0.05)
