"""What is kept beside a 16-bit weight, and how float32 values come from the two and go back into them.

Every function works on whole tensors and on slices alike, so that a fused step can go through a weight in pieces that
fit the processor's cache.
"""

from __future__ import annotations

import torch

#: The dtype of what is kept beside a bfloat16 (float16) weight; modes that are not listed keep nothing of its shape.
_REST = {"split": torch.int16, "kahan": None}
_HIGHEST_INT16 = (1 << 15) - 1


def empty_rest(mode: str, p: torch.Tensor) -> torch.Tensor | None:
    """What is kept beside a weight that has just been rounded: zeros, or None where the mode keeps nothing."""
    if mode not in _REST:
        return None
    return torch.zeros_like(p, dtype=_REST[mode] or p.dtype, requires_grad=False)


def widen(mode: str, low: torch.Tensor, rest: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write the float32 values of 16-bit weights and what is kept beside them into `out`."""
    if mode == "split":
        assert rest is not None
        bits = out.view(torch.int32)
        bits.copy_(low.view(torch.int16))
        bits.bitwise_left_shift_(16)
        bits.add_(rest)  # what rounding changed, in units of the lowest bit of a float32
        return
    out.copy_(low)
    if mode == "kahan":
        assert rest is not None
        out.add_(rest)


def narrow(
    mode: str,
    wide: torch.Tensor,
    low: torch.Tensor,
    rest: torch.Tensor | None,
    generator: torch.Generator | None = None,
) -> None:
    """Round float32 values into 16-bit weights, and what that loses into what is kept beside them.

    `wide` holds other numbers afterwards, but in the modes "master" and "stochastic".
    """
    if mode == "stochastic":
        low.copy_(round_stochastic(wide, low.dtype, generator))
        return
    low.copy_(wide)
    if mode == "split":
        assert rest is not None
        # Rounding to nearest moves a value by at most half of 2**16 units; exactly half, upwards, does not fit an
        # int16.
        bits = wide.view(torch.int32)
        bits.sub_(low.view(torch.int16).to(torch.int32).bitwise_left_shift_(16))
        rest.copy_(bits.clamp_(max=_HIGHEST_INT16))
    elif mode == "kahan":
        assert rest is not None
        rest.copy_(wide.sub_(low))


def round_stochastic(x: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """float32 values rounded to a neighbouring 16-bit value at random, so that the mean is exact. NaN and inf stay.

    bfloat16 keeps the upper 16 bits of a float32: adding a uniform 16-bit number and cutting off the rest is exact
    there. float16's grid is found by rounding towards zero and measuring how far the value lies between its neighbours.
    """
    if dtype is torch.bfloat16:
        return _to_bfloat16(x.contiguous(), generator)
    nearest = x.to(dtype)
    error = x - nearest.to(torch.float32)
    other = torch.nextafter(nearest, torch.where(error > 0, torch.inf, -torch.inf).to(dtype))
    gap = (other.to(torch.float32) - nearest.to(torch.float32)).abs()
    up = torch.rand(x.shape, device=x.device, generator=generator) * gap < error.abs()
    return torch.where((error != 0) & up & other.isfinite(), other, nearest)


def _to_bfloat16(x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    # One 64-bit random number is four 16-bit ones. Signed ones serve as well: they are taken modulo 2**16.
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    noise = draws.random_(-(1 << 63), None, generator=generator).view(torch.int16)[: x.numel()].view(x.shape)
    bits = noise.to(torch.int32).bitwise_and_((1 << 16) - 1)
    bits.add_(x.view(torch.int32)).bitwise_and_(-(1 << 16))
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)
