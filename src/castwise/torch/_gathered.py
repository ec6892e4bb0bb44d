"""Models under `fully_shard`, whole for a while: their parameters gathered, and nothing exchanged by what runs in them.

Repeating a step is each rank's own work: a rank stops where it finds something, and others that gathered and scattered
meanwhile would wait for it for ever. So all parameters are gathered before, in the formats in which the model gathers
them, and the model's own hooks, which would gather and let go layer by layer, are off until it is sharded again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ._ranks import Ranks
from .attribution_trees import mapped

__all__ = ["fits", "gathered"]

_FSDP = "torch.distributed.fsdp"
_COPIES = 2  # of the parameters: themselves, and gradients


@contextlib.contextmanager
def gathered(shards: Sequence[Any]) -> Iterator[None]:
    """Inside, the model is whole on every rank. All ranks have to enter and leave it together.

    Args:
        shards: the `fully_shard` modules of one model, in the order of `modules()`; none where it is not sharded.
    """
    with contextlib.ExitStack() as stack:
        for module in shards:
            before = [id(p) for p in module.parameters()]
            module.unshard()
            if before != [id(p) for p in module.parameters()]:  # else it is one that stays whole after its forward
                stack.callback(module.reshard)
        for module in shards:
            _quiet(module, stack)
        yield


def _quiet(module: Any, stack: contextlib.ExitStack) -> None:
    """Leave of what `fully_shard` does around a module's forward only the casts."""
    state = module._get_fsdp_state()
    formats = state._mp_policy

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = formats.param_dtype if formats.cast_forward_inputs else None
        return _cast(args, dtype), _cast(kwargs, dtype)

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _cast(output, formats.output_dtype)

    for hooks, instead in ((module._forward_pre_hooks, before), (module._forward_hooks, after)):
        for key, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith(_FSDP):
                hooks[key] = instead
                stack.callback(hooks.__setitem__, key, hook)
    # Methods that were registered as further forwards call these themselves.
    for name, own in (("_pre_forward", before), ("_post_forward", after)):
        if name not in vars(state):
            setattr(state, name, own)
            stack.callback(delattr, state, name)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    to: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.to(dtype) if x.is_floating_point() else x  # noqa: E731
    return mapped(tree, to)


def fits(ranks: Ranks) -> bool:
    """Whether every rank has memory to spare for the whole model and its gradients. All ranks ask together."""
    needed, device = 0, torch.device("cpu")
    seen: set[int] = set()
    for module in reversed(ranks.shards):  # inner ones first: a parameter belongs to the innermost
        dtype = module._get_fsdp_state()._mp_policy.param_dtype
        for p in module.parameters():
            if id(p) not in seen:
                seen.add(id(p))
                needed += _COPIES * p.numel() * (dtype or p.dtype).itemsize
                device = p.device
    return ranks.all(device.type != "cuda" or needed <= _spare(device))


def _spare(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
