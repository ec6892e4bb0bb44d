"""Measure how fast this machine multiplies matrices in each format, once, and remember it.

A second or two of square products, from small to large, stopped as soon as the next size would take too long: where a
format is emulated it can be a hundred times slower, and its small sizes already tell. Results are kept in the user's
cache directory, by device and versions, so that the second question is free.

CPUs are measured on one thread. What counts is how a format compares with float32, and on a machine that does other
things besides, a team of threads waits for its slowest member: float32 then looks ten times slower than it is.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castwise._files import write_text
from castwise.formats import FORMATS, TF32
from castwise.hardware import Device

__all__ = ["GemmRates", "cache_file", "measured_rates"]

log = logging.getLogger("castwise.advise")

_SCHEMA = 1
_FORMATS = ("fp32", "tf32", "bf16", "fp16")
_SMALLEST, _LARGEST_CPU, _LARGEST_ACCELERATOR = 64, 1024, 8192
_BUDGET = 0.35  # seconds per format and round
_ROUNDS = 2  # float32 first and last, so that a slow moment does not fall on one format alone


@dataclass(frozen=True)
class GemmRates:
    """FLOP/s of square matrix products by format and side, as measured.

    Attributes:
        device: the key of the device.
        how: framework, version and threads, such as ``"torch 2.13.0, 1 thread"``.
        rates: format -> side -> FLOP/s; a format that did not run is absent.
    """

    device: str
    how: str
    rates: Mapping[str, Mapping[int, float]]

    def peak(self, fmt: str) -> float | None:
        """The highest rate of a format over all sides, or ``None`` if it did not run."""
        return max(self.rates[fmt].values()) if self.rates.get(fmt) else None

    def relative(self, fmt: str) -> tuple[float, int] | None:
        """``(rate over fp32's, side)`` at the largest side that both reached, or ``None``."""
        common = set(self.rates.get(fmt, {})) & set(self.rates.get("fp32", {}))
        if not common:
            return None
        side = max(common)
        return self.rates[fmt][side] / self.rates["fp32"][side], side


def cache_file() -> Path:
    """Where measurements are kept: ``$CASTWISE_CACHE``, else the user's cache directory of this system."""
    chosen = os.environ.get("CASTWISE_CACHE")
    if chosen:
        return Path(chosen) / "gemm.json"
    if platform.system() == "Windows":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif platform.system() == "Darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "castwise" / "gemm.json"


def measured_rates(device: Device, *, refresh: bool = False) -> GemmRates | None:
    """The rates of this machine's device: from the cache, else measured now with torch and kept.

    Args:
        device: what ``hardware.detect`` returned.
        refresh: measure again even if the cache has them.

    Returns:
        The rates; ``None`` (logged) where torch is not installed or cannot reach the device.
    """
    try:
        import torch
    except ImportError:
        log.info("torch is not installed, so nothing is measured; install it with: pip install 'castwise[torch]'")
        return None
    how = f"torch {torch.__version__}" + (", 1 thread" if device.kind == "cpu" else "")
    # The first note names the processor or the runtime's product name, which the key of an arch leaves open.
    key = " | ".join([device.key, how, *device.notes[:1]])
    kept = _read_cache()
    if key in kept and not refresh:
        return GemmRates(device.key, how, _with_int_sides(kept[key]))
    rates = _measure(torch, "cuda" if device.kind == "rocm" else device.kind)
    if not rates:
        log.info("torch cannot multiply on %s here, so nothing is measured", device.name)
        return None
    _write_cache({**kept, key: rates})
    return GemmRates(device.key, how, rates)


def _measure(torch: Any, device: str) -> dict[str, dict[int, float]]:
    largest = _LARGEST_CPU if device == "cpu" else _LARGEST_ACCELERATOR
    measured: dict[str, dict[int, float]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else threads)
    try:
        for fmt in _FORMATS * _ROUNDS + ("fp32",):
            if fmt == TF32.name and device != "cuda":
                continue
            sides = measured.setdefault(fmt, {})
            for side, rate in _rates_of(torch, device, fmt, largest).items():
                sides[side] = max(rate, sides.get(side, 0.0))
    finally:
        torch.set_num_threads(threads)
    return {fmt: sides for fmt, sides in measured.items() if sides}


def _rates_of(torch: Any, device: str, fmt: str, largest: int) -> dict[int, float]:
    try:
        return _climb(lambda side: _product(torch, device, fmt, side), largest)
    except Exception as error:  # no kernel, no memory, no device: the format has no rate here
        log.info("%s products do not run on %s: %s: %s", fmt, device, type(error).__name__, error)
        return {}


def _climb(product: Callable[[int], Callable[[], None]], largest: int) -> dict[int, float]:
    """Rates at 64, 128, … until the next side, at eight times the work, would not fit the budget."""
    rates: dict[int, float] = {}
    side, deadline = _SMALLEST, time.perf_counter() + _BUDGET
    while side <= largest:
        run = product(side)
        run()
        seconds = _fastest(run, until=min(deadline, time.perf_counter() + _BUDGET / 4))
        rates[side] = 2 * side**3 / seconds
        if time.perf_counter() + 2 * 8 * seconds > deadline:  # one call to warm up, one to time
            break
        side *= 2
    return rates


def _fastest(run: Callable[[], None], until: float) -> float:
    fastest = float("inf")
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        fastest = min(fastest, now - start)
        if now >= until:
            return fastest


def _product(torch: Any, device: str, fmt: str, side: int) -> Callable[[], None]:
    dtype = torch.float32 if fmt == TF32.name else getattr(torch, FORMATS[fmt].long_name)
    left = torch.rand(side, side, device=device).to(dtype)
    right = torch.rand(side, side, device=device).to(dtype)
    synchronize = (lambda: None) if device == "cpu" else getattr(torch, device).synchronize
    matmul = torch.backends.cuda.matmul

    def run() -> None:
        before = matmul.allow_tf32
        matmul.allow_tf32 = fmt == TF32.name
        try:
            torch.mm(left, right)
            synchronize()
        finally:
            matmul.allow_tf32 = before

    return run


# --------------------------------------------------------------------------------------------------------------- cache


def _read_cache() -> dict[str, Any]:
    path = cache_file()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != _SCHEMA:
            return {}
        return dict(data["rates"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s); measuring again", path, error)
        return {}


def _write_cache(rates: Mapping[str, Any]) -> None:
    path = cache_file()
    try:
        write_text(path, json.dumps({"schema": _SCHEMA, "rates": rates}, indent=1))
    except OSError as error:
        log.info("measurements are not kept: %s", error)


def _with_int_sides(rates: Mapping[str, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    return {fmt: {int(side): rate for side, rate in sides.items()} for fmt, sides in rates.items()}
