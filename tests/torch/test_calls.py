"""How the arguments of one call are cast: the quick look at plain tensors and the thorough one agree, and batch norm
keeps its activations in 16 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from castwise import Policy
from castwise.torch import GradScaler, autocast
from castwise.torch._calls import Casting

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Copies(TorchDispatchMode):
    """Counts casts of tensors with more than one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dim() > 1:
            self.made.append((args[0].dtype, result.dtype))
        return result


def _weight(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4).to(dtype))


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "linear": lambda x, y: F.linear(x, y),
    "linear, bias": lambda x, y: F.linear(x, y, y[0]),
    "linear, by keyword": lambda x, y: F.linear(input=x, weight=y),
    "linear, weight": lambda x, y: F.linear(x, _weight(y.dtype)),
    "linear, view of a weight": lambda x, y: F.linear(x, _weight(y.dtype)[:2]),
    "linear, integer parameters": lambda x, y: F.linear(
        torch.arange(4), nn.Parameter(torch.eye(4, dtype=torch.int64), False)
    ),
    "softmax of torch.nn.functional": lambda x, y: F.softmax(x, dim=-1, dtype=None),
    "matmul, contraction of one, by keyword": lambda x, y: torch.matmul(input=x[:, :1], other=y[:1]),
    "softmax, 16-bit dtype": lambda x, y: torch.softmax(x, -1, dtype=torch.bfloat16),
    "layer norm module": lambda x, y: nn.LayerNorm(4)(x),
    "batch norm module": lambda x, y: nn.BatchNorm1d(4)(x),
    "matmul, contraction of one": lambda x, y: x[:, :1] @ y[:1],
    "matmul, contraction of none": lambda x, y: x[:, :0] @ y[:0],
    "addmm": lambda x, y: torch.addmm(x, x, y, beta=0.5),
    "conv1d": lambda x, y: F.conv1d(x[None], y[..., None], None, 1, (0,)),
    "softmax": lambda x, y: torch.softmax(x, -1),
    "softmax, dtype": lambda x, y: torch.softmax(x, -1, dtype=torch.float32),
    "cross entropy": lambda x, y: F.cross_entropy(x, torch.arange(4)),
    "layer norm": lambda x, y: F.layer_norm(x, (4,), y[0]),
    "batch norm": lambda x, y: F.batch_norm(x, y[0], y[1].abs(), y[2], y[3]),
    "cat": lambda x, y: torch.cat([x, y]),
    "add": lambda x, y: x + y,
    "add a large number": lambda x, y: x + 1e9,
    "add a 0-d tensor": lambda x, y: x + torch.tensor(1e9),
    "masked fill": lambda x, y: x.masked_fill(x > 0, -1e9),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "index_put": lambda x, y: x.clone().index_put((torch.tensor([0]),), y[:1]),
    "in place": lambda x, y: x.clone().add_(y),
    "out": lambda x, y: torch.add(x, y, out=torch.empty(4, 4)),
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None], is_causal=True),
    "attention, mask": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None], x[None]),
    "of integers": lambda x, y: torch.arange(4) @ torch.arange(4),
}


@pytest.mark.parametrize("preset", ["bfloat16", "float32", "tf32"])
@pytest.mark.parametrize("name", OPS)
def test_the_quick_look_decides_as_the_thorough_one(monkeypatch: pytest.MonkeyPatch, preset: str, name: str) -> None:
    def outcomes() -> list[Any]:
        found: list[Any] = []
        for first, second in itertools.product((BF16, FP16, FP32, FP64), repeat=2):
            torch.manual_seed(0)
            x, y = torch.randn(4, 4).to(first), torch.randn(4, 4).to(second)
            with autocast("cpu", policy=Policy.preset(preset)):
                try:
                    found.append(OPS[name](x, y))
                except RuntimeError as error:
                    found.append(str(error))
        return found

    quick = outcomes()
    monkeypatch.setattr(Casting, "quick", Casting.run)
    for a, b in zip(quick, outcomes(), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b


# ---- batch norm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_batch_norm_keeps_its_activations_in_16_bits(dtype: torch.dtype, affine: bool, training: bool) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8, affine=affine).train(training)
    wide = nn.BatchNorm2d(8, affine=affine).train(training)
    x = torch.randn(4, 8, 6, 6).to(dtype).requires_grad_()
    reference = x.detach().float().requires_grad_()
    with Copies() as copies, autocast("cpu", dtype=dtype):
        y = norm(x)
    assert y.dtype is dtype
    assert copies.made == []
    expected = wide(reference)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), expected, rtol=eps, atol=eps)
    assert norm.running_mean is not None and wide.running_mean is not None
    torch.testing.assert_close(norm.running_mean, wide.running_mean, rtol=1e-5, atol=1e-6)
    weight = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    (y.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(x.grad.float(), reference.grad, rtol=8 * eps, atol=8 * eps)


def test_batch_norm_with_16_bit_parameters_widens_them_to_its_input() -> None:
    norm = nn.BatchNorm1d(4).to(BF16)
    with autocast("cpu", dtype=BF16):
        assert norm(torch.randn(8, 4)).dtype is FP32


# ---- gradient penalty ------------------------------------------------------------------------------------------------


def test_a_gradient_penalty_in_float16_follows_float32() -> None:
    """The snippet of torch's documentation: unscale the inner gradients by hand, scale the whole loss."""

    def train(low: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = GradScaler("cpu", init_scale=1024.0, enabled=low)
        x, y = torch.randn(64, 16), torch.randn(64, 1)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            with autocast("cpu", dtype=FP16, enabled=low):
                loss = F.mse_loss(model(x), y)
            scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            gradients = [g / scaler.get_scale() for g in scaled]
            with autocast("cpu", dtype=FP16, enabled=low):
                loss = loss + 0.5 * torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            assert scaler.stepped or not low
            scaler.update()
            losses.append(loss.item())
        return losses

    wide, low = train(False), train(True)
    assert wide[-1] < 0.8 * wide[0]
    for a, b in zip(low, wide, strict=True):
        assert a == pytest.approx(b, rel=2e-3)
