"""What settles an op's format before any cost is weighed."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from castwise._pins import HAZARD_HEADROOM, Cause, Pin, find_pins, preset_labels
from castwise.cost import Costs
from castwise.errors import PolicyError
from castwise.graph import Graph, GraphBuilder
from castwise.policy import LayerRule, Policy
from castwise.risk import RangeRecord, Risks

SIZE = (8,)


def chain(*names: str, fmt: str = "fp32") -> Graph:
    """x, then one op after the other, called by their names; op n belongs to layer ``l<n>`` and writes ``t<n>``."""
    build = GraphBuilder(framework="torch")
    tensor = build.tensor("x", SIZE, kind="input", format=fmt)
    for number, name in enumerate(names):
        tensor = build.op(f"{name}.{number}", name, [tensor], [(f"t{number}", SIZE)], layer=f"l{number}")
    return build.build()


def costs_of(graph: Graph, fmt: str, unavailable: dict[int, str] | None = None) -> Costs:
    ops, tensors = len(graph.ops), len(graph.tensors)
    low = np.full(ops, 0.5)
    low[list(unavailable or {})] = np.inf
    casts = np.full(tensors, 0.1)
    return Costs(fmt, np.ones(ops), low, casts, casts, np.zeros(tensors, bool), "a device", unavailable or {})


def measured(graph: Graph, fmt: str, largest: dict[str, float] | None = None) -> Risks:
    """Risks of a calibrated model, every tensor with values up to 1 but those in ``largest``."""
    risks = Risks.from_sensitivities(graph, fmt, np.zeros(len(graph.tensors)))
    ranges = {
        position: RangeRecord((largest or {}).get(tensor.name, 1.0), 8) for position, tensor in enumerate(graph.tensors)
    }
    return Risks(fmt, risks.op_values, risks.op_accumulation, risks.cast_noise, risks.range_share, ranges=ranges)


def pins_of(
    graph: Graph,
    fmt: str = "fp16",
    *,
    largest: dict[str, float] | None = None,
    policy: Policy | None = None,
    unavailable: dict[int, str] | None = None,
) -> dict[str, Pin]:
    found = find_pins(
        graph, costs_of(graph, fmt, unavailable), measured(graph, fmt, largest), policy or Policy(format=fmt)
    )
    return {graph.ops[position].id: pin for position, pin in found.items()}


def causes(pins: dict[str, Pin]) -> dict[str, tuple[bool, Cause]]:
    return {op: (pin.low, pin.cause) for op, pin in pins.items()}


# ---- policy ----


def test_a_rule_for_an_op_or_a_layer_pins_and_says_which_rule_it_was() -> None:
    graph = chain("matmul", "add", "mul")
    policy = Policy(format="float16", ops={"add": "low"}, layers=(LayerRule("l0", format="float32"),))
    pins = pins_of(graph, policy=policy)
    assert causes(pins) == {"matmul.0": (False, Cause.POLICY), "add.1": (True, Cause.POLICY)}
    assert "layers[0] ('l0')" in pins["matmul.0"].reason
    assert "ops['add'] = 'low'" in pins["add.1"].reason


def test_the_catalogues_own_rules_are_no_pins() -> None:
    assert pins_of(chain("matmul", "softmax", "gelu")) == {}


def test_a_rule_for_a_third_format_stays_fp32_and_says_so() -> None:
    pins = pins_of(chain("matmul"), policy=Policy(format="float16", ops={"matmul": "bfloat16"}))
    assert causes(pins) == {"matmul.0": (False, Cause.POLICY)}
    assert "a plan in fp16 has fp32 for everything else" in pins["matmul.0"].reason


def test_a_rule_that_cannot_be_followed_is_reported_or_an_error_when_strict(caplog: pytest.LogCaptureFixture) -> None:
    graph, missing = chain("matmul"), {0: "no fp16 kernel of matmul"}
    with caplog.at_level(logging.WARNING, "castwise.plan"):
        pins = pins_of(graph, policy=Policy(format="float16", ops={"matmul": "low"}), unavailable=missing)
    assert causes(pins) == {"matmul.0": (False, Cause.HARDWARE)}
    assert "cannot be followed: no fp16 kernel of matmul" in caplog.text
    strict = Policy(format="float16", ops={"matmul": "low"}, strict=True)
    with pytest.raises(PolicyError, match="no fp16 kernel"):
        pins_of(graph, policy=strict, unavailable=missing)


def test_a_rule_wins_over_a_measured_overflow_but_not_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy(format="float16", ops={"mul": "low"})
    with caplog.at_level(logging.WARNING, "castwise.plan"):
        pins = pins_of(chain("mul"), largest={"t0": 1e6}, policy=policy)
    assert causes(pins) == {"mul.0": (True, Cause.POLICY)}
    assert "is followed although it writes 't0', whose values reach 1e+06" in caplog.text


# ---- range ----


def test_an_overflow_pins_who_writes_and_who_reads_it_and_nobody_else() -> None:
    graph = chain("matmul", "mul", "mul", "matmul", "matmul")
    pins = pins_of(graph, largest={"t1": 120_000.0})
    assert causes(pins) == {"mul.1": (False, Cause.RANGE), "mul.2": (False, Cause.RANGE)}
    assert "beyond fp16's largest, 65504" in pins["mul.1"].reason
    assert pins_of(graph, "bf16", largest={"t1": 120_000.0}) == {}, "bf16 has the range of fp32"


def test_values_close_to_the_largest_pin_too_since_other_batches_have_larger_ones() -> None:
    assert "within a factor of 2 of" in pins_of(chain("mul"), largest={"t0": 40_000.0})["mul.0"].reason
    assert pins_of(chain("mul"), largest={"t0": 30_000.0}) == {}


# ---- catalogue ----


def test_a_range_hazard_is_a_pin_in_fp16_unless_measured_harmless() -> None:
    graph = chain("square")
    near = 65504 / HAZARD_HEADROOM * 1.01
    assert causes(pins_of(graph, largest={"t0": near})) == {"square.0": (False, Cause.CATALOGUE)}
    assert pins_of(graph, largest={"t0": near / 1.1}) == {}
    assert pins_of(graph, "bf16", largest={"t0": near}) == {}, "no range hazard in bf16"


def test_a_running_sum_in_16_bits_is_not_harmless_however_small_its_results() -> None:
    assert causes(pins_of(chain("cumsum"))) == {"cumsum.0": (False, Cause.CATALOGUE)}


def test_without_measurements_every_hazard_pins() -> None:
    graph = chain("matmul", "softmax", "square", "gelu")
    found = find_pins(graph, costs_of(graph, "fp16"), Risks.unmeasured(graph, "fp16"), Policy(format="float16"))
    assert {graph.ops[position].name for position in found} == {"softmax", "square"}
    assert all("nothing was measured" in pin.reason for pin in found.values())


def test_an_op_that_the_catalogue_does_not_know_stays_fp32_until_a_rule_allows_it() -> None:
    graph = chain("mylib::secret")
    assert causes(pins_of(graph)) == {"mylib::secret.0": (False, Cause.CATALOGUE)}
    allowed = Policy(format="float16", ops={"mylib::secret": "low"})
    assert causes(pins_of(graph, policy=allowed)) == {"mylib::secret.0": (True, Cause.POLICY)}


def test_integers_made_from_floats_pin_only_where_somebody_reads_them() -> None:
    def graph(indices_read: bool) -> Graph:
        build = GraphBuilder()
        build.tensor("x", SIZE, kind="input")
        build.tensor("indices", SIZE, format="int64")
        build.op("pool", "max_pool2d", ["x"], [("y", SIZE), "indices"])
        build.op("use", "gather", ["y", "indices"] if indices_read else ["y"], [("z", SIZE)])
        return build.build()

    assert causes(pins_of(graph(True)))["pool"] == (False, Cause.CATALOGUE)
    assert "pool" not in pins_of(graph(False))


# ---- structure ----


def test_a_front_ends_pin_carries_its_reason() -> None:
    build = GraphBuilder()
    build.tensor("x", SIZE, kind="input")
    build.op("a", "matmul", ["x"], [("y", SIZE)], pin="control flow depends on its values")
    assert pins_of(build.build())["a"] == Pin(False, Cause.STRUCTURE, "control flow depends on its values")


def test_ops_in_a_third_format_and_ops_without_floats_are_left_alone() -> None:
    build = GraphBuilder()
    build.tensor("x", SIZE, kind="input", format="fp64")
    build.tensor("i", SIZE, kind="input", format="int64")
    build.tensor("j", SIZE, format="int64")
    build.op("double", "mul", ["x"], [("y", SIZE)])
    build.op("count", "add", ["i"], ["j"])
    pins = pins_of(build.build())
    assert pins["double"] == Pin(False, Cause.STRUCTURE, "it works in fp64")
    assert pins["count"] == Pin(False, Cause.STRUCTURE, "it has no floating-point operand")


@pytest.mark.parametrize(("fmt", "low"), [("fp32", False), ("fp16", True)])
def test_storage_that_is_written_in_place_keeps_the_format_it_has(fmt: str, low: bool) -> None:
    build = GraphBuilder()
    build.tensor("x", SIZE, kind="input")
    build.tensor("t", SIZE, format=fmt)
    build.op("make", "mul", ["x"], ["t"])
    build.op("write", "add", ["t", "x"], [], mutates=["t"])
    build.op("read", "matmul", ["t"], [("y", SIZE)])
    pins = pins_of(build.build())
    assert causes(pins) == {"make": (low, Cause.STRUCTURE), "write": (low, Cause.STRUCTURE)}
    assert "'write' changes its result in place" in pins["make"].reason


@pytest.mark.parametrize(("target", "low"), [("fp32", False), ("fp16", True)])
def test_the_models_own_casts_stay_what_they_are(target: str, low: bool) -> None:
    build = GraphBuilder()
    build.tensor("x", SIZE, kind="input")
    build.tensor("y", SIZE, format=target)
    build.op("cast", "to", ["x"], ["y"])
    assert causes(pins_of(build.build())) == {"cast": (low, Cause.STRUCTURE)}


# ---- the preset's labels ----


def test_preset_labels_follow_the_catalogue_and_the_inputs() -> None:
    graph = chain("matmul", "add", "softmax", "add", "matmul")
    labels = preset_labels(graph, "bf16", Policy(format="bfloat16"), {})
    assert labels.tolist() == [True, True, False, False, True]
    pinned = preset_labels(graph, "bf16", Policy(format="bfloat16"), {0: Pin(False, Cause.POLICY, "")})
    assert pinned.tolist() == [False, False, False, False, True]
