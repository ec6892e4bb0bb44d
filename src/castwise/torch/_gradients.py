"""One pass over gradients: are they finite, what is their norm, and multiply them. For dense, sparse and complex ones.

Gradients are grouped by device and dtype so that each group is one fused `_foreach` call.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.optim import Optimizer

_LONG = 1 << 14  # values; below, one call for all tensors takes less than one for each


def parameters_of(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """The parameters of optimizers, each once, in order."""
    seen: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                seen.setdefault(id(p), p)
    return list(seen.values())


def values_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The memory that holds the gradients: dense real tensors that share it, so that writing them writes the gradients.

    Sparse gradients are coalesced first (their parameter's `.grad` is replaced), as duplicate entries add up to what
    the optimizer sees. Complex ones are viewed as pairs of reals.
    """
    found = []
    for p in parameters:
        gradient = p.grad
        if gradient is None:
            continue
        if gradient.layout is torch.sparse_coo:
            if not gradient.is_coalesced():
                gradient = p.grad = gradient.coalesce()
            gradient = gradient._values()
        elif gradient.layout is not torch.strided:
            gradient = gradient.values()
        if gradient.is_complex():
            if gradient.is_conj():  # conjugated lazily: its memory holds other numbers
                gradient = p.grad = gradient.resolve_conj()
            gradient = torch.view_as_real(gradient)
        if gradient.numel():
            found.append(local(gradient))
    return found


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    to_local = getattr(x, "to_local", None)
    return to_local() if to_local is not None else x


def _grouped(values: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for g in values:
        groups[(g.device, g.dtype)].append(g)
    return groups


def norm(values: list[torch.Tensor], wide: torch.dtype | None = None) -> torch.Tensor:
    """The Euclidean norm of all gradients together, a scalar on the first one's device.

    In float32 (float64 if any gradient is) the sum of squares can overflow although every value is finite; computed
    in `wide` = float64, the norm of float32 values is finite exactly where all of them are.
    """
    if not values:
        return torch.zeros(())
    together: torch.Tensor = torch.linalg.vector_norm(norms(values, wide=wide))
    return together


def norms(
    values: list[torch.Tensor], beside: list[torch.Tensor] | None = None, wide: torch.dtype | None = None
) -> torch.Tensor:
    """The norm of each gradient, and then each scalar of `beside`, or its size, in one vector on the first's device.

    What stands beside is one more entry of the same fetch, and no kernel is run for it. No graph is recorded.
    """
    if wide is None:
        wide = torch.float64 if any(v.dtype is torch.float64 for v in values) else torch.float32
    together = [*values, *(beside or [])]
    places: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for place, x in enumerate(together):
        if place < len(values) or x.dim() or x.device != together[0].device:
            places[(x.device, x.dtype)].append(place)
    found: list[torch.Tensor] = together[:]
    with torch.no_grad():
        for (_, dtype), group in places.items():
            kept = torch.promote_types(wide, dtype)
            dots = [place for place in group if kept is torch.float32 and _is_long(together[place])]
            for place in dots:
                flat = together[place].view(-1)
                found[place] = torch.dot(flat, flat).sqrt_().to(together[0].device)
            rest = [place for place in group if place not in dots] if dots else group
            if rest:
                sizes = torch._foreach_norm([together[p] for p in rest], 2, dtype=kept)
                for place, size in zip(rest, sizes, strict=True):
                    found[place] = size.to(together[0].device)
        return torch.stack(found)


def _is_long(x: torch.Tensor) -> bool:
    """Whether a product with itself is the better norm: on CPUs it takes half the time, and is more exact."""
    return x.device.type == "cpu" and x.dtype is torch.float32 and x.numel() >= _LONG and x.is_contiguous()


def total(sizes: list[float]) -> float:
    """The norm of all from the norm of each; infinite where one is not finite."""
    if not all(map(math.isfinite, sizes)):
        return math.inf
    return math.sqrt(math.fsum(size * size for size in sizes))


def all_finite(values: list[torch.Tensor]) -> torch.Tensor:
    """Whether every gradient value is finite, as a bool scalar on the first one's device. Exact, unlike a norm's
    test.
    """
    if not values:
        return torch.ones((), dtype=torch.bool)
    found: list[torch.Tensor] = []
    for (device, dtype), group in _grouped(values).items():
        bad = torch.zeros((), dtype=torch.float32, device=device)
        one = torch.ones((), dtype=torch.float32, device=device)
        if dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            torch._amp_foreach_non_finite_check_and_unscale_(group, bad, one)
        found.append(bad.to(values[0].device))
    return torch.stack(found).sum() == 0


def multiply(values: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply gradients in place."""
    for (device, _), group in _grouped(values).items():
        torch._foreach_mul_(group, factor.to(device) if isinstance(factor, torch.Tensor) else factor)


def clear(optimizer: Optimizer) -> bool:
    """Set all gradients of an optimizer's parameters to None; whether there were any."""
    found = False
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad, found = None, True
    return found
