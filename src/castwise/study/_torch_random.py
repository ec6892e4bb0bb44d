"""The random streams of ``_random``, with PyTorch's generators among them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from castwise.study import _random
from castwise.study._random import scattered_seed

__all__ = ["Feed", "capture", "restore", "scattered_seed", "seed_all", "seeded"]


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch (every device)."""
    _random.seed_all(seed)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """The state of all generators, as tensors and plain values that a checkpoint can hold."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what ``capture`` gave."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


seeded = _random.seeded_by(capture, restore, seed_all)


class Feed(_random.Feed):
    """See ``_random.Feed``."""

    capture = staticmethod(capture)
    restore = staticmethod(restore)
    seed_all = staticmethod(seed_all)
