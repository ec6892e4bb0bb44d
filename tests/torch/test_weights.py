"""Steps that go through the weights once, and 16-bit weights that lose nothing: every optimizer, every mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from castwise.errors import CastwiseError, PolicyError
from castwise.policy import Policy
from castwise.scaling import ScalingConfig
from castwise.torch import Amp, Lion, _fused
from castwise.torch._adafactor_shards import step_shards
from castwise.torch._casts import CastCache
from castwise.torch._noise import Noise
from castwise.torch._stepping import Stepper
from castwise.torch.weights import round_stochastic

BF16 = torch.bfloat16
MODES = ["master", "split", "kahan", "stochastic"]
FP16 = Policy(format="float16", scaling=ScalingConfig(init_scale=1024.0))
SCALED = Policy(format="bfloat16", scaling_enabled=True, scaling=ScalingConfig(init_scale=1024.0))
Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of these tests, small float32 weights are left to the optimizer, as nothing is saved there."""
    monkeypatch.setattr(_fused, "_WORTH", 0)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), weight_decay=0.1),
    "lion": lambda p: Lion(p, 1e-3, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2, weight_decay=0.1),
    "muon": lambda p: torch.optim.Muon(p, 1e-2),
}


@pytest.fixture(params=["whole", "pieces of 7"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that fit into one piece, and weights that are cut."""
    if request.param != "whole":
        monkeypatch.setattr(_fused, "_CPU_PIECE", 7)


def weights_of(name: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters of several shapes, one of them with its dimensions out of order; Muon takes matrices alone."""
    g = torch.Generator().manual_seed(0)
    shapes = [(4, 5), (6, 3)] if name == "muon" else [(4, 5), (3,), (), (2, 3, 2, 2), (0, 3)]
    made = [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]
    if name == "adafactor":  # torch's own divides by the number of weights
        made.pop()
    if name != "muon":
        made[3] = nn.Parameter(made[3].detach().to(memory_format=torch.channels_last))
    return made


def gradients(parameters: list[nn.Parameter], steps: int) -> Iterator[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield [torch.randn(p.shape, generator=g).to(BF16).float() for p in parameters]


def stepper(optimizer: torch.optim.Optimizer, mode: str = "master", **options: Any) -> Stepper:
    return Stepper(optimizer, mode, CastCache(), **options)


def follow(
    name: str, parameters: list[nn.Parameter], steps: int, step: Callable[[], None], scale: float = 1.0
) -> list[torch.Tensor]:
    for given in gradients(parameters, steps):
        for p, g in zip(parameters, given, strict=True):
            p.grad = g * scale if p.dtype is not torch.float64 else g.double()
        step()
    return [p.detach().float() for p in parameters]


# ---- the same numbers as torch's -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("divisor", [1.0, 1024.0])
@pytest.mark.usefixtures("pieces")
def test_one_pass_over_the_weights_is_torchs_own_step(name: str, divisor: float) -> None:
    ours, theirs = weights_of(name), weights_of(name)
    mine = stepper(OPTIMIZERS[name](ours))
    reference = OPTIMIZERS[name](theirs)
    assert not mine._fused.why_not()
    got = follow(name, ours, 12, lambda: mine.step(divisor), divisor)
    expected = follow(name, theirs, 12, reference.step)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    theirs_state = reference.state_dict()["state"]
    ours_state = mine.optimizer.state_dict()["state"]
    for i, state in ours_state.items():
        assert state.keys() == theirs_state[i].keys()
        for key, value in state.items():
            torch.testing.assert_close(value, theirs_state[i][key], rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["master", "split"])
@pytest.mark.usefixtures("pieces")
def test_exact_modes_step_as_if_the_weights_were_float32(name: str, mode: str) -> None:
    low = weights_of(name, BF16)
    wide = [nn.Parameter(p.detach().float()) for p in low]
    mine = stepper(OPTIMIZERS[name](low), mode)
    reference = stepper(OPTIMIZERS[name](wide))
    got = follow(name, low, 12, lambda: mine.step(1.0))
    expected = follow(name, wide, 12, lambda: reference.step(1.0))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b.to(BF16).float(), rtol=2**-8, atol=0)
        assert (a == b.to(BF16).float()).float().mean() > 0.9 or not a.numel()


@pytest.mark.parametrize("name", ["momentum", "adamw", "lion", "adafactor", "muon"])
@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_must_step_itself_takes_the_same_steps(name: str, mode: str) -> None:
    """A step hook sends the optimizer down its own path."""
    one, other = weights_of(name, BF16), weights_of(name, BF16)
    fused, own = stepper(OPTIMIZERS[name](one), mode), stepper(OPTIMIZERS[name](other), mode)
    called: list[Any] = []
    own.optimizer.register_step_post_hook(lambda *_: called.append(1))
    got = follow(name, one, 10, lambda: fused.step(4.0), 4.0)
    expected = follow(name, other, 10, lambda: own.step(4.0), 4.0)
    assert len(called) == 10
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=2**-5 if mode == "stochastic" else 2**-7, atol=2e-2 if mode == "stochastic" else 1e-3
        )


# ---- long runs -------------------------------------------------------------------------------------------------------

_STEPS = 1000  # benchmarks/optimizers.py --long-runs takes 5,000
# The largest error of weights of about 1 against float64. 16-bit weights cannot be read out closer than half a step of
# bfloat16 at 1, which is 2**-9; the remainder of "kahan" itself is rounded by up to 2**-18 of the weight in each step.
LIMITS = {"master": 2.0**-8, "split": 2.0**-8, "kahan": 2.0**-8 + _STEPS * 2.0**-18}
LONG: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, 5e-4, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, 5e-4, momentum=0.9, weight_decay=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 5e-4, weight_decay=0.1),
    "lion": lambda p: Lion(p, 5e-5, weight_decay=0.1),
}


def long_run(name: str, dtype: torch.dtype, mode: str = "master", **options: Any) -> torch.Tensor:
    """Steps from weights of 1 with gradients of mean 0.3 and noise of size 0.1."""
    p = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = LONG[name]([p])
    mine = stepper(optimizer, mode, **options) if dtype is not torch.float64 else None
    noise = torch.randn(64, 64, 64, generator=torch.Generator().manual_seed(2)).mul_(0.1).add_(0.3)
    for i in range(_STEPS):
        p.grad = noise[i % 64].to(torch.float64 if mine is None else torch.float32)
        mine.step(1.0) if mine is not None else optimizer.step()
    return p.detach().double()


@pytest.fixture(scope="module")
def exact() -> dict[str, torch.Tensor]:
    return {name: long_run(name, torch.float64) for name in LONG}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("mode", MODES)
def test_long_runs_stay_beside_float64(name: str, mode: str, exact: dict[str, torch.Tensor]) -> None:
    got = long_run(name, BF16, mode)
    error = (got - exact[name]).abs()
    assert (exact[name] - 1.0).abs().mean() > 0.03  # the run goes somewhere
    if mode == "stochastic":  # each weight is off by a random walk; the mean of 4,096 of them is not
        assert (got.mean() - exact[name].mean()).abs() < 4e-3
        assert error.max() < 0.3
    else:
        assert error.max() < LIMITS[mode]


@pytest.mark.parametrize("name", ["adamw", "momentum", "lion"])
def test_long_runs_with_16_bit_state_stay_beside_float64(name: str, exact: dict[str, torch.Tensor]) -> None:
    got = long_run(name, BF16, "split", optimizer_state="bfloat16")
    assert (got.mean() - exact[name].mean()).abs() < 2e-3
    assert (got - exact[name]).abs().max() < 0.03


def test_plain_bfloat16_goes_nowhere(exact: dict[str, torch.Tensor]) -> None:
    """The failure that the modes cure, so that the tests above can fail."""
    p = nn.Parameter(torch.ones(16, 16, dtype=BF16))
    optimizer = LONG["adamw"]([p])
    optimizer.param_groups[0]["lr"] = 1e-4
    for _ in range(100):
        p.grad = torch.full_like(p, 0.3)
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(16, 16, dtype=BF16))
    assert (exact["adamw"] - 1.0).abs().min() > 0.3


def test_a_16_bit_second_moment_does_not_stall() -> None:
    """Rounded to nearest, it stalls at a quarter under constant gradients of 1: 0.999 v + 0.001 rounds back to v."""
    p = nn.Parameter(torch.ones(4096))
    mine = stepper(torch.optim.AdamW([p], 1e-4, weight_decay=0.0), optimizer_state="bfloat16")
    for _ in range(1000):
        p.grad = torch.ones(4096)
        mine.step(1.0)
    v = mine.optimizer.state[p]["exp_avg_sq"]
    assert v.dtype is BF16 and v.float().mean().item() == pytest.approx(1 - 0.999**1000, rel=0.01)
    assert p.mean().item() == pytest.approx(0.9, abs=1e-3)


# ---- between backward and step ---------------------------------------------------------------------------------------


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)


def loss_of(amp: Amp, x: torch.Tensor) -> torch.Tensor:
    with amp:
        return amp.model(x).float().square().mean()


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_float32_and_there_between_the_two_halves(mode: str) -> None:
    model = net(BF16)
    amp = Amp(model, torch.optim.SGD(model.parameters(), 1e-2), SCALED, weights=mode)
    seen: list[torch.dtype] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    amp.backward(loss_of(amp, torch.ones(2, 4, dtype=BF16)))
    assert seen == [torch.float32]
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    scaled = model[0].weight.grad.clone()
    before = amp.loss_scale
    norm = amp.unscale()
    assert before == 1024.0 and torch.equal(model[0].weight.grad, scaled / before)
    assert norm == pytest.approx(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
    result = amp.step()
    assert result.stepped and result.grad_norm == pytest.approx(norm)
    assert all(p.grad is None for p in model.parameters())


def test_clipping_by_value_between_the_halves_is_torchs() -> None:
    model, plain = net(), net()
    x = torch.full((2, 4), 3.0)
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), "float32")
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    amp.backward(loss_of(amp, x))
    amp.unscale()
    plain(x).square().mean().backward()
    for m in (model, plain):
        torch.nn.utils.clip_grad_value_(m.parameters(), 0.01)
    amp.step(clip_norm=1e9)
    reference.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_clipping_by_value_cannot_hide_an_overflow() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), FP16)
    amp.backward(loss_of(amp, torch.full((2, 4), float("inf"))))
    amp.unscale()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert not amp.step().stepped and amp.loss_scale == 512.0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_unscaling_at_the_wrong_moment_is_an_error() -> None:
    model = net()
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), FP16, accumulate=2)
    x = torch.ones(2, 4)
    with pytest.raises(CastwiseError, match="unscale"):
        amp.unscale()
    amp.backward(loss_of(amp, x))
    with pytest.raises(CastwiseError, match="unscale"):
        amp.unscale()  # one micro-batch is still to come
    amp.step()
    amp.backward(loss_of(amp, x))
    amp.unscale()
    with pytest.raises(CastwiseError, match="unscale"):
        amp.unscale()
    assert amp.step().stepped


@pytest.mark.parametrize("mode", MODES)
def test_narrow_gradients_keep_their_parameters_dtype(mode: str) -> None:
    model, other = net(BF16), net(BF16)
    amp = Amp(model, torch.optim.AdamW(model.parameters(), 1e-2), "bfloat16", weights=mode, narrow_gradients=True)
    wide = Amp(other, torch.optim.AdamW(other.parameters(), 1e-2), "bfloat16", weights=mode)
    for _ in range(5):
        for a in (amp, wide):
            a.backward(loss_of(a, torch.ones(2, 4, dtype=BF16)))
        assert all(p.grad.dtype is BF16 for p in model.parameters())
        amp.step(), wide.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2**-6, atol=2e-3)
    with pytest.raises(PolicyError, match="narrow_gradients"):
        Amp(model, torch.optim.AdamW(model.parameters()), narrow_gradients=True, accumulate=2)


def test_gradients_that_were_there_before_are_taken_over_in_float32() -> None:
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    p.grad = torch.full((3,), 0.5, dtype=BF16)
    stepper(torch.optim.SGD([p], 0.1))
    assert p.grad is not None and p.grad.dtype is torch.float32 and p.grad.tolist() == [0.5] * 3


def test_sparse_gradients_of_16_bit_weights_are_stepped_in_float32() -> None:
    table = nn.Embedding(6, 2, sparse=True).to(BF16)
    nn.init.ones_(table.weight)
    amp = Amp(table, torch.optim.SGD(table.parameters(), 1e-4), "bfloat16")
    for _ in range(200):
        with amp:
            loss = table(torch.tensor([1, 1, 4])).float().sum()
        amp.step(loss)
    moved = 1.0 - table.weight.detach().float().mean(1)
    assert moved[1].item() == pytest.approx(0.04, abs=0.004) and moved[4].item() == pytest.approx(0.02, abs=0.004)
    assert not moved[[0, 2, 3, 5]].any()


# ---- kept casts ------------------------------------------------------------------------------------------------------


def kept_cast(cache: CastCache, p: torch.Tensor) -> torch.Tensor:
    return cache.get(p, BF16, lambda x: x.to(BF16))


def test_a_step_writes_the_casts_that_the_next_forward_reads() -> None:
    p = nn.Parameter(torch.randn(5, 3))
    cache = CastCache(debug=True)
    mine = Stepper(torch.optim.AdamW([p], 0.1), "auto", cache)
    for _ in range(3):
        kept_cast(cache, p).float().sum().backward()
        mine.step(1.0)
        assert torch.equal(kept_cast(cache, p), p.detach().to(BF16))
    assert cache.casts_made == 1


def test_small_or_uncast_float32_weights_are_the_optimizers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.randn(5, 3))
    p.grad = torch.ones_like(p)
    cache = CastCache()
    mine = Stepper(torch.optim.AdamW([p], 0.1), "auto", cache)
    assert not mine._own_pass()
    kept_cast(cache, p)
    assert mine._own_pass()
    monkeypatch.setattr(_fused, "_WORTH", 16)
    assert not mine._own_pass()


def test_a_cast_that_somebody_else_holds_keeps_its_values() -> None:
    p = nn.Parameter(torch.randn(5, 3))
    cache = CastCache(debug=True)
    mine = Stepper(torch.optim.SGD([p], 0.1), "auto", cache)
    x = torch.randn(2, 5, requires_grad=True)
    old = p.detach().to(BF16)
    loss = (x.to(BF16) @ kept_cast(cache, p)).float().sum()
    loss.backward(retain_graph=True)
    mine.step(1.0)
    x.grad = None
    loss.backward()  # torch.amp's casts are new ones in each region, so this works there too
    torch.testing.assert_close(x.grad, torch.ones(2, 3).to(BF16) @ old.T, check_dtype=False, rtol=1e-2, atol=1e-2)
    assert torch.equal(kept_cast(cache, p), p.detach().to(BF16))
    held = kept_cast(cache, p).detach()
    before = held.clone()
    p.grad = torch.ones_like(p)
    mine.step(1.0)
    assert torch.equal(held, before)
    assert torch.equal(kept_cast(cache, p), p.detach().to(BF16))


def test_a_cast_that_is_old_already_is_not_refreshed() -> None:
    p = nn.Parameter(torch.ones(4))
    cache = CastCache()
    mine = Stepper(torch.optim.SGD([p], 0.5), "auto", cache)
    kept_cast(cache, p)
    with torch.no_grad():
        p.add_(1.0)
    p.grad = torch.ones(4)
    mine.step(1.0)
    assert kept_cast(cache, p).tolist() == [1.5] * 4


# ---- who steps -------------------------------------------------------------------------------------------------------


def test_optimizers_that_mean_something_else_by_a_step_take_it_themselves() -> None:
    class Halved(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)
            return super().step(closure)

    p = nn.Parameter(torch.ones(2))
    mine = stepper(Halved([p], 1.0))
    p.grad = torch.ones(2)
    mine.step(1.0)
    assert p.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": False}, {"differentiable": True}], ids=str)
def test_an_implementation_that_was_asked_for_is_used(options: dict[str, Any]) -> None:
    p = nn.Parameter(torch.ones(2))
    mine = stepper(torch.optim.AdamW([p], 0.1, **options))
    assert "another implementation" in mine._fused.why_not()


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "maximize": True}, {"eps": (1e-8, 1e-2), "d": 1.5}])
def test_adafactor_for_shards_is_torchs_own_on_whole_tensors_and_calls_its_hooks(options: dict[str, Any]) -> None:
    shapes, called = ((6, 5), (7,), (2, 3, 4)), []
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(*shape)) for shape in shapes]
    own = [nn.Parameter(p.detach().clone()) for p in mine]
    one, other = (torch.optim.Adafactor(each, 1e-2, **options) for each in (mine, own))
    one.register_step_pre_hook(lambda *_: called.append("before"))
    one.register_step_post_hook(lambda *_: called.append("after"))
    for _ in range(4):
        for p, q in zip(mine, own, strict=True):
            p.grad = q.grad = torch.randn(p.shape)
        step_shards(one)
        other.step()
    assert called == ["before", "after"] * 4
    for p, q in zip(mine, own, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)
        assert one.state[p].keys() == other.state[q].keys()


def test_a_scheduler_sees_the_step_and_does_not_warn() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    amp = Amp(model, optimizer, "bfloat16", scheduler=scheduler)
    for _ in range(2):  # warnings are errors here
        assert amp.step(loss_of(amp, torch.ones(2, 4))).stepped
    assert scheduler.get_last_lr() == [0.0025]


@pytest.mark.parametrize("name", ["int8", "fp64"])
def test_state_formats_that_there_are_not_are_refused_with_a_way_out(name: str) -> None:
    model = net()
    with pytest.raises(PolicyError, match="float32, bfloat16, 8bit"):
        Amp(model, torch.optim.AdamW(model.parameters()), optimizer_state=name)
    with pytest.raises(PolicyError, match="RMSprop"):
        Amp(model, torch.optim.RMSprop(model.parameters()), optimizer_state="bfloat16")


def test_16_bit_state_survives_a_checkpoint(tmp_path: Any) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, Amp]:
        model = net(BF16)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        return model, optimizer, Amp(model, optimizer, "bfloat16", weights="stochastic", optimizer_state="bfloat16")

    def run(amp: Amp, steps: int) -> None:
        for _ in range(steps):
            amp.step(loss_of(amp, torch.ones(2, 4, dtype=BF16)))

    model, optimizer, amp = build()
    run(amp, 3)
    torch.save([model.state_dict(), optimizer.state_dict(), amp.state_dict()], tmp_path / "all.pt")
    run(amp, 3)
    again, other, resumed = build()
    torch.manual_seed(99)  # roundings come from Amp's own generator
    for part, state in zip((again, other, resumed), torch.load(tmp_path / "all.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    run(resumed, 3)
    assert all(s.dtype is BF16 for state in other.state.values() for n, s in state.items() if n != "step")
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_replicas_round_alike_whatever_their_random_seeds() -> None:
    results = []
    for seed in (1, 2):
        p = nn.Parameter(torch.ones(64, dtype=BF16))
        mine = stepper(torch.optim.SGD([p], 1e-3), "stochastic")
        torch.manual_seed(seed)
        for _ in range(5):
            p.grad = torch.ones(64)
            mine.step(1.0)
        results.append(p.detach().clone())
    assert torch.equal(*results)


@pytest.mark.filterwarnings("default")
def test_8_bit_optimizers_of_torchao_step_16_bit_weights() -> None:
    optim = pytest.importorskip("torchao.optim")
    model = nn.Linear(64, 128, bias=False).to(BF16)
    nn.init.ones_(model.weight)
    amp = Amp(model, optim.AdamW8bit(model.parameters(), lr=1e-3, weight_decay=0.0), "bfloat16", weights="split")
    for _ in range(3):
        with amp:
            loss = model(torch.ones(1, 64, dtype=BF16)).float().sum()
        assert amp.step(loss).stepped
    assert model.weight.float().mean().item() == pytest.approx(0.997, abs=1.5e-3)


def test_random_rounding_keeps_nan_and_infinity() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, 1.0])
    for dtype in (BF16, torch.float16):
        y = round_stochastic(x, dtype).float()
        assert y[0].isnan() and y[1] == float("inf") and y[2] == -float("inf") and y[4] == 1.0


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_random_rounding_is_right_on_average_in_each_place_and_over_many(dtype: torch.dtype) -> None:
    """Places of one row and of several, in a sequence of roundings: 4.5 standard errors of what chance allows."""
    noise = Noise()
    step = 2.0**-7 if dtype is BF16 else 2.0**-10
    x = torch.linspace(1.0, 1.0 + step, 150_000)
    share = (x - 1.0) / step
    runs = torch.stack([round_stochastic(x, dtype, noise).float() for _ in range(64)])
    assert runs.unique().tolist() == [1.0, 1.0 + step]
    up = (runs - 1.0) / step
    spread = (share * (1.0 - share)).sqrt()
    even = (share > 0.2) & (share < 0.8)  # where 64 roundings are nearly a bell
    assert ((up.mean(0) - share).abs() < 5.5 * spread / 8.0)[even].all()
    assert abs((up.mean() - share.mean()).item()) < 4.5 * spread.square().mean().sqrt().item() / (64 * 150_000) ** 0.5
    one, other = (up[:, i : i + 1000] - share[i : i + 1000] for i in (60_000, 130_000))
    assert (one * other).mean(0).abs().max() < 5.5 * 0.25 / 8.0  # places do not follow each other
    assert (up[1:] * up[:-1] - share**2).mean().abs() < 1e-3  # nor do roundings


@pytest.mark.parametrize("payload", [0x7FFFFFFF, -1, 0x7FFF0001, 0x7F800001])
def test_random_rounding_keeps_nan_whatever_its_bits(payload: int) -> None:
    x = torch.tensor([payload] * 64, dtype=torch.int32).view(torch.float32)
    assert not round_stochastic(x, BF16).isfinite().any()


# ---- adapters --------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen 16-bit layer and a low-rank adapter beside it, as LoRA has them (arXiv:2106.09685)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(16, 16).to(BF16).requires_grad_(False)
        self.a, self.b = nn.Linear(16, 2, bias=False).to(dtype), nn.Linear(2, 16, bias=False).to(dtype)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x).float() + self.b(self.a(x.to(self.a.weight.dtype))).float()


@pytest.mark.parametrize("mode", MODES)
def test_adapters_learn_beside_a_frozen_16_bit_base_that_keeps_nothing(mode: str) -> None:
    losses = {}
    for dtype in (torch.float32, BF16):
        model = Adapted(dtype)
        frozen = copy.deepcopy(model.base.state_dict())
        amp = Amp(model, torch.optim.AdamW(model.parameters(), 1e-3), "bfloat16", weights=mode)
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(3)).to(BF16)
        target = model.base(x).float().roll(1, -1).detach()
        for _ in range(60):
            with amp:
                loss = (model(x) - target).square().mean()
            assert amp.step(loss).stepped
        losses[dtype] = loss.item()
        assert all(torch.equal(v, frozen[k]) for k, v in model.base.state_dict().items())
        assert len(amp._wide.kept) == (0 if dtype is torch.float32 else 2)  # two adapters, and nothing of the base
    assert losses[BF16] == pytest.approx(losses[torch.float32], rel=0.05)
