"""A study for another device: its formats are emulated here, and its hardware decides what is recommended."""

from __future__ import annotations

from pathlib import Path

from castwise.policy import Policy
from castwise.study import study

TASK = f"{Path(__file__).parent / 'known' / 'tiny_gradients.py'}:TinyGradients"


def test_a_study_for_a_v100_recommends_fp16_though_bf16_is_safe_too(tmp_path: Path) -> None:
    results = study(TASK, precisions=["fp16", "bf16"], device="v100", seeds=3, out=tmp_path, report=False)
    assert results["device_details"]["key"] == "v100"
    assert results["verdict"]["status"] == {"fp32": "safe", "fp16": "safe", "bf16": "safe"}
    assert results["arms"]["fp16"]["on_device"] == "native"
    assert results["arms"]["bf16"]["on_device"] != "native"
    assert results["verdict"]["recommended"] == "fp16"
    assert Policy.load(tmp_path / "policy.toml").format == "float16"
