"""Regions on CUDA tensors, without a GPU: fake tensors take the catalogue's rules and the meta kernels' formats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from castwise.torch import autocast

LOW = torch.float16


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def _cuda(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


@pytest.mark.usefixtures("fake")
def test_products_run_in_the_low_format() -> None:
    x, w, image, kernel = _cuda(4, 8), _cuda(8, 8), _cuda(1, 3, 8, 8), _cuda(4, 3, 3, 3)
    heads = _cuda(2, 4, 6, 8)
    with autocast("cuda", dtype=LOW):
        results = [
            x @ w,
            torch.nn.functional.linear(x, w),
            torch.nn.functional.conv2d(image, kernel),
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads),
            torch.einsum("ij,jk->ik", x, w),
        ]
    assert [r.dtype for r in results] == [LOW] * 5
    assert {r.device.type for r in results} == {"cuda"}


@pytest.mark.usefixtures("fake")
def test_ops_with_a_hazard_run_in_float32() -> None:
    x = _cuda(4, 8, dtype=LOW)
    with autocast("cuda", dtype=LOW):
        results = [
            x.exp(),
            x.softmax(-1),
            x.pow(2),
            x.cumsum(0),
            torch.nn.functional.mse_loss(x, x),
            torch.nn.functional.cross_entropy(x, torch.empty(4, device="cuda", dtype=torch.long)),
        ]
    assert [r.dtype for r in results] == [torch.float32] * 6


@pytest.mark.usefixtures("fake")
def test_other_ops_promote_mixed_inputs_to_the_widest() -> None:
    low, high = _cuda(4, 8, dtype=LOW), _cuda(4, 8)
    with autocast("cuda", dtype=LOW):
        assert torch.cat([low, high]).dtype is torch.float32
        assert torch.stack([low, low]).dtype is LOW
        assert (low + high).dtype is torch.float32
        assert low.relu().dtype is LOW
        high.index_put_((torch.empty(2, device="cuda", dtype=torch.long),), _cuda(2, 8, dtype=LOW))


@pytest.mark.usefixtures("fake")
def test_tensors_on_another_device_are_left_alone() -> None:
    with autocast("cuda", dtype=LOW):
        assert (torch.empty(2, 2) @ torch.empty(2, 2)).dtype is torch.float32
