"""Regions hold wherever code can be: nested, interleaved, in other threads and tasks, recomputed, compiled,
exported.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from castwise.torch import GradScaler, StaleCastError, autocast, is_autocast_enabled
from castwise.torch._region import current_region

BF16, FP32 = torch.bfloat16, torch.float32


def region(**kw):
    return autocast("cpu", dtype=BF16, **kw)


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width))


# ---- contexts --------------------------------------------------------------------------------------------------------


def test_an_island_is_wide_and_the_region_around_it_is_not():
    with region():
        assert product() is BF16
        with autocast("cpu", enabled=False):
            assert product() is FP32
            assert not is_autocast_enabled("cpu")
        assert product() is BF16
    assert product() is FP32


def test_an_inner_region_decides_alone():
    with region(), autocast("cpu", dtype=torch.float16):
        assert product() is torch.float16
    with autocast("cpu", dtype=torch.float16), region():
        assert product() is BF16


def test_recursion_through_one_context_object():
    context = region()

    def dive(depth: int) -> None:
        with context:
            assert product() is BF16
            if depth:
                dive(depth - 1)
            assert product() is BF16

    dive(4)
    assert product() is FP32


def test_an_exception_in_a_nested_region_leaves_the_outer_one():
    with region():
        with pytest.raises(ZeroDivisionError), autocast("cpu", enabled=False):
            raise ZeroDivisionError
        assert product() is BF16
    assert current_region() is None


def test_another_thread_is_not_inside_and_its_own_region_is_its_own():
    seen = {}

    def work() -> None:
        seen["outside"] = product()
        with region():
            seen["inside"] = product()
        seen["after"] = product()

    with region():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert product() is BF16
    assert seen == {"outside": FP32, "inside": BF16, "after": FP32}


def test_one_context_object_serves_several_threads_at_once():
    context, barrier, wrong = region(), threading.Barrier(4), []

    def work() -> None:
        for _ in range(20):
            barrier.wait()
            with context:
                barrier.wait()
                if product() is not BF16:
                    wrong.append("inside")
            if product() is not FP32:
                wrong.append("outside")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_decorated_generator_is_inside_and_its_caller_is_not():
    @region()
    def numbers():
        yield product()
        yield product()

    steps = numbers()
    assert next(steps) is BF16 and product() is FP32
    assert next(steps) is BF16 and product() is FP32
    assert list(steps) == []


def test_a_decorated_generator_takes_sent_values_and_thrown_errors():
    @region()
    def echo():
        got = yield product()
        try:
            yield (got, product())
        except KeyError:
            yield ("caught", product())

    steps = echo()
    assert next(steps) is BF16
    assert steps.send(7) == (7, BF16)
    assert steps.throw(KeyError) == ("caught", BF16)
    assert product() is FP32


def test_interleaved_generators_leave_nothing_behind():
    def inside():
        with region():
            yield product()
            yield product()

    a, b = inside(), inside()
    assert next(a) is BF16
    assert next(b) is BF16
    assert list(a) == [BF16]
    assert list(b) == [BF16]
    assert product() is FP32 and current_region() is None


def test_a_coroutine_is_inside_and_its_sibling_is_not():
    seen = []

    async def low() -> None:
        with region():
            for _ in range(3):
                seen.append(("low", product()))
                await asyncio.sleep(0)

    async def wide() -> None:
        for _ in range(3):
            seen.append(("wide", product()))
            await asyncio.sleep(0)

    @region()
    async def decorated() -> None:
        for _ in range(3):
            seen.append(("low", product()))
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(low(), wide(), decorated(), wide())

    asyncio.run(main())
    assert {dtype for who, dtype in seen if who == "low"} == {BF16}
    assert {dtype for who, dtype in seen if who == "wide"} == {FP32}
    assert product() is FP32 and current_region() is None


def test_a_decorated_async_generator_is_inside():
    @region()
    async def numbers():
        yield product()
        await asyncio.sleep(0)
        yield product()

    async def main():
        return [(dtype, product()) async for dtype in numbers()]

    assert asyncio.run(main()) == [(BF16, FP32), (BF16, FP32)]


def test_the_innermost_of_ours_and_torchs_regions_wins():
    x = torch.ones(2, 2)
    with region(), torch.autocast("cpu", enabled=False):
        assert (x @ x).dtype is FP32
    with torch.autocast("cpu", dtype=torch.float16):
        with region():
            assert (x @ x).dtype is BF16
        with autocast("cpu", enabled=False):
            assert (x @ x).dtype is FP32
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


# ---- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_are_those_without_checkpointing(reentrant):
    model, x = mlp(), torch.randn(4, 8)
    want = copy.deepcopy(model)
    with region():
        loss = want(x).float().square().sum()
    loss.backward()
    with region():
        loss = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant).float().square().sum()
    loss.backward()  # outside: the recomputation must enter the region by itself
    for a, b in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_an_island_is_recomputed_wide(reentrant):
    model, x, seen = mlp(), torch.randn(4, 8), []

    def forward(x):
        seen.append(product())  # first: a recomputation stops as soon as it has what it needs
        return model(x)

    with region(), autocast("cpu", enabled=False):
        loss = checkpoint(forward, x.requires_grad_(), use_reentrant=reentrant).sum()
    loss.backward()
    assert seen == [FP32, FP32]


# ---- compiled, exported, transformed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_fullgraph_compilation_computes_what_eager_does(backend, where):
    torch._dynamo.reset()
    model, x = mlp(), torch.randn(4, 8)
    with region():
        want = model(x)

    def inside(x):
        with region():
            return model(x)

    if where == "inside":
        got = torch.compile(inside, fullgraph=True, backend=backend)(x)
    else:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        with region():
            got = compiled(x)
        assert compiled(x).dtype is FP32  # and the region is not baked in
    assert got.dtype is BF16
    assert torch.allclose(got.float(), want.float(), atol=2e-2)
    got.float().sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_island_stays_wide_forward_and_backward(backend):
    torch._dynamo.reset()
    w = torch.full((8, 8), 1.001, requires_grad=True)
    x = torch.full((4, 8), 1.001)

    def f(x):
        low = x @ w
        with autocast("cpu", enabled=False):
            wide = x @ w
        return low, wide

    compiled = torch.compile(f, fullgraph=True, backend=backend)
    with region():
        low, wide = compiled(x)
    assert low.dtype is BF16 and wide.dtype is FP32
    (gradient,) = torch.autograd.grad(wide.sum(), w)
    assert torch.equal(gradient, torch.full((8, 8), 4 * x[0, 0].item()))  # 4.004 is no bfloat16


def test_an_exception_out_of_a_compiled_region_leaves_nothing():
    torch._dynamo.reset()

    def f(x):
        with region():
            return x @ torch.ones(3, 3)

    with pytest.raises(Exception):  # noqa: B017 - the compiler chooses the type
        torch.compile(f, backend="eager")(torch.ones(2, 2))
    assert product() is FP32 and current_region() is None


def test_export_records_the_casts_of_an_ambient_region():
    model, x = mlp().eval(), torch.randn(4, 8)
    with region():
        program = torch.export.export(model, (x,), strict=False)
        want = model(x)
    got = program.module()(x)
    assert got.dtype is BF16 and torch.allclose(got.float(), want.float(), atol=2e-2)


@pytest.mark.parametrize("weights", [True, False])
def test_multi_head_attention_is_entered(weights):
    torch.manual_seed(0)
    attention, x, log = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 4, 8), []
    with region(log=log):
        out, _ = attention(x, x, x, need_weights=weights)
    assert out.dtype is BF16
    assert {e.rule for e in log if e.op == "linear"} == {"low"}
    out.float().sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_vmap_and_functional_gradients():
    w, x = torch.randn(8, 8), torch.randn(5, 8)
    with region():
        rows = torch.func.vmap(lambda row: row @ w)(x)
        gradient = torch.func.grad(lambda w: (x @ w).float().square().sum())(w)
        jvp = torch.func.jvp(lambda w: x @ w, (w,), (torch.ones_like(w),))[1]
    assert rows.dtype is BF16 and jvp.dtype is BF16 and gradient.dtype is FP32
    assert torch.allclose(rows.float(), x @ w, atol=0.1)
    want = torch.func.grad(lambda w: (x @ w).square().sum())(w)
    assert torch.allclose(gradient, want, rtol=0.05, atol=0.5)


# ---- kept casts ------------------------------------------------------------------------------------------------------


def casts(model, x, calls: int = 5) -> int:
    with region():
        for _ in range(calls):
            model(x)
        return current_region("cpu").cache.casts_made


def test_a_weight_is_cast_once_per_region_trainable_or_frozen_or_seen_through_a_view():
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(2, 8)
    assert casts(layer, x) == 1
    layer.weight.requires_grad_(False)
    assert casts(layer, x) == 1
    assert casts(lambda x: x @ layer.weight.t(), x) == 1
    with torch.inference_mode():
        assert casts(layer, x) == 1


def test_a_kept_cast_follows_in_place_updates():
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    with region():
        layer(x)
        with torch.no_grad():
            layer.weight.fill_(2.0)
        assert layer(x).float().eq(8.0).all()


@pytest.mark.parametrize("fused", [False, True])
def test_a_kept_cast_follows_a_scalers_step(fused):
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    with region():
        scaler.scale(layer(x).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.stepped
        got = layer(x).float()
    assert torch.allclose(got, (x @ layer.weight.t()), atol=0.05)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("context", ["region", "disabled scaler", "island", "torch.autocast"])
def test_a_kept_cast_follows_a_fused_step_without_a_scaler(kind, context):
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.5, fused=True)
    disabled = GradScaler("cpu", enabled=False)
    around = {"island": region(enabled=False), "torch.autocast": torch.autocast("cpu", dtype=BF16)}
    with region():
        layer(x).float().sum().backward()
        before = layer.weight.detach().clone()
        with around.get(context, contextlib.nullcontext()):
            if context == "disabled scaler":
                disabled.step(optimizer)
            else:
                optimizer.step()
        got = layer(x).float()
    assert not torch.equal(layer.weight, before)
    assert torch.allclose(got, x @ layer.weight.t(), atol=0.05)


def test_writes_that_no_counter_sees_are_caught_in_debug_mode_and_cured_by_refresh():
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    context = region(debug=True)
    with context:
        layer(x)
        layer.weight.data.fill_(3.0)
        with pytest.raises(StaleCastError, match="refresh"):
            layer(x)
        context.refresh()
        assert layer(x).float().eq(12.0).all()


def test_a_long_region_piles_up_nothing(monkeypatch):
    monkeypatch.setattr("castwise.torch._casts._WEIGHTS_KEPT", 32)
    table = nn.Parameter(torch.randn(512, 8))
    with region():
        for i in range(512):
            torch.ones(1, 8) @ table[i : i + 1].t()
        assert len(current_region("cpu").cache) <= 64  # slices of one weight
        for _ in range(100):
            nn.Linear(8, 8)(torch.ones(1, 8))
        assert len(current_region("cpu").cache) <= 64 + 32  # modules that are gone again


def test_validation_without_gradients_inside_training_does_not_cut_the_graph():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with region():
        with torch.no_grad():
            layer(x)
        with torch.inference_mode():
            layer(x)
        layer(x).float().sum().backward()
    assert layer.weight.grad is not None


def test_an_averaged_copy_computes_with_its_own_weights():
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    average = copy.deepcopy(layer)
    with region():
        layer(x)
        with torch.no_grad():
            average.weight.fill_(1.0)
        assert average(x).float().eq(4.0).all()
