"""Mixed precision for PyTorch: `autocast`, `GradScaler`, the training loop `Amp`, and planned models."""

from __future__ import annotations

from castwise._extras import require

require("torch", extra="torch")

from ._casts import StaleCastError  # noqa: E402
from ._registry import register_op  # noqa: E402
from .amp import Amp, StepResult  # noqa: E402
from .apply import apply  # noqa: E402
from .autocast import autocast, is_autocast_enabled, refresh  # noqa: E402
from .capture import CaptureError  # noqa: E402
from .compare import compare  # noqa: E402
from .functions import custom_bwd, custom_fwd  # noqa: E402
from .inference import compile, for_inference  # noqa: E402
from .lion import Lion  # noqa: E402
from .planning import Plan, plan  # noqa: E402
from .scaler import GradScaler  # noqa: E402
from .watcher import watch  # noqa: E402

__all__ = [
    "Amp",
    "CaptureError",
    "GradScaler",
    "Lion",
    "Plan",
    "StaleCastError",
    "StepResult",
    "apply",
    "autocast",
    "compare",
    "compile",
    "custom_bwd",
    "custom_fwd",
    "for_inference",
    "is_autocast_enabled",
    "plan",
    "refresh",
    "register_op",
    "watch",
]
