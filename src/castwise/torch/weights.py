"""How 16-bit parameters are stepped without losing small updates.

The update of a weight is often smaller than the distance between neighbouring 16-bit numbers: 1.0 minus 1,000
updates of 1e-4 stays 1.0 in bfloat16. So the optimizer steps float32 values, its state is float32, and what remains
of a weight after
rounding is kept in one of four ways:

- "master": the float32 value itself (4 extra bytes per weight);
- "split": the 16 bits that rounding cuts off, kept as an integer; exact, 2 extra bytes (bfloat16 only, as its 16
  bits are the upper half of a float32);
- "kahan": the rounding error as a 16-bit number, added back before the next step; 2 extra bytes
  (Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192);
- "stochastic": nothing; the weight is rounded up or down at random with the right mean (same source).

Weight decay is part of the step, so no mode loses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from castwise.errors import PolicyError

_LOW = (torch.float16, torch.bfloat16)


class WideWeights:
    """Makes an optimizer step float32 values of a model's 16-bit parameters.

    The optimizer's groups hold the float32 values from here on; the model keeps its parameters, dtypes and names.
    Gradients of the 16-bit parameters are added to the float32 gradients as soon as backward has made them, so that
    micro-batches accumulate in float32; `p.grad` of a 16-bit parameter is None between steps.
    """

    def __init__(self, optimizer: Optimizer, mode: str) -> None:
        self.mode = "master" if mode == "auto" else mode
        self.optimizer = optimizer
        self.pairs: list[tuple[torch.Tensor, Parameter]] = []
        self._rest: list[torch.Tensor | None] = []
        self._handles: list[Any] = []
        self.adopt()

    def adopt(self) -> None:
        """Take over the optimizer's 16-bit parameters, those too that were added or unfrozen since the last call."""
        for group in self.optimizer.param_groups:
            if not any(p.dtype in _LOW and p.requires_grad for p in group["params"]):
                continue
            group["params"] = [self._widened(p) for p in group["params"]]
        state = self.optimizer.state
        for p, wide in self.pairs:
            if p in state:
                state[wide] = _widened_state(state.pop(p))

    def clear(self) -> bool:
        """Set gradients left on the 16-bit parameters to None; whether there were any."""
        found = False
        for p, _ in self.pairs:
            if p.grad is not None:
                p.grad, found = None, True
        return found

    @torch.no_grad()
    def reload(self) -> None:
        """Start from the model's 16-bit values, for a checkpoint that knows nothing of what is kept beside them."""
        for (p, wide), rest in zip(self.pairs, self._rest, strict=True):
            if self.mode == "master":
                wide.copy_(p)
            elif rest is not None:
                rest.zero_()

    def _widened(self, p: torch.Tensor) -> torch.Tensor:
        if p.dtype not in _LOW or not p.requires_grad:
            return p
        if self.mode == "split" and p.dtype is not torch.bfloat16:
            raise PolicyError(
                f'weights: "split" keeps the lower half of a float32 beside a bfloat16, and a parameter of shape '
                f"{tuple(p.shape)} is "
                f'{p.dtype}. Use "master" or "kahan".'
            )
        wide = Parameter(p.detach().to(torch.float32), requires_grad=True)
        rest = {"split": torch.int16, "kahan": p.dtype}.get(self.mode)
        self._rest.append(None if rest is None else torch.zeros_like(p, dtype=rest, requires_grad=False))
        self.pairs.append((p, wide))

        def accumulate(low: torch.Tensor) -> None:
            if low.grad is None:
                return
            if wide.grad is None:
                wide.grad = low.grad.to(torch.float32)
            else:
                wide.grad.add_(low.grad)
            low.grad = None

        hook = p.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]
        self._handles.append(hook)
        if self.mode != "master":
            wide.data = wide.data.new_empty(()).expand(p.shape)
        return wide

    @torch.no_grad()
    def before_step(self) -> None:
        """Give the optimizer the float32 values."""
        for (p, wide), rest in zip(self.pairs, self._rest, strict=True):
            if self.mode == "split":
                assert rest is not None
                wide.data = _joined(p, rest)
            elif self.mode == "kahan":
                assert rest is not None
                wide.data = p.detach().to(torch.float32) + rest.to(torch.float32)
            elif self.mode == "stochastic":
                wide.data = p.detach().to(torch.float32)

    @torch.no_grad()
    def after_step(self) -> None:
        """Round the stepped values into the model's parameters, and keep what rounding lost."""
        for (p, wide), rest in zip(self.pairs, self._rest, strict=True):
            if self.mode == "split":
                assert rest is not None
                _split(wide.data, p, rest)
            elif self.mode == "kahan":
                assert rest is not None
                p.copy_(wide.data)
                rest.copy_(wide.data - p.detach().to(torch.float32))
            elif self.mode == "stochastic":
                p.copy_(round_stochastic(wide.data, p.dtype))
            else:
                p.copy_(wide.data)
        self._release()

    def _release(self) -> None:
        if self.mode != "master":
            for _, wide in self.pairs:
                wide.data = wide.data.new_empty(()).expand(wide.shape)  # the right shape, and no memory

    def state_dict(self) -> dict[str, Any]:
        """What is kept beside the 16-bit weights."""
        kept = (
            [w.detach() for _, w in self.pairs] if self.mode == "master" else [r for r in self._rest if r is not None]
        )
        return {"mode": self.mode, "kept": [k.clone() for k in kept]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it. Raises PolicyError if it was saved in another mode or for another model."""
        if state["mode"] != self.mode:
            raise PolicyError(
                f'weights: the state was saved with "{state["mode"]}", not "{self.mode}"; use the same mode'
            )
        kept = [w for _, w in self.pairs] if self.mode == "master" else [r for r in self._rest if r is not None]
        if len(kept) != len(state["kept"]) or any(
            a.shape != b.shape for a, b in zip(kept, state["kept"], strict=False)
        ):
            raise PolicyError("weights: the saved state belongs to a model with other parameters")
        for mine, saved in zip(kept, state["kept"], strict=True):
            mine.copy_(saved)


def _widened_state(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(torch.float32) if isinstance(v, torch.Tensor) and v.dtype in _LOW else v for k, v in state.items()}


def _joined(high: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """float32 from a bfloat16 (rounded to nearest) and what its rounding changed in units of the lowest float32 bit."""
    bits = (high.detach().contiguous().view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    return bits.view(torch.float32)


def _split(wide: torch.Tensor, p: torch.Tensor, rest: torch.Tensor) -> None:
    p.copy_(wide)
    top = p.detach().contiguous().view(torch.int16).to(torch.int32) << 16
    # Rounding to nearest moves a value by at most half of 2**16 units; exactly half, upwards, does not fit an int16.
    offset = wide.contiguous().view(torch.int32) - top
    rest.copy_(offset.clamp_(max=(1 << 15) - 1).to(torch.int16))


def round_stochastic(x: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """float32 values rounded to a neighbouring 16-bit value at random, so that the mean is exact. NaN and inf stay.

    bfloat16 keeps the upper 16 bits of a float32: adding a uniform 16-bit number and cutting off the rest is exact
    there. float16's grid is found by rounding towards zero and measuring how far the value lies between its neighbours.
    """
    if dtype is torch.bfloat16:
        noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
        bits = (x.contiguous().view(torch.int32) + noise) & -(1 << 16)
        return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)
    nearest = x.to(dtype)
    error = x - nearest.to(torch.float32)
    other = torch.nextafter(nearest, torch.where(error > 0, torch.inf, -torch.inf).to(dtype))
    gap = (other.to(torch.float32) - nearest.to(torch.float32)).abs()
    up = torch.rand(x.shape, device=x.device, generator=generator) * gap < error.abs()
    return torch.where((error != 0) & up & other.isfinite(), other, nearest)
