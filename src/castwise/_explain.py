"""Why each op has the format it has: what flipping it alone would change, in seconds, noise and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from castwise import _globs
from castwise._graph_index import Floats
from castwise._pins import Cause
from castwise._units import show_bytes, show_seconds
from castwise.errors import PlanError, did_you_mean

if TYPE_CHECKING:
    from castwise.plan import Plan

__all__ = ["Change", "Explanation", "Verdict", "causes", "changes", "explain"]

# What can weigh heaviest, in the order of the columns of `changes`.
_WEIGHED = (Cause.TIME, Cause.CASTS, Cause.NOISE, Cause.MEMORY)
# Less than this share of the whole step's energy decides nothing: it is the rounding of sums.
_NOTHING = 1e-12


@dataclass(frozen=True, slots=True)
class Change:
    """What flipping one op to its other format, and nothing else, would add. Negative: what it would save."""

    op_seconds: float
    cast_seconds: float
    noise: float
    saved_bytes: float
    energy: float
    """All of these at the plan's prices. Positive where the plan's choice is the better one."""

    @property
    def seconds(self) -> float:
        return self.op_seconds + self.cast_seconds


@dataclass(frozen=True, slots=True)
class Verdict:
    """One op's format and what decided it."""

    op: str
    name: str
    layer: str
    source: str
    format: str
    cause: Cause
    reason: str
    change: Change

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.name, self.layer, self.source) if part)
        return f"{self.op} ({where}): {self.format}, decided by {self.cause}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Verdicts on an op, or on all ops of a layer. Prints as text, one op a line."""

    subject: str
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.verdicts))


def explain(plan: Plan, subject: str) -> Explanation:
    """Explain an op by its id, or all ops of the layers that a path or glob (``blocks.*.attn``) covers.

    Raises PlanError where the graph has no such op or layer; the nearest are suggested.
    """
    graph = plan.problem.graph
    if subject in graph.positions:
        return Explanation(subject, (_verdict(plan, graph.positions[subject]),))
    covered = [position for position, op in enumerate(graph.ops) if op.layer and _globs.covers(subject, op.layer)]
    if not covered:
        hint = did_you_mean(subject, [*graph.positions, *graph.layers])
        raise PlanError(f"The plan has no op and no layer {subject!r}.{hint} plan.formats lists all ops.")
    return Explanation(subject, tuple(_verdict(plan, position) for position in covered))


def changes(plan: Plan) -> Floats:
    """[ops, 4] what flipping each op alone adds: its own seconds, seconds of casts, noise, saved bytes."""
    own, shared = plan.problem.terms.flips(plan.labels)
    return np.column_stack([own[:, 0], shared[:, 0], own[:, 1] + shared[:, 1], own[:, 2] + shared[:, 2]])


def causes(plan: Plan) -> list[Cause]:
    """What decided each op, in the graph's order."""
    weighed = plan.changes * _prices(plan)
    small = _NOTHING * abs(plan.energy)
    found = [_WEIGHED[column] for column in weighed.argmax(axis=1)]
    for position in np.flatnonzero(weighed.max(axis=1) <= small).tolist():
        found[position] = Cause.NOTHING
    if plan.budget is not None:
        for position in np.flatnonzero((weighed.sum(axis=1) < -small) & ~plan.labels).tolist():
            found[position] = Cause.BUDGET
    for position, pin in plan.problem.pins.items():
        found[position] = pin.cause
    return found


def _prices(plan: Plan) -> Floats:
    return np.array([1.0, 1.0, plan.lam, plan.mu])


def _verdict(plan: Plan, position: int) -> Verdict:
    op, pin = plan.problem.graph.ops[position], plan.problem.pins.get(position)
    row = plan.changes[position]
    op_seconds, cast_seconds, noise, saved_bytes = row.tolist()
    change = Change(op_seconds, cast_seconds, noise, saved_bytes, float(row @ _prices(plan)))
    cause, fmt = plan.causes[position], plan.format_of(op.id)
    reason = pin.reason if pin is not None else _reason(plan, cause, change, low=bool(plan.labels[position]))
    return Verdict(op.id, op.name, op.layer, op.source, fmt, cause, reason, change)


def _reason(plan: Plan, cause: Cause, change: Change, *, low: bool) -> str:
    """The decision in words: what the other format would cost."""
    other = plan.wide if low else plan.fmt
    saved = f", to save {show_seconds(-change.seconds)}" if change.seconds < 0 else ""
    match cause:
        case Cause.TIME:
            return f"{other} takes {show_seconds(change.op_seconds)} longer"
        case Cause.CASTS:
            gain = f", to gain {show_seconds(-change.op_seconds)}" if change.op_seconds < 0 else ""
            return f"{other} needs {show_seconds(change.cast_seconds)} more for casts{gain}"
        case Cause.NOISE:
            relative = plan.problem.risks.relative
            before, after = relative(plan.score.noise), relative(plan.score.noise + change.noise)
            return f"{other} raises the predicted error of the output from {before:.3g} to {after:.3g}{saved}"
        case Cause.MEMORY:
            return f"{other} keeps {show_bytes(change.saved_bytes)} more for backward{saved}"
        case Cause.BUDGET:
            return f"{other} does not fit into the noise budget{saved}"
        case _:
            return "both formats cost the same"
