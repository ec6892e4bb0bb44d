"""Attribution: which operation of which layer broke a step, and why.

A step whose gradients are not finite is run again, from what `attribution_capture` kept of it, under a trace. Where the
walk back from its symptoms ends is where it broke. Then the same step is run at lower loss scales, and in float32: what
cures it tells the cause. None of this runs in a healthy step; see docs/decisions/0006.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from castwise.guard import Finding, Kind
from castwise.policy import Policy

from ._casts import CastCache
from ._region import Region
from ._rules import rules_for
from .attribution_capture import Call
from .attribution_replay import Context, Replay
from .attribution_trace import Made, Source

__all__ = ["attribute", "float32_region", "live_finding", "outside", "root_finding"]
_DIVIDE = frozenset({"div", "div_", "reciprocal", "rsqrt", "log", "log2", "log10", "pow", "true_divide", "rsqrt_"})


class Entering(AbstractContextManager[None]):
    def __init__(self, region: Region) -> None:
        self.region = region

    def __enter__(self) -> None:
        self.region.enter()

    def __exit__(self, *error: Any) -> None:
        self.region.leave()


def float32_region(device_type: str) -> Context:
    """Regions in which everything computes in float32."""
    rules = rules_for(Policy.preset("float32"), device_type)
    return lambda: Entering(Region(rules, CastCache(capacity=0)))


def attribute(
    replay: Replay,
    calls: Iterable[Call],
    context: Context,
    *,
    scale: float,
    scales: Sequence[float],
    device_type: str,
) -> tuple[Finding, Call] | None:
    """Where and why the step of these calls broke, and the call in which it did; None where no call breaks again.

    Args:
        replay: of the model.
        calls: of one step, in order.
        context: gives the region of the policy in force.
        scale: the loss scale of the step.
        scales: the lower loss scales that could be used instead, falling; empty without scaling.
        device_type: of the model.
    """
    backward: tuple[Made | Source, Call] | None = None
    for call in calls:
        root = replay.traced(call, context).root
        if root is None:
            continue
        if _phase(root) == "forward":
            return _forward(replay, call, root, context, scale, device_type), call
        backward = root, call  # of several, the last call is the nearest to the loss
    if backward is None:
        return None
    root, call = backward
    if isinstance(root, Source):
        return root_finding(root, Kind.UNKNOWN, scale), call
    return _backward(replay, call, root, context, scale, scales, device_type), call


def _phase(root: Made | Source) -> str:
    if isinstance(root, Made):
        return root.phase
    return "backward" if root.kind == "gradient" else "forward"


def _in_float32(
    replay: Replay, call: Call, context: Context, device_type: str, factor: float = 1.0
) -> Made | Source | None:
    """Where the call breaks when everything computes in float32."""
    if replay.planned is None:
        return replay.traced(call, float32_region(device_type), factor).root
    with replay.planned.in_float32():  # a plan's formats are in its graphs
        return replay.traced(call, context, factor).root


def _forward(
    replay: Replay, call: Call, root: Made | Source, context: Context, scale: float, device_type: str
) -> Finding:
    if isinstance(root, Source):
        return root_finding(root, Kind.DATA if root.is_data else Kind.BROKEN, scale)
    wide = _in_float32(replay, call, context, device_type)
    cured = wide is None or _phase(wide) == "backward"
    return root_finding(root, Kind.RANGE if cured else Kind.BROKEN, scale)


def _backward(
    replay: Replay,
    call: Call,
    root: Made,
    context: Context,
    scale: float,
    scales: Sequence[float],
    device_type: str,
) -> Finding:
    def finite(lower: float) -> bool:
        return replay.traced(call, context, lower / scale).root is None

    lower = _largest(finite, scales)
    if lower is not None:
        return root_finding(root, Kind.SCALE, scale, lower)
    wide = _in_float32(replay, call, context, device_type)
    if wide is not None and scale > 1.0:  # float32 ends somewhere too: what counts is the true gradient
        wide = _in_float32(replay, call, context, device_type, 1.0 / scale)
    return root_finding(root, Kind.RANGE if wide is None else Kind.BROKEN, scale)


def _largest(finite: Callable[[float], bool], scales: Sequence[float]) -> float | None:
    """The first of falling scales that is finite, by bisection: what is finite at one is so at all below."""
    if not scales:
        return None
    if finite(scales[0]):
        return scales[0]
    if not finite(scales[-1]):
        return None
    bad, good = 0, len(scales) - 1
    while good - bad > 1:
        middle = (bad + good) // 2
        if finite(scales[middle]):
            good = middle
        else:
            bad = middle
    return scales[good]


def root_finding(root: Made | Source, kind: Kind, scale: float, finite_scale: float | None = None) -> Finding:
    """A root of a trace, as a finding."""
    seen_on = f"on rank {root.rank}, " if root.rank >= 0 else ""
    if isinstance(root, Source):
        evidence = f"{seen_on}{root.values}"
        if root.kind == "gradient":
            return Finding(kind=kind, phase="loss", evidence=f"gradient {root.name}: {evidence}", scale=scale)
        layer = root.name.rpartition(".")[0] if root.kind in ("parameter", "buffer") else root.layer
        phase, source = "forward" if layer is not None else "loss", f"{root.kind} {root.name}"
        return Finding(
            kind=kind, phase=phase, layer=layer or "", source=source, line=root.line, evidence=evidence, scale=scale
        )
    inputs = ", ".join(map(str, root.inputs[:4])) or "nothing"
    outputs = ", ".join(map(str, root.outputs[:2]))
    divisors = root.inputs[-1:] if root.op.rstrip("_") in _DIVIDE else ()
    return Finding(
        kind=kind,
        phase=root.phase if root.inside else "loss",
        op=root.op,
        layer=root.layer,
        line=root.line,
        reads=root.reads if root.phase == "forward" else "",
        evidence=f"{seen_on}{inputs} gave {outputs}",
        scale=scale,
        finite_scale=finite_scale,
        underflow=kind is Kind.RANGE and any(v.zeros for v in divisors),
        constant=root.constant,
    )


def live_finding(root: Made | Source, scale: float, scales: Sequence[float]) -> Finding:
    """The finding of a step that was traced while it ran: the operation by itself tells the cause."""
    if isinstance(root, Source):
        return root_finding(root, Kind.DATA if root.is_data else Kind.BROKEN, scale)
    wide = root.alone is not None and root.alone.finite()
    backward = root.phase == "backward" and bool(scales)
    if backward and (wide or (root.alone is not None and root.alone.finite(scales[0] / scale))):
        return root_finding(root, Kind.SCALE, scale, scales[0])  # backward passes are linear in the loss scale
    return root_finding(root, Kind.RANGE if wide else Kind.BROKEN, scale)


def outside(losses: Iterable[torch.Tensor], scale: float) -> Finding:
    """The finding where the model is well: what is left is the loss that the program makes of its outputs."""
    values = [float(loss.detach()) for loss in losses if loss.numel() == 1]
    bad = [value for value in values if not math.isfinite(value)]
    evidence = f"the loss is {bad[0]}" if bad else "the loss is finite, its gradients are not"
    if bad and math.isnan(bad[0]):
        evidence += ", as a mean over nothing is: an empty batch, or labels that are all ignored"
    return Finding(kind=Kind.UNKNOWN, phase="loss", evidence=evidence, scale=scale)
