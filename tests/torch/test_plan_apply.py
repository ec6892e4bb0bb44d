"""What a planned torch model is: its formats are the plan's, and all else is the user's model."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from castwise.torch import Amp
from castwise.torch.apply import Applied, apply
from castwise.torch.inference import compile, for_inference
from castwise.torch.planning import Plan, Prepared, plan, prepare

from .plan_models import GPT, Branching, ConvNet, InPlace, Recurrent, WideFeedForward, cases

FORMATS = (("float16", "t4"), ("bfloat16", "h100"))


def mixed(ready: Prepared) -> Prepared:
    """As if products gained much and casts cost little: plans of small models then use both formats."""
    costs = ready.costs
    flops = ready.captured.graph.index.flops
    return replace(
        ready, costs=replace(costs, high=costs.high + flops * 1e-9, down=costs.down / 1e3, up=costs.up / 1e3)
    )


def call(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), inputs) if isinstance(inputs, dict) else (inputs, {})


@pytest.fixture(scope="module")
def plans() -> dict[tuple[str, str], tuple[nn.Module, Any, Plan]]:
    found = {}
    for fmt, device in FORMATS:
        for name, (model, inputs) in cases().items():
            found[name, fmt] = model, inputs, mixed(prepare(model, inputs, policy=fmt, device=device)).solve()
    return found


_APPLIED: dict[tuple[tuple[str, str], bool], Applied] = {}


def applied(plans: Any, case: tuple[str, str], emulate: bool) -> Applied:
    """The same module for several tests: capturing is most of their time."""
    model, _, found = plans[case]
    return _APPLIED.setdefault((case, emulate), apply(model, found, emulate=emulate))


NAMES = [(name, fmt) for fmt, _ in FORMATS for name in ("gpt", "convnet", "lstm", "encoder", "wide", "in_place")]


@pytest.mark.parametrize("case", NAMES, ids="-".join)
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "native"])
def test_the_formats_that_ran_are_the_plans_op_for_op(plans: Any, case: tuple[str, str], emulate: bool) -> None:
    _, inputs, found = plans[case]
    args, kwargs = as_arguments(inputs)
    ran = applied(plans, case, emulate).formats_run(*args, **kwargs)
    assert ran == {op: found.formats[op] for op in ran}
    graph = found.problem.graph
    floating = {op.id for op in graph.ops if any(graph.tensors[t].format == "fp32" for t in op.outputs)}
    no_kernel = {
        op.id for op in graph.ops if op.name in ("dropout", "to")
    }  # dropout of nothing, a cast to what is there
    assert floating - no_kernel <= set(ran)


def test_test_plans_are_mixed(plans: Any) -> None:
    for case, (_, _, found) in plans.items():
        if case != ("wide", "bfloat16"):  # nothing in it needs fp32
            assert 0 < found.labels.sum() < len(found.labels), case


@pytest.mark.parametrize("case", NAMES, ids="-".join)
def test_flipping_a_decisive_op_is_no_faster_within_the_budget(plans: Any, case: tuple[str, str]) -> None:
    found = plans[case][2]
    verdicts = found.most_decisive(20)
    assert len(verdicts) >= min(20, int((found.problem.pinned < 0).sum()))
    for verdict in verdicts:
        within = found.score.noise + verdict.change.noise <= found.budget
        assert not within or verdict.change.seconds >= -1e-12, verdict.op


@pytest.mark.parametrize("case", NAMES, ids="-".join)
def test_outputs_and_gradients_are_near_fp32s_and_in_the_models_formats(plans: Any, case: tuple[str, str]) -> None:
    model, inputs, found = plans[case]
    exact, tolerance = copy.deepcopy(model), 0.03 if case[1] == "float16" else 0.15
    applied = apply(copy.deepcopy(model), found)
    for have, want in zip(leaves(call(applied, inputs)), leaves(call(exact, inputs)), strict=True):
        assert have.dtype is want.dtype
        assert (have - want).norm() <= tolerance * want.norm()
        if want.requires_grad:
            weight = torch.linspace(-1, 1, want.numel()).view(want.shape)
            (have * weight).sum().backward(retain_graph=True)
            (want * weight).sum().backward(retain_graph=True)
    wanted = [p.grad.flatten() for p in exact.parameters() if p.grad is not None]
    found_gradients = [p.grad.flatten() for p in applied.parameters() if p.grad is not None]
    difference = torch.cat(found_gradients) - torch.cat(wanted)
    assert difference.norm() <= 2 * tolerance * torch.cat(wanted).norm()


def leaves(outputs: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("case", NAMES, ids="-".join)
def test_casts_are_as_many_as_the_plan_counts(plans: Any, case: tuple[str, str]) -> None:
    _, inputs, found = plans[case]
    args, kwargs = as_arguments(inputs)
    graph = applied(plans, case, False).graph_for(args, kwargs).module.graph
    casts = [n for n in graph.nodes if n.target is torch.ops.aten.to.dtype and "castwise_op" not in n.meta]
    if case[0] == "lstm":  # of an op with several results each is cast by itself
        return
    assert len(found.casts) <= len(casts) <= len(found.casts) + len(all_low_but_wide(found))


def all_low_but_wide(found: Plan) -> list[str]:
    """Ops in fp32 that would read 16 bits as they are, if any operand were fp32: one is cast to make it so."""
    graph, low = found.problem.graph, found.usage.low
    floating = [[t for t in op.inputs if graph.tensors[t].floating] for op in graph.ops]
    pairs = zip(graph.ops, floating, found.labels, strict=True)
    return [op.id for op, reads, label in pairs if op.promotes and not label and reads and all(low[t] for t in reads)]


@pytest.mark.parametrize("case", NAMES, ids="-".join)
def test_what_runs_gives_the_rewritten_graphs_results_bit_for_bit(plans: Any, case: tuple[str, str]) -> None:
    _, inputs, _ = plans[case]
    args, kwargs = as_arguments(inputs)
    planned = applied(plans, case, True)
    graph = planned.graph_for(args, kwargs)
    buffers = {name: b.clone() for name, b in planned.named_buffers()}
    have = leaves(planned(*args, **kwargs))
    for name, b in planned.named_buffers():
        b.copy_(buffers[name])
    want = leaves(graph.module(*args, **kwargs))
    assert [x.dtype for x in have] == [x.dtype for x in want]
    assert all(torch.equal(x, y) for x, y in zip(have, want, strict=True))


def test_a_parameter_or_submodule_that_was_replaced_is_used_at_the_next_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))
    x = torch.randn(3, 8)
    planned = apply(model, plan(model, (x,), policy="float32"))
    planned(x)
    model[0].weight = nn.Parameter(torch.randn(8, 8))
    assert torch.equal(planned(x), model(x))
    model[1][1] = nn.Linear(8, 4)
    assert torch.equal(planned(x), model(x))
    model[1] = nn.Sequential(nn.ReLU(), nn.Linear(8, 4))
    assert torch.equal(planned(x), model(x))
    planned(x).sum().backward()
    assert model[1][1].weight.grad is not None


def test_parameters_state_dict_and_mode_are_the_users() -> None:
    model = GPT()
    applied = apply(model, plan(model, (torch.zeros(2, 4, dtype=torch.long),), policy="bfloat16", device="h100"))
    assert list(applied.state_dict()) == list(model.state_dict())
    assert [id(p) for p in applied.parameters()] == [id(p) for p in model.parameters()]
    assert applied.head.weight is applied.embed.weight
    applied.eval()
    assert not model.training and not model.blocks[0].drop.training
    applied.load_state_dict(GPT().state_dict())
    assert torch.equal(applied.embed.weight, model.embed.weight)


def test_planning_does_not_change_the_model() -> None:
    for model, inputs in [(ConvNet(), (torch.randn(4, 3, 8, 8),)), (Recurrent(), (torch.randint(30, (2, 4)),))]:
        before = copy.deepcopy(model.state_dict())
        random = torch.get_rng_state()
        plan(model, inputs, policy="float16", device="t4", loss=lambda y: leaves(y)[0].sum())
        for_inference(model, inputs, policy="float16", device="t4")
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        assert torch.equal(random, torch.get_rng_state())
        assert model.training and all(p.grad is None for p in model.parameters())
        assert "forward" not in vars(model)
    assert model.lstm._flat_weights[0] is model.lstm.weight_ih_l0


def test_batch_statistics_are_updated_as_by_the_model() -> None:
    model, x = ConvNet(), torch.randn(4, 3, 8, 8)
    twin = copy.deepcopy(model)
    applied = apply(model, mixed(prepare(model, (x,), policy="bfloat16", device="h100")).solve())
    for _ in range(3):
        applied(x)
        twin(x)
    assert model.norm1.num_batches_tracked == 3
    assert torch.allclose(model.norm2.running_mean, twin.norm2.running_mean, atol=0.02)


def test_evaluation_mode_uses_the_running_statistics() -> None:
    model, x = ConvNet(), torch.randn(4, 3, 8, 8)
    applied = apply(model, mixed(prepare(model, (x,), policy="float16", device="t4")).solve())
    applied(x)
    applied.eval()
    before = model.norm1.running_mean.clone()
    assert torch.allclose(applied(x), model(x), rtol=0.02, atol=0.02)
    assert torch.equal(before, model.norm1.running_mean)
    ran = applied.formats_run(x)
    assert {op: ran[op] for op in ran if op.startswith("conv")} == {
        op: fmt for op, fmt in applied.castwise_plan.formats.items() if op.startswith("conv")
    }


def test_other_batch_sizes_and_lengths_need_no_new_graph() -> None:
    model = GPT()
    applied = apply(model, plan(model, (torch.zeros(3, 12, dtype=torch.long),), policy="bfloat16", device="h100"))
    for shape in ((3, 12), (5, 7), (2, 30), (4, 1)):
        ids = torch.randint(40, shape)
        assert torch.allclose(applied(ids)["logits"], model(ids)["logits"], atol=0.2)
    assert len(applied._graphs) <= 2  # a length of one may be a graph of its own


def test_the_layer_beyond_the_range_of_fp16_is_fp32_and_says_so() -> None:
    torch.manual_seed(0)
    model, x = WideFeedForward(), torch.randn(16, 32)
    found = mixed(prepare(model, (x,), policy="float16", device="t4")).solve(budget=1e-2)
    high = {op for op, fmt in found.formats.items() if fmt == "fp32"}
    graph = found.problem.graph
    layers = {graph.ops[graph.positions[op]].layer for op in high}
    assert layers == {"wo", ""}  # its result is scaled down outside of any layer
    assert {graph.ops[graph.positions[op]].name for op in high} == {"linear", "mul"}
    assert "beyond fp16's largest, 65504" in str(found.explain("wo"))
    assert apply(model, found)(x).isfinite().all()
    bf16 = mixed(prepare(model, (x,), policy="bfloat16", device="h100")).solve()
    assert bf16.format_of(next(op.id for op in bf16.problem.graph.ops if op.layer == "wo")) == "bf16"


def test_a_plan_from_a_file_runs_as_the_one_that_was_saved(tmp_path: Any) -> None:
    model, ids = GPT(), torch.randint(40, (3, 12))
    found = mixed(prepare(model, (ids,), policy="float16", device="t4")).solve()
    found.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert torch.equal(apply(model, loaded)(ids)["logits"], apply(model, found)(ids)["logits"])


def test_control_flow_that_depends_on_data_is_left_eager_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Branching(), torch.randn(4, 8)
    with caplog.at_level(logging.WARNING, "castwise"):
        module = for_inference(model, (x,))
    assert "Branching is planned as 2 graphs. Left as written: plan_models.py:" in caplog.text
    assert torch.equal(module(x), model(x).detach())
    assert torch.equal(module(-x), model(-x).detach())


def test_inference_keeps_low_weights_and_stays_within_its_tolerance() -> None:
    torch.manual_seed(0)
    model, ids = GPT(dropout=0.1), torch.randint(40, (3, 12))
    module = for_inference(model, (ids,), policy="bfloat16", tolerance=5e-3, device="h100")
    exact = copy.deepcopy(model).eval()(ids)["logits"]
    outputs = module(ids)["logits"]
    assert not outputs.requires_grad and model.training
    assert (outputs - exact).norm() <= 5e-3 * 1.3 * exact.norm()
    casts_of_weights = [
        n
        for n in module.graph_for((ids,), {}).module.graph.nodes
        if n.target is torch.ops.aten.to.dtype and n.args[0].op == "get_attr"
    ]
    assert not casts_of_weights


def test_a_compiled_plan_without_generated_code_gives_the_planned_values() -> None:
    model, ids = GPT(layers=1), torch.randint(40, (3, 12))
    found = mixed(prepare(model, (ids,), policy="bfloat16", device="h100", target="compiled")).solve()
    compiled, applied = compile(model, plan=found, backend="aot_eager"), apply(model, found)
    assert torch.allclose(compiled(ids)["logits"], applied(ids)["logits"], atol=0.05)
    compiled(ids)["logits"].sum().backward()
    assert all(p.grad is not None for p in model.blocks.parameters())


def test_in_place_changes_reach_every_reader_and_no_cast_from_before() -> None:
    model, x = InPlace(), torch.randn(8, 32)
    found = mixed(prepare(model, (x,), policy="bfloat16", device="h100")).solve()
    have, want = apply(model, found)(x), model(x)
    assert (have[0] - want[0]).norm() < 0.02 * want[0].norm()
    assert have[1].dtype is torch.float16


def test_amp_trains_the_model_in_the_plans_formats_and_leaves_it_as_it_was() -> None:
    torch.manual_seed(0)
    model, ids = GPT(layers=1), torch.randint(40, (4, 12))
    found = mixed(prepare(model, (ids,), policy="float16", device="t4")).solve()
    assert found.labels.any()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    amp = Amp(model, optimizer, plan=found)
    assert amp.policy.uses_scaling
    losses = []
    for _ in range(30):
        with amp:
            logits = model(ids)["logits"]
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))
        amp.step(losses[-1])
    assert losses[-1] < 0.5 * losses[0]
    assert "forward" not in vars(model)
    assert amp.planned is not None and amp.planned.formats(ids) == found.formats
