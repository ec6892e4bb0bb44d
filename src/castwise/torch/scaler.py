"""`GradScaler` with torch.amp's signature, on Castwise's loss-scale state machine.

    from castwise.torch import GradScaler

    scaler = GradScaler("cuda")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

Beyond torch's: the scale has a floor and a cap, a run that makes no progress at the floor stops with the likely causes,
`stepped` tells a skipped step from a step, closures and 16-bit parameters are refused with the way out, complex
gradients work.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from castwise.errors import ScaleStalledError
from castwise.scaling import ScaleState, ScalingConfig, initial_state, stalled_message, transition

from ._gradients import all_finite, multiply, parameters_of, values_of
from ._ranks import Ranks, ranks_of_tensors

log = logging.getLogger("castwise.torch.scaler")


class _Progress:
    """What has been done with one optimizer since the last update."""

    __slots__ = ("finite", "stage", "stepped")

    def __init__(self) -> None:
        self.stage = "ready"
        self.finite: torch.Tensor | None = None
        self.stepped: bool | None = None


class GradScaler:
    """Scales losses so that 16-bit gradients do not vanish, and skips the steps that overflow.

    Args:
        device: device type of the scaler ("cuda", "cpu", ...); without it, the accelerator of this machine, else "cpu".
        init_scale, growth_factor, backoff_factor, growth_interval: as in torch.amp.
        enabled: False makes every method a pass-through.
        hysteresis: how many non-finite steps in a row it takes to lower the scale.
        min_scale, max_scale: bounds of the scale; by default 1 and 2**24, widened to hold `init_scale`.
        patience: skipped steps in a row at `min_scale` after which `update` raises.

    Raises:
        PolicyError: a knob is out of its range; the message names it.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        min_scale: float | None = None,
        max_scale: float | None = None,
        patience: int = 10,
    ) -> None:
        if device is not None and not isinstance(device, str):
            raise ValueError(f"GradScaler: device must be a string such as 'cuda', not {device!r}")
        from .autocast import default_device_type

        self._device = torch.device(device if device is not None else default_device_type())
        self._enabled = enabled
        self._config = ScalingConfig(
            init_scale=float(init_scale),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min(1.0, float(init_scale)) if min_scale is None else min_scale,
            max_scale=max(2.0**24, float(init_scale)) if max_scale is None else max_scale,
            patience=patience,
        )
        self._state = initial_state(self._config)
        self._scale: dict[torch.device, torch.Tensor] = {}
        self._progress: dict[int, _Progress] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._shards: weakref.WeakKeyDictionary[Optimizer, Ranks | None] | None = None  # made when it is needed
        self._scaled = False
        self._last: _Progress | None = None

    # ---- the loop ----

    def scale(self, outputs: Any) -> Any:
        """The outputs (a tensor, or nested lists, tuples and dicts of tensors) multiplied by the scale."""
        if not self._enabled:
            return outputs
        self._scaled = True
        return self._times_scale(outputs)

    def _times_scale(self, outputs: Any) -> Any:
        if isinstance(outputs, torch.Tensor):
            scale = self._scale_on(outputs.device)
            if outputs.dtype is torch.float16:  # 65536 is beyond its range: a loss per sample would be inf
                outputs = outputs.to(torch.float32)
            return outputs * (scale if outputs.dtype is not torch.float64 else scale.to(torch.float64))
        if isinstance(outputs, dict):
            return type(outputs)((k, self._times_scale(v)) for k, v in outputs.items())
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*[self._times_scale(o) for o in outputs])
        if isinstance(outputs, list | tuple):
            return type(outputs)([self._times_scale(o) for o in outputs])
        if hasattr(outputs, "__iter__"):
            return map(self._times_scale, outputs)
        raise ValueError("GradScaler.scale: outputs must be tensors, or lists, tuples, dicts or iterables of them")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once between updates: do it before clipping.

        Raises:
            RuntimeError: it was done already, or `step` was called, since the last update.
            ValueError: a parameter is 16-bit, so that its gradients cannot be unscaled without loss.
        """
        if not self._enabled:
            return
        progress = self._of(optimizer)
        if progress.stage == "unscaled":
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if progress.stage == "stepped":
            raise RuntimeError("unscale_() is being called after step(); call it before, or call update() first.")
        self._check_scaled("unscale_")
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        _refuse_16_bit(optimizer)
        values = values_of(parameters)
        ranks = self._ranks_of(optimizer)
        progress.finite = all_finite(values) if ranks is None else ranks.finite(values)
        if self._state.scale != 1.0:
            multiply(values, 1.0 / self._state.scale)
        progress.stage = "unscaled"

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer if its gradients are finite; unscale them first where that was not done.

        Returns what `optimizer.step(*args, **kwargs)` returns, or None when the step was skipped; `stepped` tells
        which.

        Raises:
            RuntimeError: a closure was given (it would compute scaled gradients), `step` was already called since
                the last update, or there are no gradients at all.
        """
        if not self._enabled:
            self._last = self._of(optimizer)
            self._last.stepped = True
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(a) for a in args):
            raise RuntimeError(
                "GradScaler.step does not take a closure: it would be called on scaled gradients. Optimizers that "
                "need one "
                "(LBFGS) work in bfloat16 without a scaler: optimizer.step(closure), with autocast inside the closure."
            )
        progress = self._of(optimizer)
        if progress.stage == "stepped":
            raise RuntimeError("step() has already been called on this optimizer since the last update().")
        self._check_scaled("step")
        if progress.stage == "ready":
            self.unscale_(optimizer)
        if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "GradScaler.step: the optimizer has no gradients. Call scaler.scale(loss).backward() before step(), "
                "on a loss that "
                "depends on its parameters."
            )
        assert progress.finite is not None
        progress.stepped = bool(self._agree(progress.finite))
        progress.stage = "stepped"
        self._last = progress
        if not progress.stepped:
            return None
        result = optimizer.step(*args, **kwargs)
        # Fused optimizers write weights without telling the version counter, by which kept casts know that they are
        # old.
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch.autograd.graph.increment_version(stepped)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale on after the optimizers' steps, or set it to `new_scale`.

        Raises:
            ScaleStalledError: `patience` steps in a row were skipped at the lowest scale; the message names likely
            causes.
            RuntimeError: neither `unscale_` nor `step` was called since the last update.
        """
        if not self._enabled:
            self._forget_step()
            return
        if new_scale is not None:
            value = float(new_scale)
            self._state = replace(self._state, scale=min(max(value, self._config.min_scale), self._config.max_scale))
        else:
            checks = [p.finite for p in self._progress.values() if p.finite is not None]
            if not checks:
                raise RuntimeError("update() found no step: call step(optimizer) (or unscale_) before it.")
            finite = all(bool(self._agree(c)) for c in checks)
            before = self._state
            self._state, outcome = transition(before, finite, self._config)
            if not outcome.stepped:
                log.info("step %d: %s", self._state.steps, outcome.reason)
            if outcome.stalled:
                self._forget_step()
                raise ScaleStalledError(stalled_message(self._state, self._config))
        self._forget_step()

    def _agree(self, finite: torch.Tensor) -> torch.Tensor:
        """The verdict that all processes share: those of the meshes of sharded parameters share it already."""
        return finite

    def _ranks_of(self, optimizer: Optimizer) -> Ranks | None:
        """The ranks that hold shards of an optimizer's parameters, found once."""
        if self._shards is None:
            self._shards = weakref.WeakKeyDictionary()
        if optimizer not in self._shards:
            self._shards[optimizer] = ranks_of_tensors(parameters_of([optimizer]))
        return self._shards[optimizer]

    def _forget_step(self) -> None:
        self._scale.clear()
        self._progress.clear()
        self._optimizers.clear()

    # ---- what happened ----

    @property
    def stepped(self) -> bool | None:
        """Whether the last `step` changed the weights; None before the first."""
        return None if self._last is None else self._last.stepped

    def stepped_for(self, optimizer: Optimizer) -> bool | None:
        """Whether `step(optimizer)` stepped since the last update; None if it was not called."""
        progress = self._progress.get(id(optimizer))
        return None if progress is None else progress.stepped

    @property
    def skipped_steps(self) -> int:
        """How many updates followed a skipped step, over the scaler's life."""
        return self._state.skipped

    # ---- knobs ----

    def get_scale(self) -> float:
        """The scale that the next loss is multiplied by (1.0 when disabled)."""
        return self._state.scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether the scaler does anything."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """The factor by which the scale grows."""
        return self._config.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Change the factor by which the scale grows."""
        self._config = replace(self._config, growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """The factor by which the scale is lowered."""
        return self._config.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change the factor by which the scale is lowered."""
        self._config = replace(self._config, backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """How many good steps in a row it takes to grow."""
        return self._config.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Change how many good steps in a row it takes to grow."""
        self._config = replace(self._config, growth_interval=new_interval)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """torch.amp's keys, so that either scaler loads it, and Castwise's own counters beside them. {} when
        disabled.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self._state.scale,
            "growth_factor": self._config.growth_factor,
            "backoff_factor": self._config.backoff_factor,
            "growth_interval": self._config.growth_interval,
            "_growth_tracker": self._state.good_steps,
            "castwise": self._state.to_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch.amp.GradScaler.

        Raises:
            RuntimeError: the state is empty (it was saved by a disabled scaler).
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The loss-scaler state is empty: it was saved by a disabled scaler. Start this one fresh, or "
                "disable it too."
            )
        self._config = replace(
            self._config,
            init_scale=min(max(self._config.init_scale, self._config.min_scale), self._config.max_scale),
            growth_factor=state_dict["growth_factor"],
            backoff_factor=state_dict["backoff_factor"],
            growth_interval=state_dict["growth_interval"],
        )
        scale = min(max(float(state_dict["scale"]), self._config.min_scale), self._config.max_scale)
        own = state_dict.get("castwise")
        state = ScaleState.from_dict(own) if own is not None else initial_state(self._config)
        # torch's keys lead: people edit them in saved states.
        self._state = replace(state, scale=scale, good_steps=int(state_dict["_growth_tracker"]))
        self._forget_step()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle between steps only: the state of a half-done step belongs to live optimizers."""
        if self._enabled and self._progress:
            raise RuntimeError("A GradScaler can only be pickled between update() and the next scale().")
        return {
            **self.__dict__,
            "_scale": {},
            "_progress": {},
            "_optimizers": {},
            "_shards": None,
            "_last": None,
        }

    # ---- inside ----

    def _scale_on(self, device: torch.device) -> torch.Tensor:
        scale = self._scale.get(device)
        if scale is None:
            scale = self._scale[device] = torch.full((), self._state.scale, dtype=torch.float32, device=device)
        return scale

    def _of(self, optimizer: Optimizer) -> _Progress:
        number = id(optimizer)
        if number not in self._progress:
            self._progress[number] = _Progress()
            self._optimizers[number] = optimizer  # keeps the id from being reused
        return self._progress[number]

    def _check_scaled(self, method: str) -> None:
        if not self._scaled:
            raise RuntimeError(
                f"{method}() was called before any scale(): multiply the loss with scaler.scale(loss) first."
            )


def _refuse_16_bit(optimizer: Optimizer) -> None:
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for i, p in enumerate(group["params"]):
            if p.dtype is torch.float16 and p.grad is not None:
                name = names[i] if names is not None else f"parameter {i} of group {g}, of shape {tuple(p.shape)},"
                raise ValueError(
                    f"{name} is float16, so its gradients cannot be unscaled without loss. Keep the parameters in "
                    f"float32 and let "
                    "autocast lower them, or train 16-bit parameters with float32 master weights: "
                    'castwise.torch.Amp(model, optimizer, weights="master").'
                )
