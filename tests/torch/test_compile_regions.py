"""Regions around and inside code whose graph breaks, nested ones, layer rules, changing shapes, and exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from castwise.policy import Policy
from castwise.torch import Amp, autocast
from castwise.torch._region import current_region

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Function = Callable[..., Any]
# The compiler's own, while it looks at parameters and at an `item()` that breaks the graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])

LAYER = torch.nn.Linear(4, 4)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    assert current_region() is None and torch._C._len_torch_function_stack() == 0, "a region was left behind"
    assert not torch._C._is_any_autocast_enabled()


def _x() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4)


# ---- where the compiler breaks the graph -----------------------------------------------------------------------------

BREAKS: dict[str, Function] = {
    "print": lambda _: print(end=""),
    "item": lambda a: a.sum().item(),
    "numpy": lambda a: a.detach().float().numpy().sum(),
    "branch on data": lambda a: 1 if a.sum() > 0 else 0,
    "asked for": lambda _: torch._dynamo.graph_break(),
}


def _around(function: Function, way: str) -> Function:
    """`function`, compiled with breaks allowed, in a region that is entered in one of the ways there are."""
    low, amp = autocast("cpu", dtype=BF16), Amp(LAYER, torch.optim.SGD(LAYER.parameters()), "bfloat16")

    def within(context: Any) -> Function:
        def run(x: torch.Tensor) -> Any:
            with context():
                return function(x)

        return run

    compiled = {
        "inside": within(lambda: autocast("cpu", dtype=BF16)),
        "one context inside": within(lambda: low),
        "Amp inside": within(lambda: amp),
        "Amp's region inside": within(amp.region),
        "decorated": low(function),
    }
    if way in compiled:
        return torch.compile(compiled[way], backend="eager")
    inner = torch.compile(function, backend="eager")

    def outside(x: torch.Tensor) -> Any:
        with amp if way == "Amp outside" else low:
            return inner(x)

    return outside


WAYS = ["inside", "one context inside", "Amp inside", "Amp's region inside", "decorated", "outside", "Amp outside"]


@pytest.mark.parametrize("way", WAYS)
def test_ops_after_a_break_are_cast(way: str) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        a = LAYER(x)
        print(end="")
        return [a, LAYER(a), x @ x.t(), torch.softmax(a, -1)]

    compiled = _around(function, way)
    for _ in range(2):  # traced, and served
        assert [y.dtype for y in compiled(_x())] == [BF16, BF16, BF16, FP32]


@pytest.mark.parametrize("way", ["inside", "outside"])
@pytest.mark.parametrize("what", BREAKS)
def test_whatever_breaks_the_graph_does_not_leave_the_region(what: str, way: str) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        a = LAYER(x)
        BREAKS[what](a)
        b = x @ x.t()
        BREAKS[what](b)
        return [a, b, LAYER(x)]

    assert [y.dtype for y in _around(function, way)(_x())] == [BF16] * 3


@pytest.mark.parametrize(
    ("kind", "way"), [(torch.nn.LSTM, "inside"), (torch.nn.LSTM, "outside"), (torch.nn.GRU, "outside")]
)
def test_recurrent_modules_are_cast_where_the_compiler_leaves_them_alone(kind: Any, way: str) -> None:
    module, x = kind(4, 4, batch_first=True), torch.randn(2, 3, 4)
    result = _around(lambda s: module(s)[0], way)(x)
    assert result.dtype is BF16
    torch.testing.assert_close(result.float(), module(x)[0], rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("kind", "held", "compiled"),
    [
        (torch.nn.LSTM, BF16, False),
        (torch.nn.LSTM, FP16, True),
        (torch.nn.GRU, FP16, False),
        (torch.nn.RNN, BF16, False),
    ],
)
def test_recurrent_modules_with_16_bit_weights_take_float32_in_a_region(
    kind: Any, held: torch.dtype, compiled: bool
) -> None:
    module, x = kind(4, 4).to(held), torch.randn(3, 2, 4)
    run = torch.compile(module, backend="eager") if compiled else module
    want = module.float()(x)[0]
    module.to(held)
    for policy, dtype in (("bfloat16", BF16), ("float32", FP32)):
        with autocast("cpu", policy=policy):
            result = run(x)[0]
        assert result.dtype is dtype
        torch.testing.assert_close(result.float(), want, rtol=5e-2, atol=2e-2)
    with pytest.raises(ValueError, match="input dtype"):
        module(x)  # torch's own check is back


# ---- nested regions --------------------------------------------------------------------------------------------------


def _theirs_in_ours(x: torch.Tensor) -> list[torch.Tensor]:
    with autocast("cpu", dtype=FP16):
        results = [LAYER(x)]
        with torch.autocast("cpu", dtype=BF16):
            results.append(LAYER(x))
        with torch.autocast("cpu", enabled=False):
            results.append(LAYER(x))
        return [*results, LAYER(x)]


def _ours_in_theirs(x: torch.Tensor) -> list[torch.Tensor]:
    with torch.autocast("cpu", dtype=BF16):
        results = [LAYER(x)]
        with autocast("cpu", dtype=FP16):
            results.append(LAYER(x))
        with autocast("cpu", enabled=False):
            results.append(LAYER(x))
        return [*results, LAYER(x)]


def _ours_in_ours(x: torch.Tensor) -> list[torch.Tensor]:
    with autocast("cpu", dtype=BF16):
        results = [LAYER(x)]
        with autocast("cpu", dtype=FP16):
            results.append(LAYER(x))
        with autocast("cpu", enabled=False):
            results.append(LAYER(x))
        return [*results, LAYER(x)]


NESTED = {
    _theirs_in_ours: [FP16, BF16, FP32, FP16],
    _ours_in_theirs: [BF16, FP16, FP32, BF16],
    _ours_in_ours: [BF16, FP16, FP32, BF16],
}
AROUND: dict[str, Function] = {
    "nothing": contextlib.nullcontext,
    "ours": lambda: autocast("cpu", dtype=BF16),
    "theirs": lambda: torch.autocast("cpu", dtype=FP16),
}


@pytest.mark.parametrize(("around", "backend"), [*((a, "eager") for a in AROUND), ("nothing", "aot_eager")])
@pytest.mark.parametrize("function", NESTED)
def test_the_innermost_region_decides_in_compiled_code(function: Function, around: str, backend: str) -> None:
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with AROUND[around]():
        assert [y.dtype for y in compiled(_x())] == NESTED[function]
        assert [y.dtype for y in function(_x())] == NESTED[function]


@BACKENDS
def test_one_compiled_function_follows_each_region_it_is_called_in(backend: str) -> None:
    compiled = torch.compile(LAYER, backend=backend, fullgraph=True)
    for _ in range(2):
        assert compiled(_x()).dtype is FP32
        with autocast("cpu", dtype=BF16):
            assert compiled(_x()).dtype is BF16
            with autocast("cpu", dtype=FP16):
                assert compiled(_x()).dtype is FP16
            with autocast("cpu", enabled=False):
                assert compiled(_x()).dtype is FP32
            with torch.autocast("cpu", dtype=FP16):
                assert compiled(_x()).dtype is FP16
            assert compiled(_x()).dtype is BF16
        with autocast("cpu", policy="float32"):
            assert compiled(_x().bfloat16()).dtype is FP32


# ---- layer rules -----------------------------------------------------------------------------------------------------

LAYERS = Policy.from_toml(
    """
    format = "bfloat16"
    [[layers]]
    match = "b"
    format = "float32"
    [[layers]]
    match = "c"
    format = "float16"
    """
)


class Net(torch.nn.Module):
    def __init__(self, checkpointed: bool, breaks: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            torch.nn.Linear(4, 4),
            torch.nn.Sequential(torch.nn.Linear(4, 4)),
            torch.nn.Linear(4, 4),
        )
        self.checkpointed, self.breaks = checkpointed, breaks

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        a = self.a(x)
        if self.breaks:
            print(end="")
        b = checkpoint(self.b, x, use_reentrant=False) if self.checkpointed else self.b(x)
        return [a, b, self.c(x)]


@BACKENDS
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
def test_layer_rules_hold_in_compiled_models(checkpointed: bool, breaks: bool, backend: str) -> None:
    model = Net(checkpointed, breaks)
    amp = Amp(model, torch.optim.SGD(model.parameters()), LAYERS)
    compiled = torch.compile(model, backend=backend, fullgraph=not breaks)
    with amp:
        results = compiled(_x())
        want = model(_x())
    assert [y.dtype for y in results] == [y.dtype for y in want] == [BF16, FP32, FP16]
    for got, expected in zip(results, want, strict=True):
        torch.testing.assert_close(got, expected)
    sum(y.float().sum() for y in results).backward()
    assert [y.dtype for y in compiled(_x())] == [FP32] * 3


# ---- shapes, policies, exceptions ------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_sizes_may_change_between_calls(dynamic: bool | None, backend: str) -> None:
    compiled = torch.compile(LAYER, backend=backend, fullgraph=True, dynamic=dynamic)
    with autocast("cpu", dtype=BF16):
        for size in (2, 3, 5, 7):
            x = torch.randn(size, 4)
            assert torch.equal(compiled(x), LAYER(x)) and compiled(x).dtype is BF16


@BACKENDS
def test_a_marked_dimension_is_traced_once(backend: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x: torch.softmax(LAYER(x) @ x.t(), -1), backend=counter, fullgraph=True)
    with autocast("cpu", dtype=BF16):
        for size in (2, 3, 5):
            x = torch.randn(size, 4)
            torch._dynamo.mark_dynamic(x, 0)
            assert compiled(x).dtype is FP32
    assert counter.frame_count == 1


def test_entering_a_region_anew_does_not_compile_anew() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(LAYER, backend=counter, fullgraph=True)
    amp = Amp(LAYER, torch.optim.SGD(LAYER.parameters()), "bfloat16")
    for _ in range(3):
        with autocast("cpu", dtype=BF16):
            compiled(_x())
        with amp:
            compiled(_x())
    assert counter.frame_count == 1


@BACKENDS
def test_regions_of_several_policies_in_one_graph(backend: str) -> None:
    keep = Policy.from_toml('format = "bfloat16"\n[ops]\nsoftmax = "low"\n')

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        with autocast("cpu", policy=keep):
            a = torch.softmax(x, -1)
        with autocast("cpu", dtype=FP16):
            b = LAYER(x)
        with autocast("cpu", policy="float32"):
            c = a @ a.t()
        return [a, b, c, LAYER(x)]

    assert [y.dtype for y in torch.compile(function, backend=backend, fullgraph=True)(_x())] == [BF16, FP16, FP32, FP32]


@BACKENDS
@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_exception_that_the_traced_code_catches_leaves_its_region(fullgraph: bool, backend: str) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        try:
            with autocast("cpu", dtype=BF16):
                a = LAYER(x)
                raise KeyError("on purpose")
        except KeyError:
            return [a, LAYER(x)]

    compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
    assert [y.dtype for y in compiled(_x())] == [BF16, FP32]


@pytest.mark.parametrize("way", ["inside", "decorated", "outside"])
def test_an_exception_out_of_a_compiled_region_leaves_nothing(way: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = LAYER(x)
        if x.shape[0] == 2:
            raise ZeroDivisionError("on purpose")
        return y

    compiled = _around(function, way)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            compiled(_x())
        assert current_region() is None and LAYER(_x()).dtype is FP32
    assert compiled(torch.randn(3, 4)).dtype is BF16
