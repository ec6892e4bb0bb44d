"""A plan of a TensorFlow function: the neutral plan, the function that it is for, and the rewriting that follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from castwise._function_plan import FunctionPlan
from castwise.errors import PlanError
from castwise.formats import parse_format
from castwise.policy import Rule

from ._in_place import IN_PLACE
from ._lists import TENSOR_LIST
from ._replay import Hook, Rewriter
from ._rules import Choice, entry_of
from ._types import dtype_of
from .capture import capture

__all__ = ["Plan"]


@dataclass(frozen=True, eq=False)
class Plan(FunctionPlan):
    """A ``castwise.plan.Plan`` of a TensorFlow function. Operations are named by the nodes that lead to them."""

    framework, title = "tensorflow", "TensorFlow"

    @property
    def adds_in_place(self) -> bool:
        """Whether there are loops whose gradients are summed up in place, whatever the formats."""
        return any(op.pin == IN_PLACE for op in self.problem.graph.ops)

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
            at = positions.get(captured.lists.get(path, path))
            if path in captured.lists:
                is_low = at is not None and at < len(self.labels) and bool(self.labels[at])
                return Choice(TENSOR_LIST, Rule.LOW, low) if is_low else Choice(TENSOR_LIST, None)
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
