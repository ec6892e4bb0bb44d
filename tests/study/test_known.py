"""Tasks whose right answer is known: the verdict has to find it, and the remedy the layer that is to blame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from castwise.policy import Policy
from castwise.study import study
from castwise.study.tasks.digits import ConvNet, Digits
from castwise.study.tasks.text import GPT, Text

KNOWN = Path(__file__).parent / "known"


def studied(task: str, out: Path, **options: Any) -> dict[str, Any]:
    return study(f"{KNOWN / task}", out=out, report=False, **options)


def test_a_task_that_needs_mantissa_is_unsafe_in_bf16_and_cured_by_its_first_layer(tmp_path: Path) -> None:
    found = studied("mantissa.py:Mantissa", tmp_path, remedy=True)
    verdict = found["verdict"]
    assert verdict["status"]["fp16"] == "safe"
    assert verdict["status"]["bf16"] == "unsafe"
    assert verdict["remedies"] == {"bf16": "bf16+guilty-fp32"}
    cure = Policy.from_toml(found["arms"]["bf16+guilty-fp32"]["policy"])
    assert [rule.match for rule in cure.layers][:1] == ["0"]
    assert verdict["elsewhere"]["NVIDIA A100 80GB (SXM4)"] == "fp16"


def test_a_task_whose_activations_pass_65504_is_unsafe_in_fp16_and_safe_in_bf16(tmp_path: Path) -> None:
    found = studied("overflow.py:Overflow", tmp_path, remedy=True)
    verdict = found["verdict"]
    assert verdict["status"]["fp16"] == "unsafe"
    assert verdict["status"]["bf16"] == "safe"
    assert verdict["comparisons"]["fp16"]["failed_seeds"] == [0, 1, 2, 3]
    assert found["arms"]["fp16"]["final_metric"] == [None] * 4
    assert all(ending["failure"] in ("non-finite loss", "scale stalled") for ending in found["arms"]["fp16"]["ended"])
    assert verdict["remedies"] == {"fp16": "fp16+guilty-fp32"}
    cure = Policy.from_toml(found["arms"]["fp16+guilty-fp32"]["policy"])
    assert [rule.match for rule in cure.layers] == ["0"]
    # A T4 has no bf16 of its own: there the cured fp16 is the cheapest that is safe.
    assert verdict["elsewhere"]["NVIDIA T4"] == "fp16+guilty-fp32"
    assert verdict["elsewhere"]["NVIDIA A100 80GB (SXM4)"] == "bf16"


def test_tiny_gradients_are_safe_in_fp16_only_with_loss_scaling(tmp_path: Path) -> None:
    unscaled = Policy(format="float16", scaling_enabled=False).save(tmp_path / "unscaled.toml")
    found = studied(
        "tiny_gradients.py:TinyGradients", tmp_path / "out", precisions=["fp16", str(unscaled)], remedy=True
    )
    assert found["verdict"]["status"]["fp16"] == "safe"
    assert found["verdict"]["status"]["unscaled"] == "unsafe"
    assert found["verdict"]["remedies"] == {"unscaled": "unscaled+scaling"}
    assert found["arms"]["fp16"]["loss_scaling"]
    assert not found["arms"]["unscaled"]["loss_scaling"]


@pytest.mark.parametrize("task", ["healthy.py:Regression", "healthy.py:Recall"])
def test_healthy_tasks_are_not_called_unsafe(tmp_path: Path, task: str) -> None:
    found = studied(task, tmp_path)
    assert found["verdict"]["status"] == {"fp32": "safe", "fp16": "safe", "bf16": "safe"}


class QuickDigits(Digits):
    """The built-in task with half as many channels and steps."""

    steps, seeds, evaluate_every = 120, 3, 20
    _batch_size = 32

    def model(self, seed: int = 0) -> ConvNet:
        return ConvNet(width=8)


class QuickText(Text):
    """The built-in task with a narrower model and shorter pieces of text."""

    steps, seeds, evaluate_every, margin = 100, 3, 20, 0.1
    _context, _batch_size, _validation_batches = 32, 8, 2

    def model(self, seed: int = 0) -> GPT:
        return GPT(96, self._context, width=32, layers=1)


@pytest.mark.parametrize("task", [QuickDigits(), QuickText()], ids=["digits", "text"])
def test_the_built_in_tasks_reach_fp32s_metric_within_seed_noise_in_both_16_bit_formats(
    tmp_path: Path, task: Any
) -> None:
    found = study(task, out=tmp_path, report=False)
    metric = found["verdict"]["measures"][0]
    for arm in ("fp16", "bf16"):
        assert found["verdict"]["status"][arm] != "unsafe"
        comparison = found["verdict"]["comparisons"][arm]["metric"]
        # The mean of three differences of runs that are each as uncertain as fp32's own.
        assert abs(comparison["worse_by"]) < 3 * metric["seed_noise"] * (2 / 3) ** 0.5
        assert comparison["worse_by"] < metric["margin"]
