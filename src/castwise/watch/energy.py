"""Energy that a machine has spent, in joules: of NVIDIA GPUs through NVML, of Linux CPUs through RAPL's counters.

What a machine does not report is absent, and said so once; nothing is estimated.

- NVML: `nvmlDeviceGetTotalEnergyConsumption`, millijoules since the driver was loaded, Volta and later (NVML API
  reference). Read through the package nvidia-ml-py (module `pynvml`), the extra "energy".
- RAPL: /sys/class/powercap/intel-rapl:N/energy_uj, microjoules of a CPU package, Intel and AMD alike; the counter
  starts anew at max_energy_range_uj (Linux, Documentation/power/powercap/powercap.rst). Since Linux 5.10 only root may
  read it, unless it is opened up (CVE-2020-8694).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

__all__ = ["Meter", "NvmlMeter", "RaplMeter", "meters_for"]

log = logging.getLogger("castwise.watch.energy")

_POWERCAP = Path("/sys/class/powercap")
_MILLI, _MICRO = 1e-3, 1e-6


class Meter(Protocol):
    """Something that counts joules.

    Attributes:
        name: of the metric: "energy/gpu_joules" or "energy/cpu_joules".
    """

    name: str

    def joules(self) -> float:
        """Spent since the meter was made."""


class RaplMeter:
    """The energy of all CPU packages of a Linux machine, whatever runs on them.

    Args:
        root: where the kernel shows power zones.

    Raises:
        OSError: there are no counters, or they may not be read.
    """

    name = "energy/cpu_joules"

    def __init__(self, root: Path = _POWERCAP) -> None:
        # A package is intel-rapl:0; its parts are intel-rapl:0:1, and would be counted twice.
        zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        if not zones:
            raise FileNotFoundError(f"{root} shows no energy counters of CPU packages")
        self._zones = [(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text())) for zone in zones]
        self._last = [int(path.read_text()) for path, _ in self._zones]
        self._spent = 0

    def joules(self) -> float:
        """Spent since the meter was made. To be read at least once per turn of the counters, some minutes apart."""
        for place, (path, limit) in enumerate(self._zones):
            now = int(path.read_text())
            step = now - self._last[place]
            self._spent += step if step >= 0 else step + limit
            self._last[place] = now
        return self._spent * _MICRO


class NvmlMeter:
    """The energy of one NVIDIA GPU, whatever runs on it.

    Args:
        read: gives the millijoules that the GPU has spent since some moment.
    """

    name = "energy/gpu_joules"

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._first = read()

    @classmethod
    def of(cls, uuid: str) -> NvmlMeter:
        """The GPU of a UUID, as CUDA names it.

        Raises:
            ImportError: there is no pynvml. Exception: of pynvml's own, where the GPU or its driver reports nothing.
        """
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        return cls(lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)))

    def joules(self) -> float:
        """Spent since the meter was made."""
        return (self._read() - self._first) * _MILLI


def meters_for(gpu: str | None, powercap: Path = _POWERCAP) -> list[Meter]:
    """The meters that this machine has; why one is missing is logged.

    Args:
        gpu: UUID of the NVIDIA GPU that is used, None where none is.
        powercap: where Linux shows power zones.
    """
    found: list[Meter] = []
    try:
        found.append(RaplMeter(powercap))
    except (OSError, ValueError) as error:
        log.info("the CPU's energy is not logged: %s", error)
    if gpu is None:
        return found
    try:
        found.append(NvmlMeter.of(gpu))
    except ImportError:
        log.info("the GPU's energy is not logged: pynvml is missing; install it with: pip install 'castwise[energy]'")
    except Exception as error:  # pynvml's errors have no base that could be named without it
        log.info("the GPU's energy is not logged: %s: %s", type(error).__name__, error)
    return found
