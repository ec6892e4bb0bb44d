"""The guard's decisions, as pure functions: what follows from what, and the same after a checkpoint."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castwise import guard
from castwise.errors import PolicyError
from castwise.guard import Action, Finding, GuardConfig, GuardState, Kind

CONFIG = GuardConfig(give_back_after=10, stop_after=3, patience=2)


def found(kind: Kind) -> Finding:
    return Finding(kind=kind, layer="a", op="mul", scale=65536.0, finite_scale=512.0 if kind is Kind.SCALE else None)


@pytest.mark.parametrize(
    "kind,action",
    [
        (Kind.SCALE, Action.LOWER),
        (Kind.RANGE, Action.RAISE),
        (Kind.BROKEN, Action.SKIP),
        (Kind.DATA, Action.SKIP),
        (Kind.UNKNOWN, Action.SKIP),
    ],
)
def test_each_kind_has_its_remedy(kind: Kind, action: Action) -> None:
    _, move = guard.decide(GuardState(), found(kind), CONFIG)
    assert move.action is action
    assert move.scale == (512.0 if action is Action.LOWER else None)


@pytest.mark.parametrize("kind", [Kind.BROKEN, Kind.DATA, Kind.UNKNOWN])
def test_what_nothing_helps_stops_after_the_given_number_of_steps(kind: Kind) -> None:
    state, actions = GuardState(), []
    for _ in range(3):
        state, move = guard.decide(state, found(kind), CONFIG)
        actions.append(move.action)
    assert actions == [Action.SKIP, Action.SKIP, Action.STOP]


def test_a_healthy_step_starts_the_count_anew() -> None:
    state, _ = guard.decide(GuardState(), found(Kind.DATA), CONFIG)
    state = guard.healthy(state)
    assert state.helpless == state.overflows == 0


def test_the_first_overflows_in_a_row_are_the_scales_own_business() -> None:
    state = GuardState()
    looks = []
    for _ in range(4):
        looks.append(guard.worth_a_look(state, True, 65536.0, True, CONFIG))
        state = guard.ordinary(state)
    assert looks == [False, False, True, True]
    assert guard.worth_a_look(GuardState(), False, 65536.0, True, CONFIG), "a bad loss is no business of the scale"
    assert guard.worth_a_look(GuardState(), True, 1.0, False, CONFIG), "without scaling nothing is ordinary"
    assert guard.worth_a_look(GuardState(), True, 64.0, True, CONFIG), "a scale this low is not"


def test_each_wait_is_twice_the_last() -> None:
    state, waits, step = GuardState(), [], 0
    for _ in range(4):
        state = guard.raised(state, "a", (), step, CONFIG)
        (one,) = state.raised
        waits.append(one.wait)
        assert guard.due(state, step + one.wait - 1) == () and guard.due(state, step + one.wait) == (one,)
        step += one.wait
        state = guard.given_back(state, one)
        assert state.raised == ()
    assert waits == [10, 20, 40, 80]


def test_a_trial_that_fails_doubles_the_wait() -> None:
    state = guard.raised(GuardState(), "a", ("mul",), 0, CONFIG)
    state = guard.postponed(state, state.raised[0], 10)
    assert (state.raised[0].wait, state.raised[0].since) == (20, 10)
    state = guard.postponed(state, state.raised[0], 30)
    assert state.raised[0].wait == 40


KINDS = st.lists(st.tuples(st.sampled_from(list(Kind)), st.booleans()), max_size=30)


def run(kinds: list[tuple[Kind, bool]], interrupted: bool) -> list[str]:
    state, told = GuardState(), []
    for step, (kind, well) in enumerate(kinds):
        if interrupted:
            state = GuardState.from_dict(json.loads(json.dumps(state.to_dict())))
        if well:
            state = guard.healthy(state)
            for one in guard.due(state, step):
                state = guard.postponed(state, one, step) if step % 2 else guard.given_back(state, one)
            continue
        state, move = guard.decide(state, found(kind), CONFIG)
        told.append(f"{step} {move}")
        if move.action is Action.RAISE:
            state = guard.raised(state, "a", (), step, CONFIG)
    return [*told, str(state)]


@given(KINDS)
def test_decisions_are_the_same_through_a_checkpoint(kinds: list[tuple[Kind, bool]]) -> None:
    assert run(kinds, False) == run(kinds, True)


@pytest.mark.parametrize("bad", [{}, {"raised": 3}, {"raised": [{}], "waits": {}, "overflows": 0, "helpless": 0}])
def test_a_state_that_is_none_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(PolicyError, match="Guard state"):
        GuardState.from_dict(bad)


@pytest.mark.parametrize("key", ["patience", "give_back_after", "stop_after", "raise_layers", "warn_scale_below"])
def test_a_wrong_knob_is_named(key: str) -> None:
    with pytest.raises(PolicyError, match=key):
        GuardConfig(**{key: -1})  # type: ignore[arg-type]
