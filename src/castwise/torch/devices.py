"""Which `castwise.hardware.Device` a torch device type is on this machine, and policies resolved for it."""

from __future__ import annotations

import functools

import torch

from castwise.hardware import Device, detect
from castwise.policy import Policy


@functools.cache
def device_of(device_type: str) -> Device | None:
    """The device behind a torch device type ("cpu", "cuda", "mps", "xpu", ...); None where this machine has none."""
    kind = "rocm" if device_type == "cuda" and torch.version.hip else device_type
    try:
        return detect(kind)
    except ValueError:
        return None


def resolve(policy: Policy, device_type: str) -> Policy:
    """The policy with this device's overrides, and with "auto" turned into the format that it computes natively."""
    return policy.resolve(device_of(device_type))
