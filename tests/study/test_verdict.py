"""The verdict, on runs made up so that the right answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from castwise.study.protocol import TaskSpec
from castwise.study.records import Ending, Failure, RunRecord
from castwise.study.verdict import Status, Verdict, judge

SpecOf = Callable[..., TaskSpec]
GOOD = [0.970, 0.972, 0.968, 0.971, 0.969]


def judged(spec: TaskSpec, **arms: list[RunRecord]) -> Verdict:
    return judge(spec, arms, steps=400)


def shifted(by: float) -> list[float]:
    """GOOD, worse by ``by``, and not by exactly the same in every seed."""
    return [value - by + wobble for value, wobble in zip(GOOD, (0.001, -0.001, 0.0, 0.001, -0.001), strict=True)]


def test_an_arm_that_matches_is_safe_and_says_within_what(made: SimpleNamespace, spec_of: SpecOf) -> None:
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD), bf16=made.arm("bf16", shifted(0.0)))
    assert found.arms["bf16"].status is Status.SAFE
    assert found.arms["fp32"].status is Status.SAFE
    assert any("at most" in reason and "margin of 0.01" in reason for reason in found.arms["bf16"].reasons)
    detectable = found.detectable_difference()
    assert detectable is not None
    assert 0 < detectable < 0.005


def test_an_arm_that_is_worse_by_more_than_the_margin_is_unsafe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD), bf16=made.arm("bf16", shifted(0.05)))
    assert found.arms["bf16"].status is Status.UNSAFE
    assert "worse than fp32's by 0.05" in found.arms["bf16"].reasons[0]
    assert "seed-to-seed noise" in found.arms["bf16"].reasons[0]


def test_an_arm_that_is_better_is_safe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD), bf16=made.arm("bf16", shifted(-0.02)))
    assert found.arms["bf16"].status is Status.SAFE


def test_a_certain_but_small_worsening_is_within_the_margin_and_safe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD), bf16=made.arm("bf16", shifted(0.004)))
    assert found.arms["bf16"].differences["accuracy"].lower > 0
    assert found.arms["bf16"].status is Status.SAFE


def test_scattered_results_cannot_tell_and_say_how_many_seeds_would(made: SimpleNamespace, spec_of: SpecOf) -> None:
    scattered = [0.95, 0.99, 0.955, 0.985, 0.96]
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD), bf16=made.arm("bf16", scattered))
    assert found.arms["bf16"].status is Status.CANNOT_TELL
    assert any("seeds would tell" in reason for reason in found.arms["bf16"].reasons)


@pytest.mark.parametrize("seeds", [1, 2])
def test_too_few_seeds_never_make_an_arm_safe(made: SimpleNamespace, spec_of: SpecOf, seeds: int) -> None:
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD[:seeds]), bf16=made.arm("bf16", GOOD[:seeds]))
    assert {arm.status for arm in found.arms.values()} == {Status.CANNOT_TELL}
    assert "too few seeds" in found.arms["bf16"].reasons[0]
    assert found.detectable_difference() is None or seeds == 2


def test_too_few_steps_never_make_an_arm_safe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    runs = {"fp32": made.arm("fp32", GOOD), "bf16": made.arm("bf16", GOOD)}
    found = judge(spec_of(min_steps=500), runs, steps=400)
    assert found.arms["bf16"].status is Status.CANNOT_TELL
    assert "400 steps are too few" in found.arms["bf16"].reasons[0]


def test_too_few_evaluations_never_make_an_arm_safe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    def short(name: str) -> list[RunRecord]:
        return [made.run(name, seed, [0.1, 0.95, final]) for seed, final in enumerate(GOOD)]

    found = judged(spec_of(), fp32=short("fp32"), bf16=short("bf16"))
    assert found.arms["bf16"].status is Status.CANNOT_TELL


def test_where_fp32_breaks_down_nothing_can_be_told(made: SimpleNamespace, spec_of: SpecOf) -> None:
    broken = made.arm("fp32", GOOD)
    broken[2] = made.run("fp32", 2, [0.1, 0.2, 0.3], ended="the loss exploded")
    worse = made.arm("fp16", GOOD, ended="the scale stalled")
    found = judged(spec_of(), fp32=broken, bf16=made.arm("bf16", GOOD), fp16=worse)
    assert {arm.status for arm in found.arms.values()} == {Status.CANNOT_TELL}
    assert "fp32 itself failed on 1 of 5 seeds (the loss exploded)" in found.arms["bf16"].reasons[0]


def test_where_fp32_has_not_learned_nothing_is_safe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    flat = [made.run("fp32", seed, made.settled(0.10, 0.12)) for seed in range(5)]
    found = judged(spec_of(), fp32=flat, bf16=[made.run("bf16", seed, made.settled(0.10, 0.12)) for seed in range(5)])
    assert found.arms["bf16"].status is Status.CANNOT_TELL
    assert "hardly learned" in found.arms["bf16"].reasons[0]


def test_where_fp32_is_still_learning_fast_nothing_is_safe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    line = [0.1 + 0.1 * index for index in range(9)]
    runs = {name: [made.run(name, seed, line) for seed in range(5)] for name in ("fp32", "bf16")}
    found = judged(spec_of(), **runs)
    assert found.arms["bf16"].status is Status.CANNOT_TELL
    assert "train for more steps" in found.arms["bf16"].reasons[0]


def test_where_fp32_skips_its_steps_nothing_is_safe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    skipping = made.arm("fp32", GOOD, skipped=[20] * 8)
    found = judged(spec_of(), fp32=skipping, bf16=made.arm("bf16", GOOD))
    assert found.arms["bf16"].status is Status.CANNOT_TELL


def test_one_run_that_breaks_down_makes_an_arm_unsafe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    runs = made.arm("fp16", GOOD)
    runs[3] = made.run("fp16", 3, [0.1, 0.5, 0.6], ended="the scale stalled")
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD), fp16=runs)
    assert found.arms["fp16"].status is Status.UNSAFE
    assert found.arms["fp16"].failed_seeds == (3,)
    assert "1 of 5 runs broke down (seed 3: the scale stalled)" in found.arms["fp16"].reasons[0]


def test_a_run_that_breaks_down_is_unsafe_even_with_one_seed(made: SimpleNamespace, spec_of: SpecOf) -> None:
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD[:1]), fp16=made.arm("fp16", [0.2], ended="the scale stalled"))
    assert found.arms["fp16"].status is Status.UNSAFE
    assert found.arms["fp32"].status is Status.CANNOT_TELL


def test_seeds_that_fail_by_chance_alone_are_not_averaged_away(made: SimpleNamespace, spec_of: SpecOf) -> None:
    """One seed learns nothing: its huge difference makes the t interval so wide that a mean could not tell."""
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD), fp16=made.arm("fp16", [*GOOD[:4], 0.12]))
    assert found.arms["fp16"].status is Status.UNSAFE
    assert found.arms["fp16"].failed_seeds == (4,)


def test_a_bad_seed_that_fp32_has_too_is_no_failure_of_the_arm(made: SimpleNamespace, spec_of: SpecOf) -> None:
    lucky, unlucky = [*GOOD[:4], 0.3], [0.3, *GOOD[1:]]
    found = judged(spec_of(), fp32=made.arm("fp32", lucky), bf16=made.arm("bf16", unlucky))
    assert found.arms["bf16"].failed_seeds == ()
    assert found.arms["bf16"].status is Status.CANNOT_TELL


def test_an_arm_that_skips_most_of_its_later_steps_is_unsafe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    many, some, early = [40] * 8, [10] * 8, [25, 0, 0, 0, 0, 0, 0, 0]
    verdicts = {
        name: judged(spec_of(), fp32=made.arm("fp32", GOOD), fp16=made.arm("fp16", GOOD, skipped=skipped)).arms["fp16"]
        for name, skipped in {"many": many, "some": some, "early": early}.items()
    }
    assert verdicts["many"].status is Status.UNSAFE
    assert "80%" in verdicts["many"].reasons[0]
    assert verdicts["some"].status is Status.CANNOT_TELL
    assert verdicts["early"].status is Status.SAFE


def test_a_gap_that_is_small_but_growing_withholds_safe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    def sliding(seed: int, final: float) -> RunRecord:
        curve = made.settled(0.1, final)
        slide = [0.0, 0, 0, 0, 0, 0.0018, 0.0036, 0.0054, 0.0072 + 1e-4 * seed]
        return made.run("bf16", seed, [value - lost for value, lost in zip(curve, slide, strict=True)])

    runs = [sliding(seed, final) for seed, final in enumerate(GOOD)]
    found = judged(spec_of(loss_margin=0.5), fp32=made.arm("fp32", GOOD), bf16=runs)
    assert found.arms["bf16"].differences["accuracy"].upper < 0.01
    assert found.arms["bf16"].status is Status.CANNOT_TELL
    assert "still growing" in found.arms["bf16"].reasons[0]


def test_a_worse_validation_loss_is_unsafe_though_the_metric_is_the_same(
    made: SimpleNamespace, spec_of: SpecOf
) -> None:
    runs = [
        made.run("bf16", seed, made.settled(0.1, final), loss=made.settled(2.7, 0.6 + 0.01 * seed))
        for seed, final in enumerate(GOOD)
    ]
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD), bf16=runs)
    assert found.arms["bf16"].status is Status.UNSAFE
    assert "validation loss" in found.arms["bf16"].reasons[0]


def test_a_validation_loss_that_is_no_number_is_unsafe(made: SimpleNamespace, spec_of: SpecOf) -> None:
    runs = [
        made.run("fp16", seed, made.settled(0.1, final), loss=[*made.settled(2.7, 0.1)[:-1], math.nan])
        for seed, final in enumerate(GOOD)
    ]
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD), fp16=runs)
    assert found.arms["fp16"].status is Status.UNSAFE
    assert found.arms["fp16"].failed_seeds == (0, 1, 2, 3, 4)


def test_a_task_without_validation_batches_is_judged_by_its_metric_alone(
    made: SimpleNamespace, spec_of: SpecOf
) -> None:
    def bare(name: str) -> list[RunRecord]:
        return [made.run(name, s, made.settled(0.1, f), loss=[math.nan] * 9) for s, f in enumerate(GOOD)]

    found = judged(spec_of(), fp32=bare("fp32"), bf16=bare("bf16"))
    assert [measure.name for measure in found.measures] == ["accuracy"]
    assert found.arms["bf16"].status is Status.SAFE


def test_a_margin_that_nobody_stated_is_a_share_of_what_training_gained(made: SimpleNamespace, spec_of: SpecOf) -> None:
    found = judged(spec_of(margin=None), fp32=made.arm("fp32", GOOD), bf16=made.arm("bf16", GOOD))
    assert found.measures[0].margin == pytest.approx(0.02 * (0.97 - 0.1))
    assert not found.measures[0].stated


def test_a_coarse_metric_leaves_room_for_its_own_steps(made: SimpleNamespace, spec_of: SpecOf) -> None:
    """Ten held-out samples cannot show a worsening of one percent, however equal the arms look."""
    coarse = [made.run("fp32", s, [0.1, 0.5, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]) for s in range(4)]
    same = [made.run("bf16", s, [0.1, 0.5, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]) for s in range(4)]
    assert judged(spec_of(resolution=0.1), fp32=coarse, bf16=same).arms["bf16"].status is Status.CANNOT_TELL
    assert judged(spec_of(resolution=0.001), fp32=coarse, bf16=same).arms["bf16"].status is Status.SAFE


def test_the_seeds_that_fail_are_counted_whatever_kind_of_failure(made: SimpleNamespace, spec_of: SpecOf) -> None:
    runs = made.arm("fp16", GOOD)
    for seed, failure in enumerate(Failure):
        record = made.run("fp16", seed, [0.1, 0.2])
        runs[seed] = RunRecord("fp16", seed, "f", record.initial, record.intervals, Ending(failure, 50, str(failure)))
    found = judged(spec_of(), fp32=made.arm("fp32", GOOD), fp16=runs)
    assert found.arms["fp16"].failed_seeds == (0, 1, 2)
    assert math.isnan(runs[0].final.metric)
