"""Timing ops as a model runs them whose weights do not fit in the processor's cache: with weights read from memory.

An op that is timed by itself, again and again, finds its weight in the cache. In a model it does not: between two uses
of a weight the others are read. Where an op does little with each weight, as for one token, that decides which format
and which kernel is the faster one.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import torch

from castwise.graph import Graph, Kind

__all__ = ["FROM_MEMORY", "evict", "leave", "reads_weights", "weights_are_cold"]

FROM_MEMORY = {"weights": "from memory"}
"""What tells times with cold weights from others where times are kept."""

_USUAL_CACHE = 32 << 20  # bytes, where the system does not say
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def leave() -> None:
    """Leave the cache as it is."""


def evict() -> None:
    """Read so much other memory that the cache holds nothing else."""
    _other_memory().sum()


def weights_are_cold(graph: Graph, device_type: str) -> bool:
    """Whether an inference finds its weights out of the CPU's cache: they alone fill more than half of it."""
    if graph.training or device_type != "cpu":
        return False
    whole = {tensor for op in graph.ops if op.bytes is None for tensor in op.inputs}  # of a table, rows are read
    weights = (t for at, t in enumerate(graph.tensors) if at in whole and t.kind is Kind.WEIGHT)
    return sum(t.elements * t.itemsize for t in weights) > cache_size() / 2


def reads_weights(weight: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether an op reads more of its weight than of the values that it multiplies."""
    return weight.numel() > x.numel()


@functools.cache
def cache_size() -> int:
    """Bytes of the largest cache of a core."""
    sizes = [_USUAL_CACHE]
    with contextlib.suppress(OSError, ValueError):  # another system, or one that hides it
        sizes = [_bytes(path.read_text()) for path in _CACHES.glob("index*/size")] or sizes
    return max(sizes)


def _bytes(text: str) -> int:
    text = text.strip()
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text)


@functools.cache
def _other_memory() -> torch.Tensor:
    return torch.zeros(2 * cache_size() // 4)
