"""The processes that train one model together, and what all of them have to know alike.

Ranks that decide by their own gradients alone drift apart: one skips a step that the others take, and from there on
they hold different weights or wait for each other for ever. So whatever decides about a step is made common here, and
nowhere else: the norm of all gradients and whether they are finite in one all-reduce of a few numbers, and what happens
seldom (a guard's finding, a policy) as plain values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from castwise.errors import PolicyError
from castwise.policy import Policy

from ._gradients import all_finite, local, norm, values_of

__all__ = ["Ranks", "no_sync", "ranks_of", "ranks_of_tensors", "sharded_modules", "unwrapped"]

T = TypeVar("T")
_SQUARES, _BAD, _FILLED, _LOSSES = range(4)  # what the numbers of a step's all-reduce are


class Ranks:
    """The ranks of one training, seen from one of them.

    Args:
        group: they all, each once.
        wrappers: the model's DistributedDataParallel modules.
        shards: its `fully_shard` modules.
    """

    def __init__(self, group: dist.ProcessGroup, wrappers: list[DistributedDataParallel], shards: list[Any]) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.wrappers = wrappers
        self.shards = shards

    def begin(self, policy: Policy, parameters: list[torch.Tensor], accumulate: int) -> bool:
        """Make sure that all ranks train by one policy, and let gradients travel as it says.

        Returns:
            Whether gradients have to be of their parameters' dtypes, as what sends them wants it.

        Raises:
            PolicyError: they do not, or gradients cannot travel so, or would add up in 16 bits.
        """
        self.same("The policy", policy.to_toml())
        low = any(p.requires_grad and p.dtype.itemsize == 2 for p in parameters)
        if low and self.wrappers and accumulate > 1:
            raise PolicyError(
                "accumulate: DistributedDataParallel adds micro-batches of 16-bit parameters in 16 bits. Shard the "
                "model (castwise.torch.distributed.shard), keep its parameters in float32, or take accumulate=1."
            )
        modules: list[nn.Module] = [*self.wrappers, *self.shards]
        if policy.communication is not None and modules:
            from .distributed.communication import compress, is_compressed

            for module in modules:
                if not is_compressed(module):
                    compress(module, policy.communication)
        return bool(modules)

    # ---- every step ----

    def measure(
        self,
        parameters: Iterable[torch.Tensor],
        losses: list[torch.Tensor],
        finite: torch.Tensor | None = None,
        *,
        exact: bool = True,
    ) -> torch.Tensor:
        """What a step has to know of the gradients of all ranks, in one all-reduce. The same on every rank.

        Args:
            parameters: those of this rank: plain ones, which every rank holds alike, and shards of DTensors.
            losses: scalars.
            finite: False where the gradients are known not to have been finite before they were unscaled.
            exact: recompute sums of squares that leave float32's range; makes the host wait for an accelerator.

        Returns:
            Three numbers: the Euclidean norm of all gradients, infinite if any value of any rank is not finite; how
            many ranks have gradients at all; and one that is finite where all losses of all ranks are.
        """
        parts = _by_copies(parameters, self.size)
        device = _device_of(self.group, parts)
        with torch.no_grad():
            squares = torch.zeros((), dtype=torch.float64, device=device)
            for copies, values in parts.items():
                size = norm(values)
                if exact and not bool(size.isfinite()):
                    size = norm(values, torch.float64)
                squares = squares + size.to(device, torch.float64).square() / copies
            bad = squares.isfinite().logical_not()
            if finite is not None:
                bad = bad | finite.logical_not().to(device)
            filled = torch.full((), float(bool(parts)), dtype=torch.float64, device=device)
            # A sum that is not finite tells it, so that a loss is one more entry and no kernel.
            packed = torch.stack([squares, bad.to(torch.float64), filled, _sum(losses, device, filled)])
            dist.all_reduce(packed, group=self.group)
            packed[_SQUARES] = torch.where(packed[_BAD] > 0, torch.inf, packed[_SQUARES].sqrt())
        return packed[[_SQUARES, _FILLED, _LOSSES]]

    def finite(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Whether the gradients of all ranks are finite, in one all-reduce."""
        bad = all_finite(values).logical_not().to(_device_of(self.group, {1: values}), torch.float32)
        dist.all_reduce(bad, group=self.group)
        return bad == 0

    def settle(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add up gradients that tensor parallelism has left as parts of sums, where their parameters are whole."""
        for p in parameters:
            gradient: Any = p.grad
            placements = getattr(p, "placements", None)
            if placements is not None and gradient is not None and gradient.placements != placements:
                p.grad = gradient.redistribute(placements=placements)

    def synchronise(self, last: bool) -> None:
        """Let the next backward average gradients over the ranks, or (between micro-batches) leave them here."""
        for wrapper in self.wrappers:
            wrapper.require_backward_grad_sync = last
        for module in self.shards:
            module.set_requires_gradient_sync(last, recurse=False)

    # ---- what happens seldom ----

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        found = torch.tensor(float(flag), device=_device_of(self.group, {}))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def all(self, flag: bool) -> bool:
        """Whether it holds on every rank."""
        return not self.any(not flag)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on each of them. Plain picklable values."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def from_rank(self, rank: int, value: T) -> T:
        """One rank's value, on each of them."""
        held = [value]
        dist.broadcast_object_list(held, group=self.group, group_src=rank)
        return held[0]

    def same(self, what: str, value: T) -> T:
        """The value, where all ranks have the same.

        Raises:
            PolicyError: they do not.
        """
        for rank, other in enumerate(self.gather(value)):
            if other != value:
                raise PolicyError(
                    f"{what} differs between ranks: rank {self.rank} has {value!r}, rank {rank} has {other!r}. Give "
                    "all ranks the same; a format for 'auto' too, where their devices differ."
                )
        return value

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any(False)


def ranks_of(model: nn.Module, parameters: Iterable[torch.Tensor] = ()) -> Ranks | None:
    """The ranks that train a model, as its wrappers and the meshes of its parameters tell; None for a single process.

    Args:
        model: whole, DistributedDataParallel, `fully_shard`, tensor-parallel, or several of these.
        parameters: of the optimizer.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    found: dict[tuple[int, ...], Any] = {
        tuple(dist.get_process_group_ranks(w.process_group)): w.process_group for w in wrappers
    }
    for mesh in _meshes([*model.parameters(), *parameters]):
        root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        members = tuple(sorted(root.mesh.flatten().tolist()))
        found.setdefault(members, root.get_group() if root.ndim == 1 else None)
    groups = {members: group for members, group in found.items() if len(members) > 1}
    if not groups:
        return None
    widest = max(groups, key=len)
    if not all(set(members) <= set(widest) for members in groups) or len(widest) == dist.get_world_size():
        group: Any = dist.group.WORLD  # rows and columns of a grid that nobody has told us of
    else:
        group = groups[widest] or dist.new_group(list(widest), use_local_synchronization=True)
    return Ranks(group, wrappers, sharded_modules(model))


def ranks_of_tensors(parameters: list[torch.Tensor]) -> Ranks | None:
    """As `ranks_of`, for an optimizer whose model is not known: the ranks that hold shards of its parameters."""
    return ranks_of(nn.Module(), parameters)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, whose module paths are those that the user wrote."""
    while isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        model = inner
    return model


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that `torch.distributed.fsdp.fully_shard` was called on."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [m for m in model.modules() if isinstance(m, FSDPModule)]


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward inside leaves gradients on their rank; the first one after it averages all of them over the ranks.

    For DistributedDataParallel (forward inside too) and `fully_shard`. `Amp(accumulate=...)` does this by itself.
    """
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    before = [w.require_backward_grad_sync for w in wrappers]
    shards = sharded_modules(model)
    try:
        for w in wrappers:
            w.require_backward_grad_sync = False
        for m in shards:
            m.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for w, value in zip(wrappers, before, strict=True):
            w.require_backward_grad_sync = value
        for m in shards:
            m.set_requires_gradient_sync(True, recurse=False)


# ---- shards ----------------------------------------------------------------------------------------------------------


def _meshes(parameters: list[torch.Tensor]) -> list[Any]:
    found: list[Any] = []
    for p in parameters:
        mesh = getattr(p, "device_mesh", None)
        if mesh is not None and mesh not in found:
            found.append(mesh)
    return found


def _by_copies(parameters: Iterable[torch.Tensor], ranks: int) -> dict[float, list[torch.Tensor]]:
    """Local gradient values by how many of the ranks hold the same ones."""
    found: dict[float, list[torch.Tensor]] = {}
    for p in parameters:
        values = values_of([p])
        if values:
            found.setdefault(ranks / _parts(p), []).extend(values)
    return found


def _sum(losses: list[torch.Tensor], device: torch.device, without: torch.Tensor) -> torch.Tensor:
    """The sum of losses, in float64 where there are several; `without` them, another number that is finite."""
    if not losses:
        return without
    scalars = (local(loss) for loss in losses)
    first, *others = ((x.reshape(()) if x.dim() else x).to(device) for x in scalars)
    return sum((loss.to(torch.float64) for loss in others), first.to(torch.float64)) if others else first


def _parts(p: torch.Tensor) -> int:
    """How many different shards a parameter has."""
    placements = getattr(p, "placements", ())
    mesh: Any = getattr(p, "device_mesh", None)
    count = 1
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            count *= mesh.size(dimension)
    return count


def _device_of(group: dist.ProcessGroup, parts: dict[Any, list[torch.Tensor]]) -> torch.device:
    """Where the numbers that ranks exchange have to be: with the gradients, unless their backend does not go there."""
    given = next((values[0].device for values in parts.values() if values), torch.device("cpu"))
    if given.type == "cpu" and dist.get_backend(group) == "nccl":  # gradients that were offloaded, or none
        return torch.device("cuda", torch.cuda.current_device())
    return given
