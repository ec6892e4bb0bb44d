"""Mixed precision for TensorFlow graphs: `autocast` for any `tf.function`, `ConcreteFunction` or SavedModel."""

from __future__ import annotations

from castwise._extras import require

require("tensorflow", extra="tensorflow")

from ._errors import ConversionError  # noqa: E402
from ._plan import Plan  # noqa: E402
from .autocast import autocast  # noqa: E402
from .converting import Conversion, convert, verify  # noqa: E402
from .planning import plan  # noqa: E402

__all__ = ["Conversion", "ConversionError", "Plan", "autocast", "convert", "plan", "verify"]
