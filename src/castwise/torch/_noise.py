"""Rounding float32 values to 16 bits at random, so that the mean is exact, and the random numbers for it.

torch's generators make one number at a time: several times the cost of an optimizer's whole step. Here a number is a
hash of its place: `a * seed[place] + c`, modulo 2**32, with an odd `a` and, for each row of places, a `c`, drawn anew
for each rounding. That is one vectorized operation. In any place the numbers of several roundings are uniform and
independent, as `c` is; in one rounding those of several places are, as their seeds are (multiply-add hashing:
Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic", STACS 1996).

All that there is to save of it is how many roundings there were.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Noise", "round_stochastic"]

_PLACES = {"cpu": 1 << 16}  # of a row; on CPUs few, so that the seeds stay in the cache
_DEVICE_PLACES = 1 << 20
_LOW_HALF = (1 << 16) - 1
_SEED = 20201006  # any number serves
_WORD = (1 << 64) - 1


class Noise:
    """Random 16-bit numbers for whole tensors. Instances that were used alike give the same numbers, on any machine.

    Attributes:
        draws: how often numbers were drawn; setting it goes to any point of the sequence.
    """

    def __init__(self) -> None:
        self.draws = 0
        self._seeds: dict[torch.device, torch.Tensor] = {}
        self._room: dict[torch.device, torch.Tensor] = {}

    def bits(self, count: int, device: torch.device) -> torch.Tensor:
        """`count` numbers in [0, 2**16) as int32, to be used and overwritten before the next call."""
        seeds = self._seeds_on(device)[:count]
        places = max(1, seeds.numel())
        rows = -(-count // places)
        room = self._room.get(device)
        if room is None or room.numel() < rows * places:
            room = self._room[device] = torch.empty(rows * places, dtype=torch.int32, device=device)
        factor, *shifts = ((_hashed(self.draws + i) >> 32) - (1 << 31) for i in range(rows + 1))
        self.draws += rows + 1
        column = torch.tensor(shifts, dtype=torch.int32, device=device).unsqueeze(1)
        torch.add(column, seeds, alpha=factor | 1, out=room[: rows * places].view(rows, places))
        return room[:count].bitwise_right_shift_(16).bitwise_and_(_LOW_HALF)  # high bits of a product are the good ones

    def let_go(self) -> None:
        """Give the working memory back."""
        self._room.clear()

    def _seeds_on(self, device: torch.device) -> torch.Tensor:
        found = self._seeds.get(device)
        if found is None:
            places = _PLACES.get(device.type, _DEVICE_PLACES)
            numbers = np.random.Generator(np.random.Philox(_SEED)).integers(-(1 << 31), 1 << 31, places, np.int32)
            found = self._seeds[device] = torch.from_numpy(numbers).to(device)
        return found


def _hashed(number: int) -> int:
    """The 64-bit number at a place of the sequence SplitMix64 (Steele et al., OOPSLA 2014)."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


def round_stochastic(x: torch.Tensor, dtype: torch.dtype, noise: Noise | None = None) -> torch.Tensor:
    """float32 values rounded to a neighbouring 16-bit value at random, so that the mean is exact. NaN and inf stay.

    bfloat16 keeps the upper 16 bits of a float32: adding a uniform 16-bit number and cutting off the rest is exact
    there. float16's grid is found by rounding to nearest and measuring how far the value lies between its neighbours.
    """
    noise = noise or _fresh()
    if dtype is torch.bfloat16:
        return upper_half(x, noise).to(dtype)
    nearest = x.to(dtype)
    error = x - nearest.to(torch.float32)
    other = torch.nextafter(nearest, torch.where(error > 0, torch.inf, -torch.inf).to(dtype))
    gap = (other.to(torch.float32) - nearest.to(torch.float32)).abs()
    up = noise.bits(x.numel(), x.device).view(x.shape) * 2.0**-16 * gap < error.abs()
    return torch.where((error != 0) & up & other.isfinite(), other, nearest)


def upper_half(x: torch.Tensor, noise: Noise) -> torch.Tensor:
    """bfloat16 values next to those of `x`, as float32 in working memory of `noise`."""
    bits = noise.bits(x.numel(), x.device).view(x.shape)
    bits.add_(x.contiguous().view(torch.int32)).bitwise_and_(-1 - _LOW_HALF)
    rounded = bits.view(torch.float32)
    if x.device.type != "cpu" or not _known_finite(x):
        return torch.where(x.isfinite(), rounded, x)  # the carry of some NaNs would go round to zero
    return rounded


def _known_finite(x: torch.Tensor) -> bool:
    """Whether all values are finite, from one pass; false of some large ones too."""
    return isinstance(x, FakeTensor) or math.isfinite(float(x.sum()))


def _fresh() -> Noise:
    """For a caller without a sequence of its own: one that begins where torch's generator says."""
    noise = Noise()
    noise.draws = int(torch.randint(1 << 62, ()))
    return noise
