"""Arms: how they are named and resolved, and which is recommended on which hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from castwise.errors import PolicyError, StudyError
from castwise.hardware import get_device
from castwise.policy import LayerRule, Policy
from castwise.study.arms import Arm, arms_of, cheapest, why_recommended
from castwise.study.verdict import Status

T4, V100, A100, H100, CPU, MI100 = map(get_device, ("t4", "v100", "a100", "h100", "cpu_avx2", "mi100"))
SAFE, UNSAFE, UNCLEAR = Status.SAFE, Status.UNSAFE, Status.CANNOT_TELL


def status(**found: Status) -> dict[str, Status]:
    return {"fp32": SAFE, **found}


def test_fp32_comes_first_and_spellings_of_a_format_give_one_name() -> None:
    assert [arm.name for arm in arms_of(["bfloat16", "half", "float32"], CPU)] == ["fp32", "bf16", "fp16"]


def test_presets_and_policy_files_keep_their_names(tmp_path: Path) -> None:
    path = Policy(format="float16", ops={"softmax": "high"}).save(tmp_path / "careful.toml")
    arms = arms_of(["O1", str(path)], CPU)
    assert [arm.name for arm in arms] == ["fp32", "O1", "careful"]
    assert arms[2].policy.ops == {"softmax": "high"}


def test_a_policy_is_settled_for_the_device_that_is_studied() -> None:
    formats = {device.key: arms_of(["auto"], device)[1].format.name for device in (T4, A100)}
    assert formats == {"t4": "fp16", "a100": "bf16"}


def test_two_arms_of_one_name_are_refused() -> None:
    with pytest.raises(StudyError, match="'fp16'"):
        arms_of(["fp16", "float16"], CPU)


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(StudyError, match="nothing to compare"):
        arms_of(["fp32"], CPU)


def test_an_unknown_precision_suggests_the_nearest() -> None:
    with pytest.raises(PolicyError, match="fp16"):
        arms_of(["fp15"], CPU)


@pytest.mark.parametrize(
    ("device", "expected"),
    [(T4, "fp16"), (V100, "fp16"), (A100, "bf16"), (H100, "bf16"), (MI100, "fp16"), (CPU, "fp32")],
)
def test_the_cheapest_safe_arm_is_what_the_hardware_computes_natively(device: object, expected: str) -> None:
    arms = arms_of(["fp16", "bf16"], device)  # type: ignore[arg-type]
    assert cheapest(arms, status(fp16=SAFE, bf16=SAFE), device).name == expected  # type: ignore[arg-type]


def test_fp8_is_cheaper_still_where_it_is_native_and_safe() -> None:
    arms = arms_of(["bf16", "fp8_e4m3"], H100)
    assert cheapest(arms, status(bf16=SAFE, fp8_e4m3=SAFE), H100).name == "fp8_e4m3"
    assert cheapest(arms, status(bf16=SAFE, fp8_e4m3=UNSAFE), H100).name == "bf16"


@pytest.mark.parametrize("bad", [UNSAFE, UNCLEAR])
def test_what_is_not_known_to_be_safe_is_never_recommended(bad: Status) -> None:
    arms = arms_of(["fp16", "bf16"], A100)
    assert cheapest(arms, status(fp16=bad, bf16=bad), A100).name == "fp32"
    assert cheapest(arms, status(fp16=SAFE, bf16=bad), A100).name == "fp16"


def test_of_two_policies_in_one_format_the_plainer_is_cheaper() -> None:
    plain = Arm("fp16", Policy.preset("float16"))
    careful = Arm("a", Policy(format="float16", layers=(LayerRule("head", format="float32"),)))
    arms = (Arm("fp32", Policy.preset("float32")), careful, plain)
    assert cheapest(arms, status(fp16=SAFE, a=SAFE), T4).name == "fp16"
    assert cheapest(arms, status(fp16=UNSAFE, a=SAFE), T4).name == "a"


def test_the_reason_for_a_recommendation_is_true() -> None:
    def why(device: object, **found: Status) -> str:
        arms = arms_of(["fp16", "bf16"], device)  # type: ignore[arg-type]
        chosen = cheapest(arms, status(**found), device)  # type: ignore[arg-type]
        return why_recommended(chosen, arms, status(**found), device)  # type: ignore[arg-type]

    assert "fp16 with loss scaling: safe, native on NVIDIA T4" in why(T4, fp16=SAFE, bf16=SAFE)
    assert "no other arm was found safe" in why(A100, fp16=UNSAFE, bf16=UNCLEAR)
    assert "no arithmetic of its own for bf16 or fp16" in why(CPU, fp16=SAFE, bf16=SAFE)
    assert "no arithmetic of its own for bf16" in why(T4, fp16=UNSAFE, bf16=SAFE)
