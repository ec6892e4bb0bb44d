"""Products in a format this machine has no arithmetic for, with that format's exact values.

A tensor core reads 16-bit (or narrower) inputs, multiplies and adds in fp32, and rounds the result once. Emulation does
the same with what every machine has: round the inputs to the format, compute in fp32, round the result. Values are
those of the real format up to the order of the fp32 additions; tensors keep the format's own dtype, so everything
around the product (memory, promotion, overflow to inf) behaves as on real hardware. The backward pass follows from
the same three steps, because the gradient of a rounding to a format is rounded to that format again.

Ops of many steps: recurrent layers are run step by step, with a rounded state (`_recurrent`). Attention as one call
rounds its inputs and its result; some fused kernels also round the probabilities before the second product, others
do not, so that rounding is left out.

Sources: NVIDIA's description of tensor-core arithmetic (V100 white paper, 2017: fp16 products, fp32 accumulation);
Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433 (E4M3 for activations and weights, E5M2 for
gradients, per-tensor scaling into the format's range).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from castwise.errors import FormatError
from castwise.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FP64, TF32, NumberFormat
from castwise.hardware import detect

_DTYPES: dict[NumberFormat, torch.dtype] = {
    FP64: torch.float64,
    FP32: torch.float32,
    TF32: torch.float32,
    BF16: torch.bfloat16,
    FP16: torch.float16,
    FP8_E4M3: torch.float8_e4m3fn,
    FP8_E5M2: torch.float8_e5m2,
}
_NARROW_INPUTS = frozenset({TF32, FP8_E4M3, FP8_E5M2})  # formats of a product's inputs only: its result is wider
_TF32_DROPPED_BITS = 23 - TF32.mantissa_bits


def dtype_of(fmt: NumberFormat) -> torch.dtype:
    """The torch dtype whose storage holds values of `fmt` (tf32 lives in float32)."""
    return _DTYPES[fmt]


def format_of(dtype: torch.dtype) -> NumberFormat:
    """The number format of a floating torch dtype. Raises FormatError for integer, complex and unknown dtypes."""
    for fmt, known in _DTYPES.items():
        if known is dtype and fmt is not TF32:
            return fmt
    raise FormatError(f"{dtype} is not a floating format that Castwise knows; use one of float64/32/16 or bfloat16")


@functools.cache
def computes_natively(device_type: str, fmt: NumberFormat) -> bool:
    """Whether products in `fmt` run on this machine's device of that type without emulation by Castwise.

    Accelerators run every 16-bit format that their framework offers, if need be by a vendor's own emulation inside the
    kernel; what is worth choosing there is a matter for `castwise.hardware`. On a CPU without the instructions torch
    falls back to scalar code that is 30 to 130 times slower than fp32, so there Castwise emulates.
    """
    if fmt in (FP32, FP64):
        return True
    if fmt in (TF32, FP8_E4M3, FP8_E5M2):
        return False
    return device_type != "cpu" or detect("cpu").native(fmt)


def round_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 values rounded to nearest even on tf32's 10-bit mantissa; NaN and inf pass."""
    bits = x.contiguous().view(torch.int32)
    odd = (bits >> _TF32_DROPPED_BITS) & 1
    rounded = (bits + ((1 << (_TF32_DROPPED_BITS - 1)) - 1) + odd) & ~((1 << _TF32_DROPPED_BITS) - 1)
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def round_fp8(x: torch.Tensor, fmt: NumberFormat) -> torch.Tensor:
    """float32 values rounded to `fmt` after scaling the tensor by the power of two that brings max |x| just inside
    its range.

    Per-tensor "current" scaling: the scale is exact, so the only error is the format's rounding. Non-finite values
    pass.
    """
    largest = torch.where(x.isfinite(), x, 0.0).abs().amax() if x.numel() else x.new_zeros(())
    exponent = torch.floor(torch.log2(fmt.max / largest.clamp_min(torch.finfo(torch.float32).tiny))).clamp(-126, 126)
    scale = torch.where(largest > 0, torch.exp2(exponent), 1.0)
    scaled = (x * scale).clamp(-fmt.max, fmt.max).to(_DTYPES[fmt]).to(torch.float32) / scale
    return torch.where(x.isfinite(), scaled, x)


class _RoundForward(torch.autograd.Function):
    """Round values on the way in; the gradient passes (it is rounded where it enters, at the product's output)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, fmt: NumberFormat) -> torch.Tensor:
        return round_tf32(x) if fmt is TF32 else round_fp8(x, fmt)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _RoundBackward(torch.autograd.Function):
    """Pass values; round the gradient that the backward products will read."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: torch.Tensor, fmt: NumberFormat) -> torch.Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.fmt = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (round_tf32(grads[0]) if ctx.fmt is TF32 else round_fp8(grads[0], ctx.fmt)), None


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How products in a low format are computed on one type of device.

    fmt: the format of the products' inputs. dtype: what low tensors carry (bfloat16 for fp8, float32 for tf32, whose
    results are wider than their inputs). emulated: computed in fp32 on rounded values, see the module's docstring.
    narrow: a format of inputs only, rounded by arithmetic instead of a cast.
    """

    fmt: NumberFormat
    dtype: torch.dtype
    emulated: bool
    narrow: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "narrow", self.fmt in _NARROW_INPUTS)  # asked at every cast, and hashing takes time

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """An operand of a product, rounded to the format and, where emulated, held in float32."""
        if not self.emulated:
            return x.to(self.dtype)
        if self.narrow:
            return _RoundForward.apply(x.to(torch.float32), self.fmt)  # type: ignore[no-any-return,no-untyped-call]
        return x.to(self.dtype).to(torch.float32)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """A result of an emulated product, in the dtype that the format's own kernel would have given it."""
        return self.received(y).to(self.dtype)

    # Steps of a recurrent layer, which are emulated one by one in float32 (see `_recurrent`).

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """What a product reads of float32 values that were kept in `dtype`."""
        return self.enter(x) if self.narrow else x

    def received(self, y: torch.Tensor) -> torch.Tensor:
        """A product whose backward products will read rounded gradients; its values pass."""
        if not self.narrow:
            return y  # the cast of the result rounds its gradient too
        gradient = TF32 if self.fmt is TF32 else FP8_E5M2
        return _RoundBackward.apply(y, gradient)  # type: ignore[no-any-return,no-untyped-call]

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """float32 values as they come back after being stored in `dtype`."""
        return x.to(self.dtype).to(torch.float32)


@functools.cache
def arithmetic(device_type: str, fmt: NumberFormat) -> Arithmetic:
    """The arithmetic that Castwise uses for `fmt` on a type of device ("cpu", "cuda", ...)."""
    carrier = torch.bfloat16 if fmt in (FP8_E4M3, FP8_E5M2) else _DTYPES[fmt]
    return Arithmetic(fmt, carrier, not computes_natively(device_type, fmt))
