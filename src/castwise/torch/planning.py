"""`plan`: from a torch model and example inputs to the format of every op, checked by running it.

    capture the graph, measure (or predict) costs, calibrate risks, solve, verify and repair

A plan for this machine uses times measured here. A plan for a device that is not here uses its data sheet, and is
verified all the same: what this machine cannot compute it emulates, with the same values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from castwise import plan as neutral
from castwise._decide import is_wide
from castwise._joined import join_costs
from castwise.cost import Costs, roofline
from castwise.errors import PlanError
from castwise.formats import BF16
from castwise.hardware import Device, get_device
from castwise.plan import Favour, pareto, solve
from castwise.policy import Policy
from castwise.risk import Risks

from ._verify import Verification, Verifier
from .calibrate import calibrate
from .capture import Captured, CaptureError, as_call, capture, flat_inputs
from .devices import device_of
from .measure import measured_costs, versions
from .parts import CapturedParts, capture_parts

__all__ = ["Plan", "Prepared", "plan", "prepare", "verified"]

log = logging.getLogger("castwise.torch.plan")

Loss = Callable[[Any], torch.Tensor]
Target = Literal["eager", "compiled"]

_MOST_REPAIRS = 24
_MOST_TIGHTENINGS = 4
_TOLERATED = 1.25
"""How far the measured error may exceed the one that was budgeted for before the plan is solved again."""


@dataclass(frozen=True, eq=False)
class Plan(neutral.Plan):
    """A `castwise.plan.Plan` of a torch model, and how it did when it was tried."""

    verification: Verification | None = None
    """None for a plan from a file, and where nothing computes in 16 bits."""


@dataclass(frozen=True)
class Prepared:
    """All that a plan is solved from. Solve it again at other prices without capturing and measuring anew."""

    captured: Captured | CapturedParts
    costs: Costs
    risks: Risks
    policy: Policy
    batches: tuple[Any, ...]
    held_out: tuple[Any, ...]
    device_type: str

    def solve(self, budget: float | None = None, favour: Favour = "speed") -> Plan:
        """The best plan, as it was solved: not verified. `budget` is a relative error of the outputs."""
        noise = None if budget is None else self.risks.allowed(budget)
        if noise is not None and not self.risks.measured:
            raise PlanError(
                "A budget was given, but nothing computes in 16 bits here. Give a 16-bit policy or a device."
            )
        return _as_torch(
            solve(
                self.captured.graph,
                self.costs,
                self.risks,
                self.policy,
                budget=noise,
                favour=favour,
                versions=versions(),
            )
        )

    def front(self, points: int = 16, favour: Favour = "speed") -> list[neutral.Plan]:
        """Plans from the fastest to the most exact; see `castwise.plan.pareto`."""
        return pareto(
            self.captured.graph, self.costs, self.risks, self.policy, points=points, favour=favour, versions=versions()
        )


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Loss | None = None,
    policy: Policy | str = "auto",
    device: Device | str | None = None,
    budget: float | None = None,
    favour: Favour = "speed",
    batches: Sequence[Any] = (),
    target: Target = "eager",
    seconds: float = 20.0,
) -> Plan:
    """Decide the format of every op of `model` together.

    A training plan counts on an `Amp` that runs it: it keeps the low copies of weights, and writes all of them anew in
    one call after each optimizer step. Run by `apply` alone, or compiled, each step casts them.

    Args:
        model: in the mode to plan for: with `train()`, or given a loss, a training step is planned, else inference. It
            is not changed.
        example_inputs: a tensor, a tuple of positional arguments or a mapping of keyword arguments. Sizes may differ
            in later calls wherever the model allows it.
        loss: of the model's outputs, a scalar; with it the ranges of gradients are recorded.
        policy: rules of a `castwise.Policy` become fixed decisions; its format is the plan's 16-bit format.
        device: the name of a device of Castwise's table, for a plan for another machine. Default: the device that the
            model is on, with times measured on it.
        budget: the relative root-mean-square error of the outputs that the plan may cause. Default: as much as the
            policy's own op-by-op rules would.
        favour: "speed", or "memory" to save less for backward.
        batches: more inputs like the example. Half of them calibrate beside it, the others verify.
        target: "eager", or "compiled" for a model that torch.compile will fuse.
        seconds: how long measuring may take.

    Raises:
        CaptureError: nothing of the model can be captured. What cannot, of a model of which other parts can, runs as it
            is written: a warning and the plan's summary say where that is and why.
        PlanError, PolicyError: there is no such plan, or the policy's rules cannot hold.
    """
    ready = prepare(
        model, example_inputs, loss=loss, policy=policy, device=device, batches=batches, target=target, seconds=seconds
    )
    found = ready.solve(budget, favour)
    return verified(ready, found)


def prepare(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Loss | None = None,
    policy: Policy | str = "auto",
    device: Device | str | None = None,
    batches: Sequence[Any] = (),
    target: Target = "eager",
    seconds: float = 20.0,
) -> Prepared:
    """Capture, measure and calibrate: everything that `plan` does before it solves. Arguments as there."""
    training = model.training or loss is not None
    half = len(batches) // 2
    calibrating = (example_inputs, *batches[:half])
    captured = _captured(model, calibrating, training, target == "compiled")
    device_type = _device_type(model, example_inputs)
    here = device_of(device_type)
    wanted = get_device(device) if isinstance(device, str) else device or here
    if wanted is None:
        raise PlanError(f"The hardware table has no device of type {device_type!r}. Name one: device='h100'.")
    resolved = Policy.coerce(policy).resolve(wanted)
    fmt = resolved.low_format
    if is_wide(fmt):  # all ops are fp32: there is nothing to measure
        costs = _no_costs(captured, wanted.name)
        risks = Risks.unmeasured(captured.graph, BF16.name)
        return Prepared(captured, costs, risks, resolved, (example_inputs,), (), device_type)
    keep = not training or target == "eager"  # by whoever makes the steps: an `Amp`; compiled code casts weights itself
    if device is None or wanted == here:
        costs = _measured(captured, example_inputs, wanted, fmt.name, seconds, resolved.tf32, keep)
    else:
        costs = roofline(captured.graph, wanted, fmt.name, tf32=resolved.tf32, keep_low_weights=keep)
    risks = calibrate(captured, fmt.name, calibrating, loss)
    held_out = tuple(batches[half:]) or calibrating[:1]
    return Prepared(captured, costs, risks, resolved, calibrating, held_out, device_type)


def _captured(model: nn.Module, batches: tuple[Any, ...], training: bool, fused: bool) -> Captured | CapturedParts:
    """The model as one graph, or, where that cannot be, as several that leave out what no graph can hold."""
    try:
        return capture(model, batches[0], training=training, fused=fused)
    except CaptureError as failure:
        found = capture_parts(model, batches, training=training, fused=fused, failure=failure)
    places = "; ".join(found.graph.eager) or "nothing"
    log.warning("%s is planned as %d graphs. Left as written: %s", found.graph.name, len(found.parts), places)
    return found


def _measured(
    captured: Captured | CapturedParts,
    example_inputs: Any,
    device: Device,
    fmt: str,
    seconds: float,
    tf32: bool,
    keep: bool,
) -> Costs:
    if isinstance(captured, Captured):
        return measured_costs(captured, example_inputs, device, fmt, seconds=seconds, tf32=tf32, keep_low_weights=keep)
    share = seconds / len(captured.parts)
    return join_costs([
        measured_costs(part, tuple(call), device, fmt, seconds=share, tf32=tf32, keep_low_weights=keep)
        for part, call in zip(captured.parts, captured.calls, strict=True)
    ])  # fmt: skip


def verified(ready: Prepared, found: Plan) -> Plan:
    """Try a plan; raise what overflows, and tighten the budget while the error is larger than it allows."""
    if not found.labels.any() or not ready.risks.measured:
        return found
    verifier = Verifier(ready.captured, found.fmt, ready.device_type, ready.held_out)
    raised: dict[str, str] = {}
    budget = found.budget
    result = verifier.try_plan(found.formats)
    for _ in range(_MOST_REPAIRS):
        if result.finite:
            break
        guilty = [op for op in verifier.guilty(found.formats) if op not in raised]
        if not guilty:
            break
        why = f"its result was not finite in {found.fmt} on a batch on which fp32's is"
        raised |= dict.fromkeys(guilty, why)
        log.warning("%s: %s; it stays fp32", ", ".join(guilty), why)
        found = found.raised(dict.fromkeys(guilty, why))
        result = verifier.try_plan(found.formats)
    allowed = None if budget is None else found.problem.risks.relative(budget)
    for _ in range(_MOST_TIGHTENINGS):
        if allowed is None or not result.finite or result.output_error <= allowed * _TOLERATED or not allowed:
            break
        assert budget is not None
        budget *= (allowed / result.output_error) ** 2
        log.info("the error is %.3g where %.3g is allowed: solving again", result.output_error, allowed)
        again = ready.solve(found.problem.risks.relative(budget))
        found = again.raised(raised) if raised else again
        result = verifier.try_plan(found.formats)
    if not result.finite:
        log.warning("the plan's results are not finite, and no op is at fault alone: use another format or loss scale")
    held = bool(ready.held_out) and ready.held_out[0] is not ready.batches[0]
    return _as_torch(found, Verification.of(result, found.relative_error, len(ready.held_out), held, raised))


def _as_torch(found: neutral.Plan, verification: Verification | None = None) -> Plan:
    return Plan(**{f.name: getattr(found, f.name) for f in fields(neutral.Plan)}, verification=verification)


def _no_costs(captured: Captured | CapturedParts, device: str) -> Costs:
    ops, tensors = np.zeros(len(captured.graph.ops)), np.zeros(len(captured.graph.tensors))
    return Costs(BF16.name, ops, ops, tensors, tensors, tensors > 0, device)


def _device_type(model: nn.Module, example_inputs: Any) -> str:
    tensors = [*model.parameters(), *(x for x in flat_inputs(*as_call(example_inputs)) if isinstance(x, torch.Tensor))]
    return tensors[0].device.type if tensors else "cpu"
