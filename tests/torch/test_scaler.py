"""`GradScaler` does what torch's does where torch's is right, and says what it did."""

from __future__ import annotations

import collections
import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from castwise.errors import PolicyError, ScaleStalledError
from castwise.torch import GradScaler, autocast

INF = float("inf")


def scaler(**options: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 128.0, **options})


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(count)]


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def same(a: nn.Module, b: nn.Module, atol: float = 1e-6) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=atol)


Gradients = Callable[[nn.Module, torch.optim.Optimizer, Any, torch.Tensor, torch.Tensor], None]


def train(model: nn.Module, s: Any, gradients: Gradients, bad: int | None) -> Any:
    """Four steps of SGD. The step `bad` gets an inf, or is left out where nothing scales."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        if s is None:
            gradients(model, optimizer, None, x, y)
            if i != bad:
                optimizer.step()
            continue
        if i == bad and s.is_enabled():
            handle = next(iter(model.parameters())).register_hook(lambda g: g * INF)
        gradients(model, optimizer, s, x, y)
        if i == bad and s.is_enabled():
            handle.remove()
        if i != bad or s.is_enabled():
            s.step(optimizer)
        s.update() if i != bad or s.is_enabled() else None
    return s


def plain(model: nn.Module, optimizer: Any, s: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = nn.functional.mse_loss(model(x), y)
    (loss if s is None else s.scale(loss)).backward()


def clipped(model: nn.Module, optimizer: Any, s: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    plain(model, optimizer, s, x, y)
    if s is not None:
        s.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)


def clipped_scaled(model: nn.Module, optimizer: Any, s: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    plain(model, optimizer, s, x, y)
    nn.utils.clip_grad_norm_(model.parameters(), 0.2 * (1.0 if s is None else s.get_scale()))


def penalised(model: nn.Module, optimizer: Any, s: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = nn.functional.mse_loss(model(x), y)
    scaled = loss if s is None else s.scale(loss)
    gradients = torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
    back = 1.0 if s is None else 1.0 / s.get_scale()
    loss = loss + sum((g * back).square().sum() for g in gradients).sqrt()
    (loss if s is None else s.scale(loss)).backward()


def accumulated(model: nn.Module, optimizer: Any, s: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = nn.functional.mse_loss(model(xs), ys) / 2
        (loss if s is None else s.scale(loss)).backward()


@pytest.mark.parametrize("gradients", [plain, clipped, clipped_scaled, penalised, accumulated])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("bad", [None, 2])
def test_scaled_training_is_unscaled_training_without_the_skipped_steps(
    gradients: Gradients, enabled: bool, bad: int | None
) -> None:
    control, scaled = net(), net()
    train(control, None, gradients, bad)
    s = train(scaled, scaler(enabled=enabled, growth_interval=1), gradients, bad)
    same(control, scaled)
    good = 4 if bad is None else 3
    assert s.get_scale() == (128.0 * 2.0**good * (1.0 if bad is None else 0.5) if enabled else 1.0)


# ---- the scale -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.booleans(), max_size=30), st.integers(1, 4), st.sampled_from([2.0, 4.0]), st.sampled_from([0.5, 0.25])
)
@settings(max_examples=40)
def test_with_the_same_knobs_the_scale_is_torchs_step_by_step(
    finite: list[bool], interval: int, growth: float, backoff: float
) -> None:
    knobs: dict[str, Any] = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    ours = GradScaler("cpu", 2.0**16, min_scale=2.0**-100, max_scale=2.0**100, patience=1000, **knobs)
    theirs = torch.amp.GradScaler("cpu", 2.0**16, **knobs)
    for good in finite:
        for s in (ours, theirs):
            p = parameter(1.0)
            optimizer = torch.optim.SGD([p], lr=0.1)
            s.scale(p.sum()).backward()
            if not good:
                p.grad.fill_(INF)
            s.step(optimizer)
            s.update()
        assert ours.get_scale() == theirs.get_scale()
        state = theirs.state_dict()
        assert {k: ours.state_dict()[k] for k in state} == state


def test_defaults_are_torchs() -> None:
    ours, theirs = GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for ask in ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled"):
        assert getattr(ours, ask)() == getattr(theirs, ask)()


def _one_step(s: GradScaler, factor: float = 1.0) -> None:
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    s.scale(p.sum() * factor).backward()
    s.step(optimizer)
    s.update()


def test_the_scale_stays_between_its_floor_and_its_cap() -> None:
    s = scaler(growth_interval=1, min_scale=64.0, max_scale=256.0)
    for _ in range(3):
        _one_step(s)
    assert s.get_scale() == 256.0
    for _ in range(4):
        _one_step(s, INF)
    assert s.get_scale() == 64.0


def test_hysteresis_waits_for_a_second_overflow_in_a_row() -> None:
    s = scaler(hysteresis=2)
    _one_step(s, INF)
    assert s.get_scale() == 128.0
    _one_step(s, INF)
    assert s.get_scale() == 64.0


def test_patience_at_the_floor_ends_in_an_error_after_which_the_scaler_still_works() -> None:
    s = scaler(init_scale=2.0, patience=3)
    for _ in range(3):
        _one_step(s, INF)
    with pytest.raises(ScaleStalledError, match="scale"):
        _one_step(s, INF)
    _one_step(s)
    assert s.stepped is True


def test_skips_are_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    s = scaler()
    with caplog.at_level(logging.INFO, logger="castwise.torch.scaler"):
        _one_step(s, INF)
        _one_step(s)
    assert s.skipped_steps == 1
    assert len(caplog.records) == 1 and "step 1" in caplog.text


@pytest.mark.parametrize("new", [4, 4.0, torch.tensor(4.0), torch.tensor([4.0])])
def test_update_sets_the_scale_by_hand_from_any_number(new: Any) -> None:
    s = scaler()
    s.scale(torch.ones(()))  # a scale already sent to the device must not survive
    s.update(new)
    assert s.get_scale() == 4.0
    assert s.scale(torch.ones(())) == 4.0


def test_setters_change_the_next_transition() -> None:
    s = scaler()
    s.set_growth_factor(8.0)
    s.set_backoff_factor(0.25)
    s.set_growth_interval(1)
    _one_step(s)
    assert s.get_scale() == 1024.0
    _one_step(s, INF)
    assert s.get_scale() == 256.0


@pytest.mark.parametrize(
    ("knob", "value"), [("growth_factor", 1.0), ("backoff_factor", 1.0), ("growth_interval", 0), ("init_scale", INF)]
)
def test_knobs_out_of_range_are_named(knob: str, value: Any) -> None:
    with pytest.raises(PolicyError, match=knob):
        scaler(**{knob: value})


# ---- what is scaled and unscaled -------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["a", "b"])


def test_outputs_keep_their_structure() -> None:
    one = torch.ones(())
    s = scaler(init_scale=2.0)
    nested = s.scale({"x": [one, (one, one)], "pair": Pair(one, one.double())})
    assert nested["x"][0] == 2 and nested["x"][1] == (2, 2)
    assert isinstance(nested["pair"], Pair) and nested["pair"] == (2, 2)
    assert nested["pair"].b.dtype is torch.float64
    assert [float(o) for o in s.scale(o for o in (one, one))] == [2.0, 2.0]
    with pytest.raises(ValueError, match="tensors"):
        s.scale(3.0)


def test_a_float16_loss_per_sample_is_not_scaled_out_of_its_range() -> None:
    losses = torch.full((4,), 2.0, dtype=torch.float16)
    scaled = GradScaler("cpu").scale(losses)
    assert torch.equal(scaled, torch.full((4,), 131072.0))


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("value", [INF, -INF, float("nan")])
def test_one_bad_value_in_any_gradient_skips_and_is_seen_before_clipping(where: int, value: float) -> None:
    """Of any dtype, and in views that are not contiguous."""
    parameters = [
        nn.Parameter(torch.ones(10, 10)),
        nn.Parameter(torch.ones(10, 5)),
        nn.Parameter(torch.ones(4, dtype=torch.float64)),
        nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
    ]
    s = scaler(init_scale=4.0)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    s.scale(torch.ones(()))
    for p in parameters:
        p.grad = torch.full_like(p, 4.0)
    parameters[1].grad = torch.full((10, 10), 4.0)[:, :5]
    parameters[where].grad[..., -1] = value
    s.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, 1.0)  # spreads a NaN; the verdict has fallen already
    s.step(optimizer)
    assert s.stepped is False
    assert all(bool((p == 1).all()) for p in parameters)


def _sparse(values: list[float]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor(values), (2, 3), check_invariants=True
    )


@pytest.mark.parametrize(("values", "steps"), [([16.0, 32.0, 64.0], True), ([1.0, 2.0, INF], False)])
def test_sparse_gradients_are_unscaled_in_place(values: list[float], steps: bool) -> None:
    p = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([p], lr=1.0)
    s = scaler(init_scale=4.0)
    s.scale(torch.ones(()))
    p.grad = _sparse(values)
    s.step(optimizer)
    assert s.stepped is steps
    if steps:
        torch.testing.assert_close(p.detach(), -_sparse(values).to_dense() / 4)


def test_entries_of_a_sparse_gradient_that_overflow_together_are_found() -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([p], lr=1.0)
    s = scaler(init_scale=4.0)
    s.scale(torch.ones(()))
    p.grad = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([3e38, 3e38]), (3,), check_invariants=True)
    s.step(optimizer)
    assert s.stepped is False


def test_sparse_embeddings_train_as_dense_ones() -> None:
    def run(sparse: bool) -> torch.Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=sparse)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        s = scaler()
        for _ in range(3):
            optimizer.zero_grad()
            s.scale(table(torch.tensor([1, 1, 3])).square().sum()).backward()
            s.step(optimizer)
            s.update()
        return table.weight.detach()

    torch.testing.assert_close(run(True), run(False))


def test_complex_parameters_are_unscaled_exactly_and_their_overflow_is_seen() -> None:
    p = nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))
    optimizer = torch.optim.SGD([p], lr=0.5)
    s = scaler()
    s.scale(p.abs().square().sum()).backward()
    s.step(optimizer)
    torch.testing.assert_close(p.detach(), torch.zeros(2, dtype=torch.complex64))
    s.update()
    s.scale((p.real * INF).sum()).backward()
    s.step(optimizer)
    assert s.stepped is False


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("separate", [True, False])
def test_every_implementation_of_an_optimizer_takes_the_same_steps(make: Any, options: Any, separate: bool) -> None:
    control, scaled = net(), net()
    a, b = make(control.parameters(), lr=0.05, **options), make(scaled.parameters(), lr=0.05, **options)
    s = scaler()
    for i, (x, y) in enumerate(batches()):
        a.zero_grad()
        b.zero_grad()
        plain(control, a, None, x, y)
        plain(scaled, b, s, x, y)
        if i == 2:
            next(scaled.parameters()).grad.fill_(INF)
        else:
            a.step()
        if separate:
            s.unscale_(b)
        s.step(b)
        s.update()
    same(control, scaled)


def test_gradients_spoilt_after_unscaling_are_the_callers_business() -> None:
    """As in torch: the verdict is about the scaled gradients."""
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    s = scaler()
    s.scale(p.sum()).backward()
    s.unscale_(optimizer)
    p.grad.fill_(INF)
    s.step(optimizer)
    assert s.stepped is True and not p.isfinite().all()


def test_float16_parameters_are_refused_by_name_and_bfloat16_ones_are_not() -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2).half()})
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    s = scaler()
    s.scale(torch.ones(()))
    with pytest.raises(ValueError, match=r"^head\.weight is float16.*master"):
        s.step(optimizer)
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=0.5)
    s.scale(p.sum()).backward()
    s.step(optimizer)
    assert p[0] == 0.5


# ---- several optimizers ----------------------------------------------------------------------------------------------


def test_an_overflow_in_one_optimizer_skips_that_one_only_and_lowers_the_shared_scale() -> None:
    g, d = parameter(1.0), parameter(1.0)
    generator, critic = torch.optim.SGD([g], lr=0.5), torch.optim.SGD([d], lr=0.5)
    s = scaler()
    s.scale(g.sum() * INF).backward()
    s.scale(d.sum()).backward()
    s.step(generator)
    assert s.stepped is False
    s.step(critic)
    assert s.stepped is True
    assert s.stepped_for(generator) is False and s.stepped_for(critic) is True
    s.update()
    assert s.get_scale() == 64.0
    assert g == 1.0 and d == 0.5
    assert s.stepped_for(generator) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gan_with_two_losses_trains_in_a_region(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    og, oc = (torch.optim.Adam(m.parameters(), lr=0.02) for m in (generator, critic))
    s = scaler(enabled=dtype is torch.float16)
    score = nn.functional.binary_cross_entropy_with_logits
    for _ in range(40):
        with autocast("cpu", dtype=dtype):
            made, real = generator(torch.randn(16, 4)), torch.randn(16, 2) + 3.0
            told, true = critic(made.detach()), critic(real)
            loss = score(told, torch.zeros_like(told)) + score(true, torch.ones_like(true))
        oc.zero_grad()
        s.scale(loss).backward()
        s.step(oc)
        with autocast("cpu", dtype=dtype):
            told = critic(made)
            loss = score(told, torch.ones_like(told))
        og.zero_grad()
        s.scale(loss).backward()
        s.step(og)
        assert s.stepped_for(oc) and s.stepped_for(og)
        s.update()
    assert generator(torch.randn(64, 4)).mean() > 0.5  # it moved towards the data's mean of 3


def test_two_losses_over_one_graph_share_a_step() -> None:
    control, scaled = net(), net()
    for model, s in ((control, None), (scaled, scaler())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(batches()[0][0])
        losses = [out.square().mean(), (2 * out.mean() - 1).square()]
        for i, loss in enumerate(losses if s is None else s.scale(losses)):
            loss.backward(retain_graph=i == 0)
        optimizer.step() if s is None else s.step(optimizer)
    same(control, scaled)


# ---- misuse ----------------------------------------------------------------------------------------------------------


def test_calls_out_of_order_are_refused() -> None:
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    s = scaler()
    for call in (s.unscale_, s.step):
        with pytest.raises(RuntimeError, match="scale"):
            call(optimizer)
    s = scaler()
    with pytest.raises(RuntimeError, match="no step"):
        s.update()
    s.scale(p.sum()).backward()
    s.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        s.unscale_(optimizer)
    s.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        s.step(optimizer)
    with pytest.raises(RuntimeError, match=r"after step"):
        s.unscale_(optimizer)
    s.update()
    optimizer.zero_grad()
    s.scale(p.sum()).backward()
    s.step(optimizer)
    assert s.stepped is True


def test_a_step_without_gradients_says_so() -> None:
    s = scaler()
    s.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="no gradients"):
        s.step(torch.optim.SGD([parameter(1.0)], lr=0.1))


@pytest.mark.parametrize("how", ["keyword", "positional"])
def test_closures_are_refused_with_the_way_out(how: str) -> None:
    optimizer = torch.optim.LBFGS([parameter(1.0)])
    s = scaler()
    with pytest.raises(RuntimeError, match=r"closure.*bfloat16"):
        s.step(optimizer, closure=float) if how == "keyword" else s.step(optimizer, float)


def test_lbfgs_works_in_bfloat16_with_the_region_in_its_closure() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(64, 4)
    y = x @ torch.tensor([[1.0], [-1.0], [0.5], [2.0]])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(4):
        optimizer.step(closure)
    assert closure().item() < 0.01 * first


def test_a_disabled_scaler_passes_everything_through() -> None:
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.5)
    s = scaler(enabled=False)
    loss = p.sum()
    assert s.scale(loss) is loss and s.scale([loss])[0] is loss
    assert s.step(optimizer, lambda: loss.backward() or loss) is loss  # closures too: nothing is scaled
    assert s.stepped is True and p == 0.5
    s.unscale_(optimizer)
    s.update()
    assert s.state_dict() == {} and s.get_scale() == 1.0
    s.load_state_dict({})


def test_steps_return_what_the_optimizer_returns_and_take_its_arguments() -> None:
    class Told(torch.optim.SGD):
        def step(self, closure: Any = None, *, note: str = "") -> str:  # type: ignore[override]
            super().step(closure)
            return f"stepped {note}"

    p = parameter(1.0)
    s = scaler()
    s.scale(p.sum()).backward()
    assert s.step(Told([p], lr=0.1), note="once") == "stepped once"


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _worked(s: Any) -> Any:
    for factor in (1.0, INF, 1.0):
        p = parameter(1.0)
        s.scale(p.sum() * factor).backward()
        s.step(torch.optim.SGD([p], lr=0.1))
        s.update()
    return s


@pytest.mark.parametrize("source", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("target", [GradScaler, torch.amp.GradScaler])
def test_states_load_both_ways(source: Any, target: Any) -> None:
    saved = _worked(source("cpu", 64.0, 4.0, 0.25, 7)).state_dict()
    loaded = target("cpu")
    loaded.load_state_dict(copy.deepcopy(saved))
    again = loaded.state_dict()
    for key in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
        assert again[key] == saved[key]
    assert loaded.get_scale() == 16.0


def test_a_loaded_state_goes_on_as_the_saved_scaler_would_have() -> None:
    first = _worked(scaler(growth_interval=3, hysteresis=2))
    second = scaler(growth_interval=3, hysteresis=2)
    second.load_state_dict(first.state_dict())
    for factor in (INF, 1.0, INF, INF, 1.0, 1.0, 1.0):
        _one_step(first, factor)
        _one_step(second, factor)
        assert second.state_dict() == first.state_dict()


def test_a_scale_edited_in_a_saved_state_is_the_scale() -> None:
    saved = _worked(scaler()).state_dict()
    second = scaler()
    second.load_state_dict({**saved, "scale": 1024.0, "_growth_tracker": 5})
    assert second.get_scale() == 1024.0
    assert second.state_dict()["_growth_tracker"] == 5
    assert second.state_dict()["castwise"]["skipped"] == 1


def test_an_empty_state_is_refused_with_the_reason() -> None:
    with pytest.raises(RuntimeError, match="disabled"):
        scaler().load_state_dict({})


def test_pickling_works_between_steps_and_only_there() -> None:
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    s = _worked(scaler())
    copied = pickle.loads(pickle.dumps(s))
    assert copied.state_dict() == s.state_dict()
    _one_step(copied)
    s.scale(p.sum()).backward()
    s.step(optimizer)
    with pytest.raises(RuntimeError, match="update"):
        pickle.dumps(s)
