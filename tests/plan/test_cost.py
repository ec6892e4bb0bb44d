"""Predicted times by hand calculation, and measured ones from a table on disk."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from castwise.cost import Costs, MeasuredCosts, cast_key, op_key, roofline
from castwise.errors import HardwareError, PlanError
from castwise.graph import Graph, GraphBuilder
from castwise.hardware import Support, get_device
from castwise.plan import solve
from castwise.policy import Policy
from castwise.risk import Risks

T4, A100 = get_device("t4"), get_device("a100")
ROWS, INNER, COLUMNS = 4096, 1024, 2048
FLOPS = 2.0 * ROWS * INNER * COLUMNS
VERSIONS = {"torch": "2.13.0"}


def product(*, training: bool = False, trainable: bool = True, name: str = "matmul") -> Graph:
    """One matrix product large enough to be bound by arithmetic, and an addition bound by memory."""
    build = GraphBuilder()
    build.tensor("x", (ROWS, INNER), kind="input", requires_grad=True)
    build.tensor("w", (INNER, COLUMNS), kind="weight", requires_grad=trainable)
    build.tensor("b", (COLUMNS,), kind="weight", requires_grad=trainable)
    build.op("product", name, ["x", "w"], [("h", (ROWS, COLUMNS))], flops=FLOPS)
    build.op("shift", "add", ["h", "b"], [("y", (ROWS, COLUMNS))], flops=ROWS * COLUMNS)
    return build.build(training=training)


def test_a_large_product_takes_its_arithmetic_and_an_addition_its_bytes() -> None:
    costs = roofline(product(), T4, "fp16", launch=0.0)
    assert costs.high[0] == pytest.approx(FLOPS / T4.peak["fp32"])
    assert costs.low[0] == pytest.approx(FLOPS / T4.peak["fp16"])
    elements = 2 * ROWS * COLUMNS + COLUMNS
    assert costs.high[1] == pytest.approx(4 * elements / T4.bandwidth)
    assert costs.low[1] == pytest.approx(2 * elements / T4.bandwidth)
    assert costs.down[0] == pytest.approx(6 * ROWS * INNER / T4.bandwidth)


def test_every_op_and_cast_pays_its_launch() -> None:
    free, paid = (roofline(product(), T4, "fp16", launch=launch) for launch in (0.0, 1e-3))
    assert paid.high - free.high == pytest.approx(1e-3)
    assert paid.up - free.up == pytest.approx(1e-3)


def test_tf32_speeds_up_fp32_products_only() -> None:
    plain, fast = (roofline(product(), A100, "bf16", tf32=tf32, launch=0.0) for tf32 in (False, True))
    assert plain.high[0] / fast.high[0] == pytest.approx(A100.peak["tf32"] / A100.peak["fp32"])
    assert plain.high[1] == fast.high[1]


@pytest.mark.parametrize(("trainable", "passes"), [(True, 3), (False, 2)])
def test_training_adds_a_product_per_gradient(trainable: bool, passes: int) -> None:
    once = roofline(product(), T4, "fp16", launch=0.0).high
    step = roofline(product(training=True, trainable=trainable), T4, "fp16", launch=0.0).high
    assert step[0] == pytest.approx(passes * once[0])
    assert step[1] == pytest.approx(2 * once[1])


def test_a_cast_is_cast_back_in_training_where_a_gradient_flows() -> None:
    graph = product(training=True, trainable=False)
    costs = roofline(graph, T4, "fp16", launch=0.0, keep_low_weights=False)
    once = roofline(product(), T4, "fp16", launch=0.0, keep_low_weights=False)
    assert costs.down[:2] == pytest.approx(once.down[:2] * np.array([2, 1]))


def test_low_weights_are_free_where_kept_which_is_the_default_of_inference() -> None:
    inference, training = (roofline(product(training=training), T4, "fp16") for training in (False, True))
    assert inference.kept.tolist() == [False, True, True, False, False]
    assert (inference.down[1:3] == 0).all() and inference.down[0] > 0
    assert not training.kept.any() and (training.down[1:3] > 0).all()


def test_a_weight_that_is_written_in_place_keeps_no_low_copy() -> None:
    build = GraphBuilder()
    build.tensor("cache", (8,), kind="constant")
    build.op("update", "add", ["cache"], [], mutates=["cache"])
    assert not roofline(build.build(), T4, "fp16").kept.any()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_table_that_a_training_step_reads_by_rows_alone_keeps_no_low_copy(training: bool, tied: bool) -> None:
    build = GraphBuilder()
    build.tensor("ids", (4,), kind="input", format="int64")
    build.tensor("table", (1000, 8), kind="weight")
    rows = build.tensor("rows", (4, 8))
    build.op("embed", "embedding", ["table", "ids"], ["rows"], bytes=2 * 4 * 8 * 4)
    build.tensor("scores", (4, 1000), kind="output")
    build.op("head", "linear", [rows, "table"] if tied else [rows], ["scores"])
    graph = build.build(training=training)
    costs = roofline(graph, T4, "fp16", keep_low_weights=True)
    table = graph.tensor("table")
    assert costs.kept[table] == (tied or not training)
    assert (costs.down[table] == 0) == costs.kept[table]


def test_an_emulated_format_is_slower_than_fp32_and_the_plan_comes_out_fp32() -> None:
    graph = product()
    costs = roofline(graph, T4, "bf16")
    assert (costs.low > costs.high).all()
    plan = solve(graph, costs, Risks.unmeasured(graph, "bf16"), Policy(format="bfloat16"), lam=0.0)
    assert set(plan.formats.values()) == {"fp32"}


def test_a_format_without_kernels_is_unavailable_everywhere_and_says_so() -> None:
    graph = product()
    none = replace(T4, support={**T4.support, "bf16": Support.none})
    costs = roofline(graph, none, "bf16")
    assert np.isinf(costs.low).all()
    plan = solve(graph, costs, Risks.unmeasured(graph, "bf16"), Policy(format="bfloat16"))
    assert "has no bf16" in str(plan.explain("product"))


def test_an_op_without_a_kernel_is_unavailable() -> None:
    build = GraphBuilder()
    build.tensor("x", (8, 8), kind="input")
    build.op("svd", "linalg_svd", ["x"], [("s", (8,))])
    costs = roofline(build.build(), T4, "fp16")
    assert costs.unavailable == {0: "no fp16 kernel of linalg_svd on cuda"}


def test_inside_a_fused_kernel_only_what_enters_or_leaves_moves() -> None:
    build = GraphBuilder()
    size = (1024, 1024)
    build.tensor("x", size, kind="input")
    build.op("a", "gelu", ["x"], [("t", size)], fused=True)
    build.op("b", "mul", ["t"], [("u", size)], fused=True)
    build.op("c", "tanh", ["u"], [("y", size)], fused=True, output=True)
    costs = roofline(build.build(), T4, "fp16", launch=1e-3)
    one = 4 * 1024 * 1024 / T4.bandwidth
    assert costs.high == pytest.approx([one, 0.0, one])


def test_bytes_given_by_the_front_end_replace_the_sum_of_the_tensors() -> None:
    build = GraphBuilder()
    build.tensor("table", (1_000_000, 64), kind="weight")
    build.tensor("rows", (8,), kind="input", format="int64")
    build.op("look_up", "embedding", ["table", "rows"], [("y", (8, 64))], bytes=2 * 8 * 64 * 4 + 64)
    costs = roofline(build.build(), T4, "fp16", launch=0.0)
    assert costs.high[0] == pytest.approx((2 * 8 * 64 * 4 + 64) / T4.bandwidth)
    assert costs.low[0] == pytest.approx(costs.high[0] / 2, rel=1e-6)


def test_a_device_without_figures_cannot_be_predicted() -> None:
    with pytest.raises(HardwareError, match=r"no peak.fp32.* Measure them there"):
        roofline(product(), get_device("cpu_avx2"), "bf16")


def test_costs_that_make_no_sense_are_refused() -> None:
    good, two = np.ones(2), np.zeros(2, bool)
    with pytest.raises(PlanError, match="`low` has a time"):
        Costs("bf16", good, np.array([1.0, np.inf]), good, good, two)
    with pytest.raises(PlanError, match="`high` has a time"):
        Costs("bf16", -good, good, good, good, two)
    with pytest.raises(PlanError, match="do not fit a graph of 2 ops and 5 tensors"):
        Costs("bf16", good, good, good, good, two).check(product())


# ---- measured ----


def filled(graph: Graph, path: Path | None = None, versions: dict[str, str] = VERSIONS) -> MeasuredCosts:
    table = MeasuredCosts(path)
    for fmt, seconds in (("fp32", 3e-3), ("fp16", 1e-3)):
        table.put(op_key(graph, 0, fmt, T4.name, versions), seconds)
    table.put(op_key(graph, 1, "fp16", T4.name, versions), 1e-3)
    table.put(cast_key(graph.tensors[0].shape, "fp32", "fp16", T4.name, versions), 2e-4)
    return table


def test_measured_times_replace_predictions_where_both_formats_were_measured() -> None:
    graph = product(training=True)
    predicted = roofline(graph, T4, "fp16")
    costs = predicted.with_measured(graph, filled(graph), VERSIONS)
    assert costs.measured.tolist() == [True, False]
    assert (costs.high[0], costs.low[0]) == (3e-3, 1e-3)
    assert (costs.high[1], costs.low[1]) == (predicted.high[1], predicted.low[1])
    assert costs.down[0] == pytest.approx(2 * 2e-4), "x has a gradient, which is cast back"
    assert costs.up[0] == predicted.up[0]


def test_times_of_other_versions_shapes_devices_and_phases_are_not_found() -> None:
    graph = product()
    table = filled(graph)
    predicted = roofline(graph, T4, "fp16")
    assert not predicted.with_measured(graph, table, {"torch": "2.14.0"}).measured.any()
    assert not replace(predicted, device="another").with_measured(graph, table, VERSIONS).measured.any()
    other = product(training=True)
    assert not roofline(other, T4, "fp16").with_measured(other, table, VERSIONS).measured.any()
    strided = replace(graph, ops=(replace(graph.ops[0], attributes="stride=2"), graph.ops[1]))
    assert not predicted.with_measured(strided, table, VERSIONS).measured.any()


def test_a_table_survives_on_disk_exactly_and_keeps_what_others_wrote(tmp_path: Path) -> None:
    path, graph = tmp_path / "cache" / "costs.json", product()
    mine, theirs = filled(graph, path), MeasuredCosts(path)
    theirs.put("somebody else's", 0.1 + 0.2)
    theirs.save()
    mine.save()
    again = MeasuredCosts(path)
    assert again.get("somebody else's") == 0.1 + 0.2
    assert {key: again.get(key) for key in mine} == {key: mine.get(key) for key in mine}


@pytest.mark.parametrize("text", ["{", '{"schema_version": 99, "seconds": {}}', '{"schema_version": 1}', "[]"])
def test_a_damaged_table_is_reported_and_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "castwise.cost"):
        table = MeasuredCosts(path)
    assert len(table) == 0 and "measured again" in caplog.text
    table.put("a", 1.0)
    table.save()
    assert json.loads(path.read_text())["seconds"] == {"a": 1.0}


def test_a_time_that_is_no_time_is_refused() -> None:
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match="Measure it again"):
            MeasuredCosts().put("key", seconds)
    with pytest.raises(PlanError, match="has no file"):
        MeasuredCosts().save()
