"""What goes wrong in a conversion."""

from __future__ import annotations

from castwise.errors import CastwiseError

__all__ = ["ConversionError"]


class ConversionError(CastwiseError, ValueError):
    """A model cannot be read, or not be converted to a valid one. Nothing was written. The message names the node."""
