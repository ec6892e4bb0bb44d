"""What a step has to know of its gradients before it decides: their norm, and whether they and the losses are finite.

On one device that is one pass over the gradients and one fetch; on several ranks one all-reduce more.
"""

from __future__ import annotations

import logging
import math

import torch

from ._gradients import norm, norms, total, values_of
from ._ranks import Ranks
from .weights import WideWeights

__all__ = ["measured", "measured_ahead", "true_norm"]

log = logging.getLogger("castwise.torch.amp")


def measured(
    ranks: Ranks | None,
    wide: WideWeights,
    values: list[torch.Tensor],
    losses: list[torch.Tensor],
    finite: torch.Tensor | None,
) -> tuple[float, bool]:
    """The norm of the gradients, infinite where one is not finite; and whether the losses are finite.

    Args:
        ranks: that train together.
        wide: knows the parameters.
        values: their gradients.
        losses: of the step.
        finite: False where gradients are known not to have been finite before they were unscaled.
    """
    if ranks is not None:
        size, ranks_with_gradients, told = ranks.measure(wide.parameters(), losses, finite).tolist()
        if not ranks_with_gradients:
            log.warning("no parameter of the optimizer has a gradient on any rank: nothing was stepped")
        return size, math.isfinite(told)
    sizes = norms(values, losses).tolist()
    size, loss_finite = total(sizes[: len(values)]), all(map(math.isfinite, sizes[len(values) :]))
    if not math.isfinite(size):  # a sum of squares may have overflowed although every value is finite
        size = total(norms(values, wide=torch.float64).tolist())
    if finite is not None and not bool(finite):
        size = math.inf
    return size, loss_finite


def measured_ahead(
    ranks: Ranks | None,
    wide: WideWeights,
    values: list[torch.Tensor],
    losses: list[torch.Tensor],
    finite: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the gradients as a device scalar, and the sizes of the losses as a vector. Nothing is fetched.

    A norm beyond float32's range counts as infinite here.
    """
    if ranks is not None:
        size, _, told = ranks.measure(wide.parameters(), losses, finite, exact=False).unbind()
        return size, told.reshape(1)
    sizes = norms(values, losses)
    size = torch.linalg.vector_norm(sizes[: len(values)])
    if finite is not None:
        size = torch.where(finite, size, torch.inf)
    return size, sizes[len(values) :]


def true_norm(ranks: Ranks | None, parameters: list[torch.Tensor], finite: torch.Tensor) -> float:
    """The norm of gradients that were just unscaled."""
    if ranks is not None:
        return float(ranks.measure(parameters, [], finite)[0])
    return float(norm(values_of(parameters), torch.float64))
