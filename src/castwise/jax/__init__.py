"""Mixed precision for JAX: `autocast` for any function, and loss scaling as a value."""

from __future__ import annotations

from castwise._extras import require

require("jax", extra="jax")

from ._plan import Plan  # noqa: E402
from .autocast import autocast  # noqa: E402
from .named import named_layers  # noqa: E402
from .optax import skip_bad_steps, with_loss_scale  # noqa: E402
from .planning import Prepared, plan, prepare  # noqa: E402
from .report import OpReport, Report, report  # noqa: E402
from .scaling import LossScale, all_finite, value_and_grad  # noqa: E402

__all__ = [
    "LossScale",
    "OpReport",
    "Plan",
    "Prepared",
    "Report",
    "all_finite",
    "autocast",
    "named_layers",
    "plan",
    "prepare",
    "report",
    "skip_bad_steps",
    "value_and_grad",
    "with_loss_scale",
]
