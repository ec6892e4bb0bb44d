"""Models with graph breaks: what can be captured is planned as several graphs, the rest runs as it is written."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from castwise.torch import Amp, CaptureError, apply, compile, for_inference, plan
from castwise.torch._part import _path
from castwise.torch.planning import Plan, prepare, verified

from .plan_models import Branching
from .test_plan_apply import mixed

# The tracer's own, where it traces again.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Gated(nn.Module):
    """A feed-forward that doubles what comes out small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        if hidden.abs().mean().item() < 0.5:
            hidden = hidden * 2
        return x + self.down(hidden)


class Broken(nn.Module):
    """Branches inside of layers that a loop calls, a loop of as many rounds as the data needs, and layers around."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(Gated(width) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.enter(x)))
        for block in self.blocks:
            x = block(x)
        while x.abs().max() > 1:
            x = x * 0.5
        return self.head(x)


@pytest.fixture(scope="module")
def broken() -> tuple[nn.Module, torch.Tensor, Plan]:
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(16, 32)
    ready = mixed(prepare(model, (x,), policy="bfloat16", device="h100"))
    return model, x, verified(ready, ready.solve())


def test_the_capturable_parts_are_one_plan_that_says_what_is_left_as_written(broken: Any) -> None:
    model, _, found = broken
    graph = found.problem.graph
    assert len(graph.parts) == 7 and sum(graph.parts) == len(graph.ops)
    assert {"enter", "norm", "blocks.0.up", "blocks.1.down", "head"} <= {op.layer for op in graph.ops}
    assert {op.source.partition(":")[0] for op in graph.ops} <= {"test_plan_parts.py", ""}
    text = str(found.summary())
    assert "left as written, between 7 graphs" in text
    assert "in forward: if hidden.abs().mean().item() < 0.5" in text and "a graph breaks in a loop" in text
    assert 0 < found.labels.sum() < len(found.labels)
    assert all(p.grad is None for p in model.parameters()) and model.norm.num_batches_tracked == 0
    assert "forward" not in vars(model.enter)


def test_noise_of_all_parts_is_priced_at_the_models_outputs(broken: Any) -> None:
    _, _, found = broken
    assert found.verification is not None
    assert 0.6 < found.verification.ratio < 1.7


def test_what_runs_is_the_plan_and_trains_the_model(broken: Any, tmp_path: Any) -> None:
    model, x, found = broken
    found.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.problem.graph.eager == found.problem.graph.eager
    model = copy.deepcopy(model)
    planned, exact = apply(model, loaded), copy.deepcopy(model)
    ran = planned.formats_run(x)
    assert len(ran) >= len(found.formats) - 2 and ran == {op: found.formats[op] for op in ran}
    model.norm.load_state_dict(exact.norm.state_dict())
    have, want = planned(x), exact(x)
    assert have.dtype is torch.float32 and (have - want).norm() < 0.05 * want.norm()
    assert model.norm.num_batches_tracked == 1
    have.square().sum().backward()
    want.square().sum().backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad is not None and (p.grad - q.grad).norm() < 0.1 * q.grad.norm() + 1e-4
    assert not torch.equal(planned(3 * x[:5]), planned(x[:5]))  # other sizes, and another number of rounds


def test_amp_trains_a_model_with_breaks(broken: Any) -> None:
    model, x, found = copy.deepcopy(broken[0]), broken[1], broken[2]
    amp = Amp(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=found)
    target, losses = torch.randint(5, (16,), generator=torch.Generator().manual_seed(1)), []
    for _ in range(12):
        with amp:
            losses.append(F.cross_entropy(model(x), target))
        amp.step(losses[-1])
    assert losses[-1] < 0.7 * losses[0]


def test_inference_and_compiled_code_run_the_parts(broken: Any) -> None:
    model, x, found = copy.deepcopy(broken[0]), broken[1], broken[2]
    inference = for_inference(model, (x,), policy="bfloat16", device="h100")
    want = copy.deepcopy(model).eval()(x)
    assert (inference(x) - want).norm() < 0.05 * want.norm() and model.training
    compiled = compile(model, plan=found, backend="aot_eager")
    want = copy.deepcopy(model)(x)
    assert (compiled(x) - want).norm() < 0.05 * want.norm()


def test_a_branch_that_no_example_took_runs_in_fp32(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = Branching(), torch.rand(4, 8) + 0.1
    with caplog.at_level(logging.WARNING, "castwise"):
        found = plan(model, (x,), policy="bfloat16", device="h100")
    assert "Branching is planned as 2 graphs" in caplog.text and "control flow depends on data" in caplog.text
    assert "Data-dependent branching" not in caplog.text  # torch's count of the same, which says no place
    planned = apply(model, found)
    assert (planned(x) - model(x)).norm() < 0.02 * model(x).norm()
    assert torch.equal(planned(-x), x)
    both = plan(model, (x,), policy="bfloat16", device="h100", batches=[(-x,), (x,)])
    assert len(both.problem.graph.parts) == 3


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[float(v) for v in row] for row in x.tolist()], requires_grad=True)


def test_a_model_of_which_nothing_can_be_captured_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"Nothing cannot be captured as one graph.*eagerly under a preset"):
        plan(Nothing(), (torch.randn(2, 2),), policy="bfloat16", device="h100")


@pytest.mark.parametrize(
    "name, path",
    [
        ("L['self'].a", "a"),
        ("L['self'].blocks[0].out", "blocks.0.out"),
        ("L['x']._modules['blocks']._modules['3']", "blocks.3"),
        ("", ""),
    ],
)
def test_layers_have_the_paths_of_the_model(name: str, path: str) -> None:
    assert _path(name) == path
