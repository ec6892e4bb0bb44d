"""How 16-bit parameters are stepped without losing small updates.

The update of a weight is often smaller than the distance between neighbouring 16-bit numbers: 1.0 minus 1,000
updates of 1e-4 stays 1.0 in bfloat16. So the optimizer steps float32 values, its state is float32, and what remains
of a weight after rounding is kept in one of four ways:

- "master": the float32 value itself (4 extra bytes per weight);
- "split": the 16 bits that rounding cuts off, kept as an integer; exact, 2 extra bytes (bfloat16 only, as its 16
  bits are the upper half of a float32);
- "kahan": the rounding error as a 16-bit number, added back before the next step; 2 extra bytes
  (Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192);
- "stochastic": nothing; the weight is rounded up or down at random with the right mean (same source).

Weight decay is part of the step, so no mode loses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from castwise.errors import PolicyError

from ._gradients import local, parameters_of
from ._noise import Noise, round_stochastic
from ._remainders import empty_rest, narrow, widen

__all__ = ["Kept", "WideWeights", "round_stochastic"]

_LOW = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Kept:
    """A 16-bit parameter, the float32 parameter that the optimizer steps in its place, and what is kept beside it.

    In every mode but "master", `wide` has a shape and no memory between steps.
    """

    low: Parameter
    wide: Parameter
    rest: torch.Tensor | None


class WideWeights:
    """Makes an optimizer step float32 values of a model's 16-bit parameters.

    The optimizer's groups hold the float32 values from here on; the model keeps its parameters, dtypes and names.
    Gradients of 16-bit parameters are float32 (`p.grad_dtype`), so that micro-batches accumulate in float32 and
    `p.grad` is there for hooks, logs and clipping between backward and step. With `narrow_gradients` they keep the
    parameter's dtype, for half the memory.
    """

    def __init__(self, optimizer: Optimizer, mode: str, *, narrow_gradients: bool = False) -> None:
        self.mode = "master" if mode == "auto" else mode
        self.optimizer = optimizer
        self.narrow_gradients = narrow_gradients
        self.kept: list[Kept] = []
        # Of "stochastic" and of 16-bit state. Its own, so that replicas on several machines round alike and runs resume
        # exactly.
        self.noise = Noise()
        self._of_wide: dict[int, Kept] = {}
        self.adopt()

    def adopt(self) -> None:
        """Take over the optimizer's 16-bit parameters, those too that were added or unfrozen since the last call."""
        known = len(self.kept)
        for group in self.optimizer.param_groups:
            if any(p.dtype in _LOW and p.requires_grad for p in group["params"]):
                group["params"] = [self._widened(p) for p in group["params"]]
        state = self.optimizer.state
        for kept in self.kept[known:]:
            if kept.low in state:
                state[kept.wide] = _widened_state(state.pop(kept.low))

    def kept_for(self, p: torch.Tensor) -> Kept | None:
        """The 16-bit parameter behind one that the optimizer steps; None for one that is the model's own."""
        return self._of_wide.get(id(p))

    def parameters(self) -> list[torch.Tensor]:
        """The model's own parameters that the optimizer steps, in its order: those that hold the gradients."""
        own = parameters_of([self.optimizer])
        if not self._of_wide:
            return own
        known = ((p, self._of_wide.get(id(p))) for p in own)
        return [p if kept is None else kept.low for p, kept in known]

    def clear(self) -> bool:
        """Set gradients of the 16-bit parameters to None; whether there were any."""
        found = False
        for kept in self.kept:
            if kept.low.grad is not None:
                kept.low.grad, found = None, True
        return found

    @torch.no_grad()
    def reload(self) -> None:
        """Start from the model's 16-bit values, for a checkpoint that knows nothing of what is kept beside them."""
        for kept in self.kept:
            if self.mode == "master":
                kept.wide.copy_(kept.low)
            elif kept.rest is not None:
                kept.rest.zero_()

    def _widened(self, p: torch.Tensor) -> torch.Tensor:
        if p.dtype not in _LOW or not p.requires_grad:
            return p
        if self.mode == "split" and p.dtype is not torch.bfloat16:
            raise PolicyError(
                f'weights: "split" keeps the lower half of a float32 beside a bfloat16, and a parameter of shape '
                f'{tuple(p.shape)} is {p.dtype}. Use "master" or "kahan".'
            )
        wide = Parameter(p.detach().to(torch.float32), requires_grad=True)
        if self.narrow_gradients:
            wide.grad_dtype = None  # may hold a 16-bit gradient
        else:
            gradient, p.grad = p.grad, None
            p.grad_dtype = torch.float32
            p.grad = None if gradient is None else gradient.to(torch.float32)
        assert isinstance(p, Parameter)
        kept = Kept(p, wide, empty_rest(self.mode, p))
        self.kept.append(kept)
        self._of_wide[id(wide)] = kept
        self._let_go([kept])
        return wide

    # ---- a step of any optimizer ----

    @torch.no_grad()
    def before_step(self) -> None:
        """Give the optimizer float32 values and gradients."""
        for kept in self.kept:
            if self.mode != "master":
                kept.wide.data = torch.empty_like(kept.low, dtype=torch.float32)
                widen(self.mode, kept.low, kept.rest, kept.wide.data)
            gradient, kept.low.grad = kept.low.grad, None
            kept.wide.grad = None if gradient is None else gradient.to(torch.float32)

    @torch.no_grad()
    def after_step(self) -> None:
        """Round the stepped values into the model's parameters, and keep what rounding lost."""
        for kept in self.kept:
            # Of a DTensor, this rank's shard: random numbers know nothing of other ranks.
            low, rest = local(kept.low.detach()), None if kept.rest is None else local(kept.rest)
            narrow(self.mode, local(kept.wide.data), low, rest, self.noise)
            torch.autograd.graph.increment_version(kept.low)
        self._let_go(self.kept)
        self.noise.let_go()

    def _let_go(self, kept: Iterable[Kept]) -> None:
        if self.mode != "master":
            for one in kept:
                one.wide.data = one.wide.data.new_empty(()).expand(one.wide.shape)  # the right shape, and no memory

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """What is kept beside the 16-bit weights, and where the random numbers are."""
        return {"mode": self.mode, "kept": [k.clone() for k in self._tensors()], "draws": self.noise.draws}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it. Raises PolicyError if it was saved in another mode or for another model."""
        if state["mode"] != self.mode:
            raise PolicyError(
                f'weights: the state was saved with "{state["mode"]}", not "{self.mode}"; use the same mode'
            )
        kept = list(self._tensors())
        if len(kept) != len(state["kept"]) or any(
            a.shape != b.shape for a, b in zip(kept, state["kept"], strict=False)
        ):
            raise PolicyError("weights: the saved state belongs to a model with other parameters")
        for mine, saved in zip(kept, state["kept"], strict=True):
            mine.copy_(saved)
        self.noise.draws = int(state.get("draws", 0))

    def _tensors(self) -> Iterator[torch.Tensor]:
        for kept in self.kept:
            if self.mode == "master":
                yield kept.wide.detach()
            elif kept.rest is not None:
                yield kept.rest


def _widened_state(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(torch.float32) if isinstance(v, torch.Tensor) and v.dtype in _LOW else v for k, v in state.items()}
