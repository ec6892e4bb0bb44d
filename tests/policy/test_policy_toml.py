"""A policy written to TOML and read back is the same policy, exactly."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castwise import FORMATS, GuardConfig, LayerRule, OpClass, Policy, PolicyError, ScalingConfig, load_catalogue
from castwise.policy import WEIGHTS
from castwise.presets import PRESETS

NARROW = st.sampled_from(["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "tf32", "fp16"])
FORMAT = st.sampled_from(sorted(FORMATS))
# What stands in a file is any text: quotes, backslashes, control characters, other scripts.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=".*?[]"), min_size=1, max_size=8)
OP_KEYS = st.one_of(
    st.sampled_from(sorted(load_catalogue().entries)),
    st.sampled_from([f"class:{kind}" for kind in OpClass]),
    TEXT.map("mylib::{}".format),
)
OPS = st.dictionaries(OP_KEYS, st.one_of(st.sampled_from(["low", "high", "widest"]), FORMAT), max_size=3)
GLOBS = st.lists(st.one_of(TEXT, st.sampled_from(["*", "**", "layers", "[0-9]"])), min_size=1, max_size=3).map(".".join)
RULES = st.one_of(
    st.builds(LayerRule, GLOBS, format=NARROW, ops=OPS),
    st.builds(LayerRule, GLOBS, ops=OPS.filter(bool)),
    st.builds(LayerRule, GLOBS, format=st.sampled_from(["float32", "float64"])),
)
SCALING = st.builds(
    ScalingConfig,
    enabled=st.just(True),
    init_scale=st.floats(1.0, 2.0**24),
    growth_factor=st.floats(1.0, 8.0, exclude_min=True),
    backoff_factor=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True, allow_subnormal=False),
    growth_interval=st.integers(1, 10**6),
    hysteresis=st.integers(1, 5),
    patience=st.integers(1, 100),
    dynamic=st.booleans(),
)
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "format": NARROW,
        "ops": OPS,
        "layers": st.lists(st.fixed_dictionaries({"match": GLOBS, "format": NARROW}), max_size=2),
        "scaling": st.fixed_dictionaries({"growth_interval": st.integers(1, 9)}),
        "weights": st.sampled_from(WEIGHTS),
        "communication": FORMAT,
        "tf32": st.booleans(),
    },
)
POLICIES = st.builds(
    Policy,
    format=st.one_of(st.just("auto"), NARROW),
    ops=OPS,
    layers=st.lists(RULES, max_size=3),
    devices=st.dictionaries(st.sampled_from(["cpu", "cuda", "t4", "h100", "v100"]), OVERRIDES, max_size=2),
    scaling=SCALING,
    scaling_enabled=st.sampled_from([None, True, False]),
    weights=st.sampled_from(WEIGHTS),
    communication=st.none() | FORMAT,
    guard=st.builds(GuardConfig, enabled=st.booleans(), warn_scale_below=st.floats(0, 1e9)),
    tf32=st.booleans(),
    strict=st.booleans(),
)


@settings(max_examples=150)
@given(POLICIES)
def test_toml_reads_back_to_the_same_policy(policy: Policy) -> None:
    text = policy.to_toml(comment="a study\nof\x00 something")
    assert Policy.from_toml(text) == policy
    assert Policy.from_toml(text).to_toml() == policy.to_toml()


@settings(max_examples=100)
@given(POLICIES)
def test_plain_data_survives_json_and_reads_back_to_the_same_policy(policy: Policy) -> None:
    data = policy.to_dict()
    assert Policy.from_dict(json.loads(json.dumps(data))) == policy
    assert tomllib.loads(policy.to_toml()) == data


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_a_file(name: str, tmp_path: Path) -> None:
    policy = Policy.preset(name)
    assert Policy.load(policy.save(tmp_path / "policy.toml")) == policy


def test_the_file_is_one_a_person_would_write() -> None:
    policy = Policy(
        format="fp16",
        ops={"softmax": "high", "class:norm": "low"},
        layers=[LayerRule("decoder.**.ffn", format="fp32"), LayerRule("head", ops={"linear": "high"})],
        scaling=ScalingConfig(growth_interval=500),
        guard=GuardConfig(warn_scale_below=16),
        devices={"cpu": {"format": "bf16"}},
    )
    assert policy.to_toml() == (
        'format = "float16"\n'
        "\n[ops]\n"
        'softmax = "high"\n"class:norm" = "low"\n'
        "\n[scaling]\n"
        "growth_interval = 500\n"
        "\n[guard]\n"
        "warn_scale_below = 16.0\n"
        "\n[[layers]]\n"
        'match = "decoder.**.ffn"\nformat = "float32"\n'
        "\n[[layers]]\n"
        'match = "head"\n'
        "\n[layers.ops]\n"
        'linear = "high"\n'
        "\n[devices.cpu]\n"
        'format = "bfloat16"\n'
    )


def test_a_file_that_is_no_policy_is_an_error_that_names_the_file_and_the_place(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('format = "fp16"\nops = {softmax = }\n')
    with pytest.raises(PolicyError, match=r"policy\.toml: policy: not valid TOML: .*line 2"):
        Policy.load(path)
    path.write_text("[[layers]]\nmatch = 'head'\nformat = 'fp23'\n")
    with pytest.raises(PolicyError, match=r"policy\.toml: layers\[0\]\.format: "):
        Policy.load(path)
    for text in (f"scaling = {'9' * 5000}", f"ops = {'[' * 5000}"):
        path.write_text(text)
        with pytest.raises(PolicyError, match=r"policy\.toml: policy: not valid TOML"):
            Policy.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match="UTF-8"):
        Policy.load(path)


def test_what_editors_on_windows_write_is_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(b'\xef\xbb\xbfformat = "fp16"\r\n[scaling]\r\ngrowth_interval = 5\r\n')
    assert Policy.load(path) == Policy.from_toml('format = "fp16"\n[scaling]\ngrowth_interval = 5\n')
