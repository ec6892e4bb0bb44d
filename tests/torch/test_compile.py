"""Regions in compiled code: recurrent and attention modules traced whole, export, and how often a step is compiled."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from castwise.torch import Amp, autocast

BF16 = torch.bfloat16
# The compiler's own, while it looks at parameters.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
INSIDE = pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def _run(function: Any, inside: bool, backend: str, *args: torch.Tensor) -> Any:
    """`function` compiled, with the region inside what is compiled or around the call."""
    if inside:

        def body(*a: torch.Tensor) -> Any:
            with autocast("cpu", dtype=BF16):
                return function(*a)

        return torch.compile(body, backend=backend, fullgraph=True)(*args)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with autocast("cpu", dtype=BF16):
        return compiled(*args)


@BACKENDS
@INSIDE
def test_multi_head_attention_traces_whole_in_the_low_format(inside: bool, backend: str) -> None:
    module, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    result = _run(lambda q: module(q, q, q)[0], inside, backend, x)
    assert result.dtype is BF16
    torch.testing.assert_close(result.float(), module(x, x, x)[0], rtol=5e-2, atol=2e-2)


@BACKENDS
@INSIDE
def test_lstm_traces_whole_in_the_low_format(inside: bool, backend: str) -> None:
    module, x = torch.nn.LSTM(8, 8, batch_first=True), torch.randn(2, 3, 8)
    with torch._dynamo.config.patch(allow_rnn=True):
        result = _run(lambda s: module(s)[0], inside, backend, x)
    assert result.dtype is BF16
    torch.testing.assert_close(result.float(), module(x)[0], rtol=5e-2, atol=2e-2)


def test_export_in_a_region_writes_the_casts_into_the_program() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with autocast("cpu", dtype=BF16):
        program = torch.export.export(model, (x,))
    result = program.module()(x)
    assert result.dtype is BF16
    with autocast("cpu", dtype=BF16):
        assert torch.equal(result, model(x))


@pytest.mark.parametrize("given", ["model", "compiled model"])
@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_a_model_is_compiled_once_whichever_of_the_two_an_amp_was_given(given: str, policy: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    chosen: Any = model if given == "model" else compiled
    amp = Amp(chosen, torch.optim.SGD(model.parameters(), lr=0.01), policy)
    for _ in range(4):
        with amp:
            loss = compiled(torch.randn(6, 8)).float().square().mean()
        amp.step(loss)
    assert len(compilations) == 1
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


def test_layers_replaced_between_steps_are_listened_to_and_the_old_ones_let_go() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    amp = Amp(model, torch.optim.SGD(model.parameters(), lr=0.01), "float16")
    replaced = weakref.ref(model[1])
    for _ in range(2):
        with amp:
            loss = model[1](model[0](torch.full((2, 8), 1e30))).float().square().mean()
        amp.step(loss)
        model[1] = torch.nn.Linear(8, 8)
    with amp:
        model[0](torch.randn(2, 8))
    gc.collect()
    assert replaced() is None
