"""Gradients in 16 bits between backward and step: the same values, fewer casts, and nobody sees them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.torch import Amp
from castwise.torch.planning import Plan, prepare

from .test_plan_apply import mixed


class Net(nn.Module):
    """Two layers, one weight of which is read twice, and by an op that stays fp32 too."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(F.gelu(self.first(x)))
        return self.norm(F.linear(h, self.second.weight)) + self.second.weight.square().mean()


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, torch.Tensor, Plan]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 32)
    return model, x, mixed(prepare(model, (x,), policy="bfloat16", device="h100")).solve()


class _Casts(TorchDispatchMode):
    """Shapes of what is cast between fp32 and bf16, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._to_copy and {args[0].dtype, result.dtype} == {
            torch.float32,
            torch.bfloat16,
        }:
            self.shapes.append(tuple(result.shape))
        return result


def trained(planned: Any, at_once: bool, steps: int = 3, **kwargs: Any) -> tuple[nn.Module, list[float], _Casts]:
    model, x, found = copy.deepcopy(planned[0]), planned[1], planned[2]
    amp = Amp(model, torch.optim.AdamW(model.parameters(), 1e-2), plan=found, **kwargs)
    assert amp.planned is not None
    amp.planned._emulate = False
    norms = []
    for number in range(steps):
        with _Casts() as casts:
            with amp:
                loss = model(x).square().mean() + 1e-3 * sum(p.abs().sum() for p in model.parameters())
            if at_once:
                result = amp.step(loss, clip_norm=1.0)
            else:
                amp.backward(loss)
                assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
                result = amp.step(clip_norm=1.0)
        assert result.stepped and all(p.grad is None for p in model.parameters()), number
        norms.append(float(result.grad_norm))
    return model, norms, casts


def test_a_step_at_once_trains_as_backward_and_step_do_and_casts_no_weight_and_no_gradient_of_one(planned: Any) -> None:
    assert planned[2].formats and 0 < planned[2].labels.sum() < len(planned[2].labels)
    one, norms, casts = trained(planned, at_once=True)
    other, wanted, more = trained(planned, at_once=False)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
    assert norms == pytest.approx(wanted, rel=1e-6)
    assert (32, 32) not in casts.shapes and (32, 32) in more.shapes


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_the_step_writes_casts_that_are_those_of_its_weights(planned: Any, state: str) -> None:
    model, x, found = copy.deepcopy(planned[0]), planned[1], planned[2]
    amp = Amp(model, torch.optim.AdamW(model.parameters(), 1e-1), plan=found, optimizer_state=state)
    for _ in range(3):
        with amp:
            loss = model(x).square().mean()
        amp.step(loss)
        kept = [(weight(), one.cast) for weight, casts in amp._cache._kept.values() for one in casts.values()]
        assert kept and all(torch.equal(weight.to(torch.bfloat16), cast) for weight, cast in kept)


def test_who_looks_at_a_gradient_sees_float32(planned: Any) -> None:
    model, x, found = copy.deepcopy(planned[0]), planned[1], planned[2]
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), plan=found)
    seen: list[torch.dtype] = []
    model.first.weight.register_hook(lambda g: seen.append(g.dtype))
    model.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    with amp:
        loss = model(x).square().mean()
    amp.step(loss)
    assert seen == [torch.float32, torch.float32]
    with amp:
        loss = model(x).square().mean()
    loss.backward()  # without the `Amp`
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_weights_that_the_optimizer_does_not_have_get_their_gradients(planned: Any) -> None:
    model, x, found = copy.deepcopy(planned[0]), planned[1], planned[2]
    amp = Amp(model, torch.optim.SGD(model.second.parameters(), 0.1), plan=found)
    with amp:
        loss = model(x).square().mean()
    amp.step(loss)
    assert model.first.weight.grad is not None and model.second.weight.grad is None


def test_a_gradient_that_is_not_finite_is_found_in_16_bits_and_the_step_skipped(planned: Any) -> None:
    model, x, found = copy.deepcopy(planned[0]), planned[1], planned[2]
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), plan=found)
    before = [p.detach().clone() for p in model.parameters()]
    with amp:
        loss = model(x).square().mean()
    assert not amp.step(loss * float("inf")).stepped
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with amp:
        loss = model(x).square().mean()
    assert amp.step(loss).stepped
