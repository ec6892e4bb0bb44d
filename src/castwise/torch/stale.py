"""The share of a step's updates that are too small to change the weights, in the weights' own format.

Half a unit in the last place is all that rounding to nearest sees: in bfloat16 a weight of 1 ignores updates up to
0.002. A sample of each weight is compared before and after a step; what received no gradient does not count.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ._gradients import local

__all__ = ["StaleUpdates"]

_SAMPLED = 4096  # values of each weight


class StaleUpdates:
    """Looks at the weights before a step and after it."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def before(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep a sample of the weights that have gradients."""
        self._before = []
        for p in parameters:
            if p.grad is None or p.layout is not torch.strided or p.grad.layout is not torch.strided or not p.numel():
                continue
            weight, gradient = _sample(p), _sample(p.grad)
            self._before.append((p, weight.clone(), (gradient != 0) & gradient.isfinite()))

    @torch.no_grad()
    def after(self, dtypes: tuple[torch.dtype, ...] = ()) -> float | None:
        """The share of the weights with a gradient that the step left as they were; None where there were none.

        Args:
            dtypes: of the weights that count; empty: all.
        """
        moved = [
            (int(there.sum()), int((there & (_sample(p) == weight)).sum()))
            for p, weight, there in self._before
            if not dtypes or p.dtype in dtypes
        ]
        self._before = []
        total = sum(count for count, _ in moved)
        return sum(same for _, same in moved) / total if total else None


def _sample(x: torch.Tensor) -> torch.Tensor:
    flat = local(x.detach()).reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _SAMPLED))]
