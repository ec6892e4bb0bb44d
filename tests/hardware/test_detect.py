"""Recognising machines: from texts of machines that are not here, and this one for real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from castwise import _detect
from castwise.errors import HardwareError
from castwise.formats import BF16, FP16
from castwise.hardware import Support, detect

ZEN3 = "fpu sse2 avx f16c fma avx2 bmi2 sha_ni vaes"
SKYLAKE = "fpu sse2 avx f16c fma avx2 avx512f avx512dq avx512cd avx512bw avx512vl"
ZEN4 = SKYLAKE + " avx512_bf16 avx512_vnni"
SAPPHIRE_RAPIDS = ZEN4 + " avx512_fp16 amx_bf16 amx_tile amx_int8"


def cpuinfo(flags: str, *, cores: int = 2, threads: int = 1, mhz: float = 2500.0) -> str:
    rows = [
        f"processor\t: {core * threads + thread}\nmodel name\t: Some CPU @ 2.50GHz\ncpu MHz\t\t: {mhz}\n"
        f"physical id\t: 0\ncore id\t\t: {core}\nflags\t\t: {flags}\n"
        for core in range(cores)
        for thread in range(threads)
    ]
    return "\n".join(rows)


@pytest.mark.parametrize(
    ("flags", "key", "best"),
    [
        ("fpu sse2 sse4_2", "cpu_generic", None),
        (ZEN3, "cpu_avx2", None),
        (SKYLAKE, "cpu_avx512", None),
        (ZEN4, "cpu_avx512_bf16", BF16),
        (SKYLAKE + " avx512_fp16 avx512_bf16", "cpu_avx512_fp16", BF16),
        (SAPPHIRE_RAPIDS, "cpu_amx_bf16", BF16),
        (SAPPHIRE_RAPIDS + " amx_fp16", "cpu_amx_fp16", BF16),
    ],
)
def test_x86_cpus_are_told_by_their_flags(flags: str, key: str, best: object) -> None:
    device = _detect.cpu_device(_detect.cpu_flags(cpuinfo(flags)))
    assert device.key == key
    assert device.best_16bit() == best


@pytest.mark.parametrize(
    ("features", "key", "best"),
    [
        ("fp asimd evtstrm crc32", "cpu_arm_neon", None),
        ("fp asimd evtstrm atomics fphp asimdhp asimddp", "cpu_arm_fp16", FP16),
        ("fp asimd atomics fphp asimdhp sve i8mm bf16", "cpu_arm_bf16", BF16),
    ],
)
def test_arm_cpus_are_told_by_their_features(features: str, key: str, best: object) -> None:
    text = f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {features}\nCPU implementer\t: 0x41\n"
    device = _detect.cpu_device(_detect.cpu_flags(text))
    assert (device.key, device.best_16bit()) == (key, best)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("hw.optional.arm.FEAT_FP16: 1\nhw.optional.arm.FEAT_BF16: 0\nhw.optional.AdvSIMD: 1\n", "cpu_arm_fp16"),
        ("hw.optional.arm.FEAT_FP16: 1\nhw.optional.arm.FEAT_BF16: 1\nhw.optional.AdvSIMD: 1\n", "cpu_arm_bf16"),
        ("hw.optional.avx2_0: 1\nhw.optional.fma: 1\nhw.optional.avx512f: 0\n", "cpu_avx2"),
        ("", "cpu_generic"),
    ],
)
def test_macs_are_told_by_sysctl(text: str, key: str) -> None:
    assert _detect.cpu_device(_detect.flags_from_sysctl(text)).key == key


def test_a_flag_that_a_hypervisor_masks_is_not_assumed() -> None:
    """AMX without AVX512_FP16: the table's entry has both, this machine has not."""
    device = _detect.cpu_device((ZEN4 + " amx_bf16 amx_tile").split())
    assert device.key == "cpu_amx_bf16"
    assert device.native("bf16")
    assert device.supports("fp16") is Support.emulated


def test_peak_rates_of_a_cpu_are_cycles_times_cores_and_say_so() -> None:
    text = cpuinfo(ZEN3, cores=4, threads=2, mhz=3000.0)
    assert _detect.cpu_cores(text) == 4
    assert _detect.cpu_clock(text) == 3.0e9
    assert _detect.cpu_model(text) == "Some CPU @ 2.50GHz"
    device = _detect.with_peaks(_detect.cpu_device(ZEN3.split()), 4, 3.0e9)
    assert device.peak["fp32"] == 32 * 4 * 3.0e9
    assert "Optimization Reference Manual" in device.sources["peak.fp32"] and "4 cores" in device.sources["peak.fp32"]
    assert not _detect.with_peaks(_detect.cpu_device(ZEN3.split()), None, 3.0e9).peak


@pytest.mark.parametrize(
    ("name", "capability", "key"),
    [
        ("Tesla T4", (7, 5), "t4"),
        ("NVIDIA GeForce GTX 1080", (6, 1), "sm_61"),
        ("NVIDIA GH200 480GB", (9, 0), "sm_90"),
        ("NVIDIA B300", (10, 3), "sm_100"),
        ("NVIDIA GeForce RTX 3090 Ti", (8, 6), "sm_86"),
        ("Orin", (8, 7), "sm_87"),
        ("GRID T4 lookalike, named A100", (7, 5), "sm_75"),
    ],
)
def test_cuda_devices_come_as_product_or_generation(name: str, capability: tuple[int, int], key: str) -> None:
    assert _detect.cuda_device(name, capability).key == key


def test_a_gpu_newer_than_the_table_comes_as_the_newest_known_with_a_note() -> None:
    device = _detect.cuda_device("NVIDIA X1", (13, 0))
    assert device.key == "sm_120"
    assert "13.0, which the table lacks" in device.notes[0]


@pytest.mark.parametrize(
    ("name", "gfx", "key"),
    [
        ("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", "mi250x_die"),
        ("AMD Instinct MI325X", "gfx942:sramecc+:xnack-", "gfx942"),
        ("AMD Radeon RX 7800 XT", "gfx1101", "gfx1100"),
        ("AMD Radeon VII", "gfx906:sramecc-:xnack-", "gfx906"),
    ],
)
def test_rocm_devices_come_as_product_or_generation(name: str, gfx: str, key: str) -> None:
    found = _detect.rocm_device(name, gfx)
    assert found is not None and found.key == key


def test_an_unknown_gfx_target_is_not_guessed() -> None:
    assert _detect.rocm_device("AMD Something", "gfx9999") is None


@pytest.mark.parametrize(
    ("brand", "key", "best"),
    [
        ("Apple M1", "m1", FP16),
        ("Apple M1 Ultra", "apple_m1_gpu", FP16),
        ("Apple M2 Pro", "apple_m2_gpu", FP16),
        ("Apple M3 Max", "apple_m3_gpu", BF16),
        ("Apple M4 Max", "m4_max", BF16),
        ("Apple M9", "apple_m3_gpu", BF16),
    ],
)
def test_apple_gpus_come_by_generation(brand: str, key: str, best: object) -> None:
    device = _detect.apple_gpu(brand)
    assert (device.key, device.best_16bit()) == (key, best)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Intel(R) Data Center GPU Max 1550", "max_1550_stack"),
        ("Intel(R) Data Center GPU Max 1100", "xe_hpc"),
        ("Intel(R) Arc(TM) B570 Graphics", "xe2"),
        ("Intel(R) Arc(TM) A380 Graphics", "xe_hpg"),
        ("Intel(R) Iris(R) Xe Graphics", "xe_lpg"),
    ],
)
def test_intel_gpus_come_as_product_or_generation(name: str, key: str) -> None:
    found = _detect.xpu_device(name)
    assert found is not None and found.key == key


def test_tpus_and_ascend_devices_are_told_by_name() -> None:
    assert _detect.tpu_device("TPU v4").key == "tpu_v4"
    assert _detect.tpu_device("TPU v99").key == "tpu"
    ascend = _detect.npu_device("Ascend910B4")
    assert ascend is not None and ascend.key == "ascend_910b"


# ------------------------------------------------------------------------------------------------------------ this one


def test_this_machines_cpu_is_recognised_with_its_memory() -> None:
    device = detect("cpu")
    assert device.kind == "cpu"
    assert device.native("fp32") and device.native("fp64")
    assert device.memory is not None and device.memory > 2**28
    assert "found on this machine" in device.sources["memory"]


def test_what_torch_says_of_the_cpu_agrees_with_what_was_detected() -> None:
    torch = pytest.importorskip("torch")
    capability = torch.backends.cpu.get_cpu_capability()
    device = detect("cpu")
    if capability in ("AVX2", "AVX512"):
        assert device.support["fp32"] is Support.native
        assert ("avx512" in device.key or "amx" in device.key) or capability == "AVX2"
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert device.supports("bf16") is not Support.none
    elif sys.platform == "linux":
        assert device.supports("bf16") is not Support.native


def test_detecting_the_cpu_imports_no_framework() -> None:
    code = (
        "import sys, castwise.hardware as h; h.detect('cpu'); h.devices(); "
        "print([m for m in ('torch', 'jax', 'tensorflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_kind_that_is_not_there_is_an_error_that_says_what_to_do() -> None:
    kind = "npu"  # no machine that runs these tests has one without torch_npu
    pytest.importorskip("torch")
    if detect().kind == kind:
        pytest.skip("this machine has one")
    with pytest.raises(HardwareError, match=r"no npu device.*castwise doctor"):
        detect(kind)


def test_without_a_kind_the_answer_is_an_accelerator_or_the_cpu() -> None:
    device = detect()
    accelerators = ("cuda", "rocm", "xpu", "mps", "tpu", "npu")
    assert device.kind in accelerators or device == detect("cpu")


def test_a_processor_that_may_not_be_read_about_is_found_through_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    known = detect("cpu")

    def refused(self: Path, *args: object, **options: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refused)
    found = _detect._find_cpu()
    assert found.kind == known.kind
    assert "avx2" not in known.key or "avx2" in found.key
