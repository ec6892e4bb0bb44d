"""``castwise doctor``: what this machine has, and which number formats really work on it.

Frameworks answer "is bfloat16 supported?" with yes where they only emulate it, and switch themselves off with a warning
that nobody reads. So nothing is assumed: each format is tried in each installed framework, the result is compared with
float64, and a product is timed beside float32's. ``_probe.py`` does that in a process per framework, this module
gathers the answers, and ``_doctor_text.py`` puts them into words.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from castwise._doctor_text import fallbacks_of, format_report, judge
from castwise._probe import FRAMEWORKS
from castwise.errors import HardwareError, did_you_mean
from castwise.hardware import Device, detect

__all__ = [
    "DoctorReport",
    "FrameworkReport",
    "Trial",
    "add_doctor_arguments",
    "format_report",
    "judge",
    "main_doctor",
    "run_doctor",
]

log = logging.getLogger("castwise.doctor")

_PROBE_TIMEOUT = 180.0  # seconds; a first import of a framework from a cold disk takes tens of them
_COMMAND_TIMEOUT = 10.0  # seconds

# Settings that change what a format means or whether it is used, unseen by the program that runs.
_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "XLA_FLAGS",
    "TF_ENABLE_ONEDNN_OPTS",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)
_PACKAGES = (
    "torch",
    "jax",
    "jaxlib",
    "tensorflow",
    "keras",
    "onnx",
    "onnxruntime",
    "numpy",
    "scipy",
    "ml_dtypes",
    "triton",
)
_COMPILERS = {
    "c++": ("c++", "g++", "clang++"),
    "nvcc": ("nvcc",),
    "ptxas": ("ptxas",),
    "hipcc": ("hipcc",),
    "icpx": ("icpx",),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One operation tried in one format.

    Attributes:
        framework: who computed it. device: on what, as the framework calls it.
        operation: ``"matmul"`` or ``"conv2d"``. format: the format's short name.
        outcome: ``"right"``; ``"narrow"`` (right, but sums in the format); ``"wrong"``; ``"falls back"`` (computed in
            another format without an error); ``"fails"``.
        message: what was wrong, or the error.
        error: largest deviation from float64, in eps of the format and relative to the largest result.
        seconds: of a timed product; ``None`` where none was timed.
        relative_time: ``seconds`` over float32's.
    """

    framework: str
    device: str
    operation: str
    format: str
    outcome: str
    message: str = ""
    error: float | None = None
    seconds: float | None = None
    relative_time: float | None = None

    @property
    def works(self) -> bool:
        """Whether the result was right and computed in the format that was asked for."""
        return self.outcome in ("right", "narrow")


@dataclass(frozen=True, kw_only=True)
class FrameworkReport:
    """What one framework said of itself and did; where it could not be asked, only ``problem`` says something."""

    name: str
    version: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    fallbacks: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Everything ``castwise doctor`` found.

    Attributes:
        system: operating system, Python, and versions of installed packages.
        drivers, compilers: versions by name; only what was found.
        variables: environment variables that are set and change how formats are computed.
        devices: the machine's CPU and, if a framework can use one, its accelerator, from the table.
        frameworks: one report per installed framework.
        missing: frameworks that are not installed.
        fallbacks: what runs in another format than asked for, or slower than the table says, as sentences.
    """

    system: Mapping[str, str]
    drivers: Mapping[str, str]
    compilers: Mapping[str, str]
    variables: Mapping[str, str]
    devices: tuple[Device, ...]
    frameworks: tuple[FrameworkReport, ...]
    missing: tuple[str, ...]
    fallbacks: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether every installed framework could be asked and multiplies float32 correctly."""
        asked = all(not one.problem for one in self.frameworks)
        plain = [t for one in self.frameworks for t in one.trials if t.format == "fp32" and t.operation == "matmul"]
        return asked and all(trial.works for trial in plain)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists and dicts, for JSON."""
        made = {name: dict(getattr(self, name)) for name in ("system", "drivers", "compilers", "variables")}
        devices = [
            {
                "key": d.key,
                "name": d.name,
                "kind": d.kind,
                "support": {k: str(v) for k, v in d.support.items()},
                "notes": d.notes,
            }
            for d in self.devices
        ]
        frameworks = [asdict(one) for one in self.frameworks]
        return {
            **made,
            "devices": devices,
            "frameworks": frameworks,
            "missing": self.missing,
            "fallbacks": self.fallbacks,
        }


# ------------------------------------------------------------------------------------------------------------ examining


def run_doctor(frameworks: Sequence[str] | None = None, *, timeout: float = _PROBE_TIMEOUT) -> DoctorReport:
    """Examine this machine.

    Args:
        frameworks: which to ask, of ``torch``, ``jax``, ``tensorflow``, ``onnxruntime``; ``None`` for all installed.
        timeout: seconds that each may take.

    Raises:
        HardwareError: an unknown framework was named. A framework that is missing, hangs or crashes is a finding.
    """
    asked = tuple(FRAMEWORKS if frameworks is None else frameworks)
    for name in asked:
        if name not in FRAMEWORKS:
            raise HardwareError(
                f"Unknown framework {name!r}.{did_you_mean(name, FRAMEWORKS)} Use {', '.join(FRAMEWORKS)}."
            )
    installed = [name for name in asked if importlib.util.find_spec(name) is not None]
    reports = tuple(probe(name, timeout=timeout) for name in installed)
    devices = _devices_of(reports)
    return DoctorReport(
        system=_system(),
        drivers=_drivers(),
        compilers=_compilers(),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        devices=devices,
        frameworks=reports,
        missing=tuple(name for name in asked if name not in installed),
        fallbacks=fallbacks_of(reports, devices) + _unused_hardware(reports),
    )


def probe(name: str, *, timeout: float = _PROBE_TIMEOUT) -> FrameworkReport:
    """Try every format in one framework, in a process of its own; a crash is what the report then says."""
    command = [sys.executable, "-m", "castwise._probe", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return FrameworkReport(name=name, problem=f"did not answer within {timeout:g} s")
    if done.returncode != 0:
        last_words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        return FrameworkReport(name=name, problem=f"ended with {how}: {last_words}")
    return read_probe(done.stdout.splitlines()[-1])


def read_probe(line: str) -> FrameworkReport:
    """The report in the line of JSON that a probe prints."""
    data = json.loads(line)
    trials = tuple(Trial(**trial) for trial in data.pop("trials"))
    return FrameworkReport(
        trials=trials, devices=tuple(data.pop("devices")), fallbacks=tuple(data.pop("fallbacks")), **data
    )


def _devices_of(reports: Iterable[FrameworkReport]) -> tuple[Device, ...]:
    """The CPU, and the accelerator where a framework showed one: only then is it worth importing one to name it."""
    cpu = detect("cpu")
    if not _on_accelerator(reports):
        return (cpu,)
    best = detect()
    return (cpu,) if best.kind == "cpu" else (cpu, best)


def _on_accelerator(reports: Iterable[FrameworkReport]) -> bool:
    return any(device != "cpu" for one in reports for device in one.devices)


def _system() -> dict[str, str]:
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for package in ("castwise", *_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _drivers() -> dict[str, str]:
    found = {}
    nvidia = _first_line("nvidia-smi", "--query-gpu=driver_version,name,compute_cap", "--format=csv,noheader")
    if nvidia:
        found["nvidia"] = nvidia
    amd = Path("/sys/module/amdgpu/version")
    if amd.is_file():
        found["amdgpu"] = amd.read_text(encoding="utf-8").strip()
    rocm = Path("/opt/rocm/.info/version")
    if rocm.is_file():
        found["rocm"] = rocm.read_text(encoding="utf-8").strip()
    ascend = _first_line("npu-smi", "-v")
    if ascend:
        found["ascend"] = ascend
    return found


def _compilers() -> dict[str, str]:
    """Compilers that torch.compile and Triton kernels need; the C++ one as ``CXX`` names it, else the usual names."""
    found = {}
    for label, names in _COMPILERS.items():
        chosen = [os.environ["CXX"]] if label == "c++" and os.environ.get("CXX") else []
        for name in (*chosen, *names):
            version = _first_line(name, "--version", last=label in ("nvcc", "ptxas"))
            if version:
                found[label] = version
                break
    return found


def _first_line(*command: str, last: bool = False) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer ({type(error).__name__})"
    lines = done.stdout.strip().splitlines()
    return lines[-1 if last else 0].strip() if lines else ""


def _unused_hardware(reports: Sequence[FrameworkReport]) -> tuple[str, ...]:
    """A GPU that the driver shows and no framework uses."""
    gpu = _first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if not gpu or not reports or _on_accelerator(reports) or gpu.startswith("does not answer"):
        return ()
    names = ", ".join(one.name for one in reports)
    return (f"The driver shows a GPU ({gpu}) that {names} cannot use: the installed builds are for the CPU.",)


# --------------------------------------------------------------------------------------------------------- command line


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``castwise doctor`` to a parser."""
    parser.add_argument(
        "--framework",
        action="append",
        choices=FRAMEWORKS,
        help="examine only this framework (may be given more than once; default: all that are installed)",
    )
    parser.add_argument("--timeout", type=float, default=_PROBE_TIMEOUT, help="seconds each framework may take")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main_doctor(args: argparse.Namespace) -> int:
    """Run ``castwise doctor``; returns 0, or 1 if an installed framework cannot be used at all."""
    report = run_doctor(args.framework, timeout=args.timeout)
    print(json.dumps(report.to_dict(), indent=2) if args.json else format_report(report))
    return 0 if report.healthy else 1
