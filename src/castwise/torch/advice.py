"""Advice on a finding that needs more than the finding: what the model's weights are like."""

from __future__ import annotations

import torch
from torch import nn

from castwise.guard import Finding, Kind
from castwise.watch.advice import BFLOAT16_CHECKPOINT, advice_for

from ._gradients import local

__all__ = ["advise", "has_bfloat16_digits"]

_ALIKE = 0.99  # share of weights that bfloat16 holds exactly, from which on they are taken to come from there
_DISTINCT = 8  # values, up to which a weight is a constant and says nothing


def advise(finding: Finding, model: nn.Module) -> list[tuple[str, str]]:
    """The causes that a finding points to in this model, each with what to do. Reads weights, but no healthy step."""
    found = advice_for(finding)
    if finding.kind is Kind.RANGE and finding.phase == "forward" and has_bfloat16_digits(model):
        found.append(BFLOAT16_CHECKPOINT)
    return found


@torch.no_grad()
def has_bfloat16_digits(model: nn.Module) -> bool:
    """Whether almost every weight is a bfloat16 number. By chance, one float32 in 65,536 is, and one float16 in 8."""
    exact = total = 0
    for p in model.parameters():
        if p.dim() < 2 or p.dtype not in (torch.float32, torch.float16, torch.bfloat16) or p.is_meta:
            continue
        weight = local(p.detach())
        if weight.layout is not torch.strided:
            continue
        if weight.flatten()[:64].unique().numel() <= _DISTINCT:  # type: ignore[no-untyped-call]
            continue
        wide = weight.to(torch.float32)
        exact += int((wide.to(torch.bfloat16).to(torch.float32) == wide).sum())
        total += wide.numel()
    return total > 0 and exact >= _ALIKE * total
