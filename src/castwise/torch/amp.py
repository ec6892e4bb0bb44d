"""`Amp`: the training step, owned. Everything that users get out of order is done here in the right one.

    amp = Amp(model, optimizer, policy="auto")
    for batch in batches:
        with amp:
            loss = model(batch)
        result = amp.step(loss, clip_norm=1.0)

A step scales the loss and runs backward; at every `accumulate`-th call it unscales, checks that all gradients are
finite, clips, steps the optimizer or skips, steps the scheduler only after a real step, updates the scale and clears
gradients.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from castwise.errors import NonFiniteError, PolicyError, ScaleStalledError
from castwise.policy import WEIGHTS, Policy
from castwise.scaling import Outcome, ScaleState, initial_state, stalled_message, transition

from ._casts import CastCache
from ._gradients import all_finite, multiply, norm, parameters_of, values_of
from ._layers import LayerHooks
from ._region import Region
from ._rules import rules_for
from .devices import resolve
from .weights import WideWeights

log = logging.getLogger("castwise.torch.amp")

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same to the norm it divides by


class StepResult:
    """What one call of `Amp.step` did. Numbers are fetched from the device when they are read.

    Attributes:
        stepped: whether the weights were changed. False while micro-batches accumulate and when the step was skipped.
        grad_norm: Euclidean norm of the true (unscaled, unclipped) gradients; NaN while accumulating.
        loss_scale: the scale this step's loss was multiplied by.
        reason: why the step was taken, skipped or put off, in words.
        emulated: whether the policy's format was emulated on this device.
    """

    __slots__ = ("_grad_norm", "emulated", "loss_scale", "reason", "stepped")

    def __init__(
        self, stepped: bool, grad_norm: torch.Tensor | float, loss_scale: float, reason: str, emulated: bool
    ) -> None:
        self.stepped = stepped
        self._grad_norm = grad_norm
        self.loss_scale = loss_scale
        self.reason = reason
        self.emulated = emulated

    @property
    def grad_norm(self) -> float:
        return float(self._grad_norm)

    def __repr__(self) -> str:
        return (
            f"StepResult(stepped={self.stepped}, grad_norm={self.grad_norm:.6g}, loss_scale={self.loss_scale:g}, "
            f"reason={self.reason!r}, emulated={self.emulated})"
        )


class Amp:
    """Mixed-precision training of one model by one optimizer.

    Args:
        model: the module to train; layer rules of the policy are matched against its module paths.
        optimizer: any torch optimizer whose `step` needs no closure.
        policy: a `castwise.Policy`, a preset ("float32", "float16", "bfloat16", "auto", "O0".."O3"), or a policy
            file's path.
        scheduler: a learning-rate scheduler, stepped after each real optimizer step. One that takes a metric is not
            ours to call.
        accumulate: micro-batches per optimizer step; their losses are averaged.
        weights: how 16-bit parameters are kept from losing small updates: "auto" or "master", "split", "kahan",
            "stochastic" (see `castwise.torch.weights`). float32 parameters stay float32 in every mode. Default: the
            policy's.

    Raises:
        PolicyError: the policy is wrong for this model, or `accumulate` or `weights` are out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        policy: Policy | str = "auto",
        *,
        scheduler: Any = None,
        accumulate: int = 1,
        weights: str = "auto",
    ) -> None:
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise PolicyError(f"accumulate: {accumulate!r} must be a whole number of micro-batches, 1 or more")
        if weights not in WEIGHTS:
            raise PolicyError(f"weights: {weights!r} is not one of {', '.join(WEIGHTS)}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PolicyError(
                "Amp: LBFGS calls a closure several times per step, which a skipped or accumulated step cannot do. Use "
                "castwise.torch.autocast in the closure, in bfloat16 or float32."
            )
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.accumulate = accumulate
        self.device_type = _device_type(model, optimizer)
        self.policy = resolve(Policy.coerce(policy), self.device_type)
        mode = self.policy.weights if weights == "auto" else weights
        self._rules = rules_for(self.policy, self.device_type)
        self._cache = CastCache()
        self._layers = LayerHooks(model, self.policy, self.device_type) if self.policy.layers else None
        self._wide = WideWeights(optimizer, mode)
        self._parameters = parameters_of([optimizer])
        self._config = replace(self.policy.scaling, enabled=self.policy.uses_scaling)
        self._state = initial_state(self._config)
        self._micro = 0
        self._entered = threading.local()

    # ---- the region ----

    def __enter__(self) -> Amp:
        region = self.region()
        region.enter()
        self._regions().append(region)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._regions().pop().leave()

    def region(self, log: list[Any] | None = None) -> Region:
        """A fresh region of this policy, for use apart from `with amp:` (evaluation, logging of ops)."""
        return Region(self._rules, self._cache, log=log)

    def _regions(self) -> list[Region]:
        entered: list[Region] | None = getattr(self._entered, "regions", None)
        if entered is None:
            entered = self._entered.regions = []
        return entered

    def refresh(self) -> None:
        """Forget kept casts: call it after writing weights through `.data` or NumPy, which no version counter sees."""
        self._cache.refresh()

    # ---- the step ----

    def backward(self, loss: torch.Tensor) -> None:
        """Scale the loss (and divide it by `accumulate`) and run backward."""
        factor = self._state.scale / self.accumulate
        (loss if factor == 1.0 else loss.to(torch.promote_types(loss.dtype, torch.float32)) * factor).backward()  # type: ignore[no-untyped-call]

    def step(self, loss: torch.Tensor | None = None, clip_norm: float | None = None) -> StepResult:
        """Finish one micro-batch; at every `accumulate`-th call, step or skip.

        Args:
            loss: a scalar, unscaled. None when `backward(loss)` was called already.
            clip_norm: largest allowed Euclidean norm of the true gradients.

        Raises:
            ScaleStalledError, NonFiniteError: too many steps in a row were skipped; the message says what to do.
        """
        if loss is not None:
            self.backward(loss)
        self._micro += 1
        if self._micro < self.accumulate:
            reason = f"accumulating: micro-batch {self._micro} of {self.accumulate}"
            return StepResult(False, float("nan"), self._state.scale, reason, self._rules.emulated)
        self._micro = 0
        return self._finish(clip_norm)

    def _finish(self, clip_norm: float | None) -> StepResult:
        values = values_of(self._parameters)
        scale = self._state.scale
        scaled_norm = norm(values)
        finite = bool(scaled_norm.isfinite())
        if not finite:  # the sum of squares may have overflowed although every value is finite
            finite = bool(all_finite(values))
        grad_norm = scaled_norm / scale
        if finite:
            factor = 1.0 / scale
            if clip_norm is not None:
                factor *= min(1.0, clip_norm / (float(grad_norm) + _CLIP_EPS))
            if factor != 1.0:
                multiply(values, factor)
            self._step_optimizer()
        outcome = self._advance(finite)
        self.optimizer.zero_grad(set_to_none=True)
        result = StepResult(outcome.stepped, grad_norm, scale, outcome.reason, self._rules.emulated)
        if outcome.stalled:
            error = ScaleStalledError if self._config.enabled else NonFiniteError
            raise error(stalled_message(self._state, self._config))
        return result

    def _step_optimizer(self) -> None:
        self._wide.before_step()
        self.optimizer.step()
        self._wide.after_step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _advance(self, finite: bool) -> Outcome:
        self._state, outcome = transition(self._state, finite, self._config)
        if not outcome.stepped:
            log.info("step %d: %s", self._state.steps, outcome.reason)
            floor = self.policy.guard.warn_scale_below
            if self._config.enabled and self.policy.guard.enabled and self._state.scale < floor:
                log.warning(
                    "the loss scale has fallen to %g (below %g): gradients overflow again and again",
                    self._state.scale,
                    floor,
                )
        return outcome

    # ---- what it is ----

    @property
    def loss_scale(self) -> float:
        """What the next loss will be multiplied by (1.0 without scaling)."""
        return self._state.scale

    @property
    def scale_state(self) -> ScaleState:
        """The state of the loss-scale machine: scale, counters."""
        return self._state

    @property
    def emulated(self) -> bool:
        """Whether the policy's format is emulated on this device."""
        return self._rules.emulated

    def state_dict(self) -> dict[str, Any]:
        """Loss scale, counters, position among micro-batches, and what is kept beside 16-bit weights."""
        return {
            "version": 1,
            "policy": self.policy.to_toml(),
            "scaling": self._state.to_dict(),
            "micro_step": self._micro,
            "weights": self._wide.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a state of torch.amp.GradScaler (its scale and good-step count).

        Raises:
            PolicyError: the state belongs to another mode, model or version.
        """
        if "scale" in state and "_growth_tracker" in state:
            bounded = min(max(float(state["scale"]), self._config.min_scale), self._config.max_scale)
            self._state = replace(
                initial_state(self._config),
                scale=bounded if self._config.enabled else 1.0,
                good_steps=int(state["_growth_tracker"]),
            )
            return
        if state.get("version") != 1:
            raise PolicyError(
                f"Amp.load_state_dict: version {state.get('version')!r} is not known; it was saved by a newer Castwise"
            )
        scaling = ScaleState.from_dict(state["scaling"])
        self._wide.load_state_dict(state["weights"])
        self._state, self._micro = scaling, int(state["micro_step"])
        self._cache.refresh()

    def close(self) -> None:
        """Take the layer hooks off the model."""
        if self._layers is not None:
            self._layers.remove()


def _device_type(model: nn.Module, optimizer: Optimizer) -> str:
    for p in (*model.parameters(), *parameters_of([optimizer])):
        return p.device.type
    return "cpu"
