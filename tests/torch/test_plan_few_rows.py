"""Layers that multiply a few rows by their weights: to read 16-bit ones is faster without 16-bit arithmetic too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from castwise.cost import MeasuredCosts
from castwise.formats import BF16
from castwise.hardware import detect
from castwise.plan import Plan
from castwise.torch import _cold, apply, for_inference, measure, plan
from castwise.torch._rewrite import emulated_call
from castwise.torch.capture import capture
from castwise.torch.emulation import arithmetic
from castwise.torch.inference import Inference

linear = torch.ops.aten.linear.default
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def all_low(found: Plan) -> Plan:
    return replace(found, labels=np.ones_like(found.labels))


class Layers(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@settings(max_examples=60, deadline=None)
@given(
    fmt=st.sampled_from(sorted(LOW)),
    rows=st.integers(1, 6),
    inside=st.integers(1, 300),
    outside=st.integers(1, 70),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_few_rows_are_summed_in_float32_and_rounded_once(
    fmt: str, rows: int, inside: int, outside: int, biased: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, w, b = (torch.randn(s, generator=draw).to(LOW[fmt]) for s in ((rows, 1, inside), (outside, inside), (outside,)))
    with torch.no_grad():
        have = emulated_call(linear, fmt, x, w, b if biased else None)
    exact = nn.functional.linear(x.double(), w.double(), b.double() if biased else None)
    # Half a unit in the last place of the result, and what a float32 sum of so many terms may be off.
    half = exact.abs() * torch.finfo(LOW[fmt]).eps / 2
    size = nn.functional.linear(x.double().abs(), w.double().abs(), b.double().abs() if biased else None)
    assert have.dtype is LOW[fmt]
    # torch adds a bias to what it has rounded: one rounding more, of a partial result.
    partial = (exact - (b.double() if biased else 0)).abs() * torch.finfo(LOW[fmt]).eps / 2 * biased
    assert ((have.double() - exact).abs() <= 1.01 * (half + partial) + size * inside * 2.0**-23 + 1e-7).all()


def test_one_token_reads_16_bit_weights_and_many_are_emulated() -> None:
    if not arithmetic("cpu", BF16).emulated:
        pytest.skip("this processor computes in bf16")
    torch.manual_seed(0)
    model = Layers().eval()
    # Several rows may be more in the next call, and are looked at then.
    for rows, emulated in ((1, 0), (4, 3), (50, 3)):
        x = torch.randn(1, rows, 64)
        found = plan(model, (x,), policy="bfloat16", device="h100")
        low = apply(model, all_low(found))
        with torch.no_grad():
            y, exact = low(x), model(x)
        graph = low.graph_for((x,), {}).module
        assert sum(node.target is emulated_call for node in graph.graph.nodes) == emulated
        assert 1e-4 < float((y - exact).norm() / exact.norm()) < 1e-2


def test_gradients_of_one_row_are_those_of_the_emulation() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 40).bfloat16().requires_grad_(), torch.randn(30, 40).bfloat16().requires_grad_()
    wide, wide_w = x.detach().float().requires_grad_(), w.detach().float().requires_grad_()
    seed = torch.randn(1, 30).bfloat16()
    emulated_call(linear, "bf16", x, w).backward(seed)
    nn.functional.linear(wide, wide_w).backward(seed.float())  # type: ignore[no-untyped-call]
    assert x.grad is not None and wide.grad is not None and w.grad is not None and wide_w.grad is not None
    assert torch.equal(x.grad, wide.grad.bfloat16()) and torch.equal(w.grad, wide_w.grad.bfloat16())


def test_weights_that_do_not_fit_in_the_cache_are_timed_from_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, x = Layers().eval(), torch.randn(1, 1, 64)
    calls = []
    monkeypatch.setattr(measure, "evict", lambda: calls.append(1))
    for size, cold in ((1 << 30, False), (1 << 14, True)):
        monkeypatch.setattr(_cold, "cache_size", lambda size=size: size)
        captured = capture(model, (x,), training=False)
        assert _cold.weights_are_cold(captured.graph, "cpu") is cold
        assert not _cold.weights_are_cold(capture(model, (x,), training=True).graph, "cpu")
        table = MeasuredCosts(tmp_path / f"{cold}.json")
        measure.measured_costs(captured, (x,), detect("cpu"), "bf16", seconds=5, table=table)
        assert bool(calls) is cold
        assert all(("from memory" in key) is cold for key in table)


def test_a_table_that_is_read_by_rows_does_not_fill_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cold, "cache_size", lambda: 1 << 14)
    model = nn.Sequential(nn.Embedding(4096, 16), nn.Linear(16, 4)).eval()
    captured = capture(model, (torch.zeros(1, 1, dtype=torch.int64),), training=False)
    assert not _cold.weights_are_cold(captured.graph, "cpu")


def test_the_largest_cache_counts_and_one_that_is_not_told_is_assumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_cold, "_CACHES", tmp_path)
    assert _cold.cache_size.__wrapped__() == 32 << 20
    for index, size in enumerate(("48K", "2M", "", "1024K\n")):
        (tmp_path / f"index{index}").mkdir()
        if size:
            (tmp_path / f"index{index}" / "size").write_text(size)
    assert _cold.cache_size.__wrapped__() == 2 << 20
    (tmp_path / "index2" / "size").write_text("lots")
    assert _cold.cache_size.__wrapped__() == 32 << 20


def test_a_model_for_one_token_gives_what_all_its_plans_formats_say() -> None:
    torch.manual_seed(0)
    model, x = Layers().eval(), torch.randn(1, 1, 64)
    module = for_inference(model, (x,), policy="bfloat16")
    assert isinstance(module, Inference) and module.formats_run(x) == dict(module.formats(x))
    for other in (x, torch.randn(1, 1, 64), torch.randn(3, 7, 64)):
        assert torch.allclose(module(other), model(other), atol=0.05)
