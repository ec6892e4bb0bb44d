"""Gradients as bytes: blocks of narrow values, each block with a power of two that brings it into the format's range.

A float16 holds 40 binary orders of magnitude and float8 far fewer; gradients of one model spread over more. A block of
neighbours seldom does: scaled by its own largest value, nothing in it can overflow, and what vanishes is below
2**-39 (float16) of the largest. The power is exact, travels as one byte for `BLOCK` values, and belongs to the sender,
so that ranks need not agree on it. Non-finite values pass: a block that holds one is not scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BLOCK", "Packing"]

BLOCK = 256  # values that share a power of two: 0.2% more bytes than float16 alone

# The power of two that a block's largest value is brought just below: half of the format's largest power of two at
# most, so that rounding up stays in range. bfloat16 has float32's range, and needs none.
_TOP = {torch.float16: 15, torch.float8_e5m2: 15, torch.float8_e4m3fn: 8}
_MOST = 126  # of a power of two that float32 holds as a normal number, either way


@dataclass(frozen=True, slots=True)
class Packing:
    """float32 values in `dtype` (float16, bfloat16, a float8) and the powers of their blocks."""

    dtype: torch.dtype

    def padded(self, count: int) -> int:
        """`count` values, filled up to whole blocks."""
        return -(-count // BLOCK) * BLOCK

    def size(self, count: int) -> int:
        """Bytes of `count` values, a multiple of `BLOCK`."""
        return count * self.dtype.itemsize + (count // BLOCK if self.dtype in _TOP else 0)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of float32 values, (rows, count), as (rows, size(count)) bytes."""
        rows, count = x.shape
        if self.dtype not in _TOP:
            return x.to(self.dtype).view(torch.uint8)
        blocks = x.view(rows, count // BLOCK, BLOCK)
        powers = self._powers(blocks)
        scaled = blocks.mul(power_of_two(powers).unsqueeze(-1)).to(self.dtype)
        values = scaled.view(rows, count).view(torch.uint8)
        return torch.cat([values, powers.to(torch.int8).view(torch.uint8)], dim=1)

    def unpack(self, message: torch.Tensor, count: int) -> torch.Tensor:
        """The float32 values, (rows, count), of (rows, size(count)) bytes."""
        rows = message.shape[0]
        if self.dtype not in _TOP:
            return message.view(self.dtype).to(torch.float32)
        end = count * self.dtype.itemsize
        values = message[:, :end].contiguous().view(self.dtype).to(torch.float32)
        powers = message[:, end:].contiguous().view(torch.int8).to(torch.int32)
        blocks = values.view(rows, count // BLOCK, BLOCK)
        return blocks.mul_(power_of_two(-powers).unsqueeze(-1)).view(rows, count)

    def _powers(self, blocks: torch.Tensor) -> torch.Tensor:
        return powers_for(torch.maximum(blocks.amax(dim=-1), -blocks.amin(dim=-1)), self.dtype)


def power_of_two(powers: torch.Tensor) -> torch.Tensor:
    """2.0**powers for int32 powers of up to `_MOST` either way: the bits of a float32 are its exponent's."""
    return powers.add(127).bitwise_left_shift_(23).view(torch.float32)


def powers_for(largest: torch.Tensor, dtype: torch.dtype, summands: int = 1) -> torch.Tensor:
    """The powers of two by which values up to `largest` come into a format's range, sums of `summands` of them too.

    0 for what is not finite, and for a format of float32's range.
    """
    if dtype not in _TOP:
        return torch.zeros_like(largest, dtype=torch.int32)
    known = largest.isfinite() & (largest > 0)
    exponents = torch.frexp(torch.where(known, largest, 1.0)).exponent
    powers = _TOP[dtype] - exponents - (summands - 1).bit_length()
    return torch.where(known, powers, 0).clamp_(-_MOST, _MOST).to(torch.int32)
