"""Optimizer state in 8 bits: torchao's tensors (Dettmers et al., arXiv:2110.02861), rounded at random.

A code stands for one of 256 numbers between -1 and 1 (0 and 1 for what is never negative), spaced as a dynamic exponent
has them, and each block of 256 values has its own scale. Neighbouring numbers are some percent apart, and a second
moment moves by a thousandth in a step: rounded to the nearest, it would stand still wherever it is not the largest of
its block. Rounded at random with the right mean, it does not.

What torchao leaves in float32 stays so here: state of weights of under 4,096 values, or that blocks do not fill; and of
those whose dimensions are out of order in memory.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from castwise.errors import PolicyError

from ._noise import Noise

__all__ = ["BLOCK", "EightBit", "fits", "is_eight_bit", "load_torchao", "zeros"]

BLOCK = 256  # values of one scale: torchao's default
_LEAST = 4096  # values of a weight: torchao's rule, after bitsandbytes
_CODES = 256
_BITS = 16
_UNIT = 1 << _BITS
_CUT = 13  # bits of a float32's mantissa that the first of two roundings takes away
_ENTRIES = 1 << (32 - _CUT)
_tables: dict[tuple[torch.device, bool], torch.Tensor] = {}


def load_torchao() -> Any:
    """torchao's class of 8-bit state. Raises PolicyError where torchao is not installed."""
    return _torchao().OptimState8bit


def _torchao() -> Any:
    try:
        state = importlib.import_module("torchao.optim.subclass_8bit")
    except ImportError as error:
        raise PolicyError(
            'optimizer_state: "8bit" keeps state in torchao\'s tensors, and torchao cannot be imported '
            f'({error}). Install it (pip install torchao), or use "bfloat16".'
        ) from error
    with unset_fake_temporarily():  # it makes its maps by reading tensors, once
        state.get_qmap_signed(), state.get_qmap_unsigned()
    return state


def fits(weight: torch.Tensor) -> bool:
    """Whether the state of a weight is kept in 8 bits."""
    return weight.is_contiguous() and weight.numel() >= _LEAST and weight.numel() % BLOCK == 0


def is_eight_bit(state: object) -> bool:
    """Whether it is state of this kind, of any shape; torchao need not be there."""
    return type(state).__name__ == "OptimState8bit"


def zeros(weight: torch.Tensor, signed: bool) -> Any:
    """State of zeros for a weight. float32 is what it says its dtype is; it has one byte a value."""
    return load_torchao().zeros(weight.shape, signed, BLOCK, weight.device, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class EightBit:
    """A part of such state as a vector: whole blocks.

    Attributes:
        codes: of each value, which of `numbers` it is.
        scale: of each block, what numbers are multiplied by.
        numbers: in ascending order.
        signed: whether values may be negative.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    numbers: torch.Tensor
    signed: bool
    dtype: torch.dtype = torch.uint8

    @classmethod
    def of(cls, state: Any) -> EightBit:
        """All of a state, as a vector over its memory."""
        return cls(state.codes.view(-1), state.scale, state.qmap, bool(state.signed))

    @property
    def shape(self) -> torch.Size:
        """That of the vector of values."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes.device

    def numel(self) -> int:
        """How many values there are."""
        return self.codes.numel()

    def __getitem__(self, part: slice) -> EightBit:
        blocks = slice(part.start // BLOCK, part.stop // BLOCK)
        return EightBit(self.codes[part], self.scale[blocks], self.numbers, self.signed)

    def read(self, out: torch.Tensor) -> None:
        """Write the float32 values into a vector."""
        torch.index_select(self.numbers, 0, self.codes.to(torch.int32), out=out)
        out.view(-1, BLOCK).mul_(self.scale.unsqueeze(1))

    def write(self, values: torch.Tensor, noise: Noise | None) -> None:
        """Round float32 values into it: at random, with the right mean, or to the nearest without `noise`.

        `values` holds other numbers afterwards. What is never negative does not become 0 unless it is 0: the square
        root of a second moment is divided by.

        A search among the numbers for each value would take longer than all the rest of a step. So values are rounded
        twice: to 10 bits of mantissa, and from there by a table of what lies below each of those and how far. The mean
        stays right, and what the first rounding adds to the spread is little beside the second's.
        """
        blocks = values.view(-1, BLOCK)
        # The numbers need not reach -1; a largest value that does not fit would shrink in every step. It becomes one
        # that both signs have, and that is kept as it is.
        reach = torch.minimum(self.numbers[-1], -self.numbers[0]) if self.signed else self.numbers[-1]
        largest = blocks.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny)
        torch.div(largest, reach, out=self.scale)
        blocks.div_(largest.unsqueeze(1))
        places = values.view(torch.int32)
        if noise is None:
            places.add_(1 << (_CUT - 1))
        else:
            noise.add_to(places, _CUT)
        places.bitwise_right_shift_(_CUT).bitwise_and_(_ENTRIES - 1)
        found = torch.index_select(_table(self.numbers, self.signed), 0, places)
        if noise is None:
            found.add_(_UNIT // 2)
        else:
            noise.add_to(found)
        self.codes.copy_(found.bitwise_right_shift_(_BITS))


def _table(numbers: torch.Tensor, signed: bool) -> torch.Tensor:
    """For the upper bits of each float32, the code of the number at or below it, and in 2**-16 its share of the way to
    the next: one int32 for both, so that adding a random 16-bit number and cutting off 16 bits gives a code. 1 stands
    for the largest number that there is with either sign.
    """
    key = numbers.device, signed
    found = _tables.get(key)
    if found is None:
        own = _torchao()
        known = np.array(own.get_qmap_signed() if signed else own.get_qmap_unsigned(), np.float64)
        known /= -known[0] if signed else known[-1]
        with np.errstate(invalid="ignore"):  # some are NaN
            values = (np.arange(_ENTRIES, dtype=np.uint32) << _CUT).view(np.float32).astype(np.float64)
        below = np.clip(np.searchsorted(known, values, side="right") - 1, 0, _CODES - 2)
        share = np.nan_to_num((values - known[below]) / np.diff(known)[below], nan=1.0)
        if not signed:
            small = (values > 0.0) & (values < known[1])
            below[small], share[small] = 1, 0.0
        whole = below * _UNIT + np.rint(np.clip(share, 0.0, 1.0) * _UNIT).astype(np.int64)
        with unset_fake_temporarily():
            found = _tables[key] = torch.from_numpy(whole.astype(np.int32)).to(numbers.device)
    return found
