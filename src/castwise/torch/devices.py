"""Which `castwise.hardware.Device` a torch device type is on this machine, and policies resolved for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from castwise.hardware import Device, detected
from castwise.policy import Policy


def device_of(device_type: str) -> Device | None:
    """The device behind a torch device type ("cpu", "cuda", "mps", "xpu", ...); None where this machine has none."""
    kind = "rocm" if device_type == "cuda" and torch.version.hip else device_type
    return detected(kind)


def resolve(policy: Policy, device_type: str) -> Policy:
    """The policy with this device's overrides, and with "auto" turned into the format that it computes natively."""
    return policy.resolve(device_of(device_type))


def tf32(device_type: str, allowed: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, float32 products on CUDA devices may (or may not) round their inputs to TF32; afterwards it is
    as before.

    torch keeps this setting for the whole process, so other threads see it while it is changed. Elsewhere than on CUDA
    devices there is nothing to set.
    """
    return _tf32(allowed) if device_type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    restore = _set_tf32(allowed)
    try:
        yield
    finally:
        restore()


# What torch's own `flags()` contexts use: a program may have forbidden changes of these flags outside of a bracket, and
# the change here is one, as it is undone when the region is left.
_bracketed: Callable[[], contextlib.AbstractContextManager[None]] = getattr(
    torch.backends, "__allow_nonbracketed_mutation"
)


def _set_tf32(allowed: bool) -> Callable[[], None]:
    cudnn = torch.backends.cudnn
    try:
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # the program uses torch's newer settings, beside which the older ones cannot be read
        return _set_precisions("tf32" if allowed else "ieee")
    if (before[0] != "highest") != allowed:
        torch.set_float32_matmul_precision("high" if allowed else "highest")
    with _bracketed():
        cudnn.allow_tf32 = allowed

    def restore() -> None:
        if torch.get_float32_matmul_precision() != before[0]:
            torch.set_float32_matmul_precision(before[0])
        with _bracketed():
            cudnn.allow_tf32 = before[1]

    return restore


def _set_precisions(precision: str) -> Callable[[], None]:
    cudnn: Any = torch.backends.cudnn
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = precision

    def restore() -> None:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value

    return restore
