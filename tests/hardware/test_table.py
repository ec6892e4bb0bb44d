"""The device table: complete, sourced, and with the choices a practitioner would make from it."""

from __future__ import annotations

import copy
import pickle
import re
import tomllib
from importlib.resources import files

import pytest

from castwise.errors import FormatError, HardwareError
from castwise.formats import BF16, FORMATS, FP16
from castwise.hardware import KINDS, Device, Support, detect, devices, find_device, get_device, read_table

ALL = list(devices().values())
TABLE = tomllib.loads((files("castwise") / "hardware.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("device", ALL, ids=lambda device: device.key)
def test_every_number_names_its_source(device: Device) -> None:
    numbers = [f"peak.{fmt}" for fmt in device.peak] + [f"multiple_of.{fmt}" for fmt in device.multiple_of]
    numbers += [f"flops_per_cycle.{fmt}" for fmt in device.flops_per_cycle]
    numbers += [name for name in ("bandwidth", "memory") if getattr(device, name) is not None]
    for number in [*numbers, "support"]:
        assert len(device.sources[number]) > 20, f"{device.key}.{number}"
        dated = re.search(r"\b20[012]\d\b|https://", device.sources[number])
        assert dated, f"{device.key}.{number}: neither year nor address in {device.sources[number]!r}"


@pytest.mark.parametrize("device", ALL, ids=lambda device: device.key)
def test_every_entry_is_consistent(device: Device) -> None:
    assert device.kind in KINDS
    assert set(device.support) == set(FORMATS)
    for fmt in device.peak:
        assert device.native(fmt), f"{device.key} has a peak for {fmt}, which it does not compute"
    for fmt in device.multiple_of:
        assert device.native(fmt) and device.multiple_of[fmt] >= 2
    unrated = [fmt for fmt in FORMATS if device.native(fmt) and fmt not in device.peak]
    assert not unrated or device.notes or device.peak, f"{device.key}: nothing says why {unrated} have no rate"


@pytest.mark.parametrize("device", [d for d in ALL if d.peak], ids=lambda device: device.key)
def test_rates_are_dense_and_plausible(device: Device) -> None:
    if "fp32" in device.peak:
        for fmt in set(device.peak) - {"fp64"}:
            # The largest dense ratios, B200's: 30 in 16-bit formats, 60 in fp8. A sparse figure would be twice that.
            assert 1 <= device.peak[fmt] / device.peak["fp32"] <= (64 if FORMATS[fmt].bits == 8 else 32), fmt
    if {"bf16", "fp8_e4m3"} <= set(device.peak):
        assert device.peak["fp8_e4m3"] / device.peak["bf16"] == pytest.approx(2, rel=0.03)
    if device.bandwidth is not None and "fp16" in device.peak:
        assert 10 < device.peak["fp16"] / device.bandwidth < 1000  # FLOP per byte


def test_every_device_that_was_promised_is_there() -> None:
    wanted = """v100 t4 a100 a10 a30 l4 l40s rtx_3090 rtx_4090 h100 h100_pcie h200 b200
        tpu_v2 tpu_v3 tpu_v4 tpu_v5e tpu_v5p tpu_v6e mi50 mi100 mi210 mi250x mi300x rx_7900_xtx
        m1 m2 m3 max_1550 arc_a770 ascend_910b jetson_orin jetson_xavier jetson_nano
        cpu_avx2 cpu_avx512 cpu_avx512_bf16 cpu_amx_bf16 cpu_amx_fp16 cpu_avx512_fp16 cpu_arm_fp16 cpu_arm_bf16"""
    assert set(wanted.split()) <= set(devices())


@pytest.mark.parametrize("key", ["t4", "v100", "v100_pcie", "rtx_2080_ti", "m1", "m2_max", "rx_6900_xt", "cpu_avx512"])
def test_emulated_bf16_is_marked_and_never_chosen(key: str) -> None:
    device = get_device(key)
    assert device.supports("bf16") is Support.emulated
    assert device.best_16bit() is not BF16


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        *[(key, BF16) for key in ("a100", "a10", "a30", "l4", "rtx_3090", "rtx_4090", "h100", "h200", "b200")],
        *[(key, BF16) for key in ("tpu_v3", "tpu_v6e", "mi100", "mi210", "mi300x", "rx_7900_xtx", "max_1550", "m3")],
        *[(key, BF16) for key in ("ascend_910b", "jetson_orin", "cpu_avx512_bf16", "cpu_amx_bf16", "cpu_arm_bf16")],
        *[(key, FP16) for key in ("t4", "v100", "p100", "m1", "m2", "mi50", "rx_6900_xt", "jetson_nano", "ascend_910")],
        *[(key, FP16) for key in ("jetson_xavier", "cpu_arm_fp16", "ascend_310p")],
        *[(key, None) for key in ("cpu_generic", "cpu_avx2", "cpu_avx512", "cpu_arm_neon", "p40", "sm_50")],
    ],
)
def test_the_best_16_bit_format_is_the_one_computed_natively(key: str, expected: object) -> None:
    assert get_device(key).best_16bit() == expected


def test_a_native_format_that_is_slower_than_fp32_is_not_chosen() -> None:
    slow = Device(
        key="x", name="x", vendor="x", kind="cuda", arch="x",
        support={**get_device("a100").support}, peak={"fp32": 2.0, "bf16": 1.0, "fp16": 4.0},
    )  # fmt: skip
    assert not slow.gains("bf16")
    assert slow.best_16bit() is FP16


def test_fp8_of_another_variant_is_not_called_native() -> None:
    """CDNA 3 computes E4M3FNUZ (largest value 240), which is not the OCP format of that name."""
    assert not get_device("mi300x").native("fp8_e4m3")
    assert get_device("mi355x").native("fp8_e4m3")
    assert get_device("h100").native("float8_e4m3fn")


@pytest.mark.parametrize("spelling", ["T4", "tesla t4", "Tesla-T4", "TESLA_T4"])
def test_names_are_found_without_regard_to_case_and_separators(spelling: str) -> None:
    assert get_device(spelling) is devices()["t4"]


def test_an_unknown_device_is_answered_with_the_nearest() -> None:
    with pytest.raises(HardwareError, match=r"Unknown device 'rtx_4900'.*rtx_4090"):
        get_device("rtx_4900")


def test_an_unknown_format_or_kind_is_an_error() -> None:
    with pytest.raises(FormatError):
        get_device("t4").native("bf17")
    with pytest.raises(HardwareError, match=r"Unknown device kind 'gpu'"):
        detect("gpu")


@pytest.mark.parametrize(
    ("runtime_name", "key"),
    [
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100-PCIE-32GB", "v100_pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA GeForce RTX 3090", "rtx_3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A40", None),
        ("AMD Instinct MI250X", "mi250x_die"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5 lite", "tpu_v5e"),
        ("TPU v6 lite", "tpu_v6e"),
        ("TPU v5p", "tpu_v5p"),
        ("Ascend910B2", "ascend_910b2"),
        ("Ascend910B3", "ascend_910b"),
        ("Intel(R) Arc(TM) A770 Graphics", "arc_a770"),
    ],
)
def test_runtime_names_mean_the_right_product(runtime_name: str, key: str | None) -> None:
    found = find_device(runtime_name)
    assert (found.key if found else None) == key


def test_devices_are_values() -> None:
    t4 = get_device("t4")
    assert pickle.loads(pickle.dumps(t4)) == t4
    assert len({t4, pickle.loads(pickle.dumps(t4))}) == 1
    with pytest.raises(AttributeError):
        t4.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        t4.peak["fp16"] = 0.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["device"]["t4"].pop("source"), r"t4\.peak\.fp32 has no source"),
        (lambda t: t["device"]["t4"].update(source="nobody"), r"no source 'nobody'"),
        (lambda t: t["device"]["t4"].update(arch="sm_57"), r"no \[arch\.sm_57\]"),
        (lambda t: t["device"]["t4"].update(bandwith=1), r"t4\.bandwith is not a key.*bandwidth"),
        (lambda t: t["device"]["t4"]["peak"].update(fp61=1), r"t4\.peak\.fp61 is not a format"),
        (lambda t: t["device"]["t4"].update(aliases=["v100"]), r"names both"),
        (lambda t: t["device"]["t4"].update(match=["v100-sxm2"]), r"matches both"),
        (lambda t: t["arch"]["sm_75"]["support"].pop("tf32"), r"lacks tf32"),
        (lambda t: t["arch"]["sm_75"].update(kind="gpu"), r"'gpu' is no kind of device"),
        (lambda t: t.update(model={}), r"unknown table 'model'"),
    ],
)
def test_a_malformed_table_is_refused_by_name(change: object, message: str) -> None:
    table = copy.deepcopy(TABLE)
    change(table)  # type: ignore[operator]
    with pytest.raises(HardwareError, match=message):
        read_table(table)


def test_no_source_is_left_unused() -> None:
    used: set[str] = set()
    for row in [*TABLE["arch"].values(), *TABLE["device"].values()]:
        used |= {row.get("source", ""), *row.get("sources", {}).values()}
    assert set(TABLE["sources"]) == used - {""}
