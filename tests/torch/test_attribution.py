"""What broke a step: the op, the layer, the line and the cause, for the kinds of program that people write."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from castwise.errors import NonFiniteError
from castwise.guard import Finding, Kind
from castwise.policy import Policy
from castwise.torch import Amp, _scale

from .faulty import Steep

INF, NAN = float("inf"), float("nan")


def amp_for(model: nn.Module, fmt: str = "float16", **guard: Any) -> Amp:
    options = {"raise_layers": False, "patience": 0, **guard}
    return Amp(model, torch.optim.SGD(model.parameters(), 1e-3), Policy.from_dict({"format": fmt, "guard": options}))


def total(output: Any) -> torch.Tensor:
    return output.float().square().mean()


def finding(
    model: nn.Module,
    *args: Any,
    fmt: str = "float16",
    steps: int = 1,
    loss: Callable[[Any], Any] = total,
    **kwargs: Any,
) -> Finding:
    """What the guard finds in the last of some steps."""
    amp = amp_for(model, fmt)
    for _ in range(steps):
        with amp:
            value = loss(model(*args, **kwargs))
        assert not amp.step(value).stepped
    assert amp.finding is not None
    return amp.finding


class Block(nn.Module):
    """A layer whose parts have names, and whose own forward multiplies."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) * self.gain
        return self.second(torch.relu(h)) / self.gain


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def inputs() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# ---- the four kinds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_forward_overflow_is_found_at_its_op_layer_and_line(place: int) -> None:
    model = Stack(*(Block(1e6 if i == place else 1.0) for i in range(3)))
    found = finding(model, inputs())
    assert (found.kind, found.phase, found.op, found.layer) == (Kind.RANGE, "forward", "mul", f"blocks.{place}")
    assert "in Block.forward" in found.line and __file__ in found.line
    assert "inf" in found.evidence


def test_what_float32_computes_no_better_is_a_broken_computation() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(-self.linear(x).square() - 1.0)

    model = Stack(Block(), Root())
    for fmt in ("float16", "bfloat16", "float32"):
        found = finding(model, inputs(), fmt=fmt)
        assert (found.kind, found.op, found.layer) == (Kind.BROKEN, "log", "blocks.1")


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_bad_inputs_are_the_datas_fault(bad: float) -> None:
    x = inputs()
    x[1, 2] = bad
    found = finding(Stack(Block(), Block()), x, fmt="bfloat16")
    assert found.kind is Kind.DATA and found.source == "input 0" and "3.12%" in found.evidence


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("name", ["blocks.0.first.weight", "blocks.1.second.bias"])
def test_bad_weights_are_named(bad: float, name: str) -> None:
    model = Stack(Block(), Block())
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = bad
    found = finding(model, inputs())
    assert found.kind is Kind.BROKEN and found.source == f"parameter {name}" and found.layer == name.rpartition(".")[0]


class Cliff(nn.Module):
    """A layer with a steep backward."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Steep.apply(self.linear(x), self.factor)  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("factor,kind", [(3e2, Kind.SCALE), (1e8, Kind.RANGE), (NAN, Kind.BROKEN)])
def test_a_backward_overflow_is_found_in_the_layer_nearest_the_loss(place: int, factor: float, kind: Kind) -> None:
    model = Stack(*(Cliff(factor) if i == place else Block() for i in range(3)))
    found = finding(model, inputs())
    assert (found.kind, found.phase, found.layer) == (kind, "backward", f"blocks.{place}")
    assert found.line.endswith("in Steep.forward")
    if kind is Kind.SCALE:
        assert found.finite_scale is not None and 128 <= found.finite_scale < 2**16


def test_a_divisor_that_vanishes_in_float16_is_called_an_underflow() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x * 0.0)
            return y / (y.abs() * 0.0 + 1e-9)

    model = Stack(Block(), Normed())
    nn.init.constant_(model.blocks[1].linear.bias, 1e-3)  # type: ignore[union-attr,arg-type]
    found = finding(model, inputs())
    assert (found.kind, found.op, found.layer, found.underflow) == (Kind.RANGE, "div", "blocks.1", True)


# ---- programs that defeat simpler tools ------------------------------------------------------------------------------


def test_in_place_operations_do_not_get_in_the_way() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True)
    )
    with torch.no_grad():
        model[3].weight.mul_(1e6)
    found = finding(model, torch.randn(2, 2, 8, 8))
    assert (found.kind, found.layer) == (Kind.RANGE, "3")


def test_an_input_that_is_written_in_place_is_found_once_steps_are_recorded_carefully() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.clamp_(-1.0, 1.0)
            return self.linear(x) * 1e6

    model = Greedy()
    assert finding(model, inputs()).kind is Kind.UNKNOWN
    found = finding(model, inputs(), steps=2)
    assert (found.kind, found.op, found.phase) == (Kind.RANGE, "mul", "forward")


def test_a_shared_module_that_is_called_twice_is_found_at_the_call_that_broke() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(8, 8)
            self.other = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.other(self.shared(x))
            return self.shared(y * 10.0)

    model = Twice()
    nn.init.constant_(model.shared.weight, 60.0)
    found = finding(model, inputs())
    assert found.layer == "shared" and found.kind is Kind.RANGE and found.line.endswith("Twice.forward")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cliff", [False, True])
def test_checkpointed_blocks_are_seen_through(reentrant: bool, cliff: bool) -> None:
    class Checkpointed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = Checkpointed(Block(), Cliff(1e8) if cliff else Block(1e6), Block())
    found = finding(model, inputs().requires_grad_())
    assert (found.kind, found.layer) == (Kind.RANGE, "blocks.1")
    assert found.phase == ("backward" if cliff else "forward")


def test_frozen_parts_are_seen_through() -> None:
    model = Stack(Block(), Block(1e6), Block())
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    assert finding(model, inputs()).layer == "blocks.1"


@dataclasses.dataclass
class Result:
    values: torch.Tensor
    note: str


def test_dicts_dataclasses_and_several_inputs_are_carried_through() -> None:
    class Fancy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack(Block(), Cliff(1e8))

        def forward(self, batch: dict[str, torch.Tensor], *, extra: Result) -> dict[str, Any]:
            return {"result": Result(self.stack(batch["x"] + extra.values), "here"), "unused": batch["x"]}

    def loss(output: Any) -> torch.Tensor:
        return total(output["result"].values)

    found = finding(Fancy(), {"x": inputs()}, extra=Result(inputs(), "in"), loss=loss)
    assert (found.layer, found.phase) == ("stack.blocks.1", "backward")
    bad = finding(Fancy(), {"x": inputs()}, extra=Result(inputs() * NAN, "in"), loss=loss)
    assert bad.kind is Kind.DATA and bad.source.endswith("extra.values")


def test_modules_without_parameters_are_named() -> None:
    class Gain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 1e6

    assert finding(nn.Sequential(nn.Linear(8, 8), Gain(), nn.Linear(8, 8)), inputs()).layer == "1"


class Attention(nn.Module):
    def __init__(self, first_hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), -INF), first_hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y @ y.t() + self.mask).softmax(-1) @ y


def test_a_mask_of_infinities_is_not_taken_for_a_fault() -> None:
    found = finding(Stack(Attention(1), Block(1e6)), inputs())
    assert found.layer == "blocks.1"


def test_a_row_with_everything_masked_is() -> None:
    found = finding(Stack(Attention(0), Block()), inputs())
    assert (found.kind, found.layer, found.op) == (Kind.BROKEN, "blocks.0", "_softmax")


def test_random_numbers_are_those_of_the_step() -> None:
    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * (1e8 if torch.rand(()) < 0.2 else 1.0)

    model = Stack(Block(), Rare())
    amp = amp_for(model)
    broken = 0
    for _ in range(30):
        with amp:
            loss = total(model(inputs()))
        if not amp.step(loss).stepped:
            broken += 1
            assert amp.finding is not None and amp.finding.layer == "blocks.1"
            amp.forget_finding()
    assert 1 <= broken < 15


def test_parts_that_are_called_one_by_one_are_found() -> None:
    model = nn.ModuleDict({"encoder": Stack(Block(), Block()), "decoder": Stack(Block(), Block(1e6))})
    amp = amp_for(model)
    with amp:
        loss = total(model["decoder"](model["encoder"](inputs())))
    amp.step(loss)
    assert amp.finding is not None and amp.finding.layer == "decoder.blocks.1"


def test_a_part_is_raised_although_the_parts_after_it_were_given_what_it_broke() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(Block(), Block(1e6)), "decoder": nn.Linear(8, 3)})
    amp = amp_for(model, raise_layers=True)
    taken = []
    for _ in range(2):
        with amp:
            loss = total(model["decoder"](model["encoder"](inputs())))
        taken.append(amp.step(loss).stepped)
    assert taken == [False, True] and amp.policy.layers[0].match == "encoder.1"


def test_a_model_under_vmap_is_found_and_raised_once_the_fault_returns() -> None:
    model = Stack(Block(), Block(1e6))
    amp = amp_for(model, raise_layers=True)
    taken = []
    for _ in range(4):
        with amp:
            loss = total(torch.vmap(model)(inputs()))
        taken.append(amp.step(loss).stepped)
    assert amp.finding is not None and amp.finding.kind is Kind.RANGE
    assert taken == [False, False, False, True], "it cannot be repeated, and so layers are raised untried"
    assert [rule.match for rule in amp.policy.layers] == ["blocks.1", "blocks.1.second"]


def test_a_fault_in_the_loss_is_said_to_be_there_and_found_to_the_line_when_it_returns() -> None:
    model = Stack(Block())

    def loss(y: torch.Tensor) -> torch.Tensor:
        return torch.log(y.float().square().mean() * 0.0)

    first = finding(model, inputs(), loss=loss)
    assert first.phase == "loss" and first.layer == ""
    second = finding(model, inputs(), loss=loss, steps=2)
    assert (second.phase, second.op, second.kind) == ("loss", "log", Kind.BROKEN)
    assert second.line.endswith(".loss")


def test_bad_targets_are_the_datas_fault_and_found_at_the_line_that_reads_them() -> None:
    target = torch.full((4, 8), NAN)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output.float(), target)

    found = finding(Stack(Block()), inputs(), loss=loss, steps=2)
    assert (found.kind, found.phase, found.source) == (Kind.DATA, "loss", "constant that mse_loss reads")
    assert found.line.endswith(".loss")


def test_a_tensor_that_a_layer_keeps_to_itself_is_named_by_what_reads_it() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor = nn.Linear(8, 8), (torch.full((8,), NAN),)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.factor[0]  # type: ignore[no-any-return]

    found = finding(Stack(Keeps()), inputs())
    assert (found.kind, found.phase, found.layer) == (Kind.BROKEN, "forward", "blocks.0")
    assert found.source == "constant that mul in blocks.0 reads" and found.line.endswith("Keeps.forward")


def test_a_hook_of_a_weight_that_breaks_its_gradient_is_found_at_its_line() -> None:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * NAN

    model = Stack(Block())
    model.blocks[0].first.weight.register_hook(spoil)
    found = finding(model, inputs())
    assert (found.kind, found.op) == (Kind.BROKEN, "mul") and found.line.endswith(".spoil")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_compiled_torchscript_inside_a_model_is_seen_through() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 3))
    with torch.no_grad():
        next(model[1].parameters()).fill_(NAN)
    found = finding(model, inputs(), fmt="float32")
    assert (found.kind, found.source) == (Kind.BROKEN, "parameter 1.0.weight")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("device_decides", [False, True])
def test_a_loss_that_is_not_finite_is_noticed_though_its_gradients_are(
    monkeypatch: pytest.MonkeyPatch, device_decides: bool, accumulate: int
) -> None:
    """As of a term that is detached, or masked out of the gradient by a `where`."""
    if device_decides:
        monkeypatch.setattr(_scale, "ASYNCHRONOUS", frozenset({"cpu"}))
    model = Stack(Block())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    amp = Amp(model, optimizer, "bfloat16", accumulate=accumulate)
    taken = 0
    for step in range(40 * accumulate):
        with amp:
            y = model(inputs()).float()
            loss = y.square().mean()
            if step == 3 * accumulate or step >= 20 * accumulate:  # in the first micro-batch; then in all
                loss = loss + torch.log(y.detach() * 0.0 - 1.0).sum()
        taken += amp.step(loss).stepped
    assert taken == 40, "gradients are well, and steps are taken"
    told = [e for e in amp.events if e.name == "finding"]
    assert all(e.data["phase"] == "loss" and e.alarm for e in told)
    first = 3 + device_decides  # which the host hears of a step later
    assert told[0].step == first and "nan" in told[0].message
    # Looked into ever more rarely: at the 1st, 2nd, 4th, 8th and 16th in a row.
    late = device_decides  # but while steps are traced, which the 20 after the first one are
    assert [e.step for e in told[1:]] == [20, 21, 23, 27 + late, 35]
    assert told[1].data["op"] == "log" and "in test_a_loss" in told[1].data["line"]


def test_a_loss_that_only_a_layers_narrow_range_breaks_has_that_layer_raised() -> None:
    class Aside(nn.Module):
        """Also gives a penalty that overflows, and that no gradient goes through."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.penalty = nn.Linear(8, 8), nn.Linear(8, 8)
            nn.init.constant_(self.penalty.weight, 4e4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            return y, self.penalty(x.abs()).detach()

    model = Aside()
    amp = amp_for(model, raise_layers=True)
    for _ in range(3):
        with amp:
            y, penalty = model(inputs())
            loss = total(y) + penalty.float().mean()
        assert amp.step(loss).stepped
    assert [e.name for e in amp.events if e.name in ("finding", "raise")] == ["finding", "raise"]
    assert amp.finding is not None and amp.finding.layer == "penalty" and loss.isfinite()


def test_micro_batches_are_told_apart() -> None:
    model = Stack(Block())
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), "float32", accumulate=3)
    for bad in (1.0, NAN, 1.0):
        with amp:
            loss = total(model(inputs() * bad))
        amp.step(loss)
    assert amp.finding is not None and amp.finding.kind is Kind.DATA


# ---- what it leaves behind -------------------------------------------------------------------------------------------


def test_looking_changes_nothing_that_training_depends_on() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 3))
    amp = amp_for(model, "bfloat16")
    x = torch.randn(2, 2, 8, 8)
    with amp:
        loss = total(model(x * NAN))
    before = torch.get_rng_state()
    amp.step(loss)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert model[1].running_mean.isfinite().all(), "running statistics are put back"


def test_copies_and_pickles_made_inside_a_region_know_nothing_of_the_recording() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    amp = amp_for(model)
    assert amp._guard is not None
    with amp:
        twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        twin(inputs())
        thawed(inputs())
        assert not amp._guard.recorder.calls
        model(inputs())
        assert len(amp._guard.recorder.calls) == 1


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of what is run, waits for the device among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fmt", ["float16", "bfloat16", "float32"])
def test_a_healthy_step_gains_no_operation_and_no_wait(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    ops = Ops()
    fetch = torch.Tensor.tolist

    def fetched(x: torch.Tensor) -> Any:  # on this device it is no operation, on others a wait
        ops.names.append("tolist")
        return fetch(x)

    monkeypatch.setattr(torch.Tensor, "tolist", fetched)
    for enabled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Stack(Block(), Block()), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        amp = amp_for(model, fmt, enabled=enabled)
        for step in range(4):
            ops = Ops()
            with ops:
                with amp:
                    loss = functional.cross_entropy(model(inputs()).float(), torch.tensor([0, 1, 2, 0]))
                assert amp.step(loss, clip_norm=1.0).stepped
            if step:
                seen.append(ops.names)
    assert seen[0] == seen[3] and seen[1] == seen[4] and seen[2] == seen[5]
    assert [name for name in seen[0] if name in ("tolist", "aten._local_scalar_dense.default")] == ["tolist"]


@pytest.mark.parametrize("gradients", ["long", "float64"])
def test_a_loss_that_is_not_like_the_gradients_adds_no_operation_either(gradients: str) -> None:
    """Long gradients are measured one by one, and those of float64 apart from a loss of float32."""
    seen = []
    for enabled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(128, 128, bias=False) if gradients == "long" else nn.Linear(8, 8, dtype=torch.float64)
        amp = amp_for(model, "float32", enabled=enabled)
        x = torch.randn(4, model.in_features, dtype=model.weight.dtype)
        for _ in range(2):
            ops = Ops()
            with ops:
                with amp:
                    loss = total(model(x))
                assert amp.step(loss).stepped
        seen.append(ops.names)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_healthy_steps_raise_no_alarm(fmt: str) -> None:
    model = Stack(Block(), Block())
    amp = Amp(model, torch.optim.AdamW(model.parameters(), 1e-3), fmt)
    for _ in range(60):
        x = torch.randn(4, 8)
        with amp:
            loss = functional.mse_loss(model(x).float(), x)
        amp.step(loss)
    assert [e for e in amp.events if e.alarm] == []


def test_a_broken_computation_is_never_skipped_for_ever() -> None:
    model = Stack(Block())
    amp = amp_for(model, "float16", stop_after=4)
    with torch.no_grad():
        model.get_parameter("blocks.0.first.weight")[0, 0] = NAN
    with pytest.raises(NonFiniteError, match=r"4 steps in a row.*blocks\.0\.first\.weight"):
        for _ in range(10):
            with amp:
                loss = total(model(inputs()))
            amp.step(loss)
    assert amp.events[-1].name == "stop"


# ---- programs that go wrong, are compiled, or wrapped ----------------------------------------------------------------


def test_a_run_that_stalls_says_what_was_found() -> None:
    model = Stack(Block())
    amp = amp_for(model, "float32", stop_after=1000)
    with pytest.raises(NonFiniteError, match=r"stalled[\s\S]*found last: bad input data: input 0"):
        for _ in range(20):
            with amp:
                loss = total(model(inputs() * NAN))
            amp.step(loss)


def test_a_forward_that_raised_and_one_that_was_not_used_are_not_replayed() -> None:
    model = Stack(Block())
    amp = amp_for(model)
    with pytest.raises(RuntimeError, match="shapes"), amp:
        model(torch.randn(3, 7))
    with amp:
        model(inputs() * INF)
        loss = total(model(inputs() * NAN))
    amp.step(loss)
    assert amp.finding is not None and amp.finding.kind is Kind.DATA and "NaN" in amp.finding.evidence
    assert "inf" not in amp.finding.evidence


def test_a_replay_that_fails_is_told_and_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise ValueError("only once")
            return self.linear(x) * NAN

    with caplog.at_level("WARNING", "castwise.torch.guard"):
        found = finding(Once(), inputs())
    assert found.kind is Kind.UNKNOWN and "only once" in caplog.text


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the tracer's own
@pytest.mark.parametrize("how", ["wrapped", "in place", "a child"])
def test_compiled_models_are_seen_through(how: str) -> None:
    model = Stack(Block(), Block(1e6))
    called: Any = model
    if how == "wrapped":
        called = torch.compile(model, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")
    else:
        model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")  # type: ignore[assignment]
    found = finding(called, inputs())
    assert (found.kind, found.op) == (Kind.RANGE, "mul")
    assert found.layer.replace("_orig_mod.", "").replace("._orig_mod", "") == "blocks.1"


def test_a_model_in_a_wrapper_for_several_processes_is_seen_through(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for model, phase in ((Stack(Block(), Block(1e6)), "forward"), (Stack(Block(), Cliff(1e8)), "backward")):
            found = finding(nn.parallel.DistributedDataParallel(model), inputs())
            assert (found.layer, found.kind, found.phase) == ("blocks.1", Kind.RANGE, phase)
    finally:
        torch.distributed.destroy_process_group()


def test_a_buffer_that_was_bad_is_told_from_the_statistics_that_it_spoilt() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift: torch.Tensor
            self.register_buffer("shift", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.shift

    model = nn.Sequential(nn.BatchNorm1d(8), Shifted(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    amp = amp_for(model)
    for bad in (False, True, False):
        if bad:
            model.get_buffer("1.shift")[2] = NAN
        with amp:
            loss = total(model(inputs()))
        assert amp.step(loss).stepped is not bad
    assert amp.finding is not None and amp.finding.source == "buffer 1.shift"
    assert {e.data["buffer"] for e in amp.events if e.name == "heal"} >= {"1.shift", "2.running_mean"}
