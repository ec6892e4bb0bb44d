"""Paired comparison of one arm with the reference, honest about few seeds.

Every arm trains from the same seeds and the same data order as fp32, so the seed's own luck cancels in the
difference of the two runs. What is left is judged by a t interval over the seeds. Three things keep small samples
honest: the quantile of Student's t at n - 1 degrees of freedom (2.9 at three seeds, not 1.6), a floor under the
standard deviation where the metric moves in steps (an accuracy over 300 images cannot show less than 1/300), and the
smallest true difference that this many seeds would have found four times out of five.

All differences are *worsenings*: positive means the arm is worse than fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "POWER",
    "SAFE_CONFIDENCE",
    "UNSAFE_CONFIDENCE",
    "PairedDifference",
    "Trend",
    "gain_share",
    "improvement",
    "paired_difference",
    "resolution_of",
    "seeds_needed",
    "spread",
    "trend",
]

SAFE_CONFIDENCE = 0.95
"""One-sided confidence that a worsening is below the margin. Two one-sided tests at this level are a 90 % interval."""

UNSAFE_CONFIDENCE = 0.99
"""One-sided confidence that a worsening is above the margin: an accusation needs more evidence than a doubt."""

POWER = 0.8
"""Chance of finding a true difference of the size called detectable: the customary four out of five."""

# The smallest gap seen may itself be a few steps wide; how far a multiple of the step may be from a whole number.
_LARGEST_DIVISOR, _WHOLE = 12, 0.02
_SIGN_TEST_SEEDS = 5  # five seeds all on one side of the margin happen by chance once in 32


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """How much worse an arm is than fp32, over the seeds that both finished; in units of the quantity compared.

    Attributes:
        count: pairs compared.
        mean: mean worsening (negative: the arm is better).
        deviation: standard deviation of one pair's worsening, not below what the metric's steps allow.
        lower, upper: one-sided 95 % bounds of the mean worsening; together a 90 % interval. Infinite with one pair.
        certain_lower: one-sided 99 % lower bound.
        detectable: the smallest true worsening found four times out of five at 95 %. Infinite with one pair.
        each: the worsening of each pair, in seed order.
    """

    count: int
    mean: float
    deviation: float
    lower: float
    upper: float
    certain_lower: float
    detectable: float
    each: tuple[float, ...]

    def below(self, margin: float) -> bool:
        """Whether the worsening is below ``margin``, at 95 % confidence."""
        return self.upper < margin

    def above(self, margin: float) -> bool:
        """Whether the worsening is above ``margin``.

        Either by the t bound at 99 %, or because at least five seeds agree without exception (a sign test): a few
        seeds that fail badly make the deviation so large that the t bound alone would see nothing.
        """
        if self.count < 2:
            return False
        unanimous = self.count >= _SIGN_TEST_SEEDS and min(self.each) > margin
        return self.certain_lower > margin or unanimous

    @property
    def equivalent_at(self) -> float:
        """The smallest margin at which arm and fp32 would be called equivalent, in both directions."""
        return max(abs(self.lower), abs(self.upper))


def paired_difference(
    arm: Sequence[float], reference: Sequence[float], *, higher_is_better: bool, resolution: float = 0.0
) -> PairedDifference:
    """Compare ``arm`` with ``reference``, seed by seed.

    Args:
        arm, reference: one value per seed, in the same order. Pairs in which either is not finite are left out: a run
            that did not end with a number is judged by itself, not averaged.
        higher_is_better: the direction of the quantity.
        resolution: the smallest step in which the quantity moves; 0 where it is continuous.
    """
    if len(arm) != len(reference):
        raise ValueError(f"{len(arm)} values against {len(reference)}: give one value per seed in both")
    sign = -1.0 if higher_is_better else 1.0
    each = tuple(sign * (a - b) for a, b in zip(arm, reference, strict=True) if math.isfinite(a) and math.isfinite(b))
    count = len(each)
    if count == 0:
        return PairedDifference(0, math.nan, math.nan, -math.inf, math.inf, -math.inf, math.inf, each)
    mean = math.fsum(each) / count
    if count == 1:
        return PairedDifference(1, mean, math.nan, -math.inf, math.inf, -math.inf, math.inf, each)
    # Two values, each rounded to a step of width r, differ by an error of variance 2·r²/12.
    floor = resolution / math.sqrt(6.0)
    deviation = max(float(np.std(each, ddof=1)), floor)
    error = deviation / math.sqrt(count)
    half = _t_quantile(SAFE_CONFIDENCE, count) * error
    return PairedDifference(
        count=count,
        mean=mean,
        deviation=deviation,
        lower=mean - half,
        upper=mean + half,
        certain_lower=mean - _t_quantile(UNSAFE_CONFIDENCE, count) * error,
        detectable=_detectable(deviation, count),
        each=each,
    )


def seeds_needed(deviation: float, margin: float, most: int = 1000) -> int | None:
    """The fewest seeds with which a worsening of ``margin`` would be detectable; None where ``most`` do not suffice."""
    if not margin > 0 or not math.isfinite(deviation):
        return None
    return next((n for n in range(2, most + 1) if _detectable(deviation, n) <= margin), None)


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds (n - 1); NaN with fewer than two finite values."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan


def resolution_of(values: Sequence[float]) -> float:
    """The step in which a metric moves, from values seen: 1/N for an accuracy over N samples, 0 for a continuous one.

    A step is believed only where all differences between neighbouring values are whole multiples of it.
    """
    distinct = np.unique([value for value in values if math.isfinite(value)])
    if distinct.size < 2:
        return 0.0
    gaps = np.diff(distinct)
    # Sums in another order differ in the last bits; that is not a step of the metric.
    gaps = gaps[gaps > 1e-6 * np.abs(distinct).max()]
    for parts in range(1, _LARGEST_DIVISOR + 1) if gaps.size else ():
        multiples = gaps * parts / gaps.min()
        if np.abs(multiples - np.round(multiples)).max() < _WHOLE:
            return float(gaps.min()) / parts
    return 0.0


@dataclass(frozen=True, slots=True)
class Trend:
    """How the worsening changes with training, from the second half of the evaluations.

    Attributes:
        slope: mean change of the worsening per step, over the seeds.
        lower: one-sided 95 % lower bound of it; minus infinity with fewer than two seeds.
        ahead: the mean worsening if the trend went on for as many steps again.
    """

    slope: float
    lower: float
    ahead: float

    def grows_past(self, margin: float) -> bool:
        """Whether the gap is certainly growing and would pass ``margin`` before training has doubled."""
        return self.lower > 0.0 and self.ahead > margin


def trend(worsenings: Sequence[Sequence[float]], steps: Sequence[int]) -> Trend | None:
    """Fit a line to each seed's worsening over the second half of ``steps``; None where too little is there.

    Args:
        worsenings: per seed, the worsening at each of ``steps``.
        steps: the optimizer steps at which evaluations were made, increasing.
    """
    if len(steps) < 4 or len(worsenings) < 2:
        return None
    half = len(steps) // 2
    x = np.asarray(steps[half:], dtype=np.float64)
    rows = np.asarray([list(row[half : len(steps)]) for row in worsenings], dtype=np.float64)
    if rows.shape[1] != x.size or not np.isfinite(rows).all():
        return None
    centred = x - x.mean()
    slopes = rows @ centred / float(centred @ centred)
    deviation = float(np.std(slopes, ddof=1))
    slope = float(slopes.mean())
    lower = slope - _t_quantile(SAFE_CONFIDENCE, len(slopes)) * deviation / math.sqrt(len(slopes))
    return Trend(slope=slope, lower=lower, ahead=float(rows[:, -1].mean()) + slope * float(steps[-1]))


def improvement(curve: Sequence[float], *, higher_is_better: bool) -> float:
    """What training gained from the first to the last point of ``curve``; negative where it got worse."""
    if len(curve) < 2:
        return 0.0
    gained = curve[-1] - curve[0]
    return gained if higher_is_better else -gained


def gain_share(curve: Sequence[float], part: float, *, higher_is_better: bool) -> float:
    """The share of the whole gain that came in the last ``part`` of the evaluations.

    A curve that has settled gives about 0, a straight line gives ``part``. Infinite where nothing was gained.
    """
    whole = improvement(curve, higher_is_better=higher_is_better)
    if len(curve) < 2 or not whole > 0:
        return math.inf
    start = len(curve) - 1 - max(1, round(part * (len(curve) - 1)))
    return improvement(curve[start:], higher_is_better=higher_is_better) / whole


def _t_quantile(confidence: float, count: int) -> float:
    from scipy import special  # imported late: it would be half of the time of `import castwise`

    return float(special.stdtrit(count - 1, confidence))


def _detectable(deviation: float, count: int) -> float:
    """The true mean at which a one-sided t test has the stated power, exact through the noncentral t distribution."""
    from scipy import special

    critical = _t_quantile(SAFE_CONFIDENCE, count)
    noncentrality = float(special.nctdtrinc(count - 1, 1.0 - POWER, critical))
    return noncentrality * deviation / math.sqrt(count)
