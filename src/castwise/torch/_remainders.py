"""What is kept beside a 16-bit weight, and how float32 values come from the two and go back into them.

Every function works on whole tensors and on slices alike, so that a fused step can go through a weight in pieces that
fit the processor's cache.
"""

from __future__ import annotations

import torch

from ._noise import Noise, round_stochastic

#: The dtype of what is kept beside a bfloat16 (float16) weight; modes that are not listed keep nothing of its shape.
KEPT_BESIDE = {"split": torch.int16, "kahan": None}


def empty_rest(mode: str, p: torch.Tensor) -> torch.Tensor | None:
    """What is kept beside a weight that has just been rounded: zeros, or None where the mode keeps nothing."""
    if mode not in KEPT_BESIDE:
        return None
    return torch.zeros_like(p, dtype=KEPT_BESIDE[mode] or p.dtype, requires_grad=False)


def widen(
    mode: str, low: torch.Tensor, rest: torch.Tensor | None, out: torch.Tensor, room: torch.Tensor | None = None
) -> None:
    """Write the float32 values of 16-bit weights and what is kept beside them into `out`.

    `room` is working memory of as many float32 values: torch makes its own at each call where dtypes mix.
    """
    out.copy_(low)
    if mode not in KEPT_BESIDE:
        return
    assert rest is not None
    room = torch.empty_like(out) if room is None else room
    if mode == "split":  # what rounding changed, in units of the lowest bit of a float32
        out.view(torch.int32).add_(room.view(torch.int32).copy_(rest))
    else:
        out.add_(room.copy_(rest))


def narrow(
    mode: str,
    wide: torch.Tensor,
    low: torch.Tensor,
    rest: torch.Tensor | None,
    noise: Noise | None = None,
    room: torch.Tensor | None = None,
) -> None:
    """Round float32 values into 16-bit weights, and what that loses into what is kept beside them.

    `wide` holds other numbers afterwards, but in the modes "master" and "stochastic". `room` is as for `widen`; "split"
    needs none.
    """
    if mode == "stochastic":
        low.copy_(round_stochastic(wide, low.dtype, noise))
        return
    if mode == "split":
        assert rest is not None
        _split(wide, low, rest)
        return
    low.copy_(wide)
    if mode not in KEPT_BESIDE:
        return
    assert rest is not None
    room = (torch.empty_like(wide) if room is None else room).copy_(low)
    rest.copy_(wide.sub_(room))


def _split(wide: torch.Tensor, low: torch.Tensor, rest: torch.Tensor) -> None:
    """Write the two halves of float32 values; `wide` holds other numbers afterwards.

    The lower half, read as a signed number, is what the value is above or below the nearest bfloat16: by half a step
    at most, and what lies in the middle has to go up to fit, as it does with one bit more. No subtraction is needed.
    An infinite weight becomes NaN.
    """
    bits = wide.view(torch.int32)
    rest.copy_(bits)  # cuts off the upper half
    bits.bitwise_or_(1)
    low.copy_(wide)
