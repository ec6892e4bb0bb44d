"""`Amp`: the training step, owned. Everything that users get out of order is done here in the right one.

    amp = Amp(model, optimizer, policy="auto")
    for batch in batches:
        with amp:
            loss = model(batch)
        result = amp.step(loss, clip_norm=1.0)

A step scales the loss and runs backward; at every `accumulate`-th call it unscales, checks that all gradients are
finite, clips, steps the optimizer or skips, steps the scheduler only after a real step, updates the scale and clears
gradients.

A healthy step reads the gradients once for their norm, which also tells whether they are finite, and a fused optimizer
unscales and clips as it reads them. On a device that runs ahead of the host, such a step waits for nothing (unless a
scheduler has to know whether it was real): see `_scale`.
"""

from __future__ import annotations

import logging
import math
import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from castwise.errors import CastwiseError, NonFiniteError, ScaleStalledError
from castwise.formats import parse_format
from castwise.plan import Plan
from castwise.policy import Policy
from castwise.scaling import ScaleState, initial_state, lower_scales, stalled_message, transition

from ._amp_checks import check, check_clip_norm, check_loss, explain_backward
from ._amp_region import Entered, device_type_of
from ._casts import CastCache
from ._gradients import all_finite, clear, multiply, parameters_of, values_of
from ._layers import LayerHooks
from ._measured import measured, measured_ahead, true_norm
from ._narrow import NarrowGradients
from ._ranks import ranks_of, unwrapped
from ._rules import rules_for
from ._scale import StepResult, scale_on_device
from ._stepping import Stepper
from ._watched import Watched
from .apply import apply
from .devices import resolve, tf32
from .guard import Guard
from .watcher import Watcher

__all__ = ["Amp", "StepResult"]

log = logging.getLogger("castwise.torch.amp")

_STEPS_IN_FLIGHT = 2  # whose outcome a device may still owe the host
_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same to the norm it divides by


class Amp(Watched):
    """Mixed-precision training of one model by one optimizer.

    Args:
        model: the module to train; layer rules of the policy are matched against its module paths.
        optimizer: any torch optimizer whose `step` needs no closure. A fused one saves a pass over the gradients
            and, on accelerators, the wait for the device.
        policy: a `castwise.Policy`, a preset ("float32", "float16", "bfloat16", "auto", "O0".."O3"), or a policy
            file's path.
        scheduler: a learning-rate scheduler, stepped after each real optimizer step. One that takes a metric is not
            ours to call.
        accumulate: micro-batches per optimizer step; their losses are averaged.
        weights: how 16-bit parameters are kept from losing small updates: "auto" or "master", "split", "kahan",
            "stochastic" (see `castwise.torch.weights`). float32 parameters stay float32 in every mode. Default: the
            policy's.
        optimizer_state: format of the optimizer's state of the weights' shape: "float32", or "bfloat16" with unbiased
            stochastic rounding, which halves its memory. For SGD, Adam, AdamW, Muon and `castwise.torch.Lion`;
            Adafactor's state is small, and stays float32.
        narrow_gradients: keep gradients of 16-bit parameters in 16 bits, for half their memory; not with `accumulate`.
        plan: from `castwise.torch.plan`. Inside the region the model runs in the plan's formats, and what is computed
            outside of the model as it is written; `policy` then decides about loss scaling and weights alone, and
            defaults to the preset of the plan's 16-bit format.

    Raises:
        PolicyError: the policy is wrong for this model, or another argument is not what it has to be.
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
        optimizer_state: str = "float32",
        narrow_gradients: bool = False,
        plan: Plan | None = None,
    ) -> None:
        check(model, optimizer, scheduler, accumulate, weights, narrow_gradients)
        self._ranks = ranks_of(model, parameters_of([optimizer]))
        self.model = model = unwrapped(model)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.accumulate = accumulate
        self.device_type = device_type_of(model, optimizer)
        if plan is not None:
            policy = Policy.coerce(policy if policy != "auto" else parse_format(plan.fmt).long_name)
        self.planned = apply(model, plan) if plan is not None else None
        self.policy = self._asked = resolve(Policy.coerce(policy), self.device_type)
        if self._ranks is not None:
            narrow_gradients |= self._ranks.begin(self.policy, parameters_of([optimizer]), accumulate)
        mode = self.policy.weights if weights == "auto" else weights
        self._rules = rules_for(self.policy, self.device_type)
        # What `fully_shard` gathers is new at every use, in memory that is to be let go after it.
        self._cache = CastCache(capacity=0) if self._ranks is not None and self._ranks.shards else CastCache()
        self._layers = LayerHooks(self.model, self.policy, self.device_type) if self.policy.layers else None
        self._narrow = NarrowGradients() if plan is not None else None
        self._stepper = Stepper(
            optimizer,
            mode,
            self._cache,
            optimizer_state=optimizer_state,
            narrow_gradients=narrow_gradients,
            narrow=self._narrow,
        )
        self._wide = self._stepper.wide
        self._config = replace(self.policy.scaling, enabled=self.policy.uses_scaling)
        self._state = initial_state(self._config)
        self._on_device = scale_on_device(self._state, self._config, optimizer, scheduler)
        self._micro = 0
        self._begun = False
        self._unscaled: torch.Tensor | None = None
        self._entered = threading.local()
        self._observers: list[Watcher] = []
        self._guard = Guard(self, self._raise_layers) if self.policy.guard.enabled else None

    # ---- the region ----

    def __enter__(self) -> Amp:
        if self._ranks is not None and self.accumulate > 1 and torch.is_grad_enabled():
            self._ranks.synchronise(last=self._micro + 1 == self.accumulate)
        self._regions().append(self.region().__enter__())
        if self._guard is not None:
            self._guard.enter()
        for observer in self._observers:
            observer.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for observer in self._observers:
            observer.leave(error)
        if self._guard is not None:
            self._guard.leave()
        self._regions().pop().__exit__(kind, error, traceback)

    def region(self, log: list[Any] | None = None) -> Entered:
        """A context with this policy's decisions, for use apart from training steps: evaluation, or a log of ops.

        Args:
            log: a list that receives one `castwise.torch.record.OpEvent` for each op.
        """
        return Entered(self, log)

    def fresh_region(self) -> Entered:
        """As `region`, with casts of its own: for repeating a step without touching what is kept for the next."""
        return Entered(self, None, CastCache(capacity=0))

    def _regions(self) -> list[Entered]:
        entered: list[Entered] | None = getattr(self._entered, "regions", None)
        if entered is None:
            entered = self._entered.regions = []
        return entered

    def refresh(self) -> None:
        """Forget kept casts: call it after writing weights through `.data` or NumPy, which no version counter sees."""
        self._cache.refresh()

    # ---- the step ----

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Scale the loss (and divide it by `accumulate`) and run backward; several losses of one micro-batch add up.

        Gradients that are there before the first backward of an accumulation were left by something else, another
        model's loss for example, and are cleared. If backward raises, the accumulation starts anew.
        """
        check_loss(loss, "backward")
        self._backward(loss, retain_graph)

    def _backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        if not self._begun:
            self._begin()
        try:
            with ExitStack() as stack:
                stack.enter_context(tf32(self.device_type, self.policy.tf32))
                if self._guard is not None:
                    stack.enter_context(self._guard.backward(loss))
                for observer in self._observers:
                    stack.enter_context(observer.backward(loss))
                self._scaled(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException as error:
            explain_backward(error)
            if self._micro:
                log.warning("backward raised: the %d micro-batches accumulated before it are dropped", self._micro)
            self._forget_gradients()
            raise

    def _begin(self) -> None:
        self._wide.adopt()
        if self._clear():
            log.debug("gradients that were there before the first backward of a step are cleared")
        self._begun = True

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self._on_device is not None:
            if self._config.enabled:
                loss = loss.to(torch.promote_types(loss.dtype, torch.float32)) * self._on_device.factor
            return loss if self.accumulate == 1 else loss / self.accumulate
        factor = self._state.scale / self.accumulate
        return loss if factor == 1.0 else loss.to(torch.promote_types(loss.dtype, torch.float32)) * factor

    def unscale(self) -> float:
        """Make `p.grad` the true gradients between `backward(loss)` and `step()`, and return their Euclidean norm.

        Until then, and without this call, `p.grad` is the gradient times `loss_scale`, divided by `accumulate` where
        micro-batches add up. It is float32, for 16-bit parameters too (but with `narrow_gradients`), and of its
        parameter's dtype for other ones. Whether all gradients are finite is noted here, before anything else
        changes them: clipping by value cannot hide an overflow.

        Raises:
            CastwiseError: there was no `backward`, gradients are already unscaled, or micro-batches are still to come.
        """
        if not self._begun or self._unscaled is not None or self._micro + 1 < self.accumulate:
            raise CastwiseError(
                "Amp.unscale: call it once, after backward(loss) of the last micro-batch and before step()."
            )
        parameters = self._settled()
        values = values_of(parameters)
        self._unscaled = all_finite(values)
        if self.loss_scale != 1.0:
            multiply(values, 1.0 / self.loss_scale)
        return true_norm(self._ranks, parameters, self._unscaled)

    def step(self, loss: torch.Tensor | None = None, clip_norm: float | None = None) -> StepResult:
        """Finish one micro-batch; at every `accumulate`-th call, step or skip.

        Args:
            loss: a scalar, unscaled. None when `backward(loss)` was called already.
            clip_norm: largest allowed Euclidean norm of the true gradients.

        Raises:
            ScaleStalledError, NonFiniteError: too many steps in a row were skipped; the message says what to do.
            PolicyError: `clip_norm` is not a positive number, or the loss no tensor of one number with a gradient.
            CastwiseError: neither this call nor `backward` was given a loss.
        """
        check_clip_norm(clip_norm)
        if loss is not None:
            check_loss(loss, "step")
            with self._narrow_backward():
                self._backward(loss)
        elif not self._begun:
            raise CastwiseError("Amp.step: there is no loss. Give it one, or call amp.backward(loss) before it.")
        self._micro += 1
        if self._micro < self.accumulate:
            reason = f"accumulating: micro-batch {self._micro} of {self.accumulate}"
            scale = float("nan") if self._on_device is not None else self._state.scale
            return StepResult(False, float("nan"), scale, reason, self.emulated)
        narrow = self._narrow.settled() if self._narrow is not None else []
        values = [*values_of(self._settled()), *narrow]
        for observer in self._observers:
            observer.gradients(self.loss_scale if self._unscaled is None else 1.0)
        try:
            if not values and self._ranks is None:
                log.warning("no parameter of the optimizer has a gradient: nothing was stepped")
                return StepResult(False, 0.0, self.loss_scale, "no parameter has a gradient", self.emulated)
            result = self._finish_ahead(values, clip_norm) if self._on_device else self._finish(values, clip_norm)
            for observer in self._observers:
                observer.finished(result)
            return result
        finally:
            self._forget_gradients(counts=True)

    def _finish(self, values: list[torch.Tensor], clip_norm: float | None) -> StepResult:
        """Step or skip, as the host decides."""
        scale = self._state.scale
        divisor = scale if self._unscaled is None else 1.0
        size, loss_finite = measured(self._ranks, self._wide, values, self._losses(), self._unscaled)
        finite = math.isfinite(size)
        grad_norm = size / divisor
        if finite:
            if clip_norm is not None:
                divisor /= min(1.0, clip_norm / (grad_norm + _CLIP_EPS))
            self._step_optimizer(divisor)
        before, (self._state, outcome) = self._state, transition(self._state, finite, self._config)
        reason, done = self._guarded(finite, before, values, loss_finite)
        self._tell(before, self._state, reason or outcome.reason)
        if outcome.stalled and not done:
            raise self._stalled()
        return StepResult(outcome.stepped, grad_norm, scale, reason or outcome.reason, self.emulated)

    def _narrow_backward(self) -> AbstractContextManager[None]:
        """Around a backward right after which the step comes, so that 16-bit gradients need not be cast before it."""
        seen = self._ranks is not None or self._observers or self._begun or self.accumulate > 1
        return nullcontext() if self._narrow is None or seen else self._narrow.kept(self._wide.parameters())

    def _settled(self) -> list[torch.Tensor]:
        """The parameters, their gradients whole."""
        parameters = self._wide.parameters()
        if self._ranks is not None:
            self._ranks.settle(parameters)
        return parameters

    def _losses(self) -> list[torch.Tensor]:
        """What the fetch of the gradients' norms carries along: a loss may be NaN where no gradient is."""
        return self._guard.losses() if self._guard is not None else []

    def _guarded(
        self, finite: bool, before: ScaleState, values: list[torch.Tensor], loss_finite: bool = True
    ) -> tuple[str, bool]:
        """Let the guard look at a finished step: what it did in words, and whether it did anything."""
        if self._guard is None:
            return "", False
        if finite:
            if loss_finite:
                self._guard.stepped()
                return "", False
            self._guard.loss_broke(before.scale, values)
            return "gradients are finite, and the loss is not", False
        scale = self._guard.broke(before.scale, lower_scales(before.scale, self._config), values)
        if scale is None:
            return "", False
        self._state = replace(self._state, scale=scale)
        return f"gradients are not finite, step skipped; {self._guard.events[-1].message}", True

    def _step_optimizer(self, divisor: float) -> None:
        self._stepper.step(divisor)
        if self.scheduler is not None:
            self.scheduler.step()

    def _finish_ahead(self, values: list[torch.Tensor], clip_norm: float | None) -> StepResult:
        """Step or skip, as the device decides. A norm beyond float32's range counts as not finite here."""
        ahead = self._on_device
        assert ahead is not None
        self._hear(ahead.news(lag=self._ranks is not None))
        scaled_norm, losses = measured_ahead(self._ranks, self._wide, values, self._losses(), self._unscaled)
        finite = scaled_norm.isfinite()
        scaled = self._config.enabled and self._unscaled is None
        grad_norm = scaled_norm / ahead.factor if scaled else scaled_norm
        divisor = ahead.factor if scaled else None
        if clip_norm is not None:
            excess = ((grad_norm + _CLIP_EPS) / clip_norm).clamp_min(1.0).to(torch.float32)
            divisor = excess if divisor is None else divisor * excess
        self._stepper.step_ahead(divisor, finite.logical_not().to(torch.float32))
        result = StepResult.later(ahead.advance(finite, losses), grad_norm, self.emulated)
        if self._guard is not None and self._guard.alert:  # steps are looked at closely: wait for the device
            self._hear(ahead.news(wait=True), values)
        return result

    def _hear(self, news: tuple[ScaleState, bool, bool] | None, values: list[torch.Tensor] | None = None) -> None:
        """Take in what the device has reported since."""
        if news is None:
            return
        before, (self._state, stalled, loss_finite) = self._state, news
        skipped = self._state.skipped - before.skipped
        if self._guard is not None and skipped:
            self._guarded(False, before, values or [])
            if self._on_device is not None and self._state.scale != news[0].scale:
                self._on_device.set(self._state)
        elif self._guard is not None and self._state.steps > before.steps:
            self._guarded(True, before, values or [], loss_finite)
        self._tell(before, self._state, f"{skipped} steps since step {before.steps} were skipped: gradients not finite")
        if stalled:
            raise self._stalled()

    def _tell(self, before: ScaleState, after: ScaleState, reason: str) -> None:
        if after.skipped == before.skipped:
            return
        log.info("step %d: %s", after.steps, reason)
        if self._guard is not None:
            self._guard.warn_scale(after.scale, self._config.enabled)

    def _stalled(self) -> CastwiseError:
        kind = ScaleStalledError if self._config.enabled else NonFiniteError
        found = self._guard.finding if self._guard is not None else None
        return kind(stalled_message(self._state, self._config) + (f"\nWhat was found last: {found}" if found else ""))

    def _forget_gradients(self, counts: bool = False) -> None:
        self._clear()
        self._micro, self._begun, self._unscaled = 0, False, None
        if self._ranks is not None and self.accumulate > 1:
            self._ranks.synchronise(last=True)
        if self._guard is not None:
            self._guard.done(counts, _STEPS_IN_FLIGHT if self._on_device is not None else 0)

    def _clear(self) -> bool:
        """Set all gradients to None; whether there were any."""
        found = clear(self.optimizer) | (self._narrow is not None and self._narrow.clear())
        return self._wide.clear() or found
