"""Custom autograd Functions and custom ops: the backward knows the forward's region, and registered ops are cast."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import library

from castwise.errors import CastwiseError, PolicyError
from castwise.torch import autocast, custom_bwd, custom_fwd, register_op

BF16 = torch.bfloat16
SEEN: dict[str, list[torch.dtype]] = {}


def _product(a: torch.Tensor, b: torch.Tensor, where: str) -> torch.Tensor:
    """A product whose operands' formats and whose own format are noted."""
    result = a @ b
    SEEN.setdefault(where, []).extend([a.dtype, result.dtype])
    return result


def _function(forward_decorator: Any, backward_decorator: Any) -> type[torch.autograd.Function]:
    class Product(torch.autograd.Function):
        @staticmethod
        @forward_decorator
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return _product(a, b, "forward")

        @staticmethod
        @backward_decorator
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return _product(gradient, b.t(), "backward"), _product(a.t(), gradient, "backward")

    SEEN.clear()
    return Product


def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


DECORATORS = [
    pytest.param(custom_fwd, custom_bwd, id="bare"),
    pytest.param(custom_fwd(), custom_bwd(), id="called"),
    pytest.param(custom_fwd(device_type="cpu"), custom_bwd(device_type="cpu"), id="device"),
]


@pytest.mark.parametrize(("forward", "backward"), DECORATORS)
@pytest.mark.parametrize("elsewhere", ["outside", "island", "thread"])
def test_backward_enters_the_region_of_the_forward_again(forward: Any, backward: Any, elsewhere: str) -> None:
    a, b = _operands()
    with autocast("cpu", dtype=BF16):
        result = _function(forward, backward).apply(a, b).sum()
    if elsewhere == "thread":
        worker = threading.Thread(target=result.backward)
        worker.start()
        worker.join()
    else:
        with autocast("cpu", enabled=False) if elsewhere == "island" else contextlib.nullcontext():
            result.backward()
    assert SEEN["forward"] == [torch.float32, BF16]
    assert SEEN["backward"][1::2] == [BF16, BF16]
    assert a.grad is not None and a.grad.dtype is torch.float32
    assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype is torch.float32, "the region was left"


def test_backward_of_a_forward_outside_regions_is_not_cast_inside_one() -> None:
    a, b = _operands()
    result = _function(custom_fwd, custom_bwd).apply(a, b).sum()
    with autocast("cpu", dtype=BF16):
        result.backward()
    assert set(SEEN["forward"] + SEEN["backward"]) == {torch.float32}


def test_cast_inputs_casts_and_turns_casting_off_in_both_directions() -> None:
    function = _function(custom_fwd(device_type="cpu", cast_inputs=torch.float32), custom_bwd(device_type="cpu"))
    a, b = _operands()
    with autocast("cpu", dtype=BF16):
        result = function.apply(a.to(BF16), b)
        assert result.dtype is torch.float32
        result.sum().backward()
    assert set(SEEN["forward"] + SEEN["backward"]) == {torch.float32}


def test_cast_inputs_leaves_float64_integers_and_calls_outside_regions_alone() -> None:
    @custom_fwd(cast_inputs=BF16)
    def forward(ctx: Any, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> list[torch.dtype]:
        return [x.dtype, *(v.dtype for v in more.values())]

    one = torch.ones(2)
    more = {"wide": one.double(), "whole": one.long(), "single": one}
    with autocast("cpu", dtype=BF16):
        assert forward(None, one, more=more) == [BF16, torch.float64, torch.int64, BF16]
    assert forward(None, one, more=more) == [torch.float32, torch.float64, torch.int64, torch.float32]


def test_policy_replaces_the_regions_in_forward_and_backward() -> None:
    a, b = _operands()
    function = _function(custom_fwd(device_type="cpu", policy="float32"), custom_bwd(device_type="cpu"))
    with autocast("cpu", dtype=BF16):
        function.apply(a, b).sum().backward()
    assert set(SEEN["forward"] + SEEN["backward"]) == {torch.float32}
    function = _function(custom_fwd(device_type="cpu"), custom_bwd(device_type="cpu", policy="float32"))
    with autocast("cpu", dtype=BF16):
        function.apply(a, b).sum().backward()
    assert SEEN["forward"][1] is BF16
    assert SEEN["backward"][3] is torch.float32


def test_cast_inputs_and_policy_contradict_each_other() -> None:
    with pytest.raises(PolicyError, match="give one of the two"):
        custom_fwd(cast_inputs=torch.float32, policy="bfloat16")


def test_plain_torch_autocast_decides_where_it_is_innermost() -> None:
    a, b = _operands()
    with torch.autocast("cpu", dtype=BF16):
        result = _function(custom_fwd(device_type="cpu"), custom_bwd(device_type="cpu")).apply(a, b).sum()
    result.backward()
    assert SEEN["forward"][1] is BF16
    assert SEEN["backward"][1::2] == [BF16, BF16]


@pytest.mark.parametrize("noted", [True, False])
def test_setup_context_carries_the_region_and_its_lack_is_named(noted: bool) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return _product(a, b, "forward")

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return _product(gradient, b.t(), "backward"), a.t() @ gradient

    if noted:
        setattr(Product, "setup_context", staticmethod(custom_fwd(device_type="cpu")(Product.setup_context)))  # noqa: B010
    SEEN.clear()
    with autocast("cpu", dtype=BF16):
        result = Product.apply(*_operands()).sum()
    assert SEEN["forward"][1] is BF16
    if noted:
        result.backward()
        assert SEEN["backward"][1] is BF16
    else:
        with pytest.raises(CastwiseError, match="decorate setup_context"):
            result.backward()


def test_an_exception_in_the_backward_leaves_no_region_behind() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("on purpose")

    with autocast("cpu", dtype=BF16):
        result = Fails.apply(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(ArithmeticError):
        result.backward()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@pytest.mark.parametrize(("rule", "expected"), [("low", BF16), ("high", torch.float32)])
def test_registered_function_is_cast_by_its_rule_and_casts_nothing_inside(rule: str, expected: torch.dtype) -> None:
    function = _function(lambda f: f, lambda f: f)
    assert register_op(function, rule) is function
    a, b = _operands()
    with autocast("cpu", dtype=BF16):
        function.apply(a, b).sum().backward()
    assert SEEN["forward"][0] is expected
    assert a.grad is not None and a.grad.dtype is torch.float32


def test_function_registered_to_keep_its_inputs_is_inside_the_region_as_if_unregistered() -> None:
    function = register_op(_function(custom_fwd, custom_bwd), "keep")
    with autocast("cpu", dtype=BF16):
        function.apply(*_operands()).sum().backward()
    assert SEEN["forward"] == [torch.float32, BF16]


@library.custom_op("castwise_tests::wrapped", mutates_args=())
def wrapped(x: torch.Tensor, weight: torch.Tensor, others: list[torch.Tensor], *, by: float = 2.0) -> torch.Tensor:
    SEEN["op"] = [x.dtype, weight.dtype, *(o.dtype for o in others)]
    return x * weight * by


# library.custom_op takes no keyword-only tensors; library.define does.
library.define("castwise_tests::scaled", "(Tensor x, *, Tensor weight, Tensor[] others) -> Tensor")


@library.impl("castwise_tests::scaled", "CPU")
def _scaled(x: torch.Tensor, *, weight: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    return wrapped(x, weight, others)


@pytest.mark.parametrize("spelling", ["wrapper", "packet", "overload"])
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"rule": "low"}, BF16),
        ({"rule": "high"}, torch.float32),
        ({"rule": "widest"}, torch.float32),
        ({"cast_inputs": torch.float16}, torch.float16),
    ],
)
def test_registered_custom_op_casts_keyword_only_arguments_and_lists(
    spelling: str, setting: dict[str, Any], expected: torch.dtype
) -> None:
    packet = torch.ops.castwise_tests.scaled
    op = {"wrapper": wrapped, "packet": packet, "overload": packet.default}[spelling]
    register_op(op, **setting)
    register_op(wrapped, **setting)
    one = torch.ones(2)
    with autocast("cpu", dtype=BF16):
        if spelling == "wrapper":
            result = wrapped(one.to(BF16), one, [one, one.to(BF16)], by=3.0)
        else:
            result = op(one.to(BF16), weight=one, others=[one, one.to(BF16)])
    assert SEEN["op"] == [expected] * 4
    assert result.dtype is expected
