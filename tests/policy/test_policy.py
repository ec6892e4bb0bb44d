"""Making policies: presets and spellings, and errors that name the key and say what to do."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from castwise import GuardConfig, LayerRule, Policy, PolicyError, ScalingConfig
from castwise.presets import PRESETS


def test_every_preset_is_there_and_says_what_it_computes_in() -> None:
    formats = {name: Policy.preset(name).format for name in PRESETS}
    assert formats == {
        "float32": "float32",
        "float16": "float16",
        "bfloat16": "bfloat16",
        "auto": "auto",
        "O0": "float32",
        "O1": "float16",
        "O2": "float16",
        "O3": "float16",
    }


def test_the_loss_is_scaled_where_the_range_is_small_and_nowhere_else() -> None:
    scaled = {
        name: Policy.coerce(name).uses_scaling for name in ("fp16", "bf16", "fp32", "tf32", "fp8_e4m3", "fp8_e5m2")
    }
    assert scaled == {"fp16": True, "bf16": False, "fp32": False, "tf32": False, "fp8_e4m3": True, "fp8_e5m2": True}
    assert [Policy.preset(level).uses_scaling for level in ("O0", "O1", "O2", "O3")] == [False, True, True, False]
    assert Policy(format="bf16", layers=[LayerRule("a", format="fp16")]).uses_scaling
    assert Policy(format="bf16", ops={"linear": "fp16"}).uses_scaling
    assert not Policy(format="fp16", scaling_enabled=False).uses_scaling
    assert Policy(format="bf16", scaling_enabled=True).uses_scaling


def test_the_scaling_in_force_is_switched_as_the_policy_says() -> None:
    assert not Policy.preset("bfloat16").effective_scaling.enabled
    assert Policy(format="fp16", scaling=ScalingConfig(init_scale=8.0)).effective_scaling == ScalingConfig(
        init_scale=8.0
    )
    off = Policy(format="fp16", scaling=ScalingConfig(enabled=False))
    assert (off.scaling_enabled, off.uses_scaling) == (False, False)
    assert off == Policy(format="fp16", scaling_enabled=False)


@pytest.mark.parametrize(
    "value",
    [
        "fp16",
        "FLOAT16",
        "torch.float16",
        np.float16,
        np.dtype(np.float16),
        {"format": "half"},
        Policy(format="f16"),
        "O1",
    ],
)
def test_coerce_takes_whatever_means_a_policy(value: object) -> None:
    assert Policy.coerce(value) == Policy(format="float16")


def test_coerce_takes_dtypes_of_ml_dtypes_and_policy_files(tmp_path: Path) -> None:
    assert Policy.coerce(ml_dtypes.bfloat16) == Policy.preset("bfloat16")
    path = Policy.preset("O2").save(tmp_path / "deep" / "policy.toml", comment="from a test")
    assert Policy.coerce(path) == Policy.coerce(str(path)) == Policy.preset("O2")
    assert path.read_text(encoding="utf-8").startswith("# from a test\n")


def test_a_policy_is_a_value() -> None:
    policy = Policy.preset("O2")
    assert hash(policy) == hash(Policy.preset("O2"))
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy
    with pytest.raises(AttributeError):
        policy.format = "float32"  # type: ignore[misc]
    with pytest.raises(TypeError):
        policy.ops["linear"] = "high"  # type: ignore[index]
    ops = {"softmax": "high"}
    built = Policy(format="bf16", ops=ops)
    ops["softmax"] = "low"
    assert built.ops["softmax"] == "high"


FROM_DICT = Policy.from_dict
WRONG: list[tuple[str, Callable[[], object], str, str]] = [
    ("misspelt key", lambda: FROM_DICT({"formt": "fp16"}), "formt: unknown key", "'format'"),
    ("unknown format", lambda: FROM_DICT({"format": "bfloat15"}), "format: ", "'bfloat16'"),
    ("misspelt op", lambda: FROM_DICT({"ops": {"sofmax": "high"}}), "ops.sofmax: ", "'softmax'"),
    ("an op's framework name", lambda: FROM_DICT({"ops": {"dot_general": "low"}}), "ops.dot_general: ", "'matmul'"),
    ("misspelt class", lambda: FROM_DICT({"ops": {"class:nrm": "low"}}), 'ops."class:nrm": ', "'norm'"),
    (
        "a class without its prefix",
        lambda: FROM_DICT({"ops": {"reductions": "low"}}),
        "ops.reductions: ",
        "class:reduction",
    ),
    ("misspelt rule", lambda: FROM_DICT({"ops": {"softmax": "hihg"}}), "ops.softmax: ", "'high'"),
    ("ops not a table", lambda: FROM_DICT({"ops": ["softmax"]}), "ops: ", "Write ops="),
    ("op key not text", lambda: FROM_DICT({"ops": {3: "low"}}), "ops: the key 3", "class:norm"),
    ("layers not a list", lambda: FROM_DICT({"layers": {"match": "a"}}), "layers: ", "[[layers]]"),
    ("layer not a table", lambda: FROM_DICT({"layers": ["a"]}), "layers[0]: ", "match"),
    ("layer without match", lambda: FROM_DICT({"layers": [{"format": "fp32"}]}), "layers[0].match: missing", "match ="),
    (
        "layer that says nothing",
        lambda: FROM_DICT({"layers": [{"match": "a"}]}),
        "layers[0].match: ",
        "'format' or 'ops'",
    ),
    (
        "format in a later layer",
        lambda: FROM_DICT({"layers": [{"match": "a", "format": "fp32"}, {"match": "b", "format": "fp23"}]}),
        "layers[1].format: ",
        "'fp32'",
    ),
    (
        "misspelt key in a layer",
        lambda: FROM_DICT({"layers": [{"match": "a", "formats": "fp32"}]}),
        "layers[0].formats: unknown key",
        "'format'",
    ),
    (
        "malformed glob",
        lambda: FROM_DICT({"layers": [{"match": "a..b", "format": "fp32"}]}),
        "layers[0].match: ",
        "Write",
    ),
    ("glob not text", lambda: FROM_DICT({"layers": [{"match": 3, "format": "fp32"}]}), "layers[0].match: 3", "Write"),
    ("layer rules of the wrong type", lambda: Policy(layers=["head"]), "layers[0]: 'head'", "LayerRule("),  # type: ignore[list-item]
    ("one layer rule, no list", lambda: Policy(layers=LayerRule("a", format="fp32")), "layers: ", "layers=["),  # type: ignore[arg-type]
    ("weights", lambda: FROM_DICT({"weights": "masters"}), "weights: 'masters'", "'master'"),
    ("communication", lambda: FROM_DICT({"communication": "bf61"}), "communication: ", "'bf16'"),
    ("tf32 as text", lambda: FROM_DICT({"tf32": "true"}), "tf32: 'true'", "without quotes"),
    ("strict as number", lambda: FROM_DICT({"strict": 1}), "strict: 1", "true nor false"),
    (
        "misspelt knob",
        lambda: FROM_DICT({"scaling": {"init_scal": 2.0}}),
        "scaling.init_scal: unknown key",
        "'init_scale'",
    ),
    (
        "knob out of range",
        lambda: FROM_DICT({"scaling": {"backoff_factor": 2.0}}),
        "scaling.backoff_factor",
        "between 0 and 1",
    ),
    ("scaling switch", lambda: FROM_DICT({"scaling": {"enabled": "yes"}}), "scaling.enabled: 'yes'", "'auto'"),
    ("scaling not a config", lambda: Policy(scaling={"init_scale": 2}), "scaling: ", "ScalingConfig("),  # type: ignore[arg-type]
    ("guard not a config", lambda: Policy(guard=True), "guard: ", "GuardConfig("),  # type: ignore[arg-type]
    ("guard's size", lambda: FROM_DICT({"guard": {"warn_scale_below": 10**400}}), "guard.warn_scale_below: ", "0"),
    ("guard's number", lambda: FROM_DICT({"guard": {"warn_scale_below": -1}}), "guard.warn_scale_below: ", "0"),
    (
        "guard's key",
        lambda: FROM_DICT({"guard": {"warn_below": 1}}),
        "guard.warn_below: unknown key",
        "'warn_scale_below'",
    ),
    (
        "two switches that disagree",
        lambda: Policy(scaling=ScalingConfig(enabled=False), scaling_enabled=True),
        "scaling.enabled",
        "Drop",
    ),
    (
        "scaling of float32",
        lambda: FROM_DICT({"format": "fp32", "scaling": {"enabled": True}}),
        "scaling.enabled: ",
        "float16",
    ),
    ("masters of float32", lambda: FROM_DICT({"format": "fp32", "weights": "master"}), "weights: 'master'", "16-bit"),
    (
        "low under float32",
        lambda: FROM_DICT({"format": "fp32", "ops": {"linear": "low"}}),
        "ops.linear: 'low'",
        "float16",
    ),
    (
        "low in a layer under float32",
        lambda: FROM_DICT({"format": "fp32", "layers": [{"match": "a", "ops": {"linear": "low"}}]}),
        "layers[0].ops.linear: 'low'",
        "float16",
    ),
    (
        "low in a float32 layer",
        lambda: FROM_DICT({"format": "fp16", "layers": [{"match": "a", "format": "fp32", "ops": {"linear": "low"}}]}),
        "layers[0].ops.linear: 'low'",
        "the rule's own format is float32",
    ),
    ("no preset", lambda: Policy.coerce("bloat16"), "There is no preset 'bloat16'", "'bfloat16'"),
    ("no such file", lambda: Policy.coerce("nowhere.toml"), "nowhere.toml: ", "Check the path"),
    ("nothing that means a policy", lambda: Policy.coerce(None), "format: ", "None"),
]


@pytest.mark.parametrize(("make", "start", "hint"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_policy_is_an_error_that_names_the_key_and_helps(
    make: Callable[[], object], start: str, hint: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        make()
    message = str(caught.value)
    assert message.startswith(start)
    assert hint in message
    assert message.endswith((".", "?"))


def test_what_only_looks_like_a_contradiction_is_allowed() -> None:
    Policy(format="bf16", ops={"class:norm": "low", "layer_norm": "high"})
    Policy(
        format="fp32",
        layers=[LayerRule("a", format="fp16", ops={"softmax": "low"})],
        scaling_enabled=True,
        weights="master",
    )
    Policy(format="bf16", scaling_enabled=True)
    Policy(format="auto", scaling_enabled=True, weights="kahan", ops={"linear": "low"})


PATHS = ["", "encoder", "encoder.layers", "encoder.layers.0", "encoder.layers.0.norm", "head"]


def test_each_layer_rule_says_what_it_covers() -> None:
    policy = Policy(
        format="bf16", layers=[LayerRule("**.norm", format="fp32"), LayerRule("head", ops={"linear": "high"})]
    )
    assert policy.match_layers(PATHS) == (("encoder.layers.0.norm",), ("head",))


def test_a_layer_rule_that_matches_nothing_warns_with_the_nearest_paths(caplog: pytest.LogCaptureFixture) -> None:
    rules = [LayerRule("head", format="fp32"), LayerRule("encodr.layers", format="fp32")]
    with caplog.at_level(logging.WARNING, "castwise"):
        assert Policy(format="bf16", layers=rules).match_layers(PATHS)[1] == ()
    (record,) = caplog.records
    assert "layers[1].match: 'encodr.layers' matches no layer" in record.getMessage()
    assert "'encoder.layers'" in record.getMessage()
    with pytest.raises(PolicyError, match=r"layers\[1\]\.match: .*'encoder\.layers'"):
        Policy(format="bf16", layers=rules, strict=True).match_layers(iter(PATHS))


def test_the_guard_is_on_by_default_and_its_threshold_can_be_moved() -> None:
    assert Policy().guard == GuardConfig(enabled=True, warn_scale_below=128.0)
    assert FROM_DICT({"guard": {"warn_scale_below": 4}}).guard.warn_scale_below == 4.0
