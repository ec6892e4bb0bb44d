"""Adafactor on parameters that are sharded over ranks, which torch's own raises an error on.

Adafactor divides by what it knows of whole rows and columns, and scales a step by the size of the whole matrix. Of a
shard, each is a sum over ranks: some small collectives for each parameter, of as many values as it has rows or columns.
Names and meaning of state and options are those of `torch.optim.Adafactor` (Shazeer and Stern, arXiv:1804.04235).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Adafactor, Optimizer
from torch.optim import optimizer as torch_optimizer

__all__ = ["has_shards", "step_shards"]


def has_shards(optimizer: Optimizer) -> bool:
    """Whether it is torch's Adafactor, of parameters that are DTensors."""
    if type(optimizer) is not Adafactor:
        return False
    return any(hasattr(p, "placements") for group in optimizer.param_groups for p in group["params"])


@torch.no_grad()
def step_shards(optimizer: Optimizer) -> None:
    """Step all parameters that have a gradient. Every rank has to call it."""
    _call(torch_optimizer._global_optimizer_pre_hooks, optimizer)
    _call(optimizer._optimizer_step_pre_hooks, optimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                _step(p, -p.grad if group["maximize"] else p.grad, _begun(p, optimizer.state[p]), group)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether step came first
    _call(optimizer._optimizer_step_post_hooks, optimizer)
    _call(torch_optimizer._global_optimizer_post_hooks, optimizer)


def _call(hooks: Mapping[int, Any], optimizer: Optimizer) -> None:
    for hook in hooks.values():
        hook(optimizer, (), {})


def _step(p: Any, gradient: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(p.dtype).eps if eps1 is None else eps1
    lr = float(group["lr"])
    state["step"] += 1
    step = float(state["step"])
    weight = step ** group["beta2_decay"]
    rate = max(eps2, _root_mean_square(p)) * min(lr, step**-0.5)
    if group["weight_decay"]:
        p.mul_(1.0 - lr * group["weight_decay"])
    squares = gradient.square()
    if p.dim() > 1:
        rows, columns = state["row_var"], state["col_var"]
        rows.lerp_(_mean(squares, -1, rows), weight)
        columns.lerp_(_mean(squares, -2, columns), weight)
        whole = _replicated(rows.sum(-2, keepdim=True)).div(p.shape[-2]).clamp_(min=eps1)
        variance = rows * columns / whole
    else:
        state["variance"].lerp_(squares, weight)
        variance = state["variance"]
    update = variance.clamp(min=eps1 * eps1).rsqrt_().mul_(gradient)
    p.add_(update, alpha=-rate / max(1.0, _root_mean_square(update) / group["d"]))


def _begun(p: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state, made where there is none, and spread over the ranks as the parameter is."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32)
    shape = list(p.shape)
    wanted: dict[str, tuple[list[int], int | None]] = {"variance": (shape, None)}
    if p.dim() > 1:
        rows, columns = [*shape[:-1], 1], [*shape[:-2], 1, shape[-1]]
        wanted = {"row_var": (rows, p.dim() - 1), "col_var": (columns, p.dim() - 2)}
    for name, (size, gone) in wanted.items():
        found = state.get(name)
        if found is None or (hasattr(p, "placements") and not hasattr(found, "placements")):
            state[name] = _spread(p, size, gone, found)
    return state


def _spread(p: Any, shape: Sequence[int], gone: int | None, values: torch.Tensor | None) -> Any:
    """Zeros, or the whole `values`, as a parameter is sharded; along the dimension that is `gone`, on every rank."""
    if not hasattr(p, "placements"):
        return torch.zeros(shape, dtype=torch.float32, device=p.device)
    from torch.distributed.tensor import Replicate, distribute_tensor, zeros

    placements = [Replicate() if gone is not None and at.is_shard(gone) else at for at in p.placements]
    if values is None:
        return zeros(*shape, dtype=torch.float32, device_mesh=p.device_mesh, placements=placements)
    return distribute_tensor(values.to(p.device), p.device_mesh, placements, src_data_rank=None)


def _mean(squares: Any, dimension: int, like: Any) -> Any:
    total = squares.sum(dimension, keepdim=True)
    if hasattr(total, "redistribute"):
        total = total.redistribute(placements=like.placements)
    return total / squares.shape[dimension]


def _replicated(x: Any) -> Any:
    """The same on every rank; a plain tensor as it is."""
    if not hasattr(x, "redistribute"):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def _root_mean_square(x: Any) -> float:
    total = x.square().sum()
    total = total.full_tensor() if hasattr(total, "full_tensor") else total
    return math.sqrt(float(total / x.numel()))
