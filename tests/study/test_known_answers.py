"""Whole studies of tasks whose answer is known beforehand, each on the smallest model that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from castwise.study import study

KNOWN = Path(__file__).parent / "known"


def _studied(spelled: str, out: Path, precisions: tuple[str, ...] = ("fp16", "bf16"), **options: Any) -> dict[str, Any]:
    return study(f"{KNOWN / spelled}", precisions=precisions, out=out, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("known")


def _reasons(results: dict[str, Any], arm: str) -> str:
    return " ".join(reason for reason in results["verdict"]["reasons"] if reason.startswith(f"{arm}: "))


def test_a_task_that_needs_mantissa_is_unsafe_in_bf16_and_safe_in_fp16(folder: Path) -> None:
    results = _studied("mantissa.py:Mantissa", folder / "mantissa")
    assert results["verdict"]["status"] == {"fp32": "safe", "fp16": "safe", "bf16": "unsafe"}, results["verdict"]


def test_activations_beyond_65504_are_unsafe_in_fp16_and_safe_in_bf16(folder: Path) -> None:
    results = _studied("overflow.py:Overflow", folder / "overflow")
    assert results["verdict"]["status"] == {"fp32": "safe", "fp16": "unsafe", "bf16": "safe"}, results["verdict"]
    assert _reasons(results, "fp16")


def test_tiny_gradients_are_safe_in_fp16_only_with_loss_scaling_and_the_remedy_says_so(folder: Path) -> None:
    unscaled = folder / "unscaled.toml"
    unscaled.write_text('format = "float16"\n\n[scaling]\nenabled = false\n', encoding="utf-8")
    results = _studied("tiny_gradients.py:TinyGradients", folder / "tiny", ("fp16", "bf16", str(unscaled)), remedy=True)
    status = results["verdict"]["status"]
    cure = results["verdict"]["remedies"]["unscaled"]
    assert {arm: status[arm] for arm in ("fp32", "fp16", "bf16", "unscaled")} == {
        "fp32": "safe", "fp16": "safe", "bf16": "safe", "unscaled": "unsafe"
    }, results["verdict"]  # fmt: skip
    assert cure == "unscaled+scaling"
    assert status[cure] == "safe"
    assert results["arms"][cure]["loss_scaling"]
    assert not results["arms"]["unscaled"]["loss_scaling"]


def test_a_remedy_for_overflow_raises_the_layer_that_overflows(folder: Path) -> None:
    results = _studied("overflow.py:Overflow", folder / "overflow-remedy", ("fp16",), remedy=True)
    cure = results["verdict"]["remedies"]["fp16"]
    assert cure is not None, results["verdict"]
    assert results["verdict"]["status"][cure] == "safe"
    # Layer 0 is the one that sums features in the tens of thousands.
    assert '"0"' in results["arms"][cure]["policy"], results["arms"][cure]["policy"]


@pytest.mark.parametrize("name", ["Regression", "Recall"])
def test_healthy_tasks_are_not_called_unsafe(folder: Path, name: str) -> None:
    results = _studied(f"healthy.py:{name}", folder / name, seeds=3)
    assert "unsafe" not in results["verdict"]["status"].values(), results["verdict"]["reasons"]


def test_a_study_for_a_v100_recommends_fp16_as_it_has_no_bf16_however_safe(folder: Path) -> None:
    results = _studied("tiny_gradients.py:TinyGradients", folder / "v100", device="v100")
    assert results["device_details"]["key"] == "v100"
    assert results["verdict"]["status"] == {"fp32": "safe", "fp16": "safe", "bf16": "safe"}, results["verdict"]
    assert results["arms"]["fp16"]["on_device"] == "native"
    assert results["arms"]["bf16"]["on_device"] != "native"
    assert results["verdict"]["recommended"] == "fp16"
    assert "float16" in (folder / "v100" / "policy.toml").read_text(encoding="utf-8")
