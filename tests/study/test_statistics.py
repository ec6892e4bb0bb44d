"""The statistics of a study: few seeds must not look like many."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castwise.study.statistics import (
    gain_share,
    improvement,
    paired_difference,
    resolution_of,
    seeds_needed,
    spread,
    trend,
)

VALUES = st.floats(-1e3, 1e3, allow_nan=False)
PAIRS = st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=12)


def _worsenings(rng: np.random.Generator, runs: int, seeds: int, mean: float) -> np.ndarray:
    return rng.normal(mean, 1.0, (runs, seeds))


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_a_worsening_of_exactly_the_margin_is_called_safe_at_most_one_time_in_twenty(seeds: int) -> None:
    rng = np.random.default_rng(1)
    draws = _worsenings(rng, 4000, seeds, mean=1.0)
    wrong = np.mean([paired_difference(row, [0.0] * seeds, higher_is_better=False).below(1.0) for row in draws])
    # 4,000 draws have a standard error of 0.0034
    assert wrong == pytest.approx(0.05, abs=0.014)


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_no_difference_is_hardly_ever_called_above_a_margin_of_half_the_noise(seeds: int) -> None:
    rng = np.random.default_rng(2)
    draws = _worsenings(rng, 4000, seeds, mean=0.0)
    wrong = np.mean([paired_difference(row, [0.0] * seeds, higher_is_better=False).above(0.5) for row in draws])
    assert wrong < 0.006


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_detectable_difference_is_detected_four_times_out_of_five(seeds: int) -> None:
    rng = np.random.default_rng(3)
    # The true deviation is 1, so the detectable difference of a sample whose deviation happens to be 1 is the one to
    # test.
    sample = np.linspace(-1.0, 1.0, seeds)
    sample = list(sample / sample.std(ddof=1))
    size = paired_difference(sample, [0.0] * seeds, higher_is_better=False).detectable
    draws = _worsenings(rng, 4000, seeds, mean=size)
    seen = np.mean([paired_difference(row, [0.0] * seeds, higher_is_better=False).lower > 0 for row in draws])
    assert seen == pytest.approx(0.8, abs=0.025)


def test_one_seed_says_nothing() -> None:
    found = paired_difference([0.5], [0.9], higher_is_better=True)
    assert found.mean == pytest.approx(0.4)
    assert (found.lower, found.upper, found.detectable) == (-math.inf, math.inf, math.inf)
    assert not found.below(1e9)
    assert not found.above(-1e9)


def test_equal_accuracies_still_leave_room_for_one_step_of_the_metric() -> None:
    same = [0.97, 0.97, 0.97]
    assert paired_difference(same, same, higher_is_better=True).upper == 0.0
    found = paired_difference(same, same, higher_is_better=True, resolution=0.01)
    assert 0.005 < found.upper < 0.01
    assert not found.below(0.005)


def test_seeds_that_all_fail_by_different_amounts_are_above_the_margin_though_their_spread_is_huge() -> None:
    scattered = [0.02, 0.5, 0.03, 40.0, 0.04]
    found = paired_difference(scattered, [0.0] * 5, higher_is_better=False)
    assert found.certain_lower < 0
    assert found.above(0.01)
    assert not paired_difference(scattered[:4], [0.0] * 4, higher_is_better=False).above(0.01)


def test_runs_without_a_number_are_left_out_of_the_comparison() -> None:
    found = paired_difference([1.0, math.nan, 2.0], [1.0, 1.0, math.inf], higher_is_better=False)
    assert (found.count, found.each) == (1, (0.0,))
    assert paired_difference([math.nan], [1.0], higher_is_better=False).count == 0


def test_unequal_numbers_of_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="2 values against 1"):
        paired_difference([1.0, 2.0], [1.0], higher_is_better=False)


@given(PAIRS)
def test_exchanging_arm_and_reference_mirrors_the_interval(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    forth = paired_difference(ours, theirs, higher_is_better=False)
    back = paired_difference(theirs, ours, higher_is_better=False)
    assert forth.lower == pytest.approx(-back.upper, abs=1e-9)
    assert forth.mean == pytest.approx(-back.mean, abs=1e-9)


@given(PAIRS, VALUES)
def test_a_shift_of_both_changes_nothing(pairs: list[tuple[float, float]], shift: float) -> None:
    ours, theirs = zip(*pairs, strict=True)
    plain = paired_difference(ours, theirs, higher_is_better=True)
    moved = paired_difference([x + shift for x in ours], [x + shift for x in theirs], higher_is_better=True)
    assert moved.upper == pytest.approx(plain.upper, abs=1e-6)


@given(PAIRS, st.floats(0, 100))
def test_nothing_is_both_below_and_above_a_margin(pairs: list[tuple[float, float]], margin: float) -> None:
    ours, theirs = zip(*pairs, strict=True)
    found = paired_difference(ours, theirs, higher_is_better=False)
    assert not (found.below(margin) and found.above(margin))


def test_the_seeds_needed_are_those_at_which_the_margin_becomes_detectable() -> None:
    needed = seeds_needed(deviation=1.0, margin=1.0)
    assert needed == 8
    sample = np.linspace(-1.0, 1.0, needed)
    sample /= sample.std(ddof=1)
    assert paired_difference(sample, [0.0] * needed, higher_is_better=False).detectable <= 1.0
    fewer = np.linspace(-1.0, 1.0, needed - 1)
    fewer /= fewer.std(ddof=1)
    assert paired_difference(fewer, [0.0] * (needed - 1), higher_is_better=False).detectable > 1.0
    assert seeds_needed(1.0, 0.0) is None
    assert seeds_needed(1.0, 1e-4, most=50) is None


def test_the_resolution_of_an_accuracy_is_one_sample() -> None:
    assert resolution_of([36 / 360, 111 / 360, 323 / 360, 324 / 360]) == pytest.approx(1 / 360)
    assert resolution_of([30 / 360, 32 / 360, 35 / 360]) == pytest.approx(1 / 360)
    assert resolution_of(list(np.arange(797, dtype=np.float32)[::7] / np.float32(797))) == pytest.approx(
        7 / 797, rel=1e-3
    )
    assert resolution_of([0.5, 0.5]) == 0.0
    assert resolution_of([]) == 0.0


def test_a_continuous_metric_has_no_resolution() -> None:
    assert resolution_of(np.random.default_rng(0).random(30).tolist()) == 0.0


def test_rounding_in_the_last_bits_is_no_step_of_a_metric() -> None:
    assert resolution_of([0.3, 0.1 + 0.2, 0.4]) == pytest.approx(0.1)


def test_spread_is_the_sample_deviation_of_the_finite_values() -> None:
    assert spread([1.0, 3.0, math.nan]) == pytest.approx(math.sqrt(2))
    assert math.isnan(spread([1.0]))


STEPS = [10, 20, 30, 40, 50, 60, 70, 80]


def test_a_gap_that_grows_in_every_seed_is_seen_before_it_reaches_the_margin() -> None:
    rows = [[0.001 * step * (1 + 0.1 * seed) for step in STEPS] for seed in range(4)]
    found = trend(rows, STEPS)
    assert found is not None
    assert found.slope == pytest.approx(0.00115)
    assert found.ahead == pytest.approx(2 * 0.00115 * 80)
    assert found.grows_past(0.1)
    assert not found.grows_past(1.0)


def test_a_gap_that_swings_is_no_trend() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(0.0, 1.0, (5, len(STEPS))).tolist()
    found = trend(rows, STEPS)
    assert found is not None
    assert not found.grows_past(0.5)


def test_a_constant_gap_does_not_grow() -> None:
    found = trend([[0.5] * len(STEPS), [0.4] * len(STEPS)], STEPS)
    assert found is not None
    assert not found.grows_past(0.1)


def test_too_few_points_or_runs_have_no_trend() -> None:
    assert trend([[1.0, 2.0, 3.0]] * 3, STEPS[:3]) is None
    assert trend([[1.0] * 8], STEPS) is None
    assert trend([[1.0] * 8, [1.0] * 7 + [math.nan]], STEPS) is None


def test_improvement_has_the_sign_of_getting_better() -> None:
    assert improvement([2.0, 1.0], higher_is_better=False) == 1.0
    assert improvement([2.0, 1.0], higher_is_better=True) == -1.0
    assert improvement([2.0], higher_is_better=True) == 0.0


def test_a_straight_line_gains_a_quarter_in_its_last_quarter_and_a_settled_curve_nothing() -> None:
    assert gain_share([8, 7, 6, 5, 4, 3, 2, 1, 0], 0.25, higher_is_better=False) == pytest.approx(0.25)
    assert gain_share([8, 2, 1, 1, 1, 1, 1, 1, 1], 0.25, higher_is_better=False) == 0.0
    assert gain_share([1, 2, 3], 0.25, higher_is_better=False) == math.inf
