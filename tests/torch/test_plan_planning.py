"""What `plan` decides: from measured costs, from calibrated risks, and by the user's rules."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from castwise.cost import MeasuredCosts
from castwise.errors import PlanError
from castwise.graph import Kind
from castwise.hardware import detect
from castwise.policy import LayerRule, Policy
from castwise.torch._verify import Verifier
from castwise.torch.calibrate import calibrate
from castwise.torch.capture import capture
from castwise.torch.measure import measured_costs
from castwise.torch.planning import plan, prepare

from .plan_models import GPT, WideFeedForward, cases
from .test_plan_apply import mixed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASTWISE_CACHE", str(tmp_path))


@pytest.mark.parametrize("fmt, device", [("float16", "t4"), ("bfloat16", "h100")])
@pytest.mark.parametrize("name", ["gpt", "convnet", "lstm", "wide", "encoder"])
def test_predicted_error_is_what_a_trial_finds(name: str, fmt: str, device: str) -> None:
    model, inputs = cases()[name]
    ready = mixed(prepare(model, inputs, policy=fmt, device=device))
    found = ready.solve()
    result = Verifier(ready.captured, found.fmt, "cpu", [inputs]).try_plan(found.formats)
    assert 0.7 < result.output_error / found.relative_error < 1.5


def test_a_plan_keeps_the_error_that_it_was_given() -> None:
    model, inputs = cases()["gpt"]
    ready = mixed(prepare(model, inputs, policy="bfloat16", device="h100"))
    verifier = Verifier(ready.captured, "bf16", "cpu", [inputs])
    loose, tight = (ready.solve(budget) for budget in (1e-2, 1e-3))
    assert verifier.try_plan(tight.formats).output_error < 1.5e-3 < verifier.try_plan(loose.formats).output_error
    assert tight.labels.sum() < loose.labels.sum()


def test_a_plan_is_verified_on_batches_that_did_not_calibrate() -> None:
    torch.manual_seed(0)
    model = GPT(width=512, layers=1)
    batches = [(torch.randint(40, (4, 32)),) for _ in range(3)]
    found = plan(model, batches[0], policy="float16", device="t4", batches=batches[1:])
    assert found.labels.any()
    assert found.verification is not None and found.verification.held_out and found.verification.batches == 1
    assert 0.5 < found.verification.ratio < 1.5


def test_rules_of_the_policy_are_followed() -> None:
    model, inputs = cases()["gpt"]
    policy = Policy(format="bfloat16", ops={"gelu": "high"}, layers=(LayerRule("blocks.0", format="float32"),))
    found = mixed(prepare(model, inputs, policy=policy, device="h100")).solve()
    graph = found.problem.graph
    for op in graph.ops:
        if op.name == "gelu" or op.layer.startswith("blocks.0"):
            assert found.formats[op.id] == "fp32", op.id
    assert any(found.formats[op.id] == "bf16" for op in graph.ops if op.layer.startswith("blocks.1"))


def test_auto_on_a_machine_without_16_bit_arithmetic_plans_fp32() -> None:
    if detect("cpu").best_16bit() is not None:
        pytest.skip("this processor computes in 16 bits")
    model, inputs = cases()["gpt"]
    assert set(plan(model, inputs).formats.values()) == {"fp32"}


def test_what_is_measured_slower_in_16_bits_stays_fp32(tmp_path: Any) -> None:
    model, inputs = cases()["convnet"]
    found = plan(model, inputs, policy="bfloat16", seconds=10)
    costs = found.problem.costs
    assert costs.measured.mean() > 0.8
    slower = costs.measured & (costs.low > costs.high)
    assert not (found.labels & slower).any() or found.score.seconds < found.fp32.seconds
    assert found.score.seconds <= found.fp32.seconds


def test_times_are_measured_once_per_op_and_shape(tmp_path: Any) -> None:
    model, inputs = cases()["gpt"]
    captured = capture(model, inputs, training=True)
    table = MeasuredCosts(tmp_path / "times.json")
    measured_costs(captured, inputs, detect("cpu"), "bf16", seconds=20, table=table)
    ops = sum(1 for key in table if not key.startswith("cast")) // 2
    assert ops < len(captured.graph.ops) - 1  # both blocks have the same ops
    started, size = time.perf_counter(), len(table)
    measured_costs(captured, inputs, detect("cpu"), "bf16", seconds=20, table=MeasuredCosts(tmp_path / "times.json"))
    assert time.perf_counter() - started < 2.0
    assert len(MeasuredCosts(tmp_path / "times.json")) == size


def test_gradient_ranges_are_those_of_the_loss() -> None:
    model, x = WideFeedForward(), torch.randn(16, 32)
    captured = capture(model, (x,), training=True)
    risks = calibrate(captured, "fp16", [(x,)], lambda y: y.square().mean())
    model(x).square().mean().backward()
    weight = captured.graph.tensor("last_weight")
    assert model.last.weight.grad is not None
    assert risks.gradient_ranges[weight].largest == pytest.approx(float(model.last.weight.grad.abs().max()), rel=1e-4)


class Residual(torch.nn.Module):
    """A stream that a product reads and that is added up beside it, also through views that repeat its rows."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.inside, self.shift = torch.nn.Linear(width, width, bias=False), torch.nn.Parameter(torch.randn(width))
        torch.nn.init.normal_(self.inside.weight, std=0.1 / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.shift.expand(x.shape[0], -1)
        return 3 * x + self.inside(x) + self.inside(shift) + shift


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_a_cast_is_priced_by_what_the_reader_passes_on(fmt: str) -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(64, 48)
    captured = capture(model, (x,), training=True)
    risks = calibrate(captured, fmt, [(x,), *((torch.randn(64, 48),) for _ in range(7))])
    graph = captured.graph
    low = np.array([op.name == "linear" for op in graph.ops])
    stream, shift = graph.tensor("x"), graph.tensor("shift")
    noise = risks.rounding(graph, low, np.isin(np.arange(len(graph.tensors)), [stream, shift]))
    dtype = torch.bfloat16 if fmt == "bf16" else torch.float16
    for tensor, values in ((stream, x), (shift, model.shift.detach().expand(64, -1))):
        error = model.inside(values.to(dtype).float() - values).detach()
        assert 0.6 < float(error.square().sum()) / noise[tensor] < 1.7, graph.tensors[tensor].name


def test_tied_weights_are_priced_by_what_reads_them() -> None:
    model, ids = cases()["gpt"]
    captured = capture(model, ids, training=True)
    graph = captured.graph
    risks = calibrate(captured, "bf16", [ids, (torch.randint(40, (3, 12)),)])
    low = np.array([op.layer == "head" for op in graph.ops])
    [head] = [op for op, is_low in zip(graph.ops, low, strict=True) if is_low]
    weights = [t for t in head.inputs if graph.tensors[t].kind is Kind.WEIGHT]
    noise = risks.rounding(graph, low, np.isin(np.arange(len(graph.tensors)), weights)).sum()
    hidden: list[torch.Tensor] = []
    hook = model.norm.register_forward_hook(lambda _module, _args, y: hidden.append(y.detach()))
    model(*ids)
    hook.remove()
    weight = model.head.weight.detach()
    error = hidden[0] @ (weight.to(torch.bfloat16).float() - weight).T
    assert 0.6 < float(error.square().sum()) / noise < 1.7


def test_infinities_that_mask_do_not_count_as_overflow() -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool).triu(1)
            return (x.masked_fill(mask, -float("inf"))).softmax(-1)

    x = torch.randn(6, 6)
    captured = capture(Masked(), (x,), training=False)
    risks = calibrate(captured, "fp16", [(x,)])
    assert all(record.overflow == 0 and record.largest < 10 for record in risks.ranges.values())


def test_a_budget_without_16_bit_formats_is_refused() -> None:
    model, inputs = cases()["wide"]
    with pytest.raises(PlanError, match="nothing computes in 16 bits"):
        plan(model, inputs, policy="float32", budget=1e-3)


@pytest.mark.parametrize("budget", [-1.0, float("nan")])
def test_a_budget_that_is_no_error_is_refused(budget: float) -> None:
    model, inputs = cases()["gpt"]
    with pytest.raises(PlanError, match=rf"A budget of {budget} makes no sense"):
        plan(model, inputs, policy="bfloat16", device="h100", budget=budget)


def test_a_budget_allows_the_noise_that_it_is_as_a_relative_error() -> None:
    model, inputs = cases()["gpt"]
    risks = calibrate(capture(model, inputs, training=True), "bf16", [inputs])
    assert risks.allowed(0.0) == 0 and risks.relative(risks.allowed(3e-3)) == pytest.approx(3e-3)
