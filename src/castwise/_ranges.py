"""Which values a tensor took, against what a format can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from castwise.errors import PlanError
from castwise.formats import FORMATS, parse_format, range_shares

__all__ = ["RangeRecord", "suggest_loss_scale"]

# Later steps have larger gradients than those seen: leave room for two doublings below the format's largest value.
_GRADIENT_HEADROOM = 4.0


@dataclass(frozen=True, slots=True)
class RangeRecord:
    """The range of all values of a tensor that were seen, on one batch or on several."""

    largest: float = 0.0
    """max |value|."""
    count: int = 0
    overflow: float = 0.0
    """Share of values beyond the format's largest."""
    underflow: float = 0.0
    """Share of values that are not 0 and would become 0."""
    subnormal: float = 0.0
    """Share of values that would become subnormal and lose precision."""

    @classmethod
    def of(cls, values: ArrayLike, fmt: str) -> Self:
        """The record of an array, against the range of ``fmt``. Values that are not finite count as overflow."""
        array = np.asarray(values)
        if not array.size:
            return cls()
        shares = range_shares(array, parse_format(fmt))
        nonzero = shares.nonzero / array.size
        overflow = (shares.overflow * shares.count + shares.nonfinite) / array.size
        largest = float(np.abs(array.astype(np.float64, copy=False)).max())
        largest = math.inf if math.isnan(largest) else largest
        return cls(largest, array.size, overflow, shares.underflow * nonzero, shares.subnormal * nonzero)

    def merge(self, other: Self) -> Self:
        """The record of both sets of values together."""
        count = self.count + other.count
        if not count:
            return self
        mine, theirs = self.count / count, other.count / count
        return type(self)(
            max(self.largest, other.largest),
            count,
            self.overflow * mine + other.overflow * theirs,
            self.underflow * mine + other.underflow * theirs,
            self.subnormal * mine + other.subnormal * theirs,
        )

    def fits(self, fmt: str, headroom: float = 1.0) -> bool:
        """Whether all values, and values ``headroom`` times as large, are within the range of ``fmt``."""
        return self.overflow == 0 and self.largest * headroom <= FORMATS[fmt].max


def suggest_loss_scale(gradients: Iterable[RangeRecord], fmt: str) -> float:
    """The largest power of two that keeps all gradients seen, and four times larger ones, within the range of ``fmt``.

    Raises PlanError where no gradient was recorded, or one was not finite.
    """
    largest = max((record.largest for record in gradients), default=0.0)
    if not (0 < largest < math.inf):
        raise PlanError(
            "A loss scale cannot be suggested: no gradient was recorded, or all are zero, or one is not finite. "
            "Calibrate on a batch on which the fp32 model trains."
        )
    return 2.0 ** math.floor(math.log2(FORMATS[fmt].max / (_GRADIENT_HEADROOM * largest)))
