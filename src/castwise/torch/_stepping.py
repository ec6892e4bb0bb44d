"""One optimizer step on gradients that are known to be finite, or that a device scalar says to skip.

Three ways, the first that applies: Castwise's own pass over the weights (`_fused`); the optimizer's fused kernels,
which take a divisor of the gradients and a "found inf" flag; and any optimizer, after its gradients were multiplied.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from castwise.errors import PolicyError

from ._adafactor_shards import has_shards, step_shards
from ._casts import CastCache
from ._eight_bit import load_torchao
from ._fused import FusedStep
from ._gradients import multiply, parameters_of, values_of
from ._narrow import NarrowGradients
from ._refresh import refreshing
from ._updates import UPDATES
from .weights import WideWeights

log = logging.getLogger("castwise.torch.amp")

#: How `Amp(optimizer_state=...)` is spelt.
STATE_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


class Stepper:
    """Steps an optimizer and keeps what depends on its weights up to date.

    Args:
        optimizer: any torch optimizer.
        mode: how 16-bit parameters are kept; see `weights`.
        cache: kept casts of the parameters.
        optimizer_state: "float32", "bfloat16", or "8bit", in torchao's tensors.
        narrow_gradients: whether gradients of 16-bit parameters stay in 16 bits.
        narrow: 16-bit gradients of float32 parameters. With it, kept casts are written anew by every step.

    Raises:
        PolicyError: the format of the state is not known, or this optimizer keeps its state by itself.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str,
        cache: CastCache,
        *,
        optimizer_state: str = "float32",
        narrow_gradients: bool = False,
        narrow: NarrowGradients | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.wide = WideWeights(optimizer, mode, narrow_gradients=narrow_gradients)
        self.state_dtype = _state_dtype(optimizer_state, optimizer)
        self._cache, self._narrow = cache, narrow
        self._fused = FusedStep(optimizer, self.wide, cache, self.state_dtype)
        self._told = ""

    def step(self, divisor: float) -> None:
        """Step by gradients divided by `divisor`. Gradients may be changed."""
        with self._casts_follow():
            self._step(divisor)

    def _step(self, divisor: float) -> None:
        if self._own_pass():
            self._fused.step(divisor)
            return
        self.wide.before_step()
        values = values_of(parameters_of([self.optimizer]))
        devices = {v.device for v in values}
        if divisor != 1.0 and is_fused(self.optimizer) and len(devices) == 1:
            device = devices.pop()
            whole = torch.full((), divisor, dtype=torch.float32, device=device)
            self._step_fused(whole, torch.zeros((), dtype=torch.float32, device=device))
        else:
            if divisor != 1.0:
                multiply(values, 1.0 / divisor)
            step_shards(self.optimizer) if has_shards(self.optimizer) else self.optimizer.step()
            self._written()
        self.wide.after_step()

    def step_ahead(self, divisor: torch.Tensor | None, found_inf: torch.Tensor) -> None:
        """Step, or skip where `found_inf` is not 0, as device scalars say. The optimizer is a fused one."""
        with self._casts_follow():
            self._step_ahead(divisor, found_inf)

    def _step_ahead(self, divisor: torch.Tensor | None, found_inf: torch.Tensor) -> None:
        if self._own_pass() and UPDATES[type(self.optimizer)].skips:
            self._fused.step(1.0 if divisor is None else divisor, found_inf)
            return
        self.wide.before_step()
        self._step_fused(divisor, found_inf)
        self.wide.after_step()

    @contextlib.contextmanager
    def _casts_follow(self) -> Iterator[None]:
        """Around a step: 16-bit gradients of float32 weights widened in one call, their kept casts written in another.

        Which is faster than a pass of our own, where no state and no weight is in 16 bits.
        """
        if self._narrow is None:
            yield
            return
        self._narrow.widen()
        weights = [] if self._own_pass() else [p for p in self.wide.parameters() if p.grad is not None]
        with refreshing(self._cache, weights):
            yield

    def _own_pass(self) -> bool:
        planned = "" if self._narrow is None else "casts of weights are written at once"
        reason = self._fused.saves_nothing(planned) or self._fused.why_not()
        if reason and self.state_dtype is not torch.float32:
            raise PolicyError(f"optimizer_state: the optimizer has to step itself, in float32 state, as {reason}")
        if reason != self._told:
            self._told = reason
            log.info("the optimizer steps itself: %s", reason) if reason else None
        return not reason

    def _step_fused(self, divisor: torch.Tensor | None, found_inf: torch.Tensor) -> None:
        """torch's contract with fused optimizers: they divide gradients by `grad_scale` and skip where `found_inf`."""
        optimizer: Any = self.optimizer
        optimizer.grad_scale, optimizer.found_inf = divisor, found_inf
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
            self._written()

    def _written(self) -> None:
        """Fused optimizers write parameters without telling PyTorch's version counter, which kept casts rely on."""
        if is_fused(self.optimizer):
            torch.autograd.graph.increment_version(parameters_of([self.optimizer]))


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer takes `grad_scale` and `found_inf`, and so unscales and skips inside its own kernels."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supports) and all(group.get("fused", True) for group in optimizer.param_groups)


def _state_dtype(name: str, optimizer: Optimizer) -> torch.dtype:
    dtype = STATE_FORMATS.get(name)
    if dtype is None:
        raise PolicyError(f"optimizer_state: {name!r} is not one of {', '.join(STATE_FORMATS)}")
    if dtype is not torch.float32 and type(optimizer) not in UPDATES:
        known = ", ".join(kind.__name__ for kind in UPDATES)
        raise PolicyError(
            f"optimizer_state: {type(optimizer).__name__} keeps its state by itself; {name} state is for {known}"
        )
    if dtype is torch.uint8:
        load_torchao()
    return dtype
