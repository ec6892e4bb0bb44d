"""The loss scale: laws over all knobs and histories, what each knob means, and the same answers on every device."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from castwise.errors import FormatError, NonFiniteError, PolicyError
from castwise.formats import BF16, FORMATS, FP8_E4M3, FP16, NumberFormat, round_to_nearest
from castwise.scaling import (
    Outcome,
    ScaleState,
    ScalingConfig,
    advance,
    gradient_histogram,
    initial_state,
    scale_from_histogram,
    stalled_message,
    transition,
)

laws = settings(deadline=None, max_examples=150)
histories = st.lists(st.booleans(), max_size=80)


@st.composite
def configs(draw: st.DrawFn) -> ScalingConfig:
    """Any valid configuration, extremes included: limits far apart or equal, growth by 1e300, backoff to next to 0."""
    low, first, high = sorted(draw(st.floats(2.0**-126, 2.0**126)) for _ in range(3))
    return ScalingConfig(
        enabled=draw(st.booleans()),
        dynamic=draw(st.booleans()),
        init_scale=first,
        min_scale=low,
        max_scale=high,
        growth_factor=draw(st.one_of(st.just(2.0), st.floats(1.0, 1e300, exclude_min=True))),
        backoff_factor=draw(st.one_of(st.just(0.5), st.floats(0.0, 1.0, exclude_min=True, exclude_max=True))),
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 4)),
        patience=draw(st.integers(1, 6)),
    )


def run(
    config: ScalingConfig, history: list[bool], state: ScaleState | None = None
) -> list[tuple[ScaleState, Outcome]]:
    state, trace = state or initial_state(config), []
    for finite in history:
        state, outcome = transition(state, finite, config)
        trace.append((state, outcome))
    return trace


def scales(config: ScalingConfig, history: str) -> list[float]:
    """The scale after each step of a history such as "+-+": good, bad, good."""
    return [state.scale for state, _ in run(config, [step == "+" for step in history])]


# ----------------------------------------------------------------------------------------------------------------- laws


@laws
@given(configs(), histories)
def test_the_scale_is_never_zero_infinite_or_outside_its_limits(config: ScalingConfig, history: list[bool]) -> None:
    for state, _ in run(config, history):
        assert 0 < state.scale < math.inf
        if config.enabled:
            assert config.min_scale <= state.scale <= config.max_scale
        else:
            assert state.scale == 1


@laws
@given(configs(), histories, histories)
def test_a_reloaded_state_continues_with_the_same_trace(
    config: ScalingConfig, before: list[bool], after: list[bool]
) -> None:
    whole = run(config, before + after)
    saved = (run(config, before) or [(initial_state(config), None)])[-1][0]
    reloaded = ScaleState.from_dict(json.loads(json.dumps(saved.to_dict())))
    assert reloaded == saved
    assert run(config, after, reloaded) == whole[len(before) :]


@laws
@given(configs(), histories)
def test_a_step_is_taken_exactly_when_gradients_are_finite_and_every_step_is_counted(
    config: ScalingConfig, history: list[bool]
) -> None:
    trace = run(config, history)
    assert [outcome.stepped for _, outcome in trace] == history
    for number, (state, _) in enumerate(trace, start=1):
        assert (state.steps, state.skipped) == (number, history[:number].count(False))


@laws
@given(configs(), histories)
def test_the_scale_falls_only_at_bad_steps_and_rises_only_at_good_ones(
    config: ScalingConfig, history: list[bool]
) -> None:
    scale = initial_state(config).scale
    for finite, (state, _) in zip(history, run(config, history), strict=True):
        assert state.scale >= scale if finite else state.scale <= scale
        scale = state.scale


@laws
@given(configs())
def test_a_run_of_bad_steps_always_ends_in_a_stall(config: ScalingConfig) -> None:
    config = dataclasses.replace(config, backoff_factor=min(config.backoff_factor, 0.5))
    longest = 252 + config.hysteresis + config.patience  # from 2**126 down to 2**-126 by halves
    assert any(outcome.stalled for _, outcome in run(config, [False] * longest))


@laws
@given(configs(), st.floats(allow_nan=True, allow_infinity=True), st.booleans())
def test_even_an_impossible_scale_is_brought_within_the_limits(
    config: ScalingConfig, scale: float, finite: bool
) -> None:
    state, _ = transition(dataclasses.replace(initial_state(config), scale=scale), finite, config)
    limits = (config.min_scale, config.max_scale) if config.enabled else (1.0, 1.0)
    assert limits[0] <= state.scale <= limits[1]


def test_a_scale_that_is_not_a_number_restarts_from_the_floor() -> None:
    config = ScalingConfig(min_scale=2)
    assert transition(dataclasses.replace(initial_state(config), scale=math.nan), True, config)[0].scale == 2


@laws
@given(configs(), histories)
def test_the_inputs_are_left_alone(config: ScalingConfig, history: list[bool]) -> None:
    state = initial_state(config)
    before = copy.deepcopy((state, config))
    run(config, history, state)
    assert (state, config) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.scale = 1.0  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------------- knobs


def test_the_defaults_are_those_of_torch_with_a_floor_and_a_cap() -> None:
    config, scaler = ScalingConfig(), torch.amp.GradScaler("cpu")
    assert config.init_scale == scaler.get_scale()
    assert config.growth_factor == scaler.get_growth_factor()
    assert config.backoff_factor == scaler.get_backoff_factor()
    assert config.growth_interval == scaler.get_growth_interval()
    assert (config.hysteresis, config.min_scale, config.max_scale, config.patience) == (1, 1.0, 2.0**24, 10)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.booleans(), max_size=30))
def test_within_the_limits_the_scale_moves_as_torchs_does(history: list[bool]) -> None:
    config = ScalingConfig(growth_interval=3, min_scale=2.0**-126, max_scale=2.0**126)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for finite, (state, _) in zip(history, run(config, history), strict=True):
        scaler.scale(parameter.sum()).backward()
        if not finite:
            parameter.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert state.scale == scaler.get_scale()


def test_the_scale_doubles_after_growth_interval_good_steps_in_a_row_and_stops_at_the_cap() -> None:
    config = ScalingConfig(init_scale=8, max_scale=20, growth_interval=3)
    assert scales(config, "+++++-+++++++++") == [8, 8, 16, 16, 16, 8, 8, 8, 16, 16, 16, 20, 20, 20, 20]


def test_the_scale_halves_at_each_bad_step_and_stops_at_the_floor() -> None:
    assert scales(ScalingConfig(init_scale=8, min_scale=3), "---+-") == [4, 3, 3, 3, 3]


def test_hysteresis_forgives_bad_steps_until_there_are_so_many_in_a_row_and_then_no_more() -> None:
    config = ScalingConfig(init_scale=64, hysteresis=3)
    assert scales(config, "--+--+") == [64] * 6  # a good step between makes two and two harmless
    assert scales(config, "-----") == [64, 64, 32, 16, 8]  # once it has begun to fall, every further bad step counts
    assert scales(config, "---+---") == [64, 64, 32, 32, 32, 32, 16]


def test_patience_counts_skips_in_a_row_at_the_floor_only() -> None:
    config = ScalingConfig(init_scale=4, patience=3)
    trace = run(config, [step == "+" for step in "----+----"])
    assert [state.floor_skips for state, _ in trace] == [0, 0, 1, 2, 0, 1, 2, 3, 4]
    assert [outcome.stalled for _, outcome in trace] == [False] * 7 + [True, True]


@pytest.mark.parametrize("off", [{"dynamic": False}, {"enabled": False}])
def test_a_constant_scale_stays_counts_skips_and_stalls_after_patience(off: dict[str, bool]) -> None:
    config = ScalingConfig(init_scale=128, patience=3, growth_interval=1, **off)
    trace = run(config, [step == "+" for step in "+--+---"])
    assert {state.scale for state, _ in trace} == {128.0 if config.enabled else 1.0}
    assert [outcome.stalled for _, outcome in trace] == [False] * 6 + [True]
    assert trace[-1][0].skipped == 5


def test_a_state_from_another_policy_takes_the_new_policys_scale() -> None:
    state = initial_state(ScalingConfig(init_scale=2.0**20))
    assert transition(state, True, ScalingConfig(enabled=False))[0].scale == 1
    assert transition(state, True, ScalingConfig(dynamic=False, init_scale=512))[0].scale == 512
    assert transition(state, True, ScalingConfig(max_scale=2.0**17))[0].scale == 2.0**17


def test_every_outcome_says_why() -> None:
    config = ScalingConfig(init_scale=4, min_scale=2, growth_interval=2, hysteresis=2, patience=5)
    reasons = [outcome.reason for _, outcome in run(config, [step == "+" for step in "++----"])]
    assert reasons[0] == "gradients are finite"
    assert "raised from 4 to 8" in reasons[1]
    assert "kept at 8, lowered after 1 more in a row" in reasons[2]
    assert "lowered from 8 to 4" in reasons[3]
    assert "lowered from 4 to 2" in reasons[4]
    assert "floor of 2 (1 in a row, stops at 5)" in reasons[5]
    assert all("not finite, step skipped" in reason for reason in reasons[2:])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("enabled", 1), ("dynamic", "yes"), ("growth_interval", 0), ("growth_interval", 2e3), ("hysteresis", True)],
        *[("patience", -1), ("patience", "10"), ("growth_factor", 1), ("growth_factor", math.inf)],
        ("init_scale", 10**400),
        *[("backoff_factor", 1.0), ("backoff_factor", 0), ("backoff_factor", math.nan), ("min_scale", 0)],
        *[("min_scale", 1e-45), ("min_scale", 2.0**25), ("max_scale", math.inf), ("max_scale", 1e39)],
        *[("init_scale", 0.5), ("init_scale", 2.0**25), ("init_scale", math.nan), ("init_scale", None)],
        *[("init_scale", True), ("init_scale", "65536")],
    ],
)
def test_a_bad_knob_is_named(key: str, value: object) -> None:
    with pytest.raises(PolicyError, match=rf"^scaling\.{key} = .*: must"):
        ScalingConfig(**{key: value})


def test_whole_numbers_and_floats_make_equal_configurations() -> None:
    assert ScalingConfig(init_scale=1024, growth_factor=2) == ScalingConfig(init_scale=1024.0, growth_factor=2.0)
    assert repr(ScalingConfig(init_scale=1024)) == repr(ScalingConfig(init_scale=1024.0))


# ---------------------------------------------------------------------------------------------------------------- state


def test_a_state_of_device_scalars_saves_as_plain_numbers() -> None:
    on_device = ScaleState(torch.tensor(64.0), *(torch.tensor(n) for n in (1, 2, 3, 4, 5)))  # type: ignore[arg-type]
    plain = on_device.to_dict()
    assert plain == ScaleState(64.0, 1, 2, 3, 4, 5).to_dict()
    assert {type(value) for value in plain.values()} == {float, int}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scal": 1.0}, "unknown key 'scal'. Did you mean 'scale'"),
        ({"scale": None}, "not a number"),
        ({"steps": "many"}, "not a number"),
        ({"steps": math.inf}, "not a number"),
        ({"scale": 0.0}, "impossible"),
        ({"scale": math.inf}, "impossible"),
        ({"scale": math.nan}, "impossible"),
        ({"good_steps": -1}, "impossible"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, object], says: str) -> None:
    good = initial_state(ScalingConfig()).to_dict()
    with pytest.raises(PolicyError, match=says):
        ScaleState.from_dict({**good, **change})


def test_a_state_that_lacks_a_key_is_refused() -> None:
    partial = initial_state(ScalingConfig()).to_dict()
    del partial["floor_skips"]
    with pytest.raises(PolicyError, match="lacks floor_skips"):
        ScaleState.from_dict(partial)


# -------------------------------------------------------------------------------------------------------- other devices


@st.composite
def configs_of_powers_of_two(draw: st.DrawFn) -> ScalingConfig:
    """Configurations whose scales float32 holds exactly, so that a device and Python can agree to the last bit."""
    low, first, high = sorted(draw(st.integers(-30, 30)) for _ in range(3))
    return dataclasses.replace(
        draw(configs()),
        init_scale=2.0**first,
        min_scale=2.0**low,
        max_scale=2.0**high,
        growth_factor=2.0 ** draw(st.integers(1, 4)),
        backoff_factor=2.0 ** -draw(st.integers(1, 4)),
    )


@settings(deadline=None, max_examples=40)
@given(configs_of_powers_of_two(), st.lists(st.booleans(), min_size=1, max_size=25))
def test_torch_scalars_follow_the_same_trace_without_leaving_the_device(
    config: ScalingConfig, history: list[bool]
) -> None:
    first = initial_state(config)
    counters = [torch.tensor(n) for n in (first.good_steps, first.hysteresis_left, 0, 0, 0)]
    state = ScaleState(torch.tensor(first.scale), *counters)  # type: ignore[arg-type]
    for finite, (expected, outcome) in zip(history, run(config, history), strict=True):
        state, stalled = advance(state, torch.tensor(finite), config, torch.where)
        assert isinstance(stalled, torch.Tensor)
        assert (state.scale.dtype, state.steps.dtype) == (torch.float32, torch.int64)  # type: ignore[attr-defined]
        assert (ScaleState.from_dict(state.to_dict()), bool(stalled)) == (expected, outcome.stalled)


@settings(deadline=None, max_examples=10)
@given(configs_of_powers_of_two(), st.lists(st.booleans(), min_size=30, max_size=30))
def test_a_jitted_scan_in_jax_follows_the_same_trace(config: ScalingConfig, history: list[bool]) -> None:
    def step(carry: tuple[jax.Array, ...], finite: jax.Array) -> tuple[tuple[jax.Array, ...], object]:
        state, stalled = advance(ScaleState(*carry), finite, config, jnp.where)  # type: ignore[arg-type]
        after = tuple(getattr(state, field.name) for field in dataclasses.fields(ScaleState))
        return after, (after, stalled)

    first = initial_state(config).to_dict()
    carry = tuple(jnp.asarray(value, jnp.float32 if key == "scale" else jnp.int32) for key, value in first.items())
    _, (states, stalls) = jax.jit(lambda start, steps: jax.lax.scan(step, start, steps))(carry, jnp.array(history))
    for at, (expected, outcome) in enumerate(run(config, history)):
        assert ScaleState(*(values[at].item() for values in states)) == expected
        assert bool(stalls[at]) == outcome.stalled


# -------------------------------------------------------------------------------------------------------------- stalled


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ScalingConfig(patience=3, init_scale=1), "lowest loss scale allowed (scaling.min_scale = 1)"),
        (ScalingConfig(patience=3, init_scale=64, min_scale=64), "First try scaling.min_scale = 1"),
        (ScalingConfig(patience=3, init_scale=128, dynamic=False), "fixed loss scale of 128"),
        (ScalingConfig(patience=3, enabled=False), "without loss scaling"),
    ],
)
def test_a_stalled_run_is_told_what_happened_why_and_what_to_do(config: ScalingConfig, says: str) -> None:
    state, outcome = run(config, [True, False, False, False])[-1]
    assert outcome.stalled
    message = stalled_message(state, config)
    for part in (says, "last 3 steps in a row", "3 of 4 steps", "learning rate", "clip gradients", "labels", "mask"):
        assert part in message
    assert 'format = "float32"' in message
    assert 'repeat the step that fails, same batch and weights, with policy = "float32"' in message


# -------------------------------------------------------------------------------------------------------- initial scale


@laws
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30), st.sampled_from([np.float32, np.float64])
)
def test_the_histogram_counts_every_nonzero_value_under_its_exponent(values: list[float], dtype: type) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values, dtype)
    array = array[np.isfinite(array)]
    counts = gradient_histogram([array[:10], array[10:]])
    expected = [math.frexp(float(value))[1] - 1 for value in array if value != 0]
    assert counts == {exponent: expected.count(exponent) for exponent in sorted(set(expected))}
    assert list(counts) == sorted(counts)


def test_the_histogram_takes_no_gradient_that_is_not_finite_or_not_a_number() -> None:
    with pytest.raises(NonFiniteError, match="Gradient 1 "):
        gradient_histogram([np.ones(3), np.array([1.0, np.inf])])
    with pytest.raises(FormatError, match="dtype complex128"):
        gradient_histogram([np.array([1j])])


@pytest.mark.parametrize("fmt", [FP16, FP8_E4M3, FORMATS["fp8_e5m2"]], ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e-7, 1e-3, 1.0, 30.0])
def test_the_scale_from_a_histogram_overflows_nothing_and_could_not_save_more(fmt: NumberFormat, size: float) -> None:
    gradients = np.random.default_rng(0).lognormal(sigma=3.0, size=100_000) * size
    config = ScalingConfig(min_scale=2.0**-30, max_scale=2.0**60)
    scale = scale_from_histogram(gradient_histogram([gradients]), fmt, config)
    assert math.frexp(scale)[0] == 0.5  # a power of two: scaling and unscaling are exact
    largest, smallest = gradients.max() * scale, gradients.min() * scale
    assert np.isfinite(round_to_nearest(gradients * scale, fmt)).all()
    assert largest <= fmt.max / 16
    assert largest * 4 > fmt.max / 16 or smallest >= fmt.smallest_normal or scale == 1


def test_the_scale_is_no_larger_than_the_smallest_gradient_needs() -> None:
    assert scale_from_histogram({-20: 5, -18: 7}, FP16) == 2.0**6  # 2**-20 becomes 2**-14, float16's smallest normal
    assert scale_from_histogram({-20: 5, -18: 7, -40: 0}, FP16) == 2.0**6  # nothing was seen there
    assert scale_from_histogram({-20: 5, -18: 7}, BF16) == 1  # within its range already
    assert scale_from_histogram({-3: 5}, FP16) == 1


def test_headroom_is_what_the_scale_leaves_above_the_largest_gradient() -> None:
    counts = {-40: 1, -10: 1}
    wide, narrow = (scale_from_histogram(counts, FP16, headroom_bits=bits) for bits in (0, 6))
    assert (wide, narrow) == (2.0**24, 2.0**18)
    assert 2.0**-9 * wide <= FP16.max


def test_without_gradients_the_scale_is_the_configured_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert scale_from_histogram({}, FP16, ScalingConfig(init_scale=256)) == 256
    assert "All gradients are zero" in caplog.text


def test_gradients_too_large_for_the_lowest_scale_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert scale_from_histogram({20: 1}, FP16) == 1
    assert "first steps may overflow" in caplog.text
    assert scale_from_histogram({20: 1}, FP16, ScalingConfig(min_scale=2.0**-20)) == 2.0**-10


@laws
@given(st.dictionaries(st.integers(-1074, 1023), st.integers(0, 10), max_size=6), configs(), st.integers(0, 2000))
def test_the_scale_from_any_histogram_is_a_valid_initial_scale(
    counts: dict[int, int], config: ScalingConfig, headroom: int
) -> None:
    for fmt in FORMATS.values():
        scale = scale_from_histogram(counts, fmt, config, headroom_bits=headroom)
        assert dataclasses.replace(config, init_scale=scale).init_scale == scale
