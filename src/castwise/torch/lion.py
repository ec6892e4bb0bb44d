"""The Lion optimizer, which torch lacks: steps of equal size along the sign of a smoothed gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from castwise.errors import PolicyError

__all__ = ["Lion"]


class Lion(Optimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675), with decoupled decay.

    Args:
        params: parameters or groups of them.
        lr: learning rate; the paper's are 3 to 10 times smaller than AdamW's.
        betas: how slowly the direction of a step, and the kept average, follow the gradient.
        weight_decay: times `lr`, the share of a weight that each step takes off.

    Raises:
        PolicyError: an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not float(lr) >= 0.0:
            raise PolicyError(f"Lion: lr {lr!r} must be 0 or more")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise PolicyError(f"Lion: betas {betas!r} must be in [0, 1)")
        if not weight_decay >= 0.0:
            raise PolicyError(f"Lion: weight_decay {weight_decay!r} must be 0 or more")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                self.update(p, p.grad, state["exp_avg"], group["lr"], group["betas"], group["weight_decay"])
        return loss

    @staticmethod
    def update(
        w: torch.Tensor,
        gradient: torch.Tensor,
        average: torch.Tensor,
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        """The update of one weight, or of a part of one, in place."""
        lr = float(lr)
        if weight_decay:
            # Not times `1 - lr * weight_decay`: in float32 that factor is off, in each step alike.
            w.add_(w, alpha=-lr * weight_decay)
        w.add_(torch.lerp(average, gradient, 1.0 - betas[0]).sign_(), alpha=-lr)
        average.lerp_(gradient, 1.0 - betas[1])
