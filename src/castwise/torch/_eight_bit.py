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

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from castwise.errors import PolicyError

from ._noise import Noise

__all__ = ["BLOCK", "EightBit", "fits", "is_eight_bit", "load_torchao", "zeros"]

BLOCK = 256  # values of one scale: torchao's default
_LEAST = 4096  # values of a weight: torchao's rule, after bitsandbytes
_CODES = 256
_HALF = 0.5


def load_torchao() -> Any:
    """torchao's class of 8-bit state. Raises PolicyError where torchao is not installed."""
    try:
        state = importlib.import_module("torchao.optim.subclass_8bit")
    except ImportError as error:
        raise PolicyError(
            'optimizer_state: "8bit" keeps state in torchao\'s tensors, and torchao cannot be imported '
            f'({error}). Install it (pip install torchao), or use "bfloat16".'
        ) from error
    with unset_fake_temporarily():  # it makes its maps by reading tensors, once
        state.get_qmap_signed(), state.get_qmap_unsigned()
    return state.OptimState8bit


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
        """
        blocks = values.view(-1, BLOCK)
        # The numbers need not reach -1; a largest value that does not fit would shrink in every step.
        reach = torch.minimum(self.numbers[-1], -self.numbers[0]) if self.signed else self.numbers[-1]
        scale = blocks.abs().amax(1).div_(reach).clamp_min_(torch.finfo(torch.float32).tiny)
        self.scale.copy_(scale)
        blocks.div_(scale.unsqueeze(1))
        above = torch.bucketize(values, self.numbers, out_int32=True).clamp_(1, _CODES - 1)
        low, high = self.numbers[above - 1], self.numbers[above]
        share = values.sub(low).div_(high.sub_(low))
        chance = _HALF if noise is None else noise.bits(values.numel(), values.device) * 2.0**-16
        codes = above.sub_((share <= chance).to(torch.int32))
        if not self.signed:
            codes.clamp_(min=1).masked_fill_(values <= 0.0, 0)
        self.codes.copy_(codes)
