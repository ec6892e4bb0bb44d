"""Rounding float32 values to 16 bits at random, so that the mean is exact, and the random numbers for it.

torch's generators make one number at a time: several times the cost of an optimizer's whole step. Here the numbers lie
in a table, all 16-bit numbers once and in no order, and each rounding reads it from a place drawn anew; a tensor longer
than the table goes on, row by row, at a distance drawn with it. So the numbers take one addition and are not written
anywhere. In any place those of several roundings are uniform and independent, as the place in the table is; in one
rounding those of several places are uncorrelated but for what is by chance in the table, some 0.4%.

All that there is to save of it is how many roundings there were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Noise", "round_into", "round_stochastic"]

_BITS = 16
_PLACES = 1 << _BITS  # of a row: the whole table
_ROWS = {"cpu": 1 << 4}  # that one operation goes through; on CPUs few, so that the table stays in the cache
_DEVICE_ROWS = 1 << 10
_SEED = 20201006  # any number serves
_WORD = (1 << 64) - 1


class Noise:
    """Random 16-bit numbers for whole tensors. Instances that were used alike give the same numbers, on any machine.

    Attributes:
        draws: how often numbers were drawn; setting it goes to any point of the sequence.
    """

    def __init__(self) -> None:
        self.draws = 0
        self._tables: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._room: dict[torch.device, torch.Tensor] = {}

    def add_to(self, values: torch.Tensor, bits: int = _BITS) -> None:
        """Add a number in [0, 2**bits) to each value of an int32 vector, in place. 16 bits at most."""
        for numbers, part in self._drawn(values, bits):
            part.add_(numbers)

    def bits(self, count: int, device: torch.device) -> torch.Tensor:
        """`count` numbers in [0, 2**16) as int32, to be used and overwritten before the next call."""
        room = self._room.get(device)
        if room is None or room.numel() < count:
            room = self._room[device] = torch.empty(count, dtype=torch.int32, device=device)
        for numbers, part in self._drawn(room[:count]):
            part.copy_(numbers)
        return room[:count]

    def let_go(self) -> None:
        """Give the working memory back."""
        self._room.clear()

    def _drawn(self, values: torch.Tensor, bits: int = _BITS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Numbers for all parts of a vector, and the parts, of equal shape."""
        table, rows_at_most = self._table_on(values.device, bits)
        for part in torch.split(values, rows_at_most * _PLACES):
            drawn = _hashed(self.draws)
            self.draws += 1
            start, rows = drawn % _PLACES, part.numel() // _PLACES
            # An odd distance, so that no two rows read the same.
            distance = (drawn >> 32) % (_PLACES // rows_at_most // 2) * 2 + 1
            whole = rows * _PLACES
            if rows:
                yield table.as_strided((rows, _PLACES), (distance, 1), start), part[:whole].view(rows, _PLACES)
            if whole < part.numel():
                start += rows * distance
                yield table[start : start + part.numel() - whole], part[whole:]

    def _table_on(self, device: torch.device, bits: int) -> tuple[torch.Tensor, int]:
        """All numbers, over again as far as rows reach; and how many rows there may be."""
        found = self._tables.get((device, bits))
        if found is None:
            numbers = np.random.Generator(np.random.Philox(_SEED)).permutation(_PLACES).astype(np.int32)
            numbers >>= _BITS - bits
            # From any of its places on: rows that begin up to one table further, and each as long as one.
            found = self._tables[device, bits] = torch.tensor(np.tile(numbers, 3), device=device)
        return found, _ROWS.get(device.type, _DEVICE_ROWS)


def _hashed(number: int) -> int:
    """The 64-bit number at a place of the sequence SplitMix64 (Steele et al., OOPSLA 2014)."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


def round_stochastic(x: torch.Tensor, dtype: torch.dtype, noise: Noise | None = None) -> torch.Tensor:
    """float32 values rounded to a neighbouring 16-bit value at random, so that the mean is exact. NaN and inf stay."""
    low = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    round_into([low], x.clone(memory_format=torch.contiguous_format).view(-1), noise or _fresh())
    return low


def round_into(targets: Sequence[torch.Tensor], values: torch.Tensor, noise: Noise, keep_nan: bool = True) -> None:
    """Round a vector of float32 values into the 16-bit tensors that it stands for, as `round_stochastic` does.

    `values` holds other numbers afterwards. bfloat16 keeps the upper 16 bits of a float32: adding a uniform 16-bit
    number and cutting off the rest is exact there. Infinity stays, and the carry of some NaNs would go round to zero:
    looking for them takes a pass, which `keep_nan=False` saves.
    """
    if any(t.dtype is not torch.bfloat16 for t in targets):
        for target, part in zip(targets, torch.split(values, [t.numel() for t in targets]), strict=True):
            target.copy_(_by_distance(part, target.dtype, noise).view(target.shape))
        return
    finite, nearest = None, values
    if keep_nan and (values.device.type != "cpu" or not _known_finite(values)):
        finite, nearest = values.isfinite(), values.to(torch.bfloat16)
    bits = values.view(torch.int32)
    noise.add_to(bits)
    bits.bitwise_right_shift_(_BITS)
    sizes = [t.numel() for t in targets]
    shaped = [part.view(t.shape) for t, part in zip(targets, torch.split(bits, sizes), strict=True)]
    torch._foreach_copy_([t.view(torch.int16) for t in targets], shaped)
    if finite is not None:
        for t, good, exact in zip(targets, torch.split(finite, sizes), torch.split(nearest, sizes), strict=True):
            t.copy_(torch.where(good.view(t.shape), t, exact.view(t.shape)))


def _by_distance(x: torch.Tensor, dtype: torch.dtype, noise: Noise) -> torch.Tensor:
    """Values on any grid, which is found by rounding to nearest and measuring how far they lie between neighbours."""
    nearest = x.to(dtype)
    error = x - nearest.to(torch.float32)
    other = torch.nextafter(nearest, torch.where(error > 0, torch.inf, -torch.inf).to(dtype))
    gap = (other.to(torch.float32) - nearest.to(torch.float32)).abs()
    up = noise.bits(x.numel(), x.device) * 2.0**-_BITS * gap < error.abs()
    return torch.where((error != 0) & up & other.isfinite(), other, nearest)


def _known_finite(x: torch.Tensor) -> bool:
    """Whether all values are finite, from one pass; false of some large ones too."""
    return isinstance(x, FakeTensor) or math.isfinite(float(x.sum()))


def _fresh() -> Noise:
    """For a caller without a sequence of its own: one that begins where torch's generator says."""
    noise = Noise()
    noise.draws = int(torch.randint(1 << 62, ()))
    return noise
