"""Sensitivities against real rounding, ranges, and noise found by running a model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from castwise.errors import PlanError
from castwise.formats import parse_format, round_to_nearest
from castwise.graph import Graph, GraphBuilder
from castwise.risk import (
    RangeRecord,
    RiskMeter,
    Risks,
    Sensitivity,
    accumulation_noise,
    measure_groups,
    sensitivity,
    suggest_loss_scale,
)

BATCH, WIDTH, OUT, PROJECTIONS = 32, 48, 16, 24


def rounded(values: np.ndarray, fmt: str) -> np.ndarray:
    return round_to_nearest(values, parse_format(fmt))


class Network:
    """y = tanh(x·W1)·W2 in float64, with gradients of a projection of y by hand."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.x = rng.standard_normal((BATCH, WIDTH))
        self.w1 = rng.standard_normal((WIDTH, WIDTH)) / math.sqrt(WIDTH)
        self.w2 = rng.standard_normal((WIDTH, OUT)) / math.sqrt(WIDTH)
        self.h = self.x @ self.w1
        self.a = np.tanh(self.h)
        self.y = self.a @ self.w2

    def gradients(self, projection: np.ndarray) -> dict[str, np.ndarray]:
        to_a = projection @ self.w2.T
        to_h = to_a * (1 - self.a**2)
        return {
            "x": to_h @ self.w1.T,
            "w1": self.x.T @ to_h,
            "h": to_h,
            "a": to_a,
            "w2": self.a.T @ projection,
            "y": projection,
        }

    def graph(self) -> Graph:
        build = GraphBuilder()
        build.tensor("x", self.x.shape, kind="input")
        build.tensor("w1", self.w1.shape, kind="weight")
        build.tensor("w2", self.w2.shape, kind="weight")
        build.op("first", "matmul", ["x", "w1"], [("h", self.h.shape)])
        build.op("tanh", "tanh", ["h"], [("a", self.a.shape)])
        build.op("second", "matmul", ["a", "w2"], [("y", self.y.shape)], output=True)
        return build.build()

    def risks(self, fmt: str) -> Risks:
        graph = self.graph()
        meter = RiskMeter(graph, fmt)
        rng = np.random.default_rng(99)
        for _ in range(PROJECTIONS):
            for name, gradient in self.gradients(rng.standard_normal(self.y.shape)).items():
                meter.add(graph.tensor(name), sensitivity(getattr(self, name), gradient, fmt))
            meter.end_pass(reference=float((self.y**2).sum()))
        return meter.risks()

    def error_in_16_bits(self, fmt: str) -> float:
        """Mean square of the change of y with everything in ``fmt``, sums in full precision; summed over y."""
        x, w1, w2 = (rounded(values, fmt) for values in (self.x, self.w1, self.w2))
        y = rounded(rounded(np.tanh(rounded(x @ w1, fmt)), fmt) @ w2, fmt)
        return float(((y - self.y) ** 2).sum())


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("seed", range(3))
def test_predicted_noise_is_the_output_error_of_the_rounded_network(fmt: str, seed: int) -> None:
    network = Network(seed)
    risks, graph = network.risks(fmt), network.graph()
    stored_or_given = [graph.tensor(name) for name in ("x", "w1", "w2")]
    predicted = risks.op_noise.sum() + risks.cast_noise[stored_or_given].sum()
    actual = network.error_in_16_bits(fmt)
    assert 0.7 < actual / predicted < 1.5
    assert risks.relative(predicted) == pytest.approx(math.sqrt(predicted / (network.y**2).sum()))


def test_a_plans_breakdown_adds_up_to_its_noise_and_names_weights_and_casts() -> None:
    network = Network(0)
    risks, graph = network.risks("bf16"), network.graph()
    low = np.array([True, False, True])
    used = np.isin(np.arange(len(graph.tensors)), [graph.tensor(name) for name in ("x", "w1", "w2", "a")])
    parts = risks.breakdown(graph, low, used)
    assert parts.total == pytest.approx(risks.op_noise[low].sum() + risks.cast_noise[used].sum())
    assert parts.weights == pytest.approx(risks.cast_noise[[graph.tensor("w1"), graph.tensor("w2")]].sum())
    assert parts.casts == pytest.approx(risks.cast_noise[[graph.tensor("x"), graph.tensor("a")]].sum())


def test_noise_from_below_the_smallest_normal_is_told_apart() -> None:
    values = np.array([1.1, 1e-7, 3e-6])
    found = sensitivity(values, np.ones(3), "fp16")
    errors = (rounded(values, "fp16") - values) ** 2
    assert found.total == pytest.approx(errors.sum())
    assert found.range_part == pytest.approx(errors[1:].sum())
    assert sensitivity(values, np.ones(3), "bf16").range_part == 0.0


def test_values_beyond_the_range_are_overflow_and_no_noise() -> None:
    assert sensitivity(np.array([1e6, 1.0]), np.ones(2), "fp16") == Sensitivity(0.0, 0.0)
    assert RangeRecord.of(np.array([1e6, 1.0]), "fp16").overflow == 0.5


def test_ops_that_only_select_add_no_noise_but_reading_their_input_does() -> None:
    build = GraphBuilder()
    build.tensor("x", (4,), kind="input")
    build.op("relu", "relu", ["x"], [("y", (4,))], selects=True)
    risks = Risks.from_sensitivities(build.build(), "bf16", np.array([3.0, 2.0]))
    assert risks.op_noise.tolist() == [0.0]
    assert risks.cast_noise.tolist() == [3.0, 2.0]


def test_a_reader_pays_for_its_own_part_of_the_gradient_alone() -> None:
    """y = 3x + x·w, where only the product reads x in 16 bits: the wide path beside it sees x as it is."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((200, 30)), rng.standard_normal((30, 30)) / 30
    build = GraphBuilder()
    build.tensor("x", x.shape, kind="input")
    build.op("scale", "mul", ["x"], [("s", x.shape)])
    build.op("product", "matmul", ["x"], [("p", x.shape)])
    build.op("add", "add", ["s", "p"], [("y", x.shape)], output=True)
    graph = build.build()
    meter = RiskMeter(graph, "bf16")
    for _ in range(30):
        projection = rng.standard_normal(x.shape)
        through = {0: 3 * projection, 1: projection @ w.T}
        meter.add(0, sensitivity(x, through[0] + through[1], "bf16"))
        for op, gradient in through.items():
            meter.add_read(0, op, sensitivity(x, gradient, "bf16").total)
        meter.end_pass()
    risks = meter.risks()
    low = np.array([False, True, False])
    cast = np.array([True, False, False, False])
    predicted = risks.rounding(graph, low, cast)[0]
    error = rounded(x, "bf16") - x
    actual, everywhere = (float(((error @ through) ** 2).sum()) for through in (w, w + 3 * np.eye(30)))
    assert 0.8 < actual / predicted < 1.25
    assert everywhere > 20 * actual
    assert risks.breakdown(graph, low, cast).casts == pytest.approx(predicted)


@pytest.mark.parametrize("terms", [16, 64, 256])
def test_a_running_sum_in_16_bits_makes_the_noise_of_half_its_terms(terms: int) -> None:
    rng = np.random.default_rng(terms)
    values = rng.standard_normal((4000, terms))
    running = np.zeros(4000)
    exact = values.sum(axis=1)
    for column in values.T:
        running = rounded(running + column, "bf16")
    once = ((rounded(exact, "bf16") - exact) ** 2).mean()
    predicted = once + accumulation_noise(np.array([once]), np.array([float(terms)]))[0]
    assert 0.7 < ((running - exact) ** 2).mean() / predicted < 1.4


def test_nothing_is_predicted_from_gradients_that_are_not_finite() -> None:
    meter = RiskMeter(Network(0).graph(), "bf16")
    with pytest.raises(PlanError, match="Tensor 'x' has a sensitivity of nan"):
        meter.add(0, Sensitivity(math.nan))
    with pytest.raises(PlanError, match="No calibration pass"):
        meter.risks()


# ---- ranges ----

floats = stnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


@given(floats, floats, st.sampled_from(["fp16", "bf16"]))
def test_merged_records_are_the_record_of_all_values(first: np.ndarray, second: np.ndarray, fmt: str) -> None:
    merged = RangeRecord.of(first, fmt).merge(RangeRecord.of(second, fmt))
    together = RangeRecord.of(np.concatenate([first, second]), fmt)
    assert (merged.largest, merged.count) == (together.largest, together.count)
    for share in ("overflow", "underflow", "subnormal"):
        assert getattr(merged, share) == pytest.approx(getattr(together, share))


def test_a_record_says_which_formats_hold_its_values() -> None:
    record = RangeRecord.of(np.array([0.0, 30_000.0, -50_000.0]), "fp16")
    assert record.fits("fp16") and not record.fits("fp16", headroom=2.0) and record.fits("bf16", headroom=1e30)
    assert not RangeRecord.of(np.array([np.nan]), "bf16").fits("bf16")


@given(st.floats(1e-30, 1e30), st.sampled_from(["fp16", "bf16"]))
def test_the_suggested_loss_scale_is_the_largest_power_of_two_with_room_for_two_doublings(
    largest: float, fmt: str
) -> None:
    scale = suggest_loss_scale([RangeRecord(largest / 3, 1), RangeRecord(largest, 1)], fmt)
    assert math.frexp(scale)[0] == 0.5
    limit = parse_format(fmt).max / 4
    assert largest * scale <= limit < 2 * largest * scale


def test_no_loss_scale_is_suggested_from_gradients_that_say_nothing() -> None:
    for records in ([], [RangeRecord(0.0, 4)], [RangeRecord(math.inf, 4)]):
        with pytest.raises(PlanError, match="cannot be suggested"):
            suggest_loss_scale(records, "fp16")


# ---- by running the model ----


def layers(ops: int, size: int) -> list[list[int]]:
    return [list(range(start, min(start + size, ops))) for start in range(0, ops, size)]


def test_the_noisy_ops_are_found_in_far_fewer_runs_than_there_are_ops() -> None:
    ops, hot = 512, {17: 5.0, 300: 3.0, 301: 2.0}
    noise = np.full(ops, 1e-4)
    noise[list(hot)] = list(hot.values())
    runs: list[frozenset[int]] = []

    def evaluate(low: frozenset[int]) -> float:
        runs.append(low)
        return float(noise[sorted(low)].sum())

    report = measure_groups(evaluate, layers(ops, 32), budget=80)
    assert report.runs == len(runs) < 60
    assert {op: pytest.approx(report.noise(op)) for op in hot} == hot
    assert report.additivity == pytest.approx(1.0)
    assert sorted(op for op, _ in report) == list(range(ops))


@pytest.mark.parametrize("budget", [9, 20, 50])
def test_the_budget_of_runs_is_kept_and_every_op_has_a_share(budget: int) -> None:
    noise = np.random.default_rng(0).exponential(1.0, 64)
    report = measure_groups(lambda low: float(noise[sorted(low)].sum()), layers(64, 8), budget)
    assert report.runs <= budget
    assert sum(share for _, share in report) == pytest.approx(noise.sum())


def test_a_real_network_is_measured_without_gradients() -> None:
    network = Network(1)

    def evaluate(low: frozenset[int]) -> float:
        def maybe(op: int, values: np.ndarray) -> np.ndarray:
            return rounded(values, "bf16") if op in low else values

        y = maybe(2, maybe(1, np.tanh(maybe(0, network.x @ network.w1))) @ network.w2)
        return float(((y - network.y) ** 2).sum())

    report = measure_groups(evaluate, [[0, 1, 2]], budget=6, negligible=0.0)
    by_gradient = network.risks("bf16").op_noise
    for op in range(3):
        assert 0.7 < report.noise(op) / by_gradient[op] < 1.5
    assert 0.7 < report.additivity < 1.5


def test_measuring_refuses_what_makes_no_sense() -> None:
    with pytest.raises(PlanError, match="share an op"):
        measure_groups(lambda low: 0.0, [[0, 1], [1]], 10)
    with pytest.raises(PlanError, match="Allow 3"):
        measure_groups(lambda low: 0.0, [[0], [1]], 2)
    with pytest.raises(PlanError, match="output change of nan"):
        measure_groups(lambda low: math.nan, [[0]], 10)
    with pytest.raises(PlanError, match="in no measured group"):
        measure_groups(lambda low: 0.0, [[0]], 10).noise(7)
