"""What a region says of an op once in a process, because no choice of formats at that op mends it."""

from __future__ import annotations

import logging
from typing import Any

import torch

__all__ = ["TOLD", "tell"]

log = logging.getLogger("castwise.torch.autocast")

TOLD = {"binary_cross_entropy"}
"""Ops about which something is still to be said, by canonical name."""


def tell(name: str, args: tuple[Any, ...]) -> None:
    """Say that `name` takes probabilities which 16 bits have rounded already, if its first argument is such.

    Between the largest 16-bit value below 1 and 1 there is no probability: what the model is sure of becomes certain,
    and the loss of a certain error is torch's bound of 100, whatever computes the logarithm.
    """
    given = args[0] if args else None
    if not isinstance(given, torch.Tensor) or given.dtype not in (torch.float16, torch.bfloat16):
        return
    TOLD.discard(name)
    nearest = 1.0 - torch.finfo(given.dtype).eps / 2
    log.warning(
        "%s was given probabilities in %s, which has none between %.6g and 1: surer ones count as certain, and their "
        "loss and gradient are wrong. Give logits to binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss), or "
        "compute the probabilities in float32, by the policy's rule ops = {sigmoid = 'high'}.",
        name,
        str(given.dtype).removeprefix("torch."),
        nearest,
    )
