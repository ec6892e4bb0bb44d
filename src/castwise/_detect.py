"""Recognise the machine that runs: its CPU from what the system says, its accelerators through a framework.

Reading is apart from asking: the functions that turn a text or a name into a ``Device`` are pure and tested with texts
of machines that are not at hand; those that ask the system are short. No framework is imported unless the machine shows
signs of an accelerator, so that a laptop without one is answered at once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from castwise.hardware import Device, Support, devices, find_device, get_device

log = logging.getLogger("castwise.hardware")

_COMMAND_TIMEOUT = 10.0  # seconds; vendor tools can hang on a broken driver
_HERE = "found on this machine"

# x86 flags as Linux names them (also what _numpy_flags and flags_from_sysctl translate to), best level first.
_X86_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("cpu_amx_fp16", frozenset({"amx_tile", "amx_bf16", "amx_fp16"})),
    ("cpu_amx_bf16", frozenset({"amx_tile", "amx_bf16"})),
    ("cpu_avx512_fp16", frozenset({"avx512f", "avx512_fp16"})),
    ("cpu_avx512_bf16", frozenset({"avx512f", "avx512_bf16"})),
    ("cpu_avx512", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})),
    ("cpu_avx2", frozenset({"avx2", "fma"})),
)
_ARM_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("cpu_arm_bf16", frozenset({"bf16", "asimdhp"})),
    ("cpu_arm_fp16", frozenset({"asimdhp"})),
    ("cpu_arm_neon", frozenset({"asimd"})),
)
# Files that a driver makes; without any, no framework can see an accelerator. Windows and macOS have none of them.
_DEVICE_FILES: tuple[str, ...] = (
    "nvidia[0-9]*",
    "nvhost-gpu",
    "nvgpu",
    "dxg",
    "kfd",
    "dri/render*",
    "accel*",
    "vfio/[0-9]*",
)
_DEVICE_FILES += ("davinci[0-9]*",)


# ------------------------------------------------------------------------------------------------------------------ CPU


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The instruction-set flags in the text of ``/proc/cpuinfo``, in lower case (x86 ``flags``, Arm ``Features``)."""
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, flags=re.MULTILINE)
    return frozenset(lines[0].casefold().split()) if lines else frozenset()


def flags_from_sysctl(text: str) -> frozenset[str]:
    """The same flags from macOS's ``sysctl hw.optional`` (lines such as ``hw.optional.arm.FEAT_BF16: 1``)."""
    known = {
        "feat_fp16": "asimdhp",
        "neon_fp16": "asimdhp",
        "feat_bf16": "bf16",
        "advsimd": "asimd",
        "avx2_0": "avx2",
        "fma": "fma",
        **{name: name for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq")},
    }
    on = re.findall(r"^hw\.optional\.(?:arm\.)?(\w+):\s*1\s*$", text, flags=re.MULTILINE)
    return frozenset(known[name.casefold()] for name in on if name.casefold() in known)


def cpu_device(flags: Iterable[str]) -> Device:
    """The table's entry for a CPU with these flags (as Linux names them): the best instruction set it has."""
    have = frozenset(flags)
    key = next((key for key, needed in _X86_LEVELS + _ARM_LEVELS if needed <= have), "cpu_generic")
    device = devices()[key]
    if key in ("cpu_amx_bf16", "cpu_amx_fp16") and "avx512_fp16" not in have and "amx_fp16" not in have:
        # Hypervisors mask flags one by one; the table's entry assumes all that the chip has.
        support = {**device.support, "fp16": Support.emulated}
        return dataclasses.replace(device, support=support)
    return device


def cpu_cores(cpuinfo: str) -> int | None:
    """Physical cores listed in the text of ``/proc/cpuinfo``; ``None`` where it does not say."""
    sockets = re.findall(r"^physical id\s*:\s*(\d+)$", cpuinfo, flags=re.MULTILINE)
    cores = re.findall(r"^core id\s*:\s*(\d+)$", cpuinfo, flags=re.MULTILINE)
    if sockets and len(sockets) == len(cores):
        return len(set(zip(sockets, cores, strict=True)))
    return len(re.findall(r"^processor\s*:", cpuinfo, flags=re.MULTILINE)) or None


def cpu_clock(cpuinfo: str) -> float | None:
    """The highest clock in the text of ``/proc/cpuinfo``, in Hz; ``None`` where it does not say (Arm)."""
    clocks = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", cpuinfo, flags=re.MULTILINE)
    return max(map(float, clocks)) * 1e6 if clocks else None


def cpu_model(cpuinfo: str) -> str:
    """The processor's name in the text of ``/proc/cpuinfo``, or ``""``."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, flags=re.MULTILINE)
    return found.group(1).strip() if found else ""


def with_peaks(device: Device, cores: int | None, clock: float | None) -> Device:
    """The CPU with its peak rates: operations per cycle and core (the table) times cores times clock (Hz)."""
    if not cores or not clock or not device.flops_per_cycle:
        return device
    peak = {fmt: rate * cores * clock for fmt, rate in device.flops_per_cycle.items()}
    sources = dict(device.sources)
    for fmt, rate in device.flops_per_cycle.items():
        source = device.sources[f"flops_per_cycle.{fmt}"]
        here = f"{cores} cores × {clock / 1e9:.2f} GHz, {_HERE}"
        sources[f"peak.{fmt}"] = f"{rate:g} FLOP per cycle and core ({source}) × {here}"
    return dataclasses.replace(device, peak=peak, sources=sources)


def _find_cpu() -> Device:
    cpuinfo = _text_of("/proc/cpuinfo")
    if cpuinfo:
        flags = cpu_flags(cpuinfo)
    elif platform.system() == "Darwin":
        flags = flags_from_sysctl(_run("sysctl", "hw.optional"))
    else:
        flags = _numpy_flags()
    clock = max(cpu_clock(cpuinfo) or 0.0, _sysfs_clock() or 0.0)
    device = with_peaks(cpu_device(flags), cpu_cores(cpuinfo), clock)
    model = cpu_model(cpuinfo) or _run("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.processor()
    if model:
        device = dataclasses.replace(device, notes=(f"Processor: {model}.", *device.notes))
    return _with_memory(device, _ram())


def _text_of(path: str) -> str:
    """What the system tells in a file; empty where it has none, or a sandbox does not let it be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _numpy_flags() -> frozenset[str]:
    """Flags as NumPy found them, where the system has no text to read (Windows, sandboxes)."""
    try:
        found: Mapping[str, bool] = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
    except (ImportError, AttributeError):  # not a public name of NumPy
        log.warning("this system does not tell its CPU's instruction sets; taking it for one without 16-bit arithmetic")
        return frozenset()
    translated = {"FMA3": "fma", "AVX512_SPR": "avx512_fp16"}
    return frozenset(translated.get(name, name.casefold()) for name, present in found.items() if present)


def _sysfs_clock() -> float | None:
    try:
        return float(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) * 1e3  # kHz there
    except (OSError, ValueError):
        return None


def _ram() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


# --------------------------------------------------------------------------------------------------------- accelerators


def cuda_device(name: str, capability: tuple[int, int]) -> Device:
    """An NVIDIA GPU by its runtime name and compute capability: the product, else the chip generation.

    A capability that is newer than the table comes as the newest one below it, with a note.
    """
    product = find_device(name, "cuda")
    arch = f"sm_{capability[0]}{capability[1]}"
    if product is not None and _same_arch(product, arch):
        return product
    known = devices()
    exact = next((device for device in known.values() if device.key == arch or arch in device.aliases), None)
    if exact is not None:
        return dataclasses.replace(exact, notes=(f"Runtime name: {name}.", *exact.notes))
    number = capability[0] * 10 + capability[1]
    below = [key for key in known if key.startswith("sm_") and int(key[3:]) <= number]
    nearest = known[max(below, key=lambda key: int(key[3:])) if below else "sm_50"]
    note = f"{name} has compute capability {capability[0]}.{capability[1]}, which the table lacks."
    return dataclasses.replace(nearest, notes=(note, *nearest.notes))


def rocm_device(name: str, gfx: str) -> Device | None:
    """An AMD GPU by its runtime name and gfx target (``"gfx90a:sramecc+:xnack-"``); ``None`` for an unknown target."""
    target = gfx.partition(":")[0]
    product = find_device(name, "rocm")
    if product is not None and _same_arch(product, target):
        return product
    known = devices().values()
    found = next((device for device in known if device.key == target or target in device.aliases), None)
    return None if found is None else dataclasses.replace(found, notes=(f"Runtime name: {name}.", *found.notes))


def apple_gpu(brand: str) -> Device:
    """The GPU of an Apple chip by its brand string (``"Apple M1 Max"``)."""
    product = find_device(brand, "mps")
    generation = re.search(r"\bM(\d+)", brand)
    arch = f"apple_m{generation.group(1)}_gpu" if generation else "apple_m1_gpu"
    exact = product is not None and product.name.casefold() == brand.strip().casefold()
    if product is not None and exact:
        return product
    known = devices()
    found = next((device for device in known.values() if device.key == arch or arch in device.aliases), None)
    if found is None:  # newer than the table
        found = known["apple_m3_gpu"]
    return dataclasses.replace(found, notes=(f"Chip: {brand.strip()}.", *found.notes))


def xpu_device(name: str) -> Device | None:
    """An Intel GPU by its runtime name; ``None`` where the name does not tell its generation."""
    product = find_device(name, "xpu")
    if product is not None:
        return product
    generations = (
        (r"gpu max", "xe_hpc"),
        (r"arc\S* (?:pro )?b\d|arc\S* 1\d\dv", "xe2"),
        (r"arc\S* (?:pro )?a\d", "xe_hpg"),
        (r"arc\S*|graphics", "xe_lpg"),
    )
    for pattern, key in generations:
        if re.search(pattern, name.casefold()):
            found = get_device(key)
            return dataclasses.replace(found, notes=(f"Runtime name: {name}.", *found.notes))
    return None


def tpu_device(name: str) -> Device:
    """A TPU by what JAX calls it (``"TPU v4"``, ``"TPU v5 lite"``); the entry without rates if it is not known."""
    return find_device(name, "tpu") or devices()["tpu"]


def npu_device(name: str) -> Device | None:
    """An Ascend NPU by its runtime name (``"Ascend910B2"``); ``None`` for an unknown one."""
    return find_device(name, "npu")


def _same_arch(product: Device, arch: str) -> bool:
    generation = devices()[product.arch]
    return arch == generation.key or arch in generation.aliases


# -------------------------------------------------------------------------------------------------------------- looking


@functools.cache
def find(kind: str | None) -> Device | None:
    """What ``hardware.detect`` returns; ``None`` where there is no device of that kind."""
    if kind == "cpu":
        return _find_cpu()
    looked_for = ("cuda", "rocm", "xpu", "mps", "tpu", "npu") if kind is None else (kind,)
    if _may_have_accelerator():
        for one in looked_for:
            found = _find_accelerator(one)
            if found is not None:
                return found
    return _find_cpu() if kind is None else None


def _may_have_accelerator() -> bool:
    if platform.system() != "Linux":
        return True
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in _DEVICE_FILES)


def _find_accelerator(kind: str) -> Device | None:
    try:
        if kind == "tpu":
            return _find_tpu()
        torch = _import("torch_npu" if kind == "npu" else "torch") and _import("torch")
        if torch is not None:
            return _find_in_torch(torch, kind)
        return _find_without_framework() if kind == "cuda" else None
    except Exception as error:  # a broken driver or framework is told, and must not stop a run on the CPU
        log.warning("looking for a %s device failed: %s: %s", kind, type(error).__name__, error)
        return None


def _find_in_torch(torch: Any, kind: str) -> Device | None:
    if kind in ("cuda", "rocm"):
        if (kind == "rocm") != bool(torch.version.hip) or not torch.cuda.is_available():
            return None
        found = torch.cuda.get_device_properties(0)
        if kind == "rocm":
            amd = rocm_device(found.name, found.gcnArchName)
            return None if amd is None else _with_memory(amd, int(found.total_memory))
        return _with_memory(cuda_device(found.name, (found.major, found.minor)), int(found.total_memory))
    if kind == "mps":
        if not torch.backends.mps.is_available():
            return None
        return _with_memory(apple_gpu(_run("sysctl", "-n", "machdep.cpu.brand_string")), _ram())
    if kind == "xpu":
        if not torch.xpu.is_available():
            return None
        found = torch.xpu.get_device_properties(0)
        intel = xpu_device(found.name)
        return None if intel is None else _with_memory(intel, int(found.total_memory))
    return npu_device(torch.npu.get_device_name(0)) if torch.npu.is_available() else None


def _find_tpu() -> Device | None:
    if not (os.environ.get("TPU_NAME") or os.environ.get("COLAB_TPU_ADDR") or importlib.util.find_spec("libtpu")):
        return None
    jax = _import("jax")
    if jax is None or jax.default_backend() != "tpu":
        return None
    return tpu_device(jax.devices()[0].device_kind)


def _find_without_framework() -> Device | None:
    """An NVIDIA GPU that the driver shows, on a machine without torch."""
    answer = _run("nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits")
    parts = [part.strip() for part in answer.partition("\n")[0].split(",")]
    if len(parts) != 3 or not re.fullmatch(r"\d+\.\d+", parts[1]):
        return None
    major, minor = map(int, parts[1].split("."))
    mebibytes = int(parts[2]) if parts[2].isdigit() else None  # not told on Jetson
    return _with_memory(cuda_device(parts[0], (major, minor)), mebibytes * 2**20 if mebibytes else None)


def _with_memory(device: Device, memory: int | None) -> Device:
    if not memory:
        return device
    return dataclasses.replace(device, memory=memory, sources={**device.sources, "memory": _HERE})


def _import(module: str) -> Any | None:
    return importlib.import_module(module) if importlib.util.find_spec(module) is not None else None


def _run(*command: str) -> str:
    """The output of a command, or ``""`` where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("%s did not answer: %s", " ".join(command), error)
        return ""
    return done.stdout if done.returncode == 0 else ""
