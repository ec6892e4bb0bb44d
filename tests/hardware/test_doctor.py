"""The doctor: every format tried for real in every installed framework, and failures told as findings."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pytest

from castwise import _probe, _trial
from castwise._doctor_text import fallbacks_of
from castwise.doctor import (
    DoctorReport,
    FrameworkReport,
    Trial,
    add_doctor_arguments,
    format_report,
    judge,
    main_doctor,
    probe,
    read_probe,
    run_doctor,
)
from castwise.errors import HardwareError
from castwise.formats import BF16, FORMATS, FP16, FP32, FP64, TF32, NumberFormat, round_to_nearest
from castwise.hardware import get_device


def multiply(left: Any, right: Any, fmt: NumberFormat) -> tuple[Any, str]:
    """What hardware does: wide sums, one rounding of the result."""
    return round_to_nearest(left @ right, fmt), fmt.long_name


# --------------------------------------------------------------------------------------------------------- one trial


@pytest.mark.parametrize("fmt", [FP64, FP32, BF16, FP16], ids=str)
def test_a_product_with_wide_sums_is_right(fmt: NumberFormat) -> None:
    assert _trial.try_product("matmul", multiply, fmt)["outcome"] == "right"


def test_a_product_that_sums_in_the_format_is_told_apart() -> None:
    def narrow(left: Any, right: Any, fmt: NumberFormat) -> tuple[Any, str]:
        total = np.zeros((len(left), right.shape[1]))
        for k in range(left.shape[1]):
            total = round_to_nearest(total + round_to_nearest(np.outer(left[:, k], right[k]), fmt), fmt)
        return total, fmt.long_name

    assert _trial.try_product("matmul", narrow, BF16)["outcome"] == "narrow"


def test_a_quiet_change_of_format_is_a_fallback_and_a_wrong_result_is_wrong() -> None:
    def outcome(product: Any, fmt: NumberFormat) -> str:
        return str(_trial.try_product("matmul", product, fmt)["outcome"])

    assert outcome(lambda a, b, fmt: ((a @ b).astype(np.float32), "float32"), FP64) == "falls back"
    assert outcome(lambda a, b, fmt: (a @ b, "float16"), FP16) == "falls back", "named fp16, never rounded"
    assert outcome(lambda a, b, fmt: (a.astype(np.float32) @ b.astype(np.float32), "float32"), TF32) == "falls back"
    rounded = lambda a, b, fmt: (round_to_nearest(a, TF32) @ round_to_nearest(b, TF32), "float32")  # noqa: E731
    assert outcome(rounded, TF32) == "right"
    assert outcome(lambda a, b, fmt: (1.5 * (a @ b), "bfloat16"), BF16) == "wrong"
    assert outcome(lambda a, b, fmt: (np.full_like(a, np.nan), "bfloat16"), BF16) == "wrong"


def test_an_error_is_told_in_one_short_line() -> None:
    def fails(left: Any, right: Any, fmt: NumberFormat) -> tuple[Any, str]:
        raise RuntimeError("no kernel\nand much more\n" + "x" * 500)

    found = _trial.try_product("matmul", fails, FP16)
    assert found == {"outcome": "fails", "message": "RuntimeError: no kernel"}


def test_slow_formats_show_in_the_time_beside_float32() -> None:
    import time

    def timed(fmt: NumberFormat, side: int) -> Any:
        return lambda: time.sleep(0.02 if fmt is FP16 else 0.002)

    found = _trial.trials("x", "cpu", {"matmul": multiply}, timed)
    by_format = {one["format"]: one for one in found}
    assert by_format["fp16"]["relative_time"] > 4
    assert 0.5 < by_format["bf16"]["relative_time"] < 2


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        ({"outcome": "right", "relative_time": 0.5}, "faster than fp32 (2x)"),
        ({"outcome": "right", "relative_time": 1.1}, "as fast as fp32"),
        ({"outcome": "right", "relative_time": 60.0}, "60x slower than fp32"),
        ({"outcome": "narrow", "relative_time": 1.0}, "as fast as fp32, sums in the format itself"),
        ({"outcome": "right"}, "works"),
        ({"outcome": "fails"}, "does not run"),
        ({"outcome": "wrong"}, "WRONG"),
        ({"outcome": "falls back"}, "falls back"),
    ],
)
def test_a_trial_is_put_into_words(trial: dict[str, Any], words: str) -> None:
    assert judge(Trial(framework="torch", device="cpu", operation="matmul", format="fp16", **trial)) == words


def test_what_contradicts_the_table_is_told() -> None:
    def told(fmt: str, device: str, **outcome: Any) -> str:
        trial = Trial(framework="torch", device="cpu", operation="matmul", format=fmt, **outcome)
        report = FrameworkReport(name="torch", version="1", devices=("cpu",), trials=(trial,))
        return "\n".join(fallbacks_of([report], [get_device(device)]))

    assert "emulated: right, at 60x" in told("bf16", "cpu_avx2", outcome="right", relative_time=60.0)
    assert "slower than fp32, though the hardware has it" in told(
        "bf16", "cpu_avx512_bf16", outcome="right", relative_time=60.0
    )
    assert "does not run, though the hardware has it" in told("bf16", "cpu_avx512_bf16", outcome="fails", message="x")
    assert "though the table has it as emulated" in told("bf16", "cpu_avx2", outcome="right", relative_time=0.5)
    assert told("bf16", "cpu_avx512_bf16", outcome="right", relative_time=0.5) == ""
    assert "Do not use it" in told("fp16", "cpu_avx2", outcome="wrong", message="off by {9} eps")


# ------------------------------------------------------------------------------------------------------- this machine


@pytest.fixture(scope="module")
def report() -> DoctorReport:
    return run_doctor(["torch"])


def test_every_format_is_tried_in_torch_on_this_machine(report: DoctorReport) -> None:
    torch = pytest.importorskip("torch")
    (one,) = report.frameworks
    assert (one.name, one.version, one.problem) == ("torch", torch.__version__, "")
    tried = {(trial.operation, trial.format) for trial in one.trials if trial.device == "cpu"}
    assert tried == {(operation, fmt) for operation in ("matmul", "conv2d") for fmt in FORMATS}
    products = {trial.format: trial for trial in one.trials if trial.operation == "matmul" and trial.device == "cpu"}
    for fmt in ("fp64", "fp32", "bf16", "fp16"):
        assert products[fmt].works, products[fmt]
        assert products[fmt].seconds is not None and products[fmt].seconds > 0
    assert report.healthy


def test_emulated_formats_of_this_cpu_are_named_among_the_fallbacks(report: DoctorReport) -> None:
    (cpu,) = [device for device in report.devices if device.kind == "cpu"]
    if cpu.native("bf16"):
        pytest.skip("this CPU computes bf16")
    assert any("bf16" in line and "emulated" in line for line in report.fallbacks)


def test_autocast_that_switches_itself_off_is_named(report: DoctorReport) -> None:
    assert any("float8_e4m3fn" in line and "switches itself off" in line for line in report.fallbacks)


def test_the_report_is_readable_as_text_and_as_json(report: DoctorReport) -> None:
    text = format_report(report)
    for heading in ("System", "Drivers", "Compilers", "By the device table", "torch", "What falls back"):
        assert heading in text
    assert json.loads(json.dumps(report.to_dict()))["frameworks"][0]["name"] == "torch"


@pytest.mark.parametrize("name", ["jax", "tensorflow", "onnxruntime"])
def test_other_installed_frameworks_are_tried_too(name: str) -> None:
    pytest.importorskip(name)
    one = probe(name)
    assert not one.problem
    products = {trial.format: trial for trial in one.trials if trial.operation == "matmul"}
    if products:
        assert products["fp32"].works


def test_a_framework_that_crashes_or_hangs_is_a_finding() -> None:
    crashed = probe("no_such_framework")
    assert "exit status 1: KeyError" in crashed.problem
    broken = DoctorReport(
        system={}, drivers={}, compilers={}, variables={}, devices=(), frameworks=(crashed,), missing=(), fallbacks=()
    )
    assert not broken.healthy
    assert "could not be examined" in format_report(broken)
    assert "did not answer" in probe("torch", timeout=0.01).problem


def test_a_probe_is_read_back_as_it_was_printed() -> None:
    trial = {"framework": "x", "device": "cpu", "operation": "matmul", "format": "fp16", "outcome": "right"}
    printed = _probe._report("x", "1.0", {"a": 1, "b": None}, {"s": True}, ["cpu"], [trial], ["f"])
    one = read_probe(json.dumps(printed))
    assert (one.version, one.details, one.fallbacks, one.trials[0].format) == ("1.0", {"a": 1}, ("f",), "fp16")


def test_an_unknown_framework_is_refused() -> None:
    with pytest.raises(HardwareError, match=r"Unknown framework 'pytorch'.*torch"):
        run_doctor(["pytorch"])


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    parser = argparse.ArgumentParser()
    add_doctor_arguments(parser)
    assert main_doctor(parser.parse_args(["--framework", "onnxruntime", "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["frameworks"][0]["name"] == "onnxruntime"
