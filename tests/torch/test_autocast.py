"""`autocast` under the name that people import today: torch's own lists of ops, its signatures, its usual snippets."""

from __future__ import annotations

import asyncio
import gc
import textwrap
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from castwise import LayerRule, Policy
from castwise.errors import PolicyError
from castwise.torch import autocast, is_autocast_enabled

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# ---- torch's own lists of what its regions do ------------------------------------------------------------------------

# Each with the dtype that our region gives instead; docs/decisions says why.
DELIBERATE = {"reflection_pad1d": "low", "tensordot": "low"}


def _forms(name: str, module: Any) -> list[Any]:
    return [getattr(m, name) for m in (module, torch.Tensor) if m is not None and hasattr(m, name)]


def _dtypes(result: Any) -> set[torch.dtype]:
    tensors = result if isinstance(result, tuple | list) else (result,)
    return {t.dtype for t in tensors if isinstance(t, torch.Tensor)}


def _lowered(tree: Any, low: torch.dtype) -> Any:
    if isinstance(tree, tuple):
        return tuple(_lowered(x, low) for x in tree)
    return tree.to(low) if isinstance(tree, torch.Tensor) and tree.dtype is BF16 else tree


def _cpu_entries(low: torch.dtype) -> Iterator[tuple[str, Any, Any, Any, torch.dtype]]:
    lists = AutocastCPUTestLists(torch.device("cpu"))
    nn_ops = torch._C._nn
    for entries, module, want in (
        (lists.torch_16, torch, low),
        (lists.nn_16, nn_ops, low),
        (lists.torch_fp32, torch, FP32),
        (lists.nn_fp32, nn_ops, FP32),
    ):
        for name, args, *rest in entries:
            yield name, _lowered(args, low), rest[0] if rest else {}, module, want
    for entries, module in ((lists.torch_expect_builtin_promote, torch), (lists.methods_expect_builtin_promote, None)):
        for name, bf16, fp16, want in entries:
            yield name, bf16 if low is BF16 else fp16, {}, module, want
    for name, bf16, fp16 in lists.torch_need_autocast_promote:
        yield name, bf16 if low is BF16 else fp16, {}, torch, FP32


@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
def test_torchs_list_of_cpu_ops_gets_the_dtypes_it_asks_for(low: torch.dtype) -> None:
    ran = 0
    for name, args, kwargs, module, want in _cpu_entries(low):
        expected = low if DELIBERATE.get(name) == "low" else want
        for op in _forms(name, module):
            with autocast("cpu", dtype=low):
                result = op(*args, **kwargs)
            assert _dtypes(result) <= {expected}, name
            ran += 1
    assert ran > 60


# No kernel, not even a fake one, in a torch without CUDA; or a value that fake tensors do not have.
NEEDS_A_GPU = {"cudnn_convolution", "cudnn_convolution_transpose", "gru_cell", "grid_sampler", "equal"}


def _cuda_entries() -> Iterator[tuple[str, Any, Any, Any, torch.dtype]]:
    lists = AutocastTestLists(torch.device("cuda"))
    for entries, module, want in (
        (lists.torch_fp16, torch, FP16),
        (lists.nn_fp16, torch._C._nn, FP16),
        (lists.linalg_fp16, torch._C._linalg, FP16),
        (lists.methods_fp16, None, FP16),
        (lists.torch_fp32, torch, FP32),
        (lists.nn_fp32, torch._C._nn, FP32),
        (lists.methods_fp32, None, FP32),
        (lists.torch_need_autocast_promote, torch, FP32),
    ):
        for name, args, *rest in entries:
            if name == "einsum":  # the list's equation has four subscripts for matrices
                args = ("ij,jk->ik", *rest[0])
            yield name, args, rest[0] if rest and isinstance(rest[0], dict) else {}, module, want
    for name, args, want in lists.torch_expect_builtin_promote:
        yield name, args, {}, torch, want
    for name, args, want in lists.methods_expect_builtin_promote:
        yield name, args, {}, None, want
    for name, args, module in lists.banned:  # it has a rule here: float32
        yield name, args, {}, module, FP32


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated", "ignore:Using torch.cross without")
def test_torchs_list_of_cuda_ops_gets_the_dtypes_it_asks_for_on_fake_tensors() -> None:
    ran = 0
    with FakeTensorMode():
        for name, args, kwargs, module, want in _cuda_entries():
            if name in NEEDS_A_GPU:
                continue
            expected = FP16 if DELIBERATE.get(name) == "low" else want
            for op in _forms(name, module):
                with autocast("cuda", dtype=FP16):
                    result = op(*args, **kwargs)
                assert _dtypes(result) <= {expected}, name
                ran += 1
    assert ran > 120


def test_float64_integers_and_other_devices_are_left_alone() -> None:
    double, whole = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int64)
    with autocast("cpu", dtype=BF16):
        assert (double @ double).dtype is torch.float64
        assert (whole @ whole).dtype is torch.int64
        assert (double @ double.float().double()).exp().dtype is torch.float64
        assert (torch.ones(2, 2, device="meta") @ torch.ones(2, 2, device="meta")).dtype is FP32


# ---- signatures ------------------------------------------------------------------------------------------------------

SNIPPETS = {
    "fp16 with a scaler": (
        """
        scaler = GradScaler("cpu")
        for input, target in data:
            optimizer.zero_grad()
            with autocast(device_type="cpu", dtype=torch.float16):
                output = model(input)
                loss = loss_fn(output, target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
        ("from castwise.torch import autocast, GradScaler", "from torch.amp import autocast, GradScaler"),
    ),
    "bf16 without": (
        """
        for input, target in data:
            optimizer.zero_grad()
            with autocast(device_type="cpu", dtype=torch.bfloat16):
                output = model(input)
                loss = loss_fn(output, target)
            loss.backward()
            optimizer.step()
        """,
        ("from castwise.torch import autocast", "from torch.amp import autocast"),
    ),
    "without arguments": (
        """
        scaler = GradScaler()
        for input, target in data:
            optimizer.zero_grad()
            with autocast():
                output = model(input)
                loss = loss_fn(output, target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        ("from castwise.torch import autocast, GradScaler",),  # torch's own form of it is for CUDA alone
    ),
}


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_usual_snippets_train_with_only_the_import_changed(snippet: str) -> None:
    body, imports = SNIPPETS[snippet]
    last = {}
    for line in imports:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        x = torch.randn(32, 8)
        scope: dict[str, Any] = {
            "torch": torch,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loss_fn": nn.MSELoss(),
            "data": [(x, x.sum(1, keepdim=True))] * 30,
        }
        exec(line + "\n" + textwrap.dedent(body), scope)
        assert scope["output"].dtype in (FP16, BF16)
        last[line] = scope["loss"].item()
    first, *others = last.values()
    assert first < 1.0  # the data's variance is 8
    for other in others:
        assert first == pytest.approx(other, rel=0.1)


def test_positional_arguments_are_in_torchs_order() -> None:
    with autocast("cpu", FP16, True, False):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FP16
    with autocast("cpu", FP16, False):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FP32


def test_the_default_dtype_is_torchs() -> None:
    with autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.get_autocast_dtype("cpu")


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="device_type"):
        autocast(torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="dtype"):
        autocast("cpu", dtype=torch.float8_e4m3fn)
    with pytest.raises(PolicyError, match="contradicts"):
        autocast("cpu", dtype=BF16, policy="float16")
    layered = Policy(format="bfloat16", layers=(LayerRule(match="head", format="float32"),))
    with pytest.raises(PolicyError, match="Amp"):
        autocast("cpu", policy=layered)


def test_a_policy_decides_ops_in_a_region() -> None:
    policy = Policy(format="bfloat16", ops={"softmax": "low", "matmul": "high"})
    with autocast("cpu", policy=policy):
        x = torch.ones(2, 2)
        assert (x @ x).dtype is FP32
        assert x.bfloat16().softmax(-1).dtype is BF16
        assert nn.functional.linear(x, x).dtype is BF16


def test_our_regions_tell_of_themselves_and_torchs_switch_stays_off() -> None:
    with autocast("cpu", dtype=BF16):
        assert is_autocast_enabled() and is_autocast_enabled("cpu") and not is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled("cpu")
        with autocast("cpu", enabled=False):
            assert not is_autocast_enabled("cpu")
    assert not is_autocast_enabled()


def test_regions_of_two_device_types_hold_side_by_side() -> None:
    with FakeTensorMode():
        here, there = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
        with autocast("cpu", dtype=BF16), autocast("cuda", dtype=FP16):
            assert (here @ here).dtype is BF16 and (there @ there).dtype is FP16
            with autocast("cuda", enabled=False):
                assert (here @ here).dtype is BF16 and (there @ there).dtype is FP32


def test_a_task_made_inside_is_inside_while_the_region_lasts() -> None:
    async def child(left: asyncio.Event | None) -> torch.dtype:
        if left is not None:
            await left.wait()
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    async def parent() -> list[torch.dtype]:
        left = asyncio.Event()
        with autocast("cpu", dtype=BF16):
            late = asyncio.create_task(child(left))
            during = await asyncio.gather(child(None), child(None))
        left.set()
        return [*during, await late]

    assert asyncio.run(parent()) == [BF16, BF16, FP32]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "error::torch.jit.TracerWarning")
def test_a_traced_module_keeps_the_casts_of_the_region_it_was_traced_in() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with autocast("cpu", dtype=BF16):
        want = model(x)
        traced = torch.jit.trace(model, x)
    got = traced(x)
    assert got.dtype is BF16
    assert torch.equal(got, want)


# ---- kept casts ------------------------------------------------------------------------------------------------------


def test_without_a_cache_nothing_is_kept() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    with autocast("cpu", dtype=BF16, cache_enabled=False) as region:
        torch.randn(2, 4) @ weight
        assert len(region._region().cache) == 0


def test_kept_casts_are_let_go_with_the_region_and_not_when_the_collector_comes() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    gc.disable()
    try:
        with torch.no_grad(), autocast("cpu", dtype=BF16) as region:
            torch.randn(2, 4) @ weight
            (_, casts) = next(iter(region._entered[-1][1].cache._kept.values()))
            cast = weakref.ref(next(iter(casts.values())).cast)
            del casts, _
            assert cast() is not None
        assert cast() is None
        torch.utils.swap_tensors(weight, nn.Parameter(torch.randn(4, 4)))  # it refuses tensors that are referred to
    finally:
        gc.enable()


def test_weights_and_their_casts_do_not_outlive_the_region() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    alive = weakref.ref(weight)
    context = autocast("cpu", dtype=BF16)
    with context:
        torch.randn(2, 4) @ weight
    del weight
    gc.collect()
    assert alive() is None


def test_building_a_model_inside_inference_mode_works() -> None:
    with torch.inference_mode(), autocast("cpu", dtype=BF16):
        model = nn.Linear(4, 4)
        assert model(torch.randn(2, 4)).dtype is BF16
