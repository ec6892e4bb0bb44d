"""Gradients that a program clips while they are still multiplied by the loss scale.

No operation is needed to see that gradients were written after the backward: their version counters tell. Whether that
was a clip shows in what they are afterwards: the same norm, or the same largest value, step after step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ._gradients import norm, values_of

__all__ = ["ClippedTooSoon"]

_STEPS = 3  # in a row whose gradients end at the same size
_SAME = 1e-3  # relative difference; clip_grad_norm_ adds 1e-6 to the norm that it divides by


class ClippedTooSoon:
    """Compares scaled gradients before and after what a program does between backward and step."""

    def __init__(self) -> None:
        self.evidence = ""
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._sizes: list[tuple[float, float]] = []

    def after_backward(self, parameters: Iterable[torch.Tensor]) -> None:
        """The gradients are as the backward left them."""
        self._versions = [(p.grad, p.grad._version) for p in parameters if p.grad is not None]

    def changed(self, scale: float, parameters: list[torch.Tensor]) -> bool:
        """The step begins: whether gradients that are multiplied by `scale` have been clipped, now and before."""
        written = scale != 1.0 and any(gradient._version != version for gradient, version in self._versions)
        self._versions = []
        if not written:
            self._sizes = []
            return False
        values = values_of(parameters)
        largest = max((float(v.abs().max()) for v in values), default=0.0)
        self._sizes = [*self._sizes, (float(norm(values)), largest)][-_STEPS:]
        if len(self._sizes) < _STEPS:
            return False
        for place, what in enumerate(("norm", "largest value")):
            seen = [size[place] for size in self._sizes]
            if 0.0 < max(seen) < float("inf") and max(seen) - min(seen) <= _SAME * max(seen):
                self.evidence = (
                    f"after {_STEPS} backwards in a row the {what} of the gradients was cut to {seen[-1]:.4g} while "
                    f"they were multiplied by {scale:g}"
                )
                return True
        return False
