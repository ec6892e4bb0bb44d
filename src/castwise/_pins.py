"""Which ops have no choice, and why.

Five things can settle an op's format before any cost is weighed. Where several speak, the first of these wins:

1. *structure*: what the graph itself demands (a mutation, a third format, the model's own cast);
2. *hardware*: the device has no kernel;
3. *policy*: a rule that the user wrote, for the op, its class or its layer;
4. *range*: values were measured that the 16-bit format cannot hold, or not by a margin;
5. *catalogue*: the op is known to be unsafe in the format.

The last one gives way to measurement. A range hazard of the catalogue says that an op *can* leave the format's range
(exp, squares, long sums); where calibration saw all its results at least a factor HAZARD_HEADROOM below the limit, the
op is free again: unsafe by catalogue, but measured harmless. A mantissa hazard is a matter of degree, which is what the
measured noise is for: it pins only where nothing was measured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from castwise._graph_index import Bools
from castwise._ranges import RangeRecord
from castwise._terms import HIGH, LOW, Roles, wide_of
from castwise.catalogue import OpClass, OpEntry, load_catalogue
from castwise.errors import PolicyError
from castwise.formats import FORMATS, parse_format
from castwise.graph import Graph, Kind
from castwise.policy import Decision, Policy, Rule, decide, default_rule

if TYPE_CHECKING:
    from castwise.cost import Costs
    from castwise.risk import Risks

__all__ = ["HAZARD_HEADROOM", "RANGE_HEADROOM", "Cause", "Pin", "find_pins", "preset_labels"]

log = logging.getLogger("castwise.plan")

RANGE_HEADROOM = 2.0
"""A measured tensor may come this close to the format's largest value: other batches have larger values than these."""

HAZARD_HEADROOM = 16.0
"""An op with a range hazard is measured harmless where its results stay this factor below the largest value."""


class Cause(StrEnum):
    """What decided an op's format. The first five pin it; of the others, it is what weighs heaviest."""

    STRUCTURE = "structure"
    HARDWARE = "hardware"
    POLICY = "policy"
    RANGE = "range"
    CATALOGUE = "catalogue"

    TIME = "time"  # its own
    CASTS = "casts"  # between it and its neighbours
    NOISE = "noise"  # rounding what it writes, or what others read from it
    MEMORY = "memory"  # saved for backward
    BUDGET = "budget"  # worth it at the plan's price of noise, but over the budget
    NOTHING = "nothing"  # both formats cost the same


@dataclass(frozen=True, slots=True)
class Pin:
    """An op whose format is settled."""

    low: bool
    cause: Cause
    reason: str


def find_pins(graph: Graph, costs: Costs, risks: Risks, policy: Policy) -> dict[int, Pin]:
    """Every op that has no choice, by position. Warns where a rule of the policy cannot be followed, or is dangerous.

    Raises PolicyError for a rule that cannot be followed where the policy is strict.
    """
    entries = load_catalogue().entries
    rules = dict(_policy_pins(graph, costs.fmt, policy, entries))
    ranges = dict(_range_pins(graph, costs.fmt, risks))
    must = {position: Pin(HIGH, Cause.HARDWARE, reason) for position, reason in costs.unavailable.items()}
    must |= dict(_structure_pins(graph, costs.fmt, entries))
    for position, rule in rules.items():
        _report_conflict(graph, position, rule, must.get(position), ranges.get(position), policy.strict)
    return dict(_catalogue_pins(graph, costs.fmt, risks, entries)) | ranges | rules | must


def _report_conflict(graph: Graph, position: int, rule: Pin, must: Pin | None, seen: Pin | None, strict: bool) -> None:
    op = graph.ops[position]
    if must is not None and must.low != rule.low:
        message = f"Op {op.id!r}: {rule.reason} cannot be followed: {must.reason}."
        if strict:
            raise PolicyError(f"{message} Drop the rule, or exempt this op from it.")
        log.warning("%s", message)
    elif seen is not None and seen.low != rule.low:
        log.warning("Op %r: %s is followed although %s.", op.id, rule.reason, seen.reason)


def _structure_pins(graph: Graph, fmt: str, entries: Mapping[str, OpEntry]) -> Iterator[tuple[int, Pin]]:
    index, movable = graph.index, Roles.of(graph, fmt).movable
    foreign = index.touching(index.floating & ~movable)
    inert = ~index.touching(movable)
    for position, op in enumerate(graph.ops):
        if op.pin:
            yield position, Pin(HIGH, Cause.STRUCTURE, op.pin)
        elif foreign[position]:
            formats = {graph.tensors[t].format for t in (*op.inputs, *op.outputs) if not movable[t]} & FORMATS.keys()
            yield position, Pin(HIGH, Cause.STRUCTURE, f"it works in {' and '.join(sorted(formats))}")
        elif inert[position]:
            yield position, Pin(HIGH, Cause.STRUCTURE, "it has no floating-point operand")
    yield from _in_place_pins(graph, fmt, foreign)
    casts = {name for name, entry in entries.items() if entry.op_class is OpClass.CAST}
    for position, op in enumerate(graph.ops):
        if op.name in casts and op.outputs and not foreign[position] and not inert[position]:
            target = graph.tensors[op.outputs[0]].format
            yield position, Pin(target == fmt, Cause.STRUCTURE, f"the model itself casts to {target} here")


def _in_place_pins(graph: Graph, fmt: str, foreign: Bools) -> Iterator[tuple[int, Pin]]:
    """Storage that is written more than once has one format: the one it has without a plan."""
    for tensor, writer in graph.mutated.items():
        position = int(graph.index.producer[tensor])
        if position >= 0 and not foreign[position] and graph.tensors[tensor].floating:
            reason = f"op {writer!r} changes its result in place, which therefore has one format"
            yield position, Pin(graph.tensors[tensor].format == fmt, Cause.STRUCTURE, reason)


def _policy_pins(graph: Graph, fmt: str, policy: Policy, entries: Mapping[str, OpEntry]) -> Iterator[tuple[int, Pin]]:
    """Rules that the user wrote. The catalogue's own rules are no pins: the planner exists to improve on them."""
    if not policy.ops and not policy.layers:
        return
    bare = replace(policy, ops={}, layers=())
    decided: dict[tuple[str, str], Pin | None] = {}
    for position, op in enumerate(graph.ops):
        key = (op.name, op.layer)
        if key not in decided:
            entry = entries.get(op.name)
            ruled = decide(policy, entry, layer=op.layer, name=op.name)
            decided[key] = None if ruled == decide(bare, entry, name=op.name) else _as_pin(ruled, fmt)
        pin = decided[key]
        if pin is not None:
            yield position, pin


def _as_pin(decision: Decision, fmt: str) -> Pin | None:
    if decision.rule is Rule.WIDEST or decision.fmt is None:
        return None  # "follow the inputs": the planner's choice
    if decision.fmt.name == fmt:
        return Pin(LOW, Cause.POLICY, decision.reason)
    if decision.rule is Rule.HIGH:
        return Pin(HIGH, Cause.POLICY, decision.reason)
    return Pin(HIGH, Cause.POLICY, f"{decision.reason}; a plan in {fmt} has {wide_of(fmt)} for everything else")


def _range_pins(graph: Graph, fmt: str, risks: Risks) -> Iterator[tuple[int, Pin]]:
    """Who would write a 16-bit tensor that cannot hold its values, and who would read one."""
    largest = parse_format(fmt).max
    too_large = {
        tensor: _beyond(graph, tensor, record, fmt, largest)
        for tensor, record in risks.ranges.items()
        if not record.fits(fmt, RANGE_HEADROOM)
    }
    if not too_large:
        return
    for position, op in enumerate(graph.ops):
        for verb, tensors in (("reads", op.inputs), ("writes", op.outputs)):
            for tensor in tensors:
                if tensor in too_large:
                    yield position, Pin(HIGH, Cause.RANGE, f"it {verb} {too_large[tensor]}")


def _beyond(graph: Graph, tensor: int, record: RangeRecord, fmt: str, largest: float) -> str:
    name = graph.tensors[tensor].name
    where = "beyond" if record.largest > largest else f"within a factor of {RANGE_HEADROOM:g} of"
    return f"{name!r}, whose values reach {record.largest:.3g}, {where} {fmt}'s largest, {largest:.6g}"


def _catalogue_pins(graph: Graph, fmt: str, risks: Risks, entries: Mapping[str, OpEntry]) -> Iterator[tuple[int, Pin]]:
    asked_for = _integers_asked_for(graph).tolist()
    safe = {name for name, entry in entries.items() if default_rule(entry, fmt) is not Rule.HIGH}
    safe -= {name for name, entry in entries.items() if entry.hazards.get(fmt)}
    if wide_of(fmt) == "fp64":  # what the catalogue keeps wide, it keeps in fp32
        safe = {*entries}
    # A factorization's pivots belong to the factors that come with them: others are as good.
    linalg = {name for name, entry in entries.items() if entry.op_class is OpClass.LINALG}
    for position, op in enumerate(graph.ops):
        if asked_for[position] and op.name not in linalg:
            reason = "its integer result changes where rounding makes or breaks a tie"
        elif op.name in safe:
            continue
        elif op.name not in entries:
            reason = f"{op.name!r} is not in the op catalogue; a policy rule for it can allow {fmt}"
        else:
            reason = _hazard(graph, position, entries[op.name], fmt, risks)
        if reason:
            yield position, Pin(HIGH, Cause.CATALOGUE, reason)


def _integers_asked_for(graph: Graph) -> Bools:
    """[ops] whether each turns floating values into integers (argmax, top-k, a comparison) that somebody reads."""
    index = graph.index
    leaves = np.array([tensor.kind is Kind.OUTPUT for tensor in graph.tensors], bool)
    asked = ~index.floating & (index.reads.any(index.tensors) | leaves)
    reads_floats = np.bincount(index.reads.op[index.floating[index.reads.tensor]], minlength=index.ops) > 0
    return reads_floats & (np.bincount(index.writes.op[asked[index.writes.tensor]], minlength=index.ops) > 0)


def _hazard(graph: Graph, position: int, entry: OpEntry, fmt: str, risks: Risks) -> str:
    """Why the catalogue keeps an op in fp32; empty where it does not, or where measurements say it need not."""
    hazards = entry.hazards.get(fmt, frozenset())
    if not hazards:
        return f"ops of class {entry.op_class.value} stay in fp32"
    if not risks.measured:
        return f"{' and '.join(sorted(hazards))} hazard in {fmt}, and nothing was measured to weigh it by"
    if "range" in hazards and not _measured_harmless(graph, position, entry, fmt, risks):
        return f"{entry.name} can leave the range of {fmt}, and was not measured to stay well within it"
    return ""


def _measured_harmless(graph: Graph, position: int, entry: OpEntry, fmt: str, risks: Risks) -> bool:
    """Whether an op with a range hazard was seen to stay far from the limit, inside (its sums) as well as outside."""
    written = [tensor for tensor in graph.ops[position].outputs if graph.tensors[tensor].floating]
    records = [risks.ranges.get(tensor) for tensor in written]
    far = all(record is not None and record.fits(fmt, HAZARD_HEADROOM) for record in records)
    return far and entry.accumulates_wide


def preset_labels(graph: Graph, fmt: str, policy: Policy, pins: Mapping[int, Pin]) -> Bools:
    """[ops] the labels that the policy gives op by op, as a preset runs: pins first, then rules, then the catalogue."""
    entries = load_catalogue().entries
    roles = Roles.of(graph, fmt)
    low = roles.arrives_low.tolist()
    decided: dict[tuple[str, str], Decision] = {}
    movable = roles.movable.tolist()
    labels = [False] * len(graph.ops)
    for position, op in enumerate(graph.ops):
        key = (op.name, op.layer)
        if key not in decided:
            decided[key] = decide(policy, entries.get(op.name), layer=op.layer, name=op.name)
        decision = decided[key]
        if position in pins:
            labels[position] = pins[position].low
        elif decision.rule is Rule.WIDEST or decision.fmt is None:
            floats = [low[tensor] for tensor in op.inputs if movable[tensor]]
            labels[position] = bool(floats) and all(floats)
        else:
            labels[position] = decision.fmt.name == fmt
        for tensor in op.outputs:
            low[tensor] = labels[position]
    return np.array(labels, bool)
