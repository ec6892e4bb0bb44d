"""What broke a step of a planned model: the layer and the line of the program, whose ops run from graphs by then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.guard import Finding, Kind
from castwise.policy import Policy
from castwise.torch import Amp
from castwise.torch.planning import Plan, prepare

from .faulty import Steep

NAN = float("nan")

# The tracer's own, where it traces again.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def anew() -> Any:
    """The tracer keeps few graphs per function, and takes all of these models for one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Scaled(nn.Module):
    """Values by way of large ones, and gradients too, once its buffers are turned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.up: torch.Tensor
        self.down: torch.Tensor
        self.register_buffer("up", torch.ones(()))
        self.register_buffer("down", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.up * self.up
        y = y / self.up / self.up
        around: torch.Tensor = y / self.down / self.down * self.down * self.down
        passed: torch.Tensor = y.detach() + (around - around.detach())
        return passed


class Whole(nn.Module):
    """One graph."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.parts = nn.Linear(8, 8), nn.ModuleList(Scaled() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.enter(x))
        for part in self.parts:
            x = torch.tanh(part(x))
        return self.head(x)  # type: ignore[no-any-return]


class Between(nn.Module):
    """What no graph holds: a method that is not to be traced, between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by_hand(x)

    @torch.compiler.disable
    def by_hand(self, x: torch.Tensor) -> torch.Tensor:
        return (x.half() * self.scale).float()


class InParts(Whole):
    """Several graphs, with Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.between = Between()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.parts[0](torch.tanh(self.enter(x))))
        if x.abs().mean().item() > 1e3:
            x = x * 0.5
        x = self.between(x)
        return self.head(torch.tanh(self.parts[1](x)))  # type: ignore[no-any-return]


class OneKind(nn.Module):
    """Its gradients are all in 16 bits, and its loss is not."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.enter(x))  # type: ignore[no-any-return]


def all_low(model: nn.Module, x: torch.Tensor, fmt: str = "float16") -> Plan:
    """A plan that computes in 16 bits whatever may be, as if that gained much and casts cost nothing."""
    ready = prepare(model, (x,), policy=fmt, device="t4")
    costs = ready.costs
    return replace(ready, costs=replace(costs, high=costs.high + 1.0, down=costs.down * 0.0, up=costs.up * 0.0)).solve()


@pytest.fixture(scope="module", params=[Whole, InParts])
def planned(request: pytest.FixtureRequest) -> tuple[type[nn.Module], Plan]:
    torch.manual_seed(0)
    return request.param, all_low(request.param(), inputs())


def inputs() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def started(planned: tuple[type[nn.Module], Plan], **guard: Any) -> tuple[Any, Amp]:
    """A planned model after two healthy steps."""
    torch.manual_seed(0)
    model = planned[0]()
    options = {"patience": 0, "stop_after": 3, **guard}
    policy = Policy.from_dict({"format": "float16", "guard": options})
    amp = Amp(model, torch.optim.SGD(model.parameters(), 1e-3), policy, plan=planned[1])
    assert step(amp) and step(amp)
    return model, amp


def step(amp: Amp, x: torch.Tensor | None = None) -> bool:
    with amp:
        loss = amp.model(inputs() if x is None else x).float().square().mean()
    return amp.step(loss).stepped


def broken(model: Any, amp: Amp, x: torch.Tensor | None = None) -> Finding:
    assert not step(amp, x) and amp.finding is not None
    return amp.finding


@pytest.mark.parametrize("part", [0, 1])
def test_a_forward_overflow_is_found_in_each_graph_at_its_layer_and_line(planned: Any, part: int) -> None:
    model, amp = started(planned)
    model.parts[part].up.fill_(2.0**15)
    found = broken(model, amp)
    assert (found.kind, found.op, found.layer, found.phase) == (Kind.RANGE, "mul", f"parts.{part}", "forward")
    assert "test_attribution_plans.py" in found.line and found.line.endswith("in forward")


@pytest.mark.parametrize("part", [0, 1])
def test_a_backward_overflow_is_found_in_each_graph(planned: Any, part: int) -> None:
    model, amp = started(planned)
    model.parts[part].down.fill_(2.0**15)
    found = broken(model, amp)
    assert (found.kind, found.layer, found.phase) == (Kind.RANGE, f"parts.{part}", "backward")


def test_weights_buffers_and_data_that_are_bad_are_named(planned: Any) -> None:
    model, amp = started(planned, stop_after=10)
    found = broken(model, amp, inputs().fill_(NAN))
    assert (found.kind, found.source) == (Kind.DATA, "input 0")
    model.parts[1].up.fill_(NAN)
    found = broken(model, amp)
    assert (found.kind, found.source) == (Kind.BROKEN, "buffer parts.1.up")
    model.parts[1].up.fill_(1.0)
    with torch.no_grad():
        model.head.weight.fill_(NAN)
    found = broken(model, amp)
    assert (found.kind, found.source) == (Kind.BROKEN, "parameter head.weight")


def test_what_python_does_between_graphs_is_found_too() -> None:
    torch.manual_seed(0)
    plan = all_low(InParts(), inputs())
    model, amp = started((InParts, plan))
    assert amp.planned is not None and amp.planned.has_breaks
    model.between.scale = 1e6
    found = broken(model, amp)
    assert (found.op, found.layer, found.phase) == ("mul", "between", "forward")
    assert "test_attribution_plans.py" in found.line and found.line.endswith("in Between.by_hand")


def test_looking_leaves_the_graphs_as_they_are(planned: Any) -> None:
    model, amp = started(planned, raise_layers=False)
    assert amp.planned is not None
    before = {p: x.clone() for p, x in model.state_dict().items()}
    made = len(amp.planned._graphs), amp.planned.formats(inputs())
    model.parts[0].up.fill_(2.0**15)
    broken(model, amp)
    model.parts[0].up.fill_(1.0)
    assert all(torch.equal(before[p], x) for p, x in model.state_dict().items())
    assert (len(amp.planned._graphs), amp.planned.formats(inputs())) == made and step(amp)


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of what is run, waits for the device among them. Compiled code runs as it does without."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["planned", "planned in 16 bits", "planned in parts", "compiled", "compiled in place"])
def test_a_healthy_step_gains_no_operation_and_no_wait(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, fetch, seen = Ops(), torch.Tensor.tolist, []

    def fetched(x: torch.Tensor) -> Any:  # on this device it is no operation, on others a wait
        ops.names.append("tolist")
        return fetch(x)

    monkeypatch.setattr(torch.Tensor, "tolist", fetched)
    made: Any = {"planned in parts": InParts, "planned in 16 bits": OneKind}.get(how, Whole)
    plan = all_low(made(), inputs()) if how.startswith("planned") else None
    compiled = _Calls()
    for enabled in (True, False):
        torch.manual_seed(0)
        model = called = made()
        if how == "compiled":
            called = torch.compile(model, backend=compiled)  # type: ignore[assignment]
        elif how == "compiled in place":
            model.compile(backend=compiled)
        policy = Policy.from_dict({"format": "float16", "guard": {"enabled": enabled}})
        amp = Amp(called, torch.optim.SGD(model.parameters(), 1e-3), policy, plan=plan)
        for number in range(4):
            ops, before = Ops(), compiled.count
            if number < 2:  # which may compile
                assert step(amp)
                continue
            with ops:
                assert step(amp)
            seen.append(ops.names)
            assert plan is not None or compiled.count > before
    assert seen[0] == seen[2] and seen[1] == seen[3]
    waits = [name for name in seen[0] if name in ("tolist", "aten._local_scalar_dense.default")]
    assert waits.count("tolist") == 1 and len(waits) == (2 if how == "planned in parts" else 1)  # one is the model's


class _Calls:
    """A backend of torch.compile that counts the calls of what it made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def counted(compiled: Any, _example: Any) -> Any:
            def run(*args: Any) -> Any:
                self.count += 1
                return compiled(*args)

            return make_boxed_func(run)

        return aot_autograd(fw_compiler=counted)(graph, example)


def test_gradients_that_a_function_of_its_own_makes_are_found_through_a_compiled_model() -> None:
    class Cliff(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Steep.apply(x, self.factor) if self.factor != 1.0 else x  # type: ignore[no-untyped-call]

    model = nn.Sequential(nn.Linear(8, 8), Cliff(), nn.Linear(8, 8))
    called = torch.compile(model, backend="aot_eager")
    policy = Policy.from_dict({"format": "float16", "guard": {"patience": 0, "raise_layers": False}})
    amp = Amp(called, torch.optim.SGD(model.parameters(), 1e-3), policy)  # type: ignore[arg-type]
    assert step(amp)
    model[1].factor = 1e30  # type: ignore[assignment]
    found = broken(model, amp)
    assert (found.layer.removeprefix("_orig_mod."), found.phase) == ("1", "backward")


def test_a_layer_of_a_plan_is_raised_given_back_and_written_into_the_policy(planned: Any, tmp_path: Any) -> None:
    model, amp = started(planned, give_back_after=2)
    assert amp.planned is not None
    before = amp.planned.formats(inputs())
    model.parts[0].up.fill_(2.0**15)
    assert not step(amp) and step(amp)
    raised = next(e for e in amp.events if e.name == "raise")
    assert raised.data["layer"] == "parts.0" and raised.data["bytes"] > 0
    now = amp.planned.formats(inputs())
    changed = {op for op, fmt in now.items() if fmt != before[op]}
    assert changed and all(now[op] == "fp32" for op in changed)
    assert amp.policy.layers and Policy.load(amp.save_policy(tmp_path / "policy.toml")).layers == amp.policy.layers

    amp.save(tmp_path / "checkpoint.pt")
    torch.manual_seed(0)
    twin = planned[0]()
    again = Amp(twin, torch.optim.SGD(twin.parameters(), 1e-3), amp._asked, plan=planned[1])
    again.load(tmp_path / "checkpoint.pt")
    assert again.planned is not None and again.planned.formats(inputs()) == now
    assert step(again) and step(amp)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))

    model.parts[0].up.fill_(1.0)
    while not any(e.name == "give_back" for e in amp.events):
        assert step(amp) and amp._guard is not None and amp._guard.step < 20
    assert amp.planned.formats(inputs()) == before and not amp.policy.layers
