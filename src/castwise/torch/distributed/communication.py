"""Gradients between ranks in 16 bits (or 8), without a loss that matters.

torch's own compress hooks cast what there is: a gradient beyond 65504 becomes infinite, one below 6e-8 zero, and sums
over many ranks are rounded at every addition. Here what is sent is first scaled by powers of two, in one of two ways:

- `wide_sums`: every rank sends each other rank its share of the gradients, packed in scaled blocks (see `_packing`);
  the receiver adds them up in float32 and sends the sum around, packed again. As many bytes as an all-reduce in the
  same format, one rounding on either side of the sum, and only bytes for the backend to move, so that every backend
  carries every format.
- else the backend adds in the format itself: the ranks agree on one power of two for each gradient first, with room
  for the sum, which takes one more small all-reduce for each bucket. The backend has to know the format.
"""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from castwise.errors import PolicyError
from castwise.formats import FP32, parse_format
from castwise.torch.emulation import dtype_of

from .._ranks import sharded_modules
from ._packing import Packing, power_of_two, powers_for

__all__ = ["compress", "is_compressed"]

_compressed: weakref.WeakKeyDictionary[nn.Module, tuple[torch.dtype, bool]] = weakref.WeakKeyDictionary()


def compress(model: nn.Module, fmt: str, *, wide_sums: bool = True) -> None:
    """Let a model's gradients travel between ranks in a narrower format.

    Call it on every rank, once, before the first backward. `Amp` does so for a policy with a `communication` format.

    Args:
        model: holds DistributedDataParallel or `fully_shard` modules.
        fmt: "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2"; "float32" changes nothing.
        wide_sums: add in float32; else in `fmt`, by the backend.

    Raises:
        PolicyError: the format is none to send gradients in, the backend lacks it, the model has a communication hook
            already, or there is nothing in it that sends gradients.
    """
    found = parse_format(fmt)
    if found.holds(FP32):
        return
    dtype = dtype_of(found)
    if dtype is torch.float32:
        raise PolicyError(f"communication: {fmt} is a format of products, none to send. Use bfloat16 or float16.")
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    shards = sharded_modules(model)
    if not wrappers and not shards:
        raise PolicyError(
            "communication: no part of the model sends gradients. Wrap it in DistributedDataParallel or call "
            "fully_shard first, or leave the key out."
        )
    for module in (*wrappers, *shards):
        if _compressed.get(module, (dtype, wide_sums)) != (dtype, wide_sums):
            raise PolicyError(f"communication: the model's gradients are sent as {_compressed[module][0]} already.")
    for wrapper in wrappers:
        if wrapper not in _compressed:
            _hook(wrapper, dtype, wide_sums)
            _compressed[wrapper] = dtype, wide_sums
    if shards and not wide_sums:
        _refuse_missing(dtype, _group_of(shards[-1]))
    for module in shards:
        if module not in _compressed:
            module.set_custom_reduce_scatter(_ReduceScatter(dtype, wide_sums))
            _compressed[module] = dtype, wide_sums


def is_compressed(model: nn.Module) -> bool:
    """Whether `compress` was called on a model."""
    return any(m in _compressed for m in model.modules())


def _hook(wrapper: DistributedDataParallel, dtype: torch.dtype, wide_sums: bool) -> None:
    group = wrapper.process_group
    if not wide_sums:
        _refuse_missing(dtype, group)
    average: list[_Hook] = []

    def send_castwise(_state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        return average[0](bucket)

    send_castwise.__annotations__.clear()  # DistributedDataParallel compares them, and these are strings
    try:
        wrapper.register_comm_hook(None, send_castwise)
    except RuntimeError as error:
        raise PolicyError(
            f"communication: the model has a communication hook of its own ({error}). Leave out one of the two."
        ) from error
    average.append(_Hook(dtype, group, wide_sums))


def _refuse_missing(dtype: torch.dtype, group: Any) -> None:
    """Try the format on one number, as no backend tells what it has. All ranks get the same answer."""
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    try:
        dist.all_reduce(torch.zeros(1, device=device).to(dtype), group=group)
    except RuntimeError as error:
        raise PolicyError(
            f"communication: the {backend} backend cannot add {dtype} ({error}). Send bfloat16 or float16, or ask for "
            "wide_sums=True, which adds in float32 and moves only bytes."
        ) from error


# ---- the two ways ----------------------------------------------------------------------------------------------------


def reduce_scatter_wide(x: torch.Tensor, packing: Packing, group: Any) -> torch.Tensor:
    """The sum over the ranks of this rank's row.

    Args:
        x: (ranks, count) float32 values; row i is for rank i.
        packing: what travels.
        group: the ranks.

    Returns:
        (count,) float32 values.
    """
    count = x.shape[1]
    whole = packing.padded(count)
    if whole != count:
        x = nn.functional.pad(x, (0, whole - count))
    sent = packing.pack(x)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
    return packing.unpack(received, whole).sum(0)[:count]


def all_reduce_wide(x: torch.Tensor, packing: Packing, group: Any) -> None:
    """The mean over the ranks of a flat float32 tensor, in place. The same values on every rank."""
    ranks = dist.get_world_size(group)
    share = packing.padded(-(-x.numel() // ranks))
    padded = nn.functional.pad(x, (0, ranks * share - x.numel()))
    mean = reduce_scatter_wide(padded.view(ranks, share), packing, group).div_(ranks)
    sent = packing.pack(mean.view(1, share))
    received = torch.empty((ranks, sent.shape[1]), dtype=torch.uint8, device=x.device)
    dist.all_gather_single(received.view(-1), sent.view(-1), group=group)
    x.copy_(packing.unpack(received, share).view(-1)[: x.numel()])


def _agreed_powers(parts: list[torch.Tensor], dtype: torch.dtype, group: Any) -> torch.Tensor:
    """A power of two for each tensor, the same on every rank, with which the ranks' sum of it stays in range."""
    largest = torch.stack(torch._foreach_norm(parts, float("inf")))
    largest = torch.where(largest.isfinite(), largest, torch.inf)  # a maximum with NaN is not the same everywhere
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return powers_for(largest, dtype, dist.get_world_size(group))


class _Hook:
    """A hook of DistributedDataParallel that averages buckets of gradients beside the backward.

    On a CPU a thread of its own does it, in the order of the buckets and in a group of its own, as other collectives of
    the backward (SyncBatchNorm's, say) may be under way. On accelerators it is a stream.
    """

    def __init__(self, dtype: torch.dtype, group: Any, wide_sums: bool) -> None:
        self.dtype, self.wide_sums = dtype, wide_sums
        ranks = dist.get_process_group_ranks(group)
        self.own = dist.new_group(ranks, use_local_synchronization=True) if _on_cpu(group) else group
        self._worker: ThreadPoolExecutor | None = None
        self._stream: Any = None

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        x, parts = bucket.buffer(), bucket.gradients()
        return self._beside(x, parts) if x.device.type == "cpu" else self._in_stream(x, parts)

    def _average(self, x: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        """The mean over the ranks in the memory of a bucket, whose gradients are `parts`."""
        if not self.wide_sums:
            _all_reduce_narrow(x, parts, self.dtype, self.own)
            return x
        wide = x if x.dtype is torch.float32 else x.to(torch.float32)
        all_reduce_wide(wide, Packing(self.dtype), self.own)
        return x if wide is x else x.copy_(wide)

    def _beside(self, x: torch.Tensor, parts: list[torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "castwise-gradients")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def run() -> None:
            try:
                with torch.no_grad():
                    future.set_result(self._average(x, parts))
            except BaseException as error:
                future.set_exception(error)  # type: ignore[arg-type]

        self._worker.submit(run)
        return future

    def _in_stream(self, x: torch.Tensor, parts: list[torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        accelerator = torch.get_device_module(x.device)
        if self._stream is None:
            self._stream = accelerator.Stream(device=x.device)
        self._stream.wait_stream(accelerator.current_stream(x.device))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[x.device])
        with accelerator.stream(self._stream), torch.no_grad():
            x.record_stream(self._stream)
            future.set_result(self._average(x, parts))
        return future


def _all_reduce_narrow(x: torch.Tensor, parts: list[torch.Tensor], dtype: torch.dtype, group: Any) -> None:
    """The mean over the ranks of a flat tensor, in place, added in `dtype` with a power of two for each part of it."""
    ranks = dist.get_world_size(group)
    powers = _agreed_powers(parts, dtype, group).unbind()
    low = torch.empty_like(x, dtype=dtype)
    places = torch.split(low, [p.numel() for p in parts])
    for place, part, power in zip(places, parts, powers, strict=True):
        place.copy_(_scaled(part.reshape(-1), power, dtype, ranks))
    dist.all_reduce(low, group=group)
    for place, part, power in zip(places, parts, powers, strict=True):
        part.copy_(_unscaled(place, power, dtype, ranks).view(part.shape))


def _scaled(x: torch.Tensor, power: torch.Tensor, dtype: torch.dtype, ranks: int) -> torch.Tensor:
    # bfloat16 is divided before, as nothing else keeps the sum of its largest values in range.
    return x / ranks if dtype is torch.bfloat16 else x * power_of_two(power)


def _unscaled(low: torch.Tensor, power: torch.Tensor, dtype: torch.dtype, ranks: int) -> torch.Tensor:
    wide = low.to(torch.float32)
    if dtype is torch.bfloat16:
        return wide
    return wide.mul_(power_of_two(-power)).div_(ranks)


class _ReduceScatter:
    """What `fully_shard` calls instead of its own reduce-scatter: the interface of its `ReduceScatter`."""

    def __init__(self, dtype: torch.dtype, wide_sums: bool) -> None:
        self.dtype, self.wide_sums = dtype, wide_sums

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        ranks = dist.get_world_size(group)
        x = input_tensor.view(ranks, -1).to(torch.float32)
        total = reduce_scatter_wide(x, Packing(self.dtype), group) if self.wide_sums else self._narrow(x, group)
        if op == dist.ReduceOp.AVG:
            total = total.div_(ranks)
        elif op != dist.ReduceOp.SUM:
            raise PolicyError(f"communication: gradients are summed or averaged, not reduced by {op}.")
        output_tensor.copy_(total)

    def _narrow(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        ranks = x.shape[0]
        power = _agreed_powers([x], self.dtype, group)[0]
        low = _scaled(x, power, self.dtype, ranks).to(self.dtype)
        total = torch.empty(x.shape[1], dtype=self.dtype, device=x.device)
        dist.reduce_scatter_single(total, low.view(-1), group=group)
        return _unscaled(total, power, self.dtype, ranks).mul_(ranks)


def _group_of(module: Any) -> Any:
    """The ranks among which a `fully_shard` module's gradients are scattered."""
    for p in module.parameters():
        for dimension, placement in enumerate(getattr(p, "placements", ())):
            if placement.is_shard():
                return p.device_mesh.get_group(dimension)
    return dist.group.WORLD


def _on_cpu(group: Any) -> bool:
    return dist.get_backend(group) in ("gloo", "mpi")
