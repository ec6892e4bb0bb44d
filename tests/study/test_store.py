"""Records and the folder of a study: what is written comes back, and what does not belong together is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castwise.errors import StudyError
from castwise.study.records import Ending, Evaluation, Failure, Interval, RunRecord, from_json, to_json
from castwise.study.store import Store

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.just(math.nan)
EVALUATIONS = st.builds(Evaluation, NUMBERS, NUMBERS)
INTERVALS = st.builds(
    Interval,
    step=st.integers(1, 10**6),
    loss=NUMBERS,
    evaluation=EVALUATIONS,
    grad_norms=st.lists(NUMBERS, max_size=3).map(tuple),
    direction=NUMBERS,
    scale=NUMBERS,
    skipped=st.integers(0, 100),
    samples=st.integers(0, 100),
    seconds=NUMBERS,
)
RECORDS = st.builds(
    RunRecord,
    arm=st.text(max_size=10),
    seed=st.integers(0, 100),
    fingerprint=st.text(max_size=5),
    initial=EVALUATIONS,
    intervals=st.lists(INTERVALS, max_size=3).map(tuple),
    ending=st.none() | st.builds(Ending, st.sampled_from(Failure), st.integers(0, 9), st.text(max_size=5)),
    emulated=st.booleans(),
    memory=st.dictionaries(st.text(max_size=5), st.integers(0, 10**12), max_size=2),
)
SETTINGS = {"task": "digits", "steps": 100}


@given(RECORDS)
def test_records_come_back_from_json_bit_for_bit(record: RunRecord) -> None:
    text = json.dumps(to_json(record), allow_nan=False)
    back = from_json(json.loads(text))
    assert repr(back) == repr(record)  # repr, since NaN differs from itself
    assert json.dumps(to_json(back), allow_nan=False) == text


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "study")
    found.begin(SETTINGS, resume=False)
    return found


def test_a_run_in_progress_is_found_again_with_its_state(store: Store, made: SimpleNamespace) -> None:
    record = made.run("fp16", 2, [0.1, 0.5])
    store.checkpoint(record, b"\x00state\xff")
    found = store.running("fp16", 2)
    assert found is not None
    assert (to_json(found[0]), found[1]) == (to_json(record), b"\x00state\xff")
    assert store.running("fp16", 1) is None
    assert store.running("bf16", 2) is None


def test_a_finished_run_gives_up_its_place_and_leaves_its_state_where_asked(
    store: Store, made: SimpleNamespace
) -> None:
    for seed, keep in ((0, True), (1, False)):
        record = made.run("fp16", seed, [0.1, 0.5])
        store.checkpoint(record, f"state {seed}".encode())
        store.finish(record, keep_state=keep)
        assert store.finished("fp16", seed) is not None
        assert store.running("fp16", seed) is None
    assert store.last_state("fp16") == b"state 0"
    assert store.last_state("bf16") is None


def test_a_kill_between_the_two_steps_of_finishing_is_made_good_on_resume(store: Store, made: SimpleNamespace) -> None:
    record = made.run("fp16", 0, [0.1, 0.5])
    store.checkpoint(record, b"state")
    running = store.state / "running.bin"
    kept = running.read_bytes()
    store.finish(record, keep_state=True)
    store.state.joinpath("fp16.last.bin").unlink()
    running.write_bytes(kept)
    store.begin(SETTINGS, resume=True)
    assert store.last_state("fp16") == b"state"
    assert not running.exists()


def test_arm_names_may_hold_any_character(store: Store, made: SimpleNamespace) -> None:
    record = made.run("a/b ü+c", 0, [0.1, 0.5])
    store.finish(record, keep_state=False)
    assert store.finished("a/b ü+c", 0) is not None
    assert store.finished("a", 0) is None


def test_an_interrupted_study_is_not_overwritten_by_accident(store: Store, made: SimpleNamespace) -> None:
    store.checkpoint(made.run("fp16", 0, [0.1]), b"state")
    with pytest.raises(StudyError, match="--resume"):
        store.begin(SETTINGS, resume=False)


def test_a_finished_study_is_replaced_and_other_files_are_left_alone(store: Store, made: SimpleNamespace) -> None:
    store.finish(made.run("fp16", 0, [0.1, 0.5]), keep_state=False)
    (store.root / "results.json").write_text("{}")
    (store.root / "notes.txt").write_text("mine")
    (store.state / "notes.txt").write_text("mine")
    store.begin(SETTINGS, resume=False)
    assert store.finished("fp16", 0) is None
    assert not (store.root / "results.json").exists()
    assert (store.root / "notes.txt").read_text() == (store.state / "notes.txt").read_text() == "mine"


def test_a_finished_study_is_kept_on_resume(store: Store, made: SimpleNamespace) -> None:
    store.finish(made.run("fp16", 0, [0.1, 0.5]), keep_state=False)
    (store.root / "results.json").write_text("{}")
    store.begin(SETTINGS, resume=True)
    assert store.finished("fp16", 0) is not None


@pytest.mark.parametrize("resume", [True, False])
def test_a_study_whose_task_failed_before_its_first_interval_is_begun_anew(store: Store, resume: bool) -> None:
    """Who corrects a mistake in the task runs the same command again."""
    store.begin(SETTINGS | {"task file": "corrected"}, resume=resume)
    assert json.loads((store.state / "settings.json").read_text()) == SETTINGS | {"task file": "corrected"}


def test_two_studies_do_not_write_to_one_folder_at_once(store: Store) -> None:
    with store.held(), pytest.raises(StudyError, match="Another study is writing"), store.held():
        pass
    with store.held():
        pass


def test_resuming_with_other_settings_names_what_changed(store: Store, made: SimpleNamespace) -> None:
    store.checkpoint(made.run("fp16", 0, [0.1]), b"state")
    with pytest.raises(StudyError, match=r"steps = 100, and this one has 200"):
        store.begin(SETTINGS | {"steps": 200}, resume=True)
    with pytest.raises(StudyError, match="torch"):
        store.begin(SETTINGS | {"torch": "9"}, resume=True)


def test_resuming_where_nothing_is_begins(tmp_path: Path) -> None:
    fresh = Store(tmp_path / "new")
    fresh.begin(SETTINGS, resume=True)
    fresh.begin(SETTINGS, resume=True)


def test_a_damaged_record_names_its_file(store: Store) -> None:
    (store.state / "fp16.seed0.json").write_text("{}")
    with pytest.raises(StudyError, match=r"fp16\.seed0\.json is not a run"):
        store.finished("fp16", 0)
    (store.state / "settings.json").write_text("{")
    with pytest.raises(StudyError, match=r"settings\.json is damaged"):
        store.begin(SETTINGS, resume=True)


@pytest.mark.parametrize("left", [0, 7, 40, -1])
def test_a_cut_off_checkpoint_names_its_file(store: Store, made: SimpleNamespace, left: int) -> None:
    store.checkpoint(made.run("fp16", 0, [0.1]), b"state")
    path = store.state / "running.bin"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(StudyError, match=r"running\.bin is not a run .* or it is damaged"):
        store.running("fp16", 0)
    with pytest.raises(StudyError, match=r"running\.bin"):
        store.begin(SETTINGS, resume=True)


def test_a_run_that_ended_early_has_no_final_value(made: SimpleNamespace) -> None:
    whole, broken = made.run("a", 0, [0.1, 0.5]), made.run("a", 0, [0.1, 0.5], ended="boom")
    assert whole.final.metric == 0.5
    assert math.isnan(broken.final.metric)


def test_the_peak_loss_is_the_largest_finite_one(made: SimpleNamespace) -> None:
    assert made.run("a", 0, [0.1, 0.5, 0.2], loss=[1.0, math.nan, -7.0]).peak_loss == 7.0
    assert math.isnan(made.run("a", 0, [0.1, 0.2], loss=[math.nan, math.nan]).peak_loss)
