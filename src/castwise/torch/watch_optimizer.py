"""Watching a loop that steps its optimizer by itself, under `torch.autocast`, `castwise.torch.autocast` or neither.

What goes wrong there is what `Amp` does for its users: 16-bit parameters without float32 values beside them, an epsilon
that the format of the optimizer's state does not have, clipping before unscaling. torch calls an optimizer's hooks
before and after each real step; a step that a scaler skips is none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ._gradients import norm, parameters_of, values_of
from .guard_metrics import spoilt_statistics
from .reports import Reports
from .stale import StaleUpdates

__all__ = ["OptimizerWatcher", "vanishing_epsilon"]

LOW = (torch.float16, torch.bfloat16)
_STALE = 0.5  # share of updates that are lost, from which on 16-bit parameters stand still
_TINY = 1e-3  # a true norm that nobody clips to: what is cut to it was still multiplied by the scale
_STEPS = 3
_SAME = 1e-3


class OptimizerWatcher:
    """Collects the metrics of an optimizer's steps and hands them to sinks.

    Args:
        optimizer: whose steps are watched.
        reports: where to.
        look_every: compare weights before and after each n-th step; 0: never.
        model: for its running statistics; its parameters are the optimizer's.
        scaler: torch.amp.GradScaler or castwise.torch.GradScaler, if the loop has one.
    """

    def __init__(
        self, optimizer: Optimizer, reports: Reports, look_every: int, model: nn.Module | None, scaler: Any
    ) -> None:
        self.optimizer, self.reports, self.look_every = optimizer, reports, look_every
        self.model, self.scaler = model, scaler
        self._stale = StaleUpdates()
        self._norm: torch.Tensor | None = None
        self._scale = 1.0
        self._skips = False
        self._scaled_norms: list[float] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def loss(self, loss: torch.Tensor) -> None:
        """The unscaled loss of a micro-batch, before the step."""
        self.reports.loss(loss)

    def count(self, *, samples: int = 0, tokens: int = 0) -> None:
        """Samples and tokens of the step that runs, for batches of changing size."""
        self.reports.count(samples=samples, tokens=tokens)

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    # ---- around a step -----------------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = parameters_of([optimizer])
        found = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
        self._skips = found is not None and bool(found)
        self._norm, self._scale = norm(values_of(parameters)), float(self.scaler.get_scale()) if self.scaler else 1.0
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused optimizer unscales by itself
            self._norm = self._norm / self._scale
        if self._looks():
            self._stale.before(parameters)
            for words in vanishing_epsilon(optimizer):
                self.reports.hazard("optimizer epsilon", words)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stale = None
        if self._skips:
            self.reports.forget_losses()
            return
        if self._looks():
            stale = self._stale.after()
            self._look(optimizer, stale)
        reports = self.reports
        if reports.step_ends():
            grad_norm = float(self._norm) if self._norm is not None else float("nan")
            self._check_clip(grad_norm)
            reports.write(self._metrics(grad_norm, stale))
            reports.trend()
        reports.forget_losses()

    def _look(self, optimizer: Optimizer, stale: float | None) -> None:
        low = [p for p in parameters_of([optimizer]) if p.dtype in LOW]
        if low and stale is not None and stale > _STALE:
            dtype = str(low[0].dtype).removeprefix("torch.")
            words = f"{stale:.0%} of a step's updates change nothing; {len(low)} parameters are {dtype}"
            self.reports.hazard("half-precision parameters", words)
        words = spoilt_statistics(self.model) if self.model is not None else ""
        if words:
            self.reports.hazard("statistics", words)

    def _check_clip(self, grad_norm: float) -> None:
        """The same tiny norm at each step, times the scale: it was cut to a limit that was meant for true gradients."""
        scaled = grad_norm * self._scale
        self._scaled_norms = [*self._scaled_norms, scaled][-_STEPS:]
        spread = max(self._scaled_norms) - min(self._scaled_norms)
        same = len(self._scaled_norms) == _STEPS and spread <= _SAME * scaled
        if self._scale > 1.0 and 0.0 < grad_norm < _TINY and same:
            words = f"the gradients' norm is {scaled:.4g} divided by the loss scale {self._scale:g}, step after step"
            self.reports.hazard("clip before unscale", words)

    def _looks(self) -> bool:
        return bool(self.look_every) and self.reports.steps % self.look_every == 0

    def _metrics(self, grad_norm: float, stale: float | None) -> dict[str, Any]:
        reports = self.reports
        device = next((p.device for p in parameters_of([self.optimizer])), torch.device("cpu"))
        record: dict[str, Any] = {
            "step": reports.steps,
            "time": time.time(),
            "train/loss": reports.step_loss(),
            "train/grad_norm": grad_norm,
            "train/learning_rate": float(self.optimizer.param_groups[0]["lr"]),
        }
        if self.scaler is not None:
            record["train/loss_scale"] = self._scale
        if stale is not None:
            record["numerics/stale_updates"] = stale
        return record | reports.performance(device)


def vanishing_epsilon(optimizer: Optimizer) -> Iterator[str]:
    """Evidence of an eps that is zero in the format in which the optimizer adds it."""
    for place, group in enumerate(optimizer.param_groups):
        eps = group.get("eps")
        if not isinstance(eps, float | int) or isinstance(eps, bool):
            continue
        for dtype in {p.dtype for p in group["params"] if p.is_floating_point()}:
            if float(torch.tensor(float(eps), dtype=torch.float64).to(dtype)) == 0.0:
                kind = type(optimizer).__name__
                yield f"eps={eps:g} of {kind} is 0 in {str(dtype).removeprefix('torch.')} (parameter group {place})"
