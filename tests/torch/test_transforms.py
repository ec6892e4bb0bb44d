"""Regions under torch.func: transforms compose with casting, from outside and from inside."""

from __future__ import annotations

import pytest
import torch

from castwise.torch import autocast

BF16 = torch.bfloat16


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 8), torch.randn(8, 3)


def _loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).float().square().mean()


def _loss_inside(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu", dtype=BF16):
        return _loss(w, x)


def test_vmap_gives_the_batched_product_in_the_low_format() -> None:
    x, w = _data()
    with autocast("cpu", dtype=BF16):
        each = torch.vmap(lambda row: row @ w)(x)
    assert each.dtype is BF16
    torch.testing.assert_close(each.float(), x @ w, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("inside", [True, False])
def test_grad_is_float32_and_close_to_the_full_precision_gradient(inside: bool) -> None:
    x, w = _data()
    if inside:
        found = torch.func.grad(_loss_inside)(w, x)
    else:
        with autocast("cpu", dtype=BF16):
            found = torch.func.grad(_loss)(w, x)
    exact = torch.func.grad(_loss)(w, x)
    assert found.dtype is torch.float32
    assert not torch.equal(found, exact), "the products were not low"
    torch.testing.assert_close(found, exact, rtol=5e-2, atol=2e-2)


def test_per_sample_gradients_compose_vmap_and_grad() -> None:
    x, w = _data()
    found = torch.vmap(torch.func.grad(_loss_inside), in_dims=(None, 0))(w, x.unsqueeze(1))
    exact = torch.vmap(torch.func.grad(_loss), in_dims=(None, 0))(w, x.unsqueeze(1))
    assert found.shape == (5, 8, 3)
    torch.testing.assert_close(found, exact, rtol=5e-2, atol=5e-2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own forward-mode formulas
@pytest.mark.parametrize("inside", [True, False])
def test_jvp_runs_in_the_low_format_forward(inside: bool) -> None:
    x, w = _data()
    tangent = torch.ones_like(w)
    _, exact = torch.func.jvp(lambda v: x @ v, (w,), (tangent,))

    def product(v: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", dtype=BF16):
            return x @ v

    if inside:
        value, found = torch.func.jvp(product, (w,), (tangent,))
    else:
        with autocast("cpu", dtype=BF16):
            value, found = torch.func.jvp(lambda v: x @ v, (w,), (tangent,))
    assert value.dtype is BF16
    torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=5e-2)


def test_functional_call_uses_the_given_parameters_and_not_kept_casts_of_the_modules() -> None:
    x, _ = _data()
    module = torch.nn.Linear(8, 3)
    others = {k: torch.zeros_like(v) for k, v in module.named_parameters()}
    with autocast("cpu", dtype=BF16):
        own = module(x)
        other = torch.func.functional_call(module, others, (x,))
        again = module(x)
    assert own.dtype is other.dtype is BF16
    assert other.eq(0).all()
    assert torch.equal(own, again) and own.ne(0).any()
