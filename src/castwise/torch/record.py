"""What ran: one event per op that a region decided about, for reports, tests and `castwise.torch.autocast(log=...)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._calls import Call
from ._rules import Rules


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One call inside a region.

    Attributes:
        op: canonical name of the op.
        rule: "low", "high" or "widest": what was decided.
        inputs: dtypes of the tensors the call was given, before casting.
        outputs: dtypes of the tensors it returned.
        layer: path of the layer rule in force, "" without one.
        emulated: computed in float32 on values rounded to the format.
        reason: what decided.
    """

    op: str
    rule: str
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    layer: str
    emulated: bool
    reason: str


def event(call: Call, rules: Rules, args: tuple[Any, ...], result: Any) -> OpEvent:
    """The event of one call."""
    outputs = result if isinstance(result, list | tuple) else (result,)
    return OpEvent(
        call.name,
        call.rule.value,
        tuple(a.dtype for a in args if isinstance(a, torch.Tensor)),
        tuple(o.dtype for o in outputs if isinstance(o, torch.Tensor)),
        rules.layer,
        call.arithmetic is not None and call.arithmetic.emulated,
        call.reason,
    )
