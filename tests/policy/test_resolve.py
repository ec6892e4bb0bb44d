"""A policy on a device: overrides from the general to the particular, and "auto" settled by what is native."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castwise import LayerRule, Policy, PolicyError, Rule, ScalingConfig, decide, devices, get_device, load_catalogue
from castwise.presets import PRESETS

T4, H100, CPU = get_device("t4"), get_device("h100"), get_device("cpu_avx2")


def test_auto_is_what_the_device_computes_natively_and_float32_where_that_is_nothing() -> None:
    assert {name: Policy().resolve(get_device(name)).format for name in ("t4", "v100", "h100", "cpu_avx2")} == {
        "t4": "float16",
        "v100": "float16",
        "h100": "bfloat16",
        "cpu_avx2": "float32",
    }
    assert Policy().resolve(None).format == "float32"


@pytest.mark.parametrize("key", sorted(devices()))
def test_auto_never_chooses_an_emulated_format(key: str) -> None:
    device = devices()[key]
    resolved = Policy().resolve(device)
    assert resolved.format == "float32" or device.native(resolved.format)


@given(st.sampled_from([name for name in PRESETS if name != "auto"]), st.sampled_from(sorted(devices())))
def test_presets_are_the_same_on_every_device(name: str, key: str) -> None:
    assert Policy.preset(name).resolve(devices()[key]) == Policy.preset(name)


def test_what_auto_became_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "castwise.policy"):
        Policy().resolve(T4)
    assert "'auto' is float16 on" in caplog.text


def test_overrides_apply_from_kind_to_architecture_to_product_in_whatever_order_they_are_written() -> None:
    policy = Policy(
        format="bf16",
        devices={
            "t4": {"weights": "master", "ops": {"softmax": "low"}},
            "sm_75": {"weights": "kahan", "ops": {"softmax": "widest", "gelu": "high"}},
            "cuda": {"format": "fp16", "weights": "split"},
            "cpu": {"format": "float32"},
        },
    )
    on_t4 = policy.resolve(T4)
    assert on_t4 == Policy(format="fp16", weights="master", ops={"softmax": "low", "gelu": "high"})
    assert policy.resolve(get_device("rtx-2080-ti")).weights == "kahan"
    assert policy.resolve(H100) == Policy(format="fp16", weights="split")
    assert policy.resolve(CPU) == Policy(format="float32")
    assert policy.resolve(None) == Policy(format="bf16")


def test_an_override_may_be_keyed_by_any_name_of_the_device() -> None:
    policy = Policy(format="bf16", devices={"RTX-4090": {"format": "fp16"}})
    assert policy.resolve(get_device("rtx_4090")).format == "float16"


def test_an_override_adds_ops_and_knobs_appends_layers_and_replaces_the_rest() -> None:
    policy = Policy(
        format="bf16",
        ops={"softmax": "high"},
        layers=[LayerRule("a", format="float32")],
        scaling=ScalingConfig(init_scale=8.0),
        communication="bf16",
        devices={
            "cuda": {
                "format": "fp16",
                "ops": {"gelu": "high"},
                "layers": [{"match": "a", "format": "fp16"}],
                "scaling": {"growth_interval": 7},
                "communication": "fp16",
                "tf32": True,
            }
        },
    )
    assert policy.resolve(H100) == Policy(
        format="fp16",
        ops={"softmax": "high", "gelu": "high"},
        layers=[LayerRule("a", format="float32"), LayerRule("a", format="fp16")],
        scaling=ScalingConfig(init_scale=8.0, growth_interval=7),
        communication="fp16",
        tf32=True,
    )


@given(st.sampled_from(sorted(devices())), st.sampled_from(["auto", "fp16", "bf16", "fp32"]))
def test_resolving_twice_changes_nothing_more(key: str, fmt: str) -> None:
    policy = Policy(format=fmt, devices={"cpu": {"format": "bf16", "ops": {"gelu": "high"}}, "t4": {"tf32": True}})
    once = policy.resolve(devices()[key])
    assert once.resolve(devices()[key]) == once
    assert once.format != "auto"
    assert not once.devices


@pytest.mark.parametrize("how", ["auto", "override"])
def test_what_is_asked_of_a_narrow_format_falls_away_where_float32_is_left(how: str) -> None:
    override = {"cpu": {"format": "float32"}} if how == "override" else {}
    policy = Policy(
        format="auto" if how == "auto" else "fp16",
        ops={"linear": "low", "gelu": "widest"},
        layers=[LayerRule("a", ops={"softmax": "low"})],
        scaling=ScalingConfig(init_scale=8.0),
        scaling_enabled=True,
        weights="master",
        devices=override,
    )
    on_cpu = policy.resolve(CPU)
    assert (on_cpu.format, on_cpu.uses_scaling, on_cpu.weights) == ("float32", False, "auto")
    assert on_cpu.scaling.init_scale == 8.0
    assert decide(on_cpu, load_catalogue().entries["linear"], layer="a").rule is Rule.HIGH
    on_t4 = policy.resolve(T4)
    assert (on_t4.format, on_t4.uses_scaling, on_t4.weights) == ("float16", True, "master")
    assert on_t4.ops["linear"] == "low"


def test_a_narrow_layer_keeps_its_scaling_and_weights_where_the_rest_is_float32() -> None:
    policy = Policy(layers=[LayerRule("a", format="fp16")], scaling_enabled=True, weights="master").resolve(CPU)
    assert (policy.format, policy.uses_scaling, policy.weights) == ("float32", True, "master")


@pytest.mark.parametrize(
    ("override", "start", "hint"),
    [
        ({"h10": {}}, "devices.h10: ", "'h100'"),
        ({"gpu 7": {}}, 'devices."gpu 7": ', "Kinds of device: cpu, cuda"),
        ({"t4": "fp16"}, "devices.t4: 'fp16' is not a table", "[devices.t4]"),
        ({"t4": {"fromat": "fp16"}}, "devices.t4.fromat: unknown key", "'format'"),
        ({"t4": {"devices": {}}}, "devices.t4.devices: unknown key", "Known here"),
        ({"t4": {"format": "fp61"}}, "devices.t4.format: ", "'fp16'"),
        ({"t4": {"communication": None}}, "devices.t4.communication: ", "Leave the key out"),
        ({"t4": {"ops": {"sofmax": "low"}}}, "devices.t4.ops.sofmax: ", "'softmax'"),
        ({"t4": {"layers": [{"match": "a", "format": "x"}]}}, "devices.t4.layers[0].format: ", "Castwise knows"),
        ({"t4": {"scaling": {"init_scale": -1.0}}}, "devices.t4.scaling.init_scale", "limits"),
        ({"t4": {"format": "fp32", "ops": {"linear": "low"}}}, "devices.t4.ops.linear: 'low'", "float16"),
        ({"t4": {"format": "fp32", "scaling": {"enabled": True}}}, "devices.t4.scaling.enabled: ", "float16"),
    ],
)
def test_a_wrong_override_is_found_when_the_policy_is_made(override: dict[str, object], start: str, hint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(format="fp16", devices=override)  # type: ignore[arg-type]
    assert str(caught.value).startswith(start)
    assert hint in str(caught.value)
