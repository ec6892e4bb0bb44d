"""What goes wrong in a conversion."""

from __future__ import annotations

from castwise.errors import CastwiseError

__all__ = ["ConversionError"]


class ConversionError(CastwiseError, ValueError):
    """A SavedModel cannot be read, or not be converted within the tolerance. Nothing was written."""
