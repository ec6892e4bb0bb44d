"""The one function that decides an op's format: what wins over what, and that it always says why."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castwise import (
    FORMATS,
    LayerRule,
    OpClass,
    Policy,
    PolicyError,
    Rule,
    decide,
    load_catalogue,
    parse_format,
)
from castwise.policy import default_rule

OPS = load_catalogue().entries
ENTRIES = st.sampled_from(sorted(OPS)).map(OPS.__getitem__)
NARROW = st.sampled_from(["float16", "bfloat16", "float8_e4m3fn", "tf32"])


@pytest.mark.parametrize("preset", ["float16", "bfloat16"])
def test_a_preset_without_rules_is_the_catalogue_op_for_op(preset: str) -> None:
    policy = Policy.preset(preset)
    for entry in OPS.values():
        decision = decide(policy, entry)
        assert decision.rule is default_rule(entry, policy.low_format.name)
        expected = {Rule.LOW: policy.low_format, Rule.HIGH: FORMATS["fp32"], Rule.WIDEST: None}
        assert decision.fmt == expected[decision.rule]


def test_softmax_is_high_products_low_and_relu_follows_its_inputs() -> None:
    policy = Policy.preset("float16")
    rules = {name: decide(policy, OPS[name]).rule for name in ("softmax", "linear", "conv2d", "relu", "reshape")}
    assert rules == {
        "softmax": Rule.HIGH,
        "linear": Rule.LOW,
        "conv2d": Rule.LOW,
        "relu": Rule.WIDEST,
        "reshape": Rule.WIDEST,
    }


def test_the_range_hazard_of_a_square_endangers_fp16_and_not_bf16() -> None:
    assert decide(Policy.preset("float16"), OPS["square"]).rule is Rule.HIGH
    assert decide(Policy.preset("bfloat16"), OPS["square"]).rule is Rule.WIDEST


@given(ENTRIES, NARROW, st.sampled_from(["", "a.b"]))
def test_every_decision_gives_a_reason_and_a_format_that_fits_its_rule(entry: object, fmt: str, layer: str) -> None:
    policy = Policy(format=fmt, ops={"class:norm": "high"}, layers=[LayerRule("a", ops={"class:conv": "widest"})])
    decision = decide(policy, entry, layer=layer)
    assert decision.reason
    assert (decision.fmt is None) == (decision.rule is Rule.WIDEST)


def test_a_name_wins_over_its_class_in_whatever_order_they_are_written() -> None:
    one = Policy(format="bf16", ops={"class:norm": "low", "layer_norm": "high"})
    other = Policy(format="bf16", ops={"layer_norm": "high", "class:norm": "low"})
    for policy in (one, other):
        assert decide(policy, OPS["layer_norm"]).rule is Rule.HIGH
        assert decide(policy, OPS["group_norm"]).rule is Rule.LOW


def test_layer_rules_win_over_op_rules_and_later_ones_over_earlier_ones() -> None:
    policy = Policy(
        format="bf16",
        ops={"softmax": "low"},
        layers=[
            LayerRule("decoder", ops={"softmax": "high"}),
            LayerRule("decoder.last", ops={"softmax": "widest"}),
        ],
    )
    softmax = OPS["softmax"]
    assert decide(policy, softmax, layer="encoder").rule is Rule.LOW
    assert decide(policy, softmax, layer="decoder.0").rule is Rule.HIGH
    assert decide(policy, softmax, layer="decoder.last.attn").rule is Rule.WIDEST
    assert decide(policy, softmax, layer="decoder.last").reason.startswith("layers[1] ('decoder.last')")


def test_a_wide_layer_does_all_its_arithmetic_wide_and_leaves_the_rest_alone() -> None:
    policy = Policy(format="fp16", ops={"softmax": "low"}, layers=[LayerRule("**.head", format="float32")])
    for name in ("linear", "softmax", "add", "gelu", "layer_norm"):
        decision = decide(policy, OPS[name], layer="model.head.proj")
        assert (decision.rule, decision.fmt) == (Rule.HIGH, FORMATS["fp32"])
        assert "layers[0] ('**.head').format" in decision.reason
    for name in ("reshape", "argmax", "gather"):
        assert decide(policy, OPS[name], layer="model.head").rule is Rule.WIDEST


def test_a_narrow_layer_changes_the_format_and_keeps_the_rules() -> None:
    policy = Policy(format="fp16", ops={"softmax": "low"}, layers=[LayerRule("ffn", format="bfloat16")])
    assert decide(policy, OPS["linear"], layer="ffn").fmt == FORMATS["bf16"]
    assert decide(policy, OPS["softmax"], layer="ffn").fmt == FORMATS["bf16"]
    assert decide(policy, OPS["square"], layer="ffn").rule is Rule.WIDEST  # bf16 has the range
    assert decide(policy, OPS["layer_norm"], layer="ffn").rule is Rule.HIGH


def test_an_island_inside_a_wide_layer_can_be_narrow_again() -> None:
    wide_then_narrow = [LayerRule("decoder", format="float32"), LayerRule("decoder.3", format="bfloat16")]
    policy = Policy(format="fp16", layers=wide_then_narrow)
    assert decide(policy, OPS["linear"], layer="decoder.2").rule is Rule.HIGH
    assert decide(policy, OPS["linear"], layer="decoder.3").fmt == FORMATS["bf16"]
    reverse = Policy(format="fp16", layers=wide_then_narrow[::-1])
    assert decide(reverse, OPS["linear"], layer="decoder.3").rule is Rule.HIGH
    by_op = Policy(format="fp16", layers=[wide_then_narrow[0], LayerRule("decoder.3", ops={"linear": "low"})])
    assert decide(by_op, OPS["linear"], layer="decoder.3").fmt == FORMATS["fp16"]
    assert decide(by_op, OPS["conv2d"], layer="decoder.3").rule is Rule.HIGH


@pytest.mark.parametrize(
    ("setting", "rule", "fmt"),
    [
        ("float32", Rule.HIGH, "fp32"),
        ("float64", Rule.HIGH, "fp64"),
        ("half", Rule.LOW, "fp16"),
        ("tf32", Rule.LOW, "tf32"),
        ("fp8_e5m2", Rule.LOW, "fp8_e5m2"),
    ],
)
def test_a_rule_may_name_a_format_outright(setting: str, rule: Rule, fmt: str) -> None:
    decision = decide(Policy(format="bf16", ops={"linear": setting}), OPS["linear"])
    assert (decision.rule, decision.fmt) == (rule, FORMATS[fmt])


def test_a_wide_policy_computes_everything_in_its_format() -> None:
    assert decide(Policy.preset("float32"), OPS["linear"]).fmt == FORMATS["fp32"]
    assert decide(Policy(format="float64"), OPS["linear"]).fmt == FORMATS["fp64"]
    assert decide(Policy.preset("float32"), OPS["reshape"]).rule is Rule.WIDEST
    inside = Policy(format="float64", layers=[LayerRule("a", format="float32")])
    assert decide(inside, OPS["linear"], layer="a").fmt == FORMATS["fp64"]


def test_in_eight_bits_only_bare_products_are_low() -> None:
    policy = Policy(format="fp8_e4m3")
    assert decide(policy, OPS["linear"]).fmt == FORMATS["fp8_e4m3"]
    assert decide(policy, OPS["scaled_dot_product_attention"]).rule is Rule.HIGH
    assert decide(policy, OPS["lstm"]).rule is Rule.HIGH


def test_an_unknown_op_only_has_its_inputs_brought_together_unless_a_rule_names_it() -> None:
    policy = Policy(format="fp16", ops={"mylib::scan": "high"}, layers=[LayerRule("a", format="float32")])
    assert decide(policy, None, name="mylib::other").rule is Rule.WIDEST
    assert "catalogue" in decide(policy, None, name="mylib::other", layer="a").reason
    assert decide(policy, None, name="mylib::scan").rule is Rule.HIGH


@pytest.mark.parametrize("name", ["linear", "relu"])
def test_a_format_without_a_kernel_on_the_device_is_widened_and_the_reason_says_both(name: str) -> None:
    policy = Policy.preset("float16")
    entry = dataclasses.replace(OPS[name], no_kernel={"cpu": ("fp16",)})
    without = decide(policy, entry)
    assert without.rule is not Rule.HIGH
    on_cpu = decide(policy, entry, kind="cpu")
    assert (on_cpu.rule, on_cpu.fmt) == (Rule.HIGH, FORMATS["fp32"])
    assert f"no float16 kernel for {name} on cpu" in on_cpu.reason
    assert without.reason in on_cpu.reason
    assert decide(policy, entry, kind="cuda") == without
    assert decide(Policy.preset("bfloat16"), entry, kind="cpu").rule is not Rule.HIGH


def test_a_policy_that_is_still_auto_is_not_decided_on() -> None:
    with pytest.raises(PolicyError, match="resolve"):
        decide(Policy(), OPS["linear"])


def test_o2_keeps_norms_and_losses_wide_and_o3_only_losses() -> None:
    for level, norm in (("O2", Rule.HIGH), ("O3", Rule.LOW)):
        policy = Policy.preset(level)
        for entry in OPS.values():
            rule = decide(policy, entry).rule
            if entry.op_class in (OpClass.MATMUL, OpClass.CONV, OpClass.ELEMENTWISE, OpClass.REDUCTION):
                assert rule is Rule.LOW, entry.name
            elif entry.op_class is OpClass.NORM:
                assert rule is norm, entry.name
            elif entry.op_class is OpClass.LOSS:
                assert rule is Rule.HIGH, entry.name


def test_formats_of_all_spellings_mean_the_same_policy() -> None:
    assert {Policy(format=word) for word in ("fp16", "half", "torch.float16", "mixed_float16")} == {Policy.preset("O1")}
    assert parse_format(Policy.preset("bf16").format) == FORMATS["bf16"]
