"""What becomes of planned modules in copies, in files, and in transforms of torch.func."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from castwise.torch import _chosen, _kernels, apply, compile, for_inference, plan
from castwise.torch.capture import CaptureError
from castwise.torch.planning import Plan


def through_a_file(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": through_a_file,
}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()


def planned(model: nn.Module, x: torch.Tensor) -> Plan:
    """All ops in 16 bits."""
    found = plan(model, (x,), policy="bfloat16", device="h100")
    return replace(found, labels=np.ones_like(found.labels))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inference", [False, True])
def test_a_copy_of_a_module_that_ran_computes_the_same_on_weights_of_its_own(
    model: Any, way: str, inference: bool
) -> None:
    x = torch.randn(3, 16)
    module: Any = for_inference(model, (x,), policy="bfloat16") if inference else apply(model, planned(model, x))
    before = module(x)
    copied = WAYS[way](module)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert type(copied) is type(module) and copied.castwise_model is not model
    assert torch.equal(copied(x), before)
    assert inference or not torch.equal(module(x), before)
    assert list(copied.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("faster", [0, 1])
def test_a_copy_runs_in_the_kernels_that_were_chosen_and_asks_no_clock(
    model: Any, way: str, faster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 16)
    module: Any = for_inference(model, (x,), policy="float32")
    with monkeypatch.context() as timed:
        timed.setattr(_kernels, "alternating", lambda *_: [1.0 + faster, 2.0 - faster])
        before = module(x)

    def asked(*_: Any) -> list[float]:
        raise AssertionError("kernels were timed again")

    monkeypatch.setattr(_kernels, "alternating", asked)
    copied = WAYS[way](module)
    assert torch.equal(copied(x), before)
    monkeypatch.setattr(_chosen, "versions", lambda: {"torch": "another"})
    with pytest.raises(AssertionError, match="timed again"):  # what was faster there may not be so here
        WAYS[way](module)(x)


def test_a_copy_of_a_compiled_module_is_compiled(model: Any) -> None:
    x = torch.randn(3, 16)
    module = compile(model, plan=planned(model, x), backend="aot_eager")
    assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_a_model_that_is_copied_while_a_plan_is_in_place_is_copied_without_it(model: Any) -> None:
    x = torch.randn(3, 16)
    applied, exact = apply(model, planned(model, x)), model(x)
    with applied.in_place():
        low = model(x)
        copied = copy.deepcopy(model)
    assert not torch.equal(low, exact)
    assert torch.equal(copied(x), exact) and copied[0].weight is not model[0].weight
    nn.init.zeros_(copied[0].weight)
    assert torch.equal(model(x), exact) and not torch.equal(copied(x), exact)


def test_averages_of_an_applied_modules_weights_are_computed_as_it_is(model: Any) -> None:
    x = torch.randn(3, 16)
    applied = apply(model, planned(model, x))
    low = applied(x)
    averaged = torch.optim.swa_utils.AveragedModel(applied)
    averaged.update_parameters(applied)
    assert torch.equal(averaged(x), low)


def test_transforms_of_torch_func_take_what_was_called_once_outside_of_them(model: Any) -> None:
    x = torch.randn(5, 3, 16)
    applied = apply(model, planned(model, x[0]))
    with pytest.raises(CaptureError, match="Call it once outside"):
        torch.func.vmap(applied)(x)
    applied(x[0].requires_grad_())
    one_by_one = torch.stack([applied(one) for one in x])
    assert torch.allclose(torch.func.vmap(applied)(x), one_by_one, atol=1e-2)

    def loss(weights: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(applied, weights, (one,)).square().sum()  # type: ignore[no-any-return]

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), x)
    applied(x[1]).square().sum().backward()
    for name, weight in model.named_parameters():
        assert torch.allclose(per_sample[name][1], weight.grad, rtol=0.05, atol=0.05)
