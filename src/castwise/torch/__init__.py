"""Mixed precision for PyTorch: `autocast`, `GradScaler` and the training loop `Amp`."""

from __future__ import annotations

from castwise._extras import require

require("torch", extra="torch")

from ._casts import StaleCastError  # noqa: E402
from ._registry import register_op  # noqa: E402
from .amp import Amp, StepResult  # noqa: E402
from .autocast import autocast, is_autocast_enabled, refresh  # noqa: E402
from .scaler import GradScaler  # noqa: E402

__all__ = [
    "Amp",
    "GradScaler",
    "StaleCastError",
    "StepResult",
    "autocast",
    "is_autocast_enabled",
    "refresh",
    "register_op",
]
