"""What Castwise can step by itself: dense real parameters of optimizers that nobody else listens to."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

_STEPPED = frozenset({torch.float32, torch.bfloat16, torch.float16})


def has_step_hooks(optimizer: Any) -> bool:
    """Whether somebody wants to be called around each step of the optimizer."""
    own = optimizer.__dict__.get("step")  # schedulers put one there that only notes the call
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or (own is not None and not getattr(own, "_wrapped_by_lr_sched", False))
    )


def is_dense_and_real(p: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a parameter and its gradient are plain numbers side by side in memory."""
    if gradient.layout is not torch.strided or p.dtype not in _STEPPED or gradient.dtype not in _STEPPED:
        return False
    if hasattr(p, "to_local"):
        return False
    return p.is_contiguous() or _fills_its_memory(p)


def _fills_its_memory(p: torch.Tensor) -> bool:
    """Whether the values of a tensor lie side by side, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
