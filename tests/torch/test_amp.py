"""The training step, owned: order of operations, skipping, accumulation, checkpoints, layer rules, both paths."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from castwise.errors import CastwiseError, NonFiniteError, PolicyError, ScaleStalledError
from castwise.policy import LayerRule, Policy
from castwise.scaling import ScalingConfig
from castwise.torch import Amp, _scale
from castwise.torch.devices import tf32
from castwise.torch.weights import round_stochastic

INF = float("inf")
SCALING = {"init_scale": 1024.0, "growth_interval": 3}
FP16 = Policy(format="float16", scaling=ScalingConfig(**SCALING))  # type: ignore[arg-type]


def linear(weight: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer.to(dtype)


def take(amp: Amp, x: float = 1.0, **options: Any) -> _scale.StepResult:
    """One step on loss = weight * x."""
    with amp:
        loss = amp.model(torch.full((1, 1), float(x))).float().sum()
    return amp.step(loss, **options)


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of keeping the scale: on the host, and (with fused optimizers) on a device that runs ahead."""
    if request.param == "device":
        monkeypatch.setattr(_scale, "ASYNCHRONOUS", frozenset({"cpu"}))
    return str(request.param)


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, fused=True)


# ---- one step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FP16, "bfloat16", "float32"], ids=["fp16", "bf16", "fp32"])
def test_a_step_is_the_optimizers_own_on_true_gradients(path: str, policy: Policy | str) -> None:
    model = linear()
    amp = Amp(model, sgd(model, 0.5), policy)
    result = take(amp, 2.0)
    assert result.stepped and result.grad_norm == 2.0
    assert model.weight.item() == 0.0
    assert model.weight.grad is None
    assert result.loss_scale == (1024.0 if policy is FP16 else 1.0)
    assert result.reason == "gradients are finite"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("policy", [FP16, "bfloat16"], ids=["fp16", "bf16"])
def test_clipping_is_torchs_on_true_gradients(path: str, policy: Policy | str, fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    plain = copy.deepcopy(model)
    x = torch.randn(4, 8)
    amp = Amp(model, torch.optim.SGD(model.parameters(), 1.0, fused=fused), policy)
    with amp:
        loss = model(x).float().square().sum()
    result = amp.step(loss, clip_norm=0.25)
    reference = torch.optim.SGD(plain.parameters(), 1.0)
    plain(x).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
    reference.step()
    assert result.grad_norm == pytest.approx(norm.item(), rel=2e-2)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)


def test_clipping_leaves_small_gradients_alone(path: str) -> None:
    model = linear()
    result = take(Amp(model, sgd(model), FP16), 0.25, clip_norm=10.0)
    assert result.stepped and model.weight.item() == 0.75


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), "1", True, [1.0], torch.ones(2)])
def test_an_impossible_clip_norm_is_named(clip: Any) -> None:
    model = linear()
    with pytest.raises(PolicyError, match=r"clip_norm.* or None"):
        take(Amp(model, sgd(model), "bfloat16"), clip_norm=clip)


@pytest.mark.parametrize("method", ["step", "backward"])
@pytest.mark.parametrize(
    "loss,said",
    [
        (3.0, "loss is 3.0.*without .item()"),
        ("3", "loss is '3'"),
        ([torch.ones(())], "loss is"),
        (torch.ones(3, requires_grad=True), r"loss has the shape \(3,\).*mean or sum"),
        (torch.ones(()), "loss needs no gradient"),
    ],
)
def test_what_is_no_loss_is_named_before_anything_is_touched(method: str, loss: Any, said: str) -> None:
    model = linear()
    amp = Amp(model, sgd(model), FP16)
    with pytest.raises(PolicyError, match=f"Amp.{method}: {said}"):
        getattr(amp, method)(loss)
    assert take(amp).stepped, "the next step is a clean one"


@pytest.mark.parametrize("policy", [FP16, "bfloat16", "float32"], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_a_bad_step_is_skipped_in_every_format(path: str, policy: Policy | str, bad: float) -> None:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    amp = Amp(model, optimizer, policy)
    assert not take(amp, bad).stepped
    assert model.weight.item() == 1.0
    assert float(optimizer.state[model.weight]["step"]) == 0 if optimizer.state else True
    assert amp.loss_scale == (512.0 if policy is FP16 else 1.0)
    assert take(amp).stepped and model.weight.item() < 1.0
    assert amp.scale_state.skipped == 1 and amp.scale_state.steps == 2


def test_the_scale_grows_and_shrinks_as_the_state_machine_says(path: str) -> None:
    model = linear()
    amp = Amp(model, sgd(model, 0.0), FP16)
    scales = [take(amp, x).loss_scale for x in (1, 1, 1, 1, INF, 1, 1, 1, 1)]
    assert scales == [1024, 1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048]
    assert "raised" in take(amp).reason or amp.loss_scale == 2048


@pytest.mark.parametrize("fmt,error", [("float16", ScaleStalledError), ("bfloat16", NonFiniteError)])
def test_persistent_nan_stops_with_a_reason_and_spares_the_weights(path: str, fmt: str, error: type) -> None:
    model = linear()
    unguarded = Policy.from_dict({"format": fmt, "guard": {"enabled": False}})
    amp = Amp(model, sgd(model), unguarded)
    with pytest.raises(error, match="Likely causes"):
        for _ in range(60):
            take(amp, float("nan"))
    assert model.weight.item() == 1.0 and model.weight.grad is None
    assert amp.loss_scale >= 1.0


@pytest.mark.parametrize("policy", [FP16, "bfloat16", "float32"], ids=["fp16", "bf16", "fp32"])
def test_a_guarded_run_stops_and_names_what_was_bad(path: str, policy: Any) -> None:
    model = linear()
    amp = Amp(model, sgd(model), policy)
    with pytest.raises(NonFiniteError, match="input 0"):
        for _ in range(60):
            take(amp, float("nan"))
    assert model.weight.item() == 1.0 and model.weight.grad is None


def test_finite_gradients_whose_squares_overflow_are_stepped_on_the_host() -> None:
    model = linear()
    amp = Amp(model, sgd(model, 1e-25), "float32")
    result = take(amp, 1e25)
    assert result.stepped and result.grad_norm == pytest.approx(1e25)
    assert model.weight.item() == pytest.approx(0.0, abs=1e-6)


def test_skips_are_told(path: str, caplog: pytest.LogCaptureFixture) -> None:
    model = linear()
    amp = Amp(model, sgd(model), FP16)
    with caplog.at_level(logging.INFO, "castwise.torch.amp"):
        take(amp, INF)
        take(amp)
    assert any("not finite" in r.getMessage() for r in caplog.records)


def test_results_are_fetched_only_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that runs ahead, nothing between two steps asks it for a number."""
    monkeypatch.setattr(_scale, "ASYNCHRONOUS", frozenset({"cpu"}))
    model = linear()
    amp = Amp(model, torch.optim.AdamW(model.parameters(), 0.1, fused=True), FP16)
    take(amp)  # the optimizer's state is made
    asked: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
                asked.append(str(func))
            return func(*args, **(kwargs or {}))

    amp._on_device.news(wait=True)  # type: ignore[union-attr]
    with Watch():
        result = take(amp, INF, clip_norm=1.0)
        assert not asked
        assert not result.stepped
        assert asked


def test_several_groups_unused_frozen_sparse_and_complex_parameters_in_one_step() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)
            self.unused = nn.Linear(2, 2)
            self.frozen = nn.Linear(2, 2).requires_grad_(False)
            self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            h = self.frozen(self.table(i))
            return (self.phase * h.to(torch.complex64)).abs().sum()

    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    groups = [{"params": [model.table.weight], "lr": 0.5}, {"params": [model.phase, *model.unused.parameters()]}]
    amp = Amp(model, torch.optim.SGD(groups, 0.25), FP16)
    i = torch.tensor([1, 1, 3])
    with amp:
        loss = model(i)
    result = amp.step(loss)
    plain(i).backward()
    want = torch.sqrt(
        plain.table.weight.grad.to_dense().square().sum() + plain.phase.grad.abs().square().sum()  # type: ignore[union-attr]
    )
    assert result.stepped and result.grad_norm == pytest.approx(want.item(), rel=2e-3)
    torch.testing.assert_close(
        model.phase.detach(),
        (plain.phase - 0.25 * plain.phase.grad).detach(),
        rtol=2e-3,
        atol=2e-3,  # type: ignore[operator]
    )
    moved = plain.table.weight - 0.5 * plain.table.weight.grad.to_dense()  # type: ignore[union-attr]
    torch.testing.assert_close(model.table.weight.detach(), moved.detach(), rtol=2e-3, atol=2e-3)
    assert torch.equal(model.unused.weight, plain.unused.weight)


def test_a_step_without_any_gradient_says_so() -> None:
    used, unused = linear(), linear()
    amp = Amp(used, sgd(unused), "bfloat16")
    result = take(amp)
    assert not result.stepped and "no parameter" in result.reason


def test_a_step_without_a_loss_is_refused() -> None:
    model = linear()
    with pytest.raises(CastwiseError, match="backward"):
        Amp(model, sgd(model), FP16).step()


def test_gradients_left_by_another_models_loss_do_not_count(path: str) -> None:
    """A generator's loss runs backward through the discriminator too."""
    g, d = linear(), linear()
    amp_g, amp_d = Amp(g, sgd(g), FP16), Amp(d, sgd(d), FP16)
    with amp_g:
        loss = d(g(torch.ones(1, 1))).sum()
    amp_g.step(loss)
    take(amp_d, 0.5)
    assert d.weight.item() == 0.5


def test_several_losses_of_one_step_add_up(path: str) -> None:
    model = linear()
    amp = Amp(model, sgd(model), FP16)
    for x in (0.25, 0.5):
        with amp:
            loss = model(torch.full((1, 1), x)).sum()
        amp.backward(loss)
    assert amp.step().grad_norm == 0.75 and model.weight.item() == 0.25


def test_parameters_added_later_are_unscaled_and_clipped_too(path: str) -> None:
    model = nn.Sequential(linear(), linear())
    optimizer = torch.optim.SGD(model[0].parameters(), 1.0, fused=True)
    amp = Amp(model, optimizer, FP16)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    take(amp, 0.5)
    assert model[0].weight.item() == model[1].weight.item() == 0.5


# ---- accumulation ----------------------------------------------------------------------------------------------------


def test_micro_batches_are_averaged_and_stepped_once(path: str) -> None:
    model = linear()
    amp = Amp(model, sgd(model), FP16, accumulate=4)
    results = [take(amp, x) for x in (0.5, 0.25, 0.25, 1.0)]
    assert [r.stepped for r in results] == [False, False, False, True]
    assert results[0].reason == "accumulating: micro-batch 1 of 4"
    assert model.weight.item() == 0.5


def test_one_bad_micro_batch_skips_the_whole_step(path: str) -> None:
    model = linear()
    amp = Amp(model, sgd(model), FP16, accumulate=2)
    assert not [take(amp, x) for x in (INF, 1.0)][1].stepped
    assert model.weight.item() == 1.0
    assert [take(amp, 0.5) for _ in range(2)][1].stepped and model.weight.item() == 0.5


@pytest.mark.parametrize("mode", ["master", "split", "kahan", "stochastic"])
def test_16_bit_parameters_accumulate_in_float32(mode: str) -> None:
    """256 + 255 micro-batches of 1: bfloat16 cannot count past 256."""
    model = linear(dtype=torch.bfloat16)
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.0), "bfloat16", accumulate=511, weights=mode)
    for _ in range(511):
        with amp:
            loss = model(torch.ones(1, 1, dtype=torch.bfloat16)).float().sum() * 511
        result = amp.step(loss)
    assert result.grad_norm == 511.0


def test_an_exception_in_the_region_or_in_backward_leaves_a_clean_step(path: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *g: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("backward fails")

    model = linear()
    amp = Amp(model, sgd(model), FP16)
    with pytest.raises(ZeroDivisionError), amp:
        raise ZeroDivisionError
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with amp:
        loss = (model(torch.ones(1, 1)) + Fails.apply(model(torch.ones(1, 1)))).sum()
    with pytest.raises(ArithmeticError):
        amp.step(loss)
    assert model.weight.grad is None
    take(amp, 0.5)
    assert model.weight.item() == 0.5


def test_the_scheduler_moves_only_with_real_steps(path: str) -> None:
    model = linear()
    optimizer = sgd(model, 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    amp = Amp(model, optimizer, FP16, scheduler=scheduler, accumulate=2)
    for x in (INF, 1.0, 0.5, 0.5):
        take(amp, x)
    assert optimizer.param_groups[0]["lr"] == 0.5 and model.weight.item() == 0.5


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)


@pytest.mark.parametrize("weights", ["float32", "master", "split", "kahan"])
@pytest.mark.parametrize("stop", [3, 4])
def test_a_resumed_run_is_the_undisturbed_one_even_between_micro_batches(path: str, weights: str, stop: int) -> None:
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    policy = FP16 if weights == "float32" else Policy(format="bfloat16")
    batches = torch.randn(10, 2, 4, generator=torch.Generator().manual_seed(1))
    batches[5] = INF

    def build() -> tuple[nn.Module, torch.optim.Optimizer, Amp]:
        model = _net(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        mode = "auto" if weights == "float32" else weights
        return model, optimizer, Amp(model, optimizer, policy, accumulate=2, weights=mode)

    def run(model: nn.Module, amp: Amp, part: torch.Tensor) -> None:
        for x in part:
            with amp:
                loss = model(x.to(dtype)).float().square().mean()
            amp.step(loss)

    model, optimizer, amp = build()
    run(model, amp, batches[:stop])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    run(model, amp, batches[stop:])

    resumed, other, again = build()
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    again.load_state_dict(torch.load(_stored(saved[2]), weights_only=True))
    run(resumed, again, batches[stop:])
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert amp.scale_state == again.scale_state and amp.scale_state.skipped == 1


def _stored(state: Any) -> Any:
    import io

    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return stream


def test_states_of_torchs_own_scaler_load(path: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.1)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    model = linear()
    amp = Amp(model, sgd(model, 0.0), FP16)
    amp.load_state_dict(scaler.state_dict())
    assert (amp.loss_scale, amp.scale_state.good_steps) == (256.0, 1)
    take(amp), take(amp)
    assert amp.loss_scale == 512.0
    amp.load_state_dict({"scale": 1e30, "_growth_tracker": 0})
    assert amp.loss_scale == 2.0**24


def test_a_state_that_does_not_fit_is_refused() -> None:
    model = linear(dtype=torch.bfloat16)
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), "bfloat16", accumulate=3)
    state = amp.state_dict()
    for change in ({"version": 99}, {"weights": {"mode": "kahan", "kept": []}}, {"micro_step": 5}):
        with pytest.raises(PolicyError):
            amp.load_state_dict({**state, **change})


@pytest.mark.parametrize("fused", [True, False])
def test_weights_written_by_any_optimizer_are_cast_anew(path: str, fused: bool) -> None:
    """Fused optimizers do not move PyTorch's version counter, by which a stale cast is known."""
    model = linear()
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.25, fused=fused), FP16)
    seen = []
    for _ in range(3):
        with amp:
            loss = model(torch.ones(1, 1)).sum()
        seen.append(loss.item())
        amp.step(loss)
    assert seen == [1.0, 0.75, 0.5]


# ---- kept weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["master", "split"])
def test_exact_modes_step_16_bit_weights_as_if_they_were_float32(mode: str) -> None:
    low, wide = _net(torch.bfloat16), _net(torch.bfloat16).float()
    names = [n for n, _ in low.named_parameters()]
    optimizer = torch.optim.AdamW(low.parameters(), 1e-3)
    amp = Amp(low, optimizer, "bfloat16", weights=mode)
    reference = torch.optim.AdamW(wide.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        gradients = [torch.randn(p.shape, generator=generator).bfloat16() for p in low.parameters()]
        amp.step(sum((p * g).float().sum() for p, g in zip(low.parameters(), gradients, strict=True)))
        for p, g in zip(wide.parameters(), gradients, strict=True):
            p.grad = g.float()
        reference.step()
    for p, q in zip(low.parameters(), wide.parameters(), strict=True):
        assert p.dtype is torch.bfloat16
        torch.testing.assert_close(p, q.bfloat16(), rtol=0, atol=0)
    assert [n for n, _ in low.named_parameters()] == names


def test_split_weights_refuse_float16_and_say_what_to_use() -> None:
    model = linear(dtype=torch.float16)
    with pytest.raises(PolicyError, match="master"):
        Amp(model, torch.optim.SGD(model.parameters(), 0.1), "float16", weights="split")


def test_parameters_unfrozen_later_are_kept_in_float32_too() -> None:
    model = linear(dtype=torch.bfloat16).requires_grad_(False)
    head = linear(dtype=torch.bfloat16)
    both = nn.Sequential(model, head)
    amp = Amp(both, torch.optim.SGD(both.parameters(), 1e-4), "bfloat16")
    model.requires_grad_(True)
    for _ in range(1000):
        with amp:
            loss = both(torch.ones(1, 1, dtype=torch.bfloat16)).float().sum()
        amp.step(loss)
    assert model.weight.item() == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_is_unbiased_and_keeps_what_the_format_holds(dtype: torch.dtype) -> None:
    x = torch.full((200_000,), 1.0 + 0.3 * torch.finfo(dtype).eps)
    y = round_stochastic(x, dtype).clone().float()  # what it returns may be working memory
    assert set(y.unique().tolist()) == {1.0, 1.0 + torch.finfo(dtype).eps}
    assert ((y.mean() - 1) / torch.finfo(dtype).eps).item() == pytest.approx(0.3, abs=0.01)
    exact = torch.tensor([0.0, -2.0, INF, -INF], dtype=dtype)
    assert torch.equal(round_stochastic(exact.float(), dtype), exact)
    assert round_stochastic(torch.tensor([float("nan")]), dtype).isnan().all()


# ---- layer rules -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        y = self.head(h)
        if self.fail:
            raise ZeroDivisionError
        z = self.body(y)
        self.dtypes = [h.dtype, y.dtype, z.dtype]
        return z


BF16, FP32 = torch.bfloat16, torch.float32
HEAD_WIDE = Policy(format="bfloat16", layers=[LayerRule("head", format="float32")])


def layered(policy: Policy = HEAD_WIDE) -> tuple[Net, Amp]:
    model = Net()
    return model, Amp(model, torch.optim.SGD(model.parameters(), 0.1), policy)


def test_a_layer_under_a_rule_runs_by_it_and_the_rest_does_not() -> None:
    model, amp = layered()
    with amp:
        model(torch.ones(2, 4))
    assert model.dtypes == [BF16, FP32, BF16]
    model(torch.ones(2, 4))
    assert model.dtypes == [FP32, FP32, FP32]  # outside of the region the hooks do nothing
    amp.close()
    with amp:
        model(torch.ones(2, 4))
    assert model.dtypes == [BF16, BF16, BF16]


def test_layer_rules_survive_an_exception_inside_the_layer() -> None:
    model, amp = layered()
    for victim in (model, model.head):
        hook = victim.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError), amp:
            model(torch.ones(2, 4))
        hook.remove()
    with amp:
        model(torch.ones(2, 4))
        assert model.dtypes == [BF16, FP32, BF16]
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is BF16
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FP32


def test_copies_and_pickles_of_the_model_follow_its_rules() -> None:
    model, amp = layered()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad(), amp.region():
            other(torch.ones(2, 4))
        assert other.dtypes == [BF16, FP32, BF16]


def test_a_module_used_under_two_names_is_covered_by_either() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model = Twice()
    policy = Policy(format="bfloat16", strict=True, layers=[LayerRule("b", format="float32")])
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), policy)
    with amp:
        assert model(torch.ones(2, 4)).dtype is FP32


@pytest.mark.parametrize("reentrant", [True, False])
def test_layer_rules_hold_in_the_recomputation_of_checkpoints(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, amp = layered()
    x = torch.randn(2, 4, requires_grad=True)
    gradients: list[torch.Tensor] = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        with amp:
            loss = run(x).float().square().sum()
        loss.backward()
        assert model.dtypes == [BF16, FP32, BF16]
        gradients.append(model.head.weight.grad.clone())  # type: ignore[union-attr]
        model.zero_grad()
    assert torch.equal(*gradients)


def test_evaluation_regions_nest_and_can_log() -> None:
    model, amp = layered()
    events: list[Any] = []
    region = amp.region(log=events)
    with torch.inference_mode(), region, region:
        model(torch.ones(2, 4))
    assert model.dtypes == [BF16, FP32, BF16]
    assert [e.rule for e in events if e.op == "linear"] == ["low", "high", "low"]


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True], ids=["free", "flags frozen"])
def test_tf32_is_set_for_cuda_and_put_back(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", not frozen)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for allowed, kind in itertools.product((True, False), ("cuda", "cpu")):
        with pytest.raises(ZeroDivisionError), tf32(kind, allowed):
            inside = torch.get_float32_matmul_precision() != "highest", torch.backends.cudnn.allow_tf32
            assert inside == ((allowed, allowed) if kind == "cuda" else (before[0] != "highest", before[1]))
            raise ZeroDivisionError
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize(
    "options", [{"accumulate": 0}, {"accumulate": True}, {"weights": "mastre"}, {"policy": "bf61"}], ids=str
)
def test_wrong_arguments_are_named(options: dict[str, Any]) -> None:
    model = linear()
    with pytest.raises(PolicyError):
        Amp(model, sgd(model), **options)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = linear()
    with pytest.raises(PolicyError, match="closure"):
        Amp(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    ("model", "optimizer", "scheduler", "said"),
    [
        (lambda m: None, lambda o: o, lambda o: None, "the model is a NoneType"),
        (lambda m: torch.optim.SGD(m.parameters()), lambda o: nn.Linear(1, 1), lambda o: None, "the model is a SGD"),
        (lambda m: m, lambda o: None, lambda o: None, "the optimizer is a NoneType"),
        (lambda m: m, lambda o: o, lambda o: 3, "the scheduler is 3"),
        (lambda m: m, lambda o: o, torch.optim.lr_scheduler.ReduceLROnPlateau, "stepped with a metric"),
    ],
)
def test_parts_of_the_wrong_kind_are_told_before_anything_is_touched(
    model: Any, optimizer: Any, scheduler: Any, said: str
) -> None:
    net = nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters())
    with pytest.raises(PolicyError, match=said):
        Amp(model(net), optimizer(sgd), scheduler=scheduler(sgd))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "a NoneType, not a state"),
        ({}, "version None"),
        ({"version": 1}, "lacks scaling, micro_step"),
        ({"scale": float("nan"), "_growth_tracker": 0}, "scale of nan"),
        ({"scale": "x", "_growth_tracker": 0}, "scale of 'x'"),
        ({"scale": 2.0, "_growth_tracker": -1}, "tracker of -1"),
    ],
)
def test_a_state_that_nothing_saved_is_refused(state: Any, said: str) -> None:
    net = nn.Linear(2, 2)
    amp = Amp(net, torch.optim.SGD(net.parameters()), "float16")
    with pytest.raises(PolicyError, match=said):
        amp.load_state_dict(state)
    assert amp.loss_scale == 65536.0


def test_backward_that_was_run_already_says_who_runs_it() -> None:
    model = nn.Linear(4, 1)
    amp = Amp(model, torch.optim.SGD(model.parameters()), "bfloat16")
    with amp:
        loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time") as caught:
        amp.step(loss)
    assert any("leave out loss.backward()" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_a_custom_backward_that_meets_two_formats_says_how_functions_are_decorated(policy: str) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return gradients[0] @ weight, gradients[0].t() @ x

    model = nn.Linear(4, 3)
    amp = Amp(model, torch.optim.SGD(model.parameters()), policy)
    with amp:
        loss = Product.apply(model(torch.ones(2, 4)), model.weight[:, :3]).square().mean()
    with pytest.raises(RuntimeError) as caught:
        amp.step(loss)
    assert any("castwise.torch.custom_fwd" in note for note in caught.value.__notes__)
