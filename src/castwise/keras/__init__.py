"""Mixed precision for Keras 3 on TensorFlow, JAX and PyTorch: one policy, the same rules beneath each."""

from __future__ import annotations

from castwise._extras import require

require("keras", extra="keras")

from .apply import apply  # noqa: E402
from .callbacks import StopOnCollapse, Watch  # noqa: E402
from .global_policy import set_global_policy  # noqa: E402
from .record import OpRecord, Records, record  # noqa: E402
from .saving import load_model  # noqa: E402
from .scaling import LossScaleOptimizer  # noqa: E402

__all__ = [
    "LossScaleOptimizer",
    "OpRecord",
    "Records",
    "StopOnCollapse",
    "Watch",
    "apply",
    "load_model",
    "record",
    "set_global_policy",
]
