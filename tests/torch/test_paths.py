"""Layers have the names that the user wrote, whatever wraps them: rules, findings and metrics tell of the same ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from castwise import LayerRule, Policy
from castwise.torch import Amp
from castwise.torch._paths import named_layers, paths_of
from castwise.torch.record import OpEvent

# Dynamo asks a compiled layer's input, which is no leaf, for its gradient.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.module = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.relu(self.module(self.body(x))))
        return y


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def compiled_head(model: Model) -> Any:
    model.head = compiled(model.head)
    return model


def checkpointed(model: Model) -> Any:
    model.head = checkpoint_wrapper(model.head)
    return compiled(model)


WRAPPED = {"compiled": compiled, "compiled head": compiled_head, "checkpointed and compiled": checkpointed}
POLICY = replace(Policy.coerce("float16"), layers=(LayerRule("head", format="float32"),), strict=True)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=list(WRAPPED))
def test_wrappers_add_nothing_to_the_names_of_layers(wrap: Any) -> None:
    assert list(dict(named_layers(wrap(Model())))) == ["", "body", "body.0", "body.1", "module", "head"]
    assert paths_of(wrap(Model()))["" if wrap is compiled_head else "_orig_mod"] == ""


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=list(WRAPPED))
def test_a_rule_for_a_layer_holds_where_the_layer_or_the_model_is_compiled(wrap: Any) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8)
    plain, seen = Amp(model, torch.optim.SGD(model.parameters()), POLICY), []
    with plain:
        want = model(x)
    plain.close()
    model = wrap(model)
    amp = Amp(model, torch.optim.SGD(model.parameters()), POLICY)  # strict: a rule that matches nothing is refused
    head = next(m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 1)
    head.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    with amp:
        have = model(x)
    assert have.dtype is want.dtype is torch.float32 and set(seen) == {torch.float32}
    assert torch.allclose(have, want, atol=1e-2)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=list(WRAPPED))
def test_the_guard_names_and_raises_a_layer_of_a_compiled_model(wrap: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.module.bias.fill_(1e4)
        model.head.weight.fill_(1e2)
    model = wrap(model)
    amp = Amp(model, torch.optim.SGD(model.parameters(), lr=0.0), "float16")
    for _ in range(6):
        with amp:
            loss = model(torch.ones(4, 8)).mean()
        amp.step(loss)
    assert amp.finding is not None and amp.finding.layer == "head"
    assert amp.policy.layers[0].match == "head"  # the others make way for what it is given


def test_the_log_of_a_region_names_layers_as_they_were_written() -> None:
    model, log = compiled_head(Model()), list[OpEvent]()
    amp = Amp(model, torch.optim.SGD(model.parameters()), POLICY)
    with amp.region(log):
        model(torch.ones(2, 8))
    assert {event.layer for event in log} == {"", "head"}
