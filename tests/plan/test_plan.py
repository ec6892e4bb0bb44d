"""Plans as a user meets them: solved, explained, summed up, saved, checked and repaired."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castwise._pins import preset_labels
from castwise.cost import Costs, roofline
from castwise.errors import PlanError
from castwise.graph import Graph, GraphBuilder
from castwise.hardware import get_device
from castwise.plan import Cause, Fingerprint, Plan, Problem, pareto, solve, solve_formats
from castwise.policy import LayerRule, Policy
from castwise.risk import RangeRecord, Risks

from .oracle import enumerate_labellings, random_case

TOKENS, WIDTH, HIDDEN = 512, 256, 1024
BF16, FP16 = Policy(format="bfloat16"), Policy(format="float16")
ROUNDING = 1e-9


def feed_forward(blocks: int = 2, *, training: bool = True) -> Graph:
    """Blocks of norm, two products with a gelu in between, and a residual addition, as a small transformer has."""
    build = GraphBuilder("small", framework="torch")
    stream = build.tensor("x", (TOKENS, WIDTH), kind="input")
    for block in range(blocks):
        path = f"blocks.{block}"
        up, down = (f"{path}.{name}.weight" for name in ("up", "down"))
        build.tensor(up, (WIDTH, HIDDEN), kind="weight")
        build.tensor(down, (HIDDEN, WIDTH), kind="weight")
        flops, mlp = 2.0 * TOKENS * WIDTH * HIDDEN, f"{path}.mlp"
        normed = build.op(
            f"{path}.norm",
            "layer_norm",
            [stream],
            [(f"{path}.n", (TOKENS, WIDTH))],
            layer=f"{path}.norm",
            saves=[stream],
        )
        hidden = build.op(
            f"{path}.up", "matmul", [normed, up], [(f"{path}.h", (TOKENS, HIDDEN))],
            layer=mlp, flops=flops, saves=[normed, up], source=f"model.py:{10 + block}",
        )  # fmt: skip
        active = build.op(
            f"{path}.gelu", "gelu", [hidden], [(f"{path}.a", (TOKENS, HIDDEN))], layer=mlp, saves=[hidden]
        )
        out = build.op(
            f"{path}.down", "matmul", [active, down], [(f"{path}.o", (TOKENS, WIDTH))],
            layer=mlp, flops=flops, saves=[active, down],
        )  # fmt: skip
        last = block == blocks - 1
        stream = build.op(
            f"{path}.add", "add", [stream, out], [(f"{path}.s", (TOKENS, WIDTH))],
            layer=path, output=last, keeps_format=last,
        )  # fmt: skip
    return build.build(training=training)


def risks_of(graph: Graph, fmt: str = "bf16", noise: dict[str, float] | None = None) -> Risks:
    """A little noise everywhere, more where ``noise`` names a tensor, and values far from any limit."""
    total = np.full(len(graph.tensors), 1e-8)
    for name, value in (noise or {}).items():
        total[graph.tensor(name)] = value
    risks = Risks.from_sensitivities(graph, fmt, total)
    return replace(risks, ranges={tensor: RangeRecord(1.0, 10) for tensor in range(len(graph.tensors))})


def planned(graph: Graph | None = None, **options: object) -> Plan:
    graph = graph or feed_forward()
    return solve(graph, roofline(graph, get_device("a100"), "bf16"), risks_of(graph), BF16, **options)  # type: ignore[arg-type]


# ---- solving ----


def test_at_a_price_the_plan_is_the_cheapest_of_all_and_certified() -> None:
    for seed in range(60):
        case = random_case(np.random.default_rng(40_000 + seed))
        plan = solve(case.graph, case.costs, case.risks, BF16, lam=0.7, mu=0.01)
        pinned = np.full(len(case.graph), -1, np.int8)
        for position, pin in plan.problem.pins.items():
            pinned[position] = pin.low
        energies = enumerate_labellings(replace(case, pins=pinned)).energy(0.7, 0.01)
        slack = ROUNDING * max(1.0, energies.max())
        assert plan.energy <= energies.min() + slack
        assert plan.gap <= slack


def test_the_default_plan_is_never_noisier_nor_slower_than_the_preset_and_often_faster() -> None:
    graph = feed_forward(blocks=3)
    costs = roofline(graph, get_device("a100"), "bf16")
    faster = 0
    for seed in range(20):
        noise = 10.0 ** np.random.default_rng(seed).uniform(-9, -5, len(graph.tensors))
        plan = solve(graph, costs, Risks.from_sensitivities(graph, "bf16", noise), BF16)
        preset = plan.problem.score(preset_labels(graph, "bf16", BF16, plan.problem.pins))
        assert plan.score.noise <= preset.noise and plan.score.seconds <= preset.seconds
        faster += plan.score.seconds < preset.seconds
    assert faster > 5


def test_where_the_hull_has_nothing_better_the_preset_itself_is_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castwise._front.EXACT_OPS", 0)
    graph = feed_forward(blocks=3)
    costs = roofline(graph, get_device("a100"), "bf16")
    for seed in range(20):
        noise = 10.0 ** np.random.default_rng(seed).uniform(-9, -5, len(graph.tensors))
        plan = solve(graph, costs, Risks.from_sensitivities(graph, "bf16", noise), BF16)
        preset = plan.problem.score(preset_labels(graph, "bf16", BF16, plan.problem.pins))
        assert plan.score.noise <= preset.noise and plan.score.seconds <= preset.seconds


def test_a_price_of_zero_gives_the_fastest_plan_and_a_high_one_the_most_exact() -> None:
    fastest, exact = planned(lam=0.0), planned(lam=1e12)
    assert fastest.score.seconds < exact.score.seconds
    assert exact.score.noise == 0.0 and set(exact.formats.values()) == {"fp32"}


def test_a_fp32_policy_lowers_nothing() -> None:
    graph = feed_forward()
    costs = roofline(graph, get_device("a100"), "bf16")
    plan = solve(graph, costs, risks_of(graph), Policy(format="float32"))
    assert set(plan.formats.values()) == {"fp32"}
    assert plan.score == plan.fp32
    assert "format = 'float32'" in str(plan.explain("blocks.0.up"))


def test_favouring_memory_keeps_less_for_backward() -> None:
    graph = feed_forward()
    costs = roofline(graph, get_device("a100"), "bf16")
    slow = replace(costs, low=costs.high * 1.05)  # 16 bits are a little slower: only memory speaks for them
    speed, memory = (
        solve(graph, slow, risks_of(graph), BF16, lam=0.0, favour=favour) for favour in ("speed", "memory")
    )
    assert speed.score.saved_bytes == speed.fp32.saved_bytes
    assert memory.score.saved_bytes < 0.75 * memory.fp32.saved_bytes
    assert Cause.MEMORY in memory.causes


def test_an_fp16_plan_keeps_one_hazardous_layer_in_fp32_and_nothing_else() -> None:
    graph = feed_forward(blocks=4)
    costs, risks = roofline(graph, get_device("t4"), "fp16"), risks_of(graph, "fp16")
    ranges = {**risks.ranges, graph.tensor("blocks.2.a"): RangeRecord(120_000.0, 10, overflow=0.01)}
    healthy = solve(graph, costs, risks, FP16, lam=0.0)
    plan = solve(graph, costs, replace(risks, ranges=ranges), FP16, lam=0.0)
    changed = {op for op, fmt in plan.formats.items() if fmt != healthy.formats[op]}
    assert changed == {"blocks.2.gelu", "blocks.2.down"}
    assert "whose values reach 1.2e+05, beyond fp16's largest, 65504" in str(plan.summary())


def test_a_noisy_op_is_the_one_that_stays_fp32_within_a_budget() -> None:
    graph = feed_forward()
    costs = roofline(graph, get_device("a100"), "bf16")
    risks = risks_of(graph, noise={"blocks.1.o": 1.0})
    plan = solve(graph, costs, risks, BF16, budget=1e-3)
    assert plan.score.noise <= 1e-3
    assert plan.format_of("blocks.1.down") == "fp32"
    assert plan.format_of("blocks.0.down") == plan.format_of("blocks.1.up") == "bf16"
    assert "decided by noise" in str(plan.explain("blocks.1.down")) or "budget" in str(plan.explain("blocks.1.down"))


def test_what_does_not_fit_together_is_refused() -> None:
    graph = feed_forward()
    costs, risks = roofline(graph, get_device("a100"), "bf16"), risks_of(graph)
    for change, message in (
        ({"lam": 1.0, "budget": 1.0}, "not both"),
        ({"budget": -1.0}, "budget of -1.0 makes no sense"),
        ({"budget": float("nan")}, "budget of nan makes no sense"),
        ({"lam": -1.0}, "0 or more"),
        ({"mu": -1.0}, "0 or more"),
        ({"favour": "beauty"}, "Favour 'speed' or 'memory'"),
    ):
        with pytest.raises(PlanError, match=message):
            solve(graph, costs, risks, BF16, **change)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="policy's format is fp16, the costs are for bf16"):
        solve(graph, costs, risks, FP16)
    with pytest.raises(PlanError, match="Costs are for bf16, risks for fp16"):
        solve(graph, costs, risks_of(graph, "fp16"), BF16)
    with pytest.raises(PlanError, match="not fp8_e5m2"):
        solve(graph, replace(costs, fmt="fp8_e5m2"), replace(risks, fmt="fp8_e5m2"), Policy(format="fp8_e5m2"))
    with pytest.raises(PlanError, match="negative or not finite at position 1"):
        noise = np.zeros(len(graph))
        noise[1] = np.nan
        solve(graph, costs, replace(risks, op_values=noise), BF16)


# ---- fronts and formats ----


def test_a_front_runs_from_fast_to_exact_and_every_plan_on_it_is_the_best_at_its_price() -> None:
    graph = feed_forward(blocks=4)
    rng = np.random.default_rng(0)
    risks = replace(risks_of(graph), op_values=10.0 ** rng.uniform(-9, -5, len(graph)))
    costs = roofline(graph, get_device("a100"), "bf16")
    plans = pareto(graph, costs, risks, BF16, points=6)
    assert 3 <= len(plans) <= 6
    for faster, slower in itertools.pairwise(plans):
        assert faster.score.seconds < slower.score.seconds
        assert faster.score.noise > slower.score.noise
    for plan in plans:
        assert plan.energy == pytest.approx(solve(graph, costs, risks, BF16, lam=plan.lam).energy, rel=1e-9)


def test_formats_are_compared_within_one_budget() -> None:
    graph = feed_forward()
    costs = roofline(graph, get_device("a100"), "bf16")
    bf16, fp16 = risks_of(graph, noise={"blocks.0.h": 1e-4}), risks_of(graph, "fp16")
    alternatives = {"bf16": (costs, bf16), "fp16": (replace(costs, fmt="fp16"), fp16)}
    choice = solve_formats(graph, alternatives, BF16, budget=5e-5)
    assert choice.best.fmt == "fp16", "bf16 has no room for its noisiest op within the budget"
    assert list(choice.plans) == ["fp16", "bf16"]
    huge = {tensor: RangeRecord(1e6, 10, overflow=1.0) for tensor in range(len(graph.tensors))}
    overflowing = {**alternatives, "fp16": (replace(costs, fmt="fp16"), replace(fp16, ranges=huge))}
    assert solve_formats(graph, overflowing, BF16).best.fmt == "bf16", "in fp16 nothing can be lowered"


def test_a_format_without_a_plan_is_rejected_with_its_reason() -> None:
    graph = feed_forward()
    costs = roofline(graph, get_device("a100"), "bf16")
    noisy = replace(risks_of(graph), op_values=np.ones(len(graph)))
    alternatives = {"bf16": (costs, noisy), "fp16": (replace(costs, fmt="fp16"), risks_of(graph, "fp16"))}
    rule = Policy(format="bfloat16", ops={"gelu": "low"})
    choice = solve_formats(graph, alternatives, rule, budget=1e-3)
    assert list(choice.plans) == ["fp16"] and "Raise the budget" in choice.rejected["bf16"]
    with pytest.raises(PlanError, match="No format has a plan"):
        solve_formats(graph, {"bf16": alternatives["bf16"]}, rule, budget=1e-3)


# ---- explaining ----


def test_an_explanation_names_the_rule_the_cost_or_the_risk() -> None:
    graph = feed_forward()
    costs = roofline(graph, get_device("a100"), "bf16")
    risks = risks_of(graph, noise={"blocks.1.s": 1.0})
    policy = Policy(format="bfloat16", layers=(LayerRule("blocks.0.norm", format="float32"),))
    plan = solve(graph, costs, risks, policy, lam=1.0)
    by_op = {op: plan.explain(op).verdicts[0] for op in plan.formats}
    assert (by_op["blocks.0.norm"].cause, by_op["blocks.0.norm"].format) == (Cause.POLICY, "fp32")
    assert "layers[0]" in by_op["blocks.0.norm"].reason
    assert (by_op["blocks.0.up"].cause, by_op["blocks.0.up"].format) == (Cause.TIME, "bf16")
    assert by_op["blocks.0.up"].reason.startswith("fp32 takes") and "model.py:10" in str(by_op["blocks.0.up"])
    assert (by_op["blocks.1.add"].cause, by_op["blocks.1.add"].format) == (Cause.NOISE, "fp32")
    assert "raises the predicted error of the output" in by_op["blocks.1.add"].reason


def test_what_weighs_heaviest_is_weighed_at_the_plans_prices() -> None:
    build = GraphBuilder()
    build.tensor("x", (1,), kind="input")
    build.op("a", "matmul", ["x"], [("y", (1,))], output=True, keeps_format=True)
    graph = build.build()
    casts = np.array([0.5, 0.0])
    costs = Costs("bf16", np.array([1.0]), np.array([0.0]), casts, np.zeros(2), np.zeros(2, bool))
    risks = Risks.from_sensitivities(graph, "bf16", np.array([0.0, 0.1]))
    dear, cheap = (solve(graph, costs, risks, BF16, lam=lam).explain("a").verdicts[0] for lam in (20.0, 1.0))
    assert (dear.format, dear.cause) == ("fp32", Cause.NOISE), "gains 1 s, of which casts eat 0.5 s and noise 2 s"
    assert (cheap.format, cheap.cause) == ("bf16", Cause.TIME)
    assert dear.change.energy == pytest.approx(1.5)


def test_a_change_is_what_flipping_the_op_does_and_no_flip_helps() -> None:
    plan = planned(lam=1e3)
    for position, op in enumerate(plan.problem.graph.ops):
        flipped = plan.labels.copy()
        flipped[position] = not flipped[position]
        after = plan.problem.score(flipped)
        change = plan.explain(op.id).verdicts[0].change
        assert change.seconds == pytest.approx(after.seconds - plan.score.seconds, rel=1e-9, abs=1e-15)
        assert change.noise == pytest.approx(after.noise - plan.score.noise, rel=1e-9, abs=1e-15)
        assert change.saved_bytes == after.saved_bytes - plan.score.saved_bytes
        assert change.energy >= -plan.gap - 1e-15


def test_a_layer_or_glob_is_explained_op_by_op_and_a_typo_gets_the_nearest() -> None:
    plan = planned(lam=0.0)
    assert [verdict.op for verdict in plan.explain("blocks.1.mlp").verdicts] == [
        f"blocks.1.{name}" for name in ("up", "gelu", "down")
    ]
    assert len(plan.explain("blocks.*.mlp").verdicts) == 6
    assert str(plan.explain("blocks.1.mlp")).count("\n") == 2
    with pytest.raises(PlanError, match=r"Did you mean .*'blocks.1.mlp'"):
        plan.explain("blocks.1.mlpp")
    with pytest.raises(PlanError, match=r"Did you mean .*'blocks.1.down'"):
        plan.format_of("blocks.1.donw")


def test_the_most_decisive_ops_had_a_choice_and_come_in_order() -> None:
    policy = Policy(format="bfloat16", ops={"gelu": "high"})
    graph = feed_forward()
    plan = solve(graph, roofline(graph, get_device("a100"), "bf16"), risks_of(graph), policy, lam=0.0)
    decisive = plan.most_decisive(5)
    energies = [verdict.change.energy for verdict in decisive]
    assert len(decisive) == 5 and energies == sorted(energies, reverse=True)
    assert {verdict.op for verdict in plan.most_decisive(100)} == {op for op in plan.formats if "gelu" not in op}


# ---- summary and casts ----


def test_a_summary_counts_ops_casts_bytes_time_noise_and_reasons() -> None:
    policy = Policy(format="bfloat16", ops={"layer_norm": "high"})
    graph = feed_forward()
    costs = roofline(graph, get_device("a100"), "bf16", keep_low_weights=True)
    plan = solve(graph, costs, risks_of(graph), policy, lam=0.0)
    summary = plan.summary()
    assert sum(summary.ops.values()) == len(graph) and summary.ops["bf16"] == sum(plan.labels)
    assert summary.kept_copies == 4 and summary.kept_bytes == 2 * 4 * WIDTH * HIDDEN
    assert summary.casts_down == sum(cast.target == "bf16" and not cast.kept for cast in plan.casts)
    assert summary.cast_bytes == sum(cast.step_bytes for cast in plan.casts)
    assert summary.noise.total == pytest.approx(plan.score.noise)
    assert summary.speedup == plan.fp32.seconds / plan.score.seconds > 1
    reasons = {kept.reason: kept.count for kept in summary.stays_fp32}
    assert reasons["ops['layer_norm'] = 'high'"] == 2
    text = str(summary)
    for part in ("small: fp32 and bf16, training step, NVIDIA A100", "casts", "saved for backward", "layer_norm ×2"):
        assert part in text


def test_casts_are_listed_once_per_tensor_and_direction_with_their_bytes() -> None:
    build = GraphBuilder("fan")
    build.tensor("x", (100,), kind="input", requires_grad=True)
    for name in "abc":
        build.op(name, "matmul", ["x"], [(f"{name}.out", (100,))], output=True, keeps_format=True)
    graph = build.build(training=True)
    tensors = len(graph.tensors)
    costs = Costs(
        "bf16", np.ones(3), np.zeros(3), np.full(tensors, 0.1), np.full(tensors, 0.1), np.zeros(tensors, bool)
    )
    plan = solve(graph, costs, risks_of(graph), BF16, lam=0.0)
    assert [(cast.tensor, cast.source, cast.target) for cast in plan.casts] == [
        ("x", "fp32", "bf16"), ("a.out", "bf16", "fp32"), ("b.out", "bf16", "fp32"), ("c.out", "bf16", "fp32")
    ]  # fmt: skip
    assert {cast.bytes for cast in plan.casts} == {100 * 6}
    assert {cast.step_bytes for cast in plan.casts} == {2 * 100 * 6}, "each gradient is cast back"


def test_a_plan_without_measured_noise_says_so() -> None:
    graph = feed_forward()
    costs = roofline(graph, get_device("a100"), "bf16")
    plan = solve(graph, costs, Risks.unmeasured(graph, "bf16"), BF16)
    assert "not measured" in str(plan.summary())
    assert {kept.cause for kept in plan.summary().stays_fp32} >= {Cause.CATALOGUE}


# ---- files and fingerprints ----


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_plan_survives_its_file_exactly(seed: int) -> None:
    case = random_case(np.random.default_rng(seed))
    plan = solve(case.graph, case.costs, case.risks, BF16, lam=0.3, versions={"torch": "2.13.0"})
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False)))
    assert again.to_dict() == plan.to_dict()
    assert again.problem.graph == plan.problem.graph and again.problem.pins == plan.problem.pins
    assert (again.score, again.casts, again.causes) == (plan.score, plan.casts, plan.causes)


def test_a_loaded_plan_explains_sums_up_and_solves_as_the_saved_one(tmp_path: Path) -> None:
    graph = feed_forward()
    costs, risks = roofline(graph, get_device("a100"), "bf16"), risks_of(graph)
    blocked = replace(costs, low=np.where(np.arange(len(graph)) == 3, np.inf, costs.low), unavailable={3: "no kernel"})
    infinite = {**risks.ranges, 0: RangeRecord(np.inf, 3, overflow=0.5)}
    plan = solve(graph, blocked, replace(risks, ranges=infinite), BF16, budget=1e-7)
    plan.save(tmp_path / "deep" / "plan.json")
    again = Plan.load(tmp_path / "deep" / "plan.json")
    assert str(again.summary()) == str(plan.summary())
    assert str(again.explain("blocks.**")) == str(plan.explain("blocks.**"))
    raised = {"blocks.0.up": "missed the budget"}
    assert again.raised(raised).to_dict() == plan.raised(raised).to_dict()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "no plan of schema version 1"),
        ('{"schema_version": 2}', "no plan of schema version 1"),
        ('{"schema_version": 1}', "damaged"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert "broken.json" in str(caught.value)


def test_an_edited_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned(lam=0.0).save(path)
    data = json.loads(path.read_text())
    data["graph"]["ops"]["name"][0] = "rms_norm"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="its file was edited"):
        Plan.load(path)
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "missing.json")


def test_a_plan_used_elsewhere_says_what_differs() -> None:
    plan = planned(lam=0.0, versions={"torch": "2.13.0"})
    graph, here = plan.problem.graph, plan.fingerprint
    assert plan.check(here) == []
    newer = replace(here, device="NVIDIA T4", versions={**here.versions, "torch": "2.14.0"})
    assert plan.check(newer) == [
        f"The device is 'NVIDIA T4'; the plan was made for {get_device('a100').name!r}.",
        "The version of torch is 2.14.0; the plan was made with 2.13.0.",
    ]
    longer = Fingerprint.of(feed_forward(blocks=3), plan.problem.costs, plan.versions)
    assert plan.check(longer)[0].startswith("The model has 15 ops")
    wider = replace(graph, tensors=(replace(graph.tensors[0], shape=(1, 1)), *graph.tensors[1:]))
    assert "other shapes" in plan.check(Fingerprint.of(wider, plan.problem.costs, plan.versions))[0]


# ---- repair ----


def test_raising_an_op_solves_again_within_the_same_budget() -> None:
    plan = planned(budget=1e-6)
    assert plan.format_of("blocks.0.up") == "bf16"
    repaired = plan.raised({"blocks.0.up": "its outputs were off by more than predicted"})
    assert repaired.format_of("blocks.0.up") == "fp32"
    assert repaired.budget == plan.budget and repaired.score.noise <= 1e-6
    assert "off by more than predicted" in str(repaired.explain("blocks.0.up"))
    assert plan.format_of("blocks.0.up") == "bf16", "the first plan is as it was"
    with pytest.raises(PlanError, match="no op 'nothing'"):
        plan.raised({"nothing": "a typo"})


def test_problems_are_refused_where_arrays_do_not_fit_the_graph() -> None:
    graph, other = feed_forward(), feed_forward(blocks=1)
    costs = roofline(graph, get_device("a100"), "bf16")
    with pytest.raises(PlanError, match="do not fit a graph"):
        Problem.of(other, costs, risks_of(other), BF16)
    with pytest.raises(PlanError, match="Make risks from this graph"):
        Problem.of(graph, costs, risks_of(other), BF16)


def test_a_plan_for_fp64_and_fp32_chooses_between_these():
    build = GraphBuilder("solver")
    x = build.tensor("x", (8, 8), kind="input", format="fp64")
    for name in ("a", "b"):
        y = build.tensor(f"y_{name}", (8, 8), format="fp64", kind="output" if name == "b" else "activation")
        x = build.op(name, "matmul", [x], [y])
    graph = build.build()
    costs = Costs("fp32", np.ones(2), np.array([0.4, 0.4]), np.full(3, 0.1), np.full(3, 0.1), np.zeros(3, bool))
    risks = Risks.from_sensitivities(graph, "fp32", np.array([0.0, 1.0, 9.0]))
    plan = solve(graph, costs, risks, Policy(format="float32"), budget=2.0)
    assert dict(plan.formats) == {"a": "fp32", "b": "fp64"}
    assert plan.wide == "fp64" and "fp64 and fp32" in str(plan.summary())
    assert Plan.from_dict(plan.to_dict()).formats == plan.formats
