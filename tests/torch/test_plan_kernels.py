"""Kernels that a planned model chooses by the clock: whichever is chosen, the results are the model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.guard import Raised
from castwise.torch import _kernels, apply, for_inference, plan


class Dense(nn.Module):
    """Linear layers with all activations that can be inside of their kernel, one that two read, and none."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=number != 1) for number in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e = self.layers
        x = F.relu(b(F.gelu(a(x))))
        x = F.gelu(c(x), approximate="tanh")
        y = d(x)
        return e(F.gelu(y) + y)


class Images(nn.Module):
    """Convolutions, and a view of their result as the model lays it out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(width), nn.Linear(width * 64, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.relu(self.norm(self.first(x)))
        x = x + self.second(x)
        return self.head(x.view(x.shape[0], -1)), x


def uses(module: torch.fx.GraphModule, target: object) -> int:
    return sum(node.target is target for node in module.graph.nodes)


@pytest.mark.parametrize("worth, packed", [(float("inf"), 5), (0.0, 0)])
def test_packed_linear_layers_give_the_models_results(
    monkeypatch: pytest.MonkeyPatch, worth: float, packed: int
) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(_kernels, "_WORTH", worth)
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(4, 7, 32)
    module = for_inference(model, (x,), policy="float32")
    for given in (x, torch.randn(2, 3, 32), torch.randn(9, 1, 32)):
        assert torch.allclose(module(given), model(given), atol=1e-5)
    graph = module.graph_for((x,), {}).run._source
    assert uses(graph, torch.ops.mkldnn._linear_pointwise.default) == packed
    assert uses(graph, torch.ops.aten.gelu.default) == (1 if packed else 3)


def test_packed_layers_that_win_alone_and_lose_together_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(4, 7, 32)
    times = {"alone": [2.0, 1.0], "together": [1.0, 2.0]}
    monkeypatch.setattr(
        _kernels,
        "alternating",
        lambda runs, *_: times["together" if "_plain_call" in runs[0].__qualname__ else "alone"],
    )
    module = for_inference(model, (x,), policy="float32")
    assert torch.equal(module(x), model(x))
    assert uses(module.graph_for((x,), {}).run._source, torch.ops.mkldnn._linear_pointwise.default) == 0
    times["together"] = [2.0, 1.0]
    module = for_inference(model, (x,), policy="float32")
    module(x)
    assert uses(module.graph_for((x,), {}).run._source, torch.ops.mkldnn._linear_pointwise.default) == 5


@pytest.mark.parametrize("worth", [float("inf"), 0.0])
def test_convolutions_on_channels_last_memory_give_the_models_results(
    monkeypatch: pytest.MonkeyPatch, worth: float
) -> None:
    monkeypatch.setattr(_kernels, "_WORTH", worth)
    monkeypatch.setattr(_kernels, "_WORTH_TRYING", 0.0)
    torch.manual_seed(0)
    model, x = Images(), torch.randn(4, 3, 8, 8)
    twin = copy.deepcopy(model)
    planned = apply(model, plan(model, (x,), policy="float32"))
    for _ in range(2):
        have, want = planned(x), twin(x)
        assert all(
            a.stride() == b.stride() and torch.allclose(a, b, atol=1e-5) for a, b in zip(have, want, strict=True)
        )
        (have[0].sum() + have[1].square().sum()).backward()
        (want[0].sum() + want[1].square().sum()).backward()
    assert all(
        torch.allclose(p.grad, q.grad, atol=1e-3) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert all(p.is_contiguous() for p in model.parameters())
    assert model.norm.num_batches_tracked == 2
    assert torch.allclose(model.norm.running_mean, twin.norm.running_mean, atol=1e-5)
    assert uses(planned.graph_for((x,), {}).module, torch.ops.aten.contiguous.default) == 0  # what is exported


def test_convolutions_stay_on_channels_last_memory_when_a_layer_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "_WORTH", float("inf"))
    monkeypatch.setattr(_kernels, "_WORTH_TRYING", 0.0)
    model, x = Images(), torch.randn(4, 3, 8, 8)
    planned = apply(model, plan(model, (x,), policy="bfloat16"))
    laid_out: list[bool] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.convolution.default:
                laid_out.append(args[0].is_contiguous(memory_format=torch.channels_last))
            return func(*args, **(kwargs or {}))

    planned(x)
    planned.raise_layers((Raised("second"),))
    with Seen(), torch.no_grad():
        raised = planned(x)
    assert laid_out and all(laid_out)
    assert torch.allclose(raised[0], model(x)[0], atol=0.1)


def test_a_graph_whose_views_are_written_stays_on_the_memory_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Written(Images):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.second(self.first(x))
            x.view(x.shape[0], -1).mul_(2.0)
            return self.head(x.flatten(1)), x

    monkeypatch.setattr(_kernels, "_WORTH", float("inf"))
    monkeypatch.setattr(_kernels, "_WORTH_TRYING", 0.0)
    torch.manual_seed(0)
    model, x = Written(), torch.randn(2, 3, 8, 8)
    have, want = apply(model, plan(model, (x,), policy="float32"))(x), model(x)
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
