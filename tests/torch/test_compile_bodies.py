"""Functions that the compiler runs as bodies of one op (checkpointed ones, branches, loops, custom autograd Functions)
are cast like all others, forward, backward and recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import library
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_
from torch.utils.checkpoint import checkpoint

from castwise.torch import Amp, autocast, custom_bwd, custom_fwd, emulation, register_op
from castwise.torch._rules import rules_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Function = Callable[..., Any]
# The compiler's own: while it looks at parameters, at custom Functions, and on importing its code generator.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
]

_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm")


@pytest.fixture(autouse=True)
def _native_arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products in 16 bits as they are on hardware that has them, so that graphs show their formats."""
    monkeypatch.setattr(emulation, "computes_natively", lambda *_: True)
    for kept in (emulation.arithmetic, rules_for):
        kept.cache_clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    LAYER.zero_grad()
    yield
    monkeypatch.undo()
    for kept in (emulation.arithmetic, rules_for):
        kept.cache_clear()


class Graphs:
    """A backend that keeps the graphs it is given and runs them as they are."""

    def __init__(self, boxed: bool = False) -> None:
        self.boxed = boxed
        self.seen: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Function:
        self.seen.append(graph)
        return make_boxed_func(graph.forward) if self.boxed else graph.forward

    def formats(self, key: str = "example_value") -> list[torch.dtype]:
        """The format of every product in every graph, those of bodies included."""
        found = []
        for graph in self.seen:
            for module in graph.modules():
                if isinstance(module, torch.fx.GraphModule):
                    found += [n.meta[key].dtype for n in module.graph.nodes if _is_product(n)]
        return found


def _is_product(node: torch.fx.Node) -> bool:
    return node.op.startswith("call") and getattr(node.target, "__name__", str(node.target)).split(".")[0] in _PRODUCTS


LAYER = torch.nn.Linear(4, 4)
WEIGHT = LAYER.weight


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient @ b.t(), a.t() @ gradient


class ProductWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient @ b.t(), a.t() @ gradient


class DecoratedProduct(Product):
    forward = staticmethod(custom_fwd(device_type="cpu")(Product.forward))
    backward = staticmethod(custom_bwd(device_type="cpu")(Product.backward))


class RegisteredProduct(Product):
    pass


register_op(RegisteredProduct, "low")


class WideProduct(Product):
    """Wide forward and backward, whatever the region."""

    forward = staticmethod(custom_fwd(device_type="cpu", cast_inputs=FP32)(Product.forward))
    backward = staticmethod(custom_bwd(device_type="cpu")(Product.backward))


class HalfProduct(Product):
    """Forward and backward under a policy of its own."""

    forward = staticmethod(custom_fwd(device_type="cpu", policy="float16")(Product.forward))
    backward = staticmethod(custom_bwd(device_type="cpu", policy="float16")(Product.backward))


@library.custom_op("castwise_tests::mm", mutates_args=())
def custom_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@custom_mm.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


register_op(custom_mm, "low")


@torch.compiler.nested_compile_region
def nested_region(x: torch.Tensor) -> torch.Tensor:
    return LAYER(x)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return LAYER(torch.tanh(LAYER(x)))


BODIES: dict[str, tuple[Function, int]] = {
    "checkpoint": (lambda x: checkpoint(LAYER, x, use_reentrant=False), 1),
    "reentrant checkpoint": (lambda x: checkpoint(LAYER, x, use_reentrant=True), 1),
    "nested checkpoint": (
        lambda x: checkpoint(lambda y: checkpoint(_twice, y, use_reentrant=False) * 2, x, use_reentrant=False),
        2,
    ),
    "region in a checkpoint": (
        lambda x: checkpoint(autocast("cpu", dtype=BF16)(LAYER.forward), x, use_reentrant=False),
        1,
    ),
    "cond": (lambda x: torch.cond(x.sum() > 0, lambda y: LAYER(y), lambda y: LAYER(-y), (x,)), 2),
    "vmap": (lambda x: torch.vmap(LAYER)(x), 1),
    "func.grad": (lambda x: torch.func.grad(lambda y: LAYER(y).sum())(x), 1),
    "Function": (lambda x: Product.apply(x, WEIGHT), 3),
    "Function with setup_context": (lambda x: ProductWithSetup.apply(x, WEIGHT), 3),
    "decorated Function": (lambda x: DecoratedProduct.apply(x, WEIGHT), 3),
    "registered Function": (lambda x: RegisteredProduct.apply(x, WEIGHT), 3),
    "registered op": (lambda x: custom_mm(x, WEIGHT), 1),
    "overload": (lambda x: torch.ops.aten.mm.default(x, WEIGHT), 1),
    "while_loop": (
        lambda x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, LAYER(y).float()), (torch.tensor(0), x.detach())),
        1,
    ),
    "scan": (lambda x: scan(lambda carry, y: (LAYER(carry + y).float(), y * 2), torch.zeros(4), x.detach()), 1),
    "associative_scan": (
        lambda x: associative_scan(torch.matmul, torch.eye(4).repeat(4, 1, 1), 0, combine_mode="generic"),
        2,
    ),
    "map": (lambda x: map_(LAYER, x), 1),
    "nested_compile_region": (lambda x: nested_region(nested_region(x).float()), 2),
    "Function in a checkpoint": (
        lambda x: checkpoint(lambda y: DecoratedProduct.apply(y, WEIGHT), x, use_reentrant=False),
        3,
    ),
}
REGIONS = ["inside", "outside"]
SLOW = ("while_loop", "scan", "associative_scan", "map")  # to compile; one of the regions is enough


def _compiled(function: Function, region: str, backend: Any) -> Function:
    """`function`, compiled whole, in a region that is entered inside or outside of what is compiled."""
    if region == "outside":
        return autocast("cpu", dtype=BF16)(torch.compile(function, backend=backend, fullgraph=True))
    if region == "decorated":
        return torch.compile(autocast("cpu", dtype=BF16)(function), backend=backend, fullgraph=True)
    if region == "amp":
        amp = Amp(LAYER, torch.optim.SGD(LAYER.parameters()), "bfloat16")
        inner = torch.compile(function, backend=backend, fullgraph=True)

        def around(x: torch.Tensor) -> Any:
            with amp:
                return inner(x)

        return around

    def body(x: torch.Tensor) -> Any:
        with autocast("cpu", dtype=BF16):
            return function(x)

    return torch.compile(body, backend=backend, fullgraph=True)


@pytest.mark.parametrize(
    ("case", "region"), [(c, r) for c in BODIES for r in REGIONS if r == "outside" or c not in SLOW]
)
def test_products_in_bodies_of_ops_are_low(case: str, region: str) -> None:
    function, products = BODIES[case]
    graphs = Graphs()
    _compiled(function, region, graphs)(torch.randn(3, 4, requires_grad=True))
    assert len(graphs.formats()) >= products and set(graphs.formats()) == {BF16}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("function", [WideProduct, HalfProduct])
def test_a_custom_function_with_a_format_of_its_own_keeps_it_in_compiled_code(function: Any, region: str) -> None:
    graphs, want = Graphs(), FP32 if function is WideProduct else FP16
    _compiled(lambda x: function.apply(x, WEIGHT), region, graphs)(torch.randn(3, 4, requires_grad=True))
    assert graphs.formats() == [want] * 3


@pytest.mark.parametrize("function", [DecoratedProduct, RegisteredProduct, WideProduct])
def test_custom_functions_are_cast_where_the_compiler_leaves_them_alone(function: Any) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", dtype=BF16):
            print(end="")
            y = function.apply(x, WEIGHT)
            print(end="")
            return y

    results = []
    for run in (broken, torch.compile(broken, backend="eager")):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        y = run(x)
        y.float().sum().backward()
        results.append((y, x.grad))
    assert results[0][0].dtype is results[1][0].dtype is (FP32 if function is WideProduct else BF16)
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("region", ["decorated", "amp"])
def test_checkpointed_products_are_low_however_the_region_is_entered(region: str) -> None:
    graphs = Graphs()
    _compiled(BODIES["checkpoint"][0], region, graphs)(torch.randn(3, 4, requires_grad=True))
    assert graphs.formats() == [BF16]


@pytest.mark.parametrize("region", REGIONS)
def test_recomputed_products_are_low(region: str) -> None:
    forward, backward = Graphs(boxed=True), Graphs(boxed=True)
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)
    x = torch.randn(3, 4, requires_grad=True)
    _compiled(lambda y: checkpoint(_twice, y, use_reentrant=False), region, backend)(x).sum().backward()
    assert forward.formats("val") == [BF16] * 2
    recomputed = len(backward.formats("val")) - 4  # two gradients for each of two products
    assert recomputed >= 1 and set(backward.formats("val")) == {BF16}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("region", REGIONS)
def test_compiled_checkpoints_give_the_values_and_gradients_of_the_uncompiled_region(backend: str, region: str) -> None:
    if backend == "inductor":
        _need_a_compiler()

    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(_twice, x, use_reentrant=False)

    results = []
    for run in (autocast("cpu", dtype=BF16)(function), _compiled(function, region, backend)):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        y = run(x)
        y.float().square().sum().backward()
        results.append((y, x.grad, WEIGHT.grad))
        LAYER.zero_grad()
    for want, got in zip(*results, strict=True):
        assert want.dtype is got.dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_what_inductor_calls_is_cast_as_it_was_traced() -> None:
    """Its code calls `torch.convolution` while the region is entered, and reads the memory that comes back."""
    _need_a_compiler()
    narrow, wide = torch.nn.Conv2d(2, 4, 3), torch.nn.Conv2d(4, 2, 3)

    def function(x: torch.Tensor) -> torch.Tensor:
        low = narrow(x)
        with autocast("cpu", enabled=False):
            return wide(low.float()) + x.mean()

    x = torch.randn(2, 2, 8, 8)
    results = []
    for run in (function, torch.compile(function)):
        with autocast("cpu", dtype=BF16):
            results.append(run(x))
    assert results[1].dtype is FP32
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-2)


@functools.cache
def _need_a_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError) as reason:
        pytest.skip(f"the inductor backend needs a C++ compiler: {reason}")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_island_in_a_compiled_checkpoint_stays_wide(backend: str) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        low = LAYER(x)
        with autocast("cpu", enabled=False):
            wide = x @ x.t()
        assert low.dtype is BF16 and wide.dtype is FP32
        return low @ low.t() + wide

    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(lambda y: checkpoint(block, y, use_reentrant=False), backend=backend, fullgraph=True)
    with autocast("cpu", dtype=BF16):
        result = compiled(x)
        eager = block(x)
    assert torch.equal(result, eager)
    result.sum().backward()
    got, x.grad = x.grad, None
    eager.sum().backward()
    torch.testing.assert_close(got, x.grad)
