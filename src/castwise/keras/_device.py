"""The device that Keras computes on, as Castwise's table knows it."""

from __future__ import annotations

import functools
from typing import Any

from castwise._extras import require
from castwise.formats import NumberFormat
from castwise.hardware import detected
from castwise.policy import Policy

from ._internals import backend_name

__all__ = ["device_kind", "native", "resolve"]


def device_kind() -> str:
    """The kind of Keras' default device: "cpu", "cuda", "tpu", …"""
    backend = backend_name()
    if backend == "torch":
        from keras.src.backend.torch.core import get_device

        return str(get_device()).partition(":")[0]
    if backend == "jax":
        jax: Any = require("jax", extra="jax")
        return {"gpu": "cuda"}.get(jax.default_backend(), str(jax.default_backend()))
    if backend == "tensorflow":
        tf: Any = require("tensorflow", extra="tensorflow")
        return "cuda" if tf.config.list_logical_devices("GPU") else "cpu"
    return "cpu"


def resolve(policy: Policy) -> Policy:
    """The policy for Keras' device: its overrides applied, "auto" turned into what it computes natively."""
    if policy.format != "auto" and not policy.devices:
        return policy
    return policy.resolve(detected(device_kind()))


@functools.cache
def native(kind: str, fmt: NumberFormat) -> bool:
    """Whether a kind of device computes in a format itself; accelerators do, a CPU where it has the instructions."""
    device = detected(kind)
    return kind != "cpu" or (device is not None and device.native(fmt))
