"""A plan of a TensorFlow function: the neutral plan, the function that it is for, and the rewriting that follows it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from castwise import _files
from castwise import plan as neutral
from castwise._graph_index import Bools
from castwise._pins import Cause, Pin
from castwise.errors import PlanError
from castwise.formats import parse_format
from castwise.policy import Rule

from ._replay import Hook, Rewriter
from ._rules import Choice, entry_of
from ._types import dtype_of
from .capture import capture

__all__ = ["Plan", "as_tensorflow"]


@dataclass(frozen=True, eq=False)
class Plan(neutral.Plan):
    """A ``castwise.plan.Plan`` of a TensorFlow function. Operations are named by the nodes that lead to them."""

    structure: str = ""
    """A digest of the traced function's nodes, without sizes."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of a call ("as written", "planned") as measured; empty where nothing was timed."""
    error: float | None = None
    """The relative root-mean-square error of the results as measured; None where the plan was not tried."""

    def rewriter(self, concrete: Any, hook: Hook | None = None) -> Rewriter:
        """What rewrites a function as planned.

        Raises:
            PlanError: the plan was made for another function.
        """
        from .autocast import results_of

        captured = capture(concrete.graph, results_of(concrete))
        if captured.structure != self.structure:
            raise PlanError(
                f"This plan was made for another function than {concrete.name!r}: TensorFlow traces other nodes here "
                "than it did for the plan. Make one with castwise.tensorflow.plan(fn, *args) for such arguments."
            )
        # By position: a signature and the function that it calls differ in the names of their nodes alone.
        low, positions, causes = dtype_of(parse_format(self.fmt)), captured.graph.positions, self.causes

        def choose(op: Any, path: str, layer: str) -> Choice:
            entry = entry_of(op)
            stores = entry is not None and entry.stores_constant
            at = positions.get(path)
            if at is None:
                view = entry is not None and entry.view
                return Choice(op.type, Rule.WIDEST if view else None, reason="a view follows its input")
            if at >= len(self.labels) or path not in captured.ops:
                return Choice(op.type, None, reason="as written")
            pin = self.problem.pins.get(at)
            reason = f"planned: {pin.reason if pin is not None else f'decided by {causes[at].value}'}"
            if self.labels[at]:
                return Choice(self.problem.graph.ops[at].name, Rule.LOW, low, reason, stores)
            return Choice(self.problem.graph.ops[at].name, Rule.HIGH, None, reason, stores)

        return Rewriter(choose, hook)

    def relabelled(self, labels: Bools, reason: str) -> Self:
        """The plan with other labels; ``reason`` says why to those that ask about the operations that changed."""
        changed = {
            position: Pin(bool(label), Cause.TIME, reason)
            for position, (label, before) in enumerate(zip(labels, self.labels, strict=True))
            if label != before
        }
        return replace(self, problem=self.problem.with_pins(changed), labels=labels, error=None)

    def to_dict(self) -> dict[str, object]:
        """The plan and its whole problem as plain data for JSON."""
        own = {"structure": self.structure, "seconds": dict(self.seconds), "error": self.error}
        return {**super().to_dict(), "tensorflow": own}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """The plan that ``to_dict`` described. Raises PlanError where the data is no plan of a TensorFlow function."""
        made = neutral.Plan.from_dict(data)
        own: Any = data.get("tensorflow")
        try:
            return cls(**_fields(made), **own)
        except TypeError as error:
            raise PlanError(
                "This is no plan of a TensorFlow function. Make one with castwise.tensorflow.plan."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, atomically."""
        _files.write_text(path, json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan file. Raises PlanError that names the file where it is no plan of a TensorFlow function."""
        neutral.Plan.load(path)  # its errors name the file
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except PlanError as error:
            raise PlanError(f"{os.fspath(path)!r}: {error}") from error


def _fields(made: neutral.Plan) -> dict[str, Any]:
    return {one.name: getattr(made, one.name) for one in fields(neutral.Plan)}


def as_tensorflow(made: neutral.Plan, structure: str) -> Plan:
    """A neutral plan as that of a TensorFlow function."""
    return Plan(**_fields(made), structure=structure)
