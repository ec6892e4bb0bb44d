"""What the planner is told of rounding noise: one number per tensor, from runs of the model.

Where the model can be run beside a disturbed twin, tensors are told apart one by one. The loudest hide the others, so
that what a plan still rounds is measured again once the loudest are gone. Where there is no twin (loops carry what they
compute on), groups of ops are lowered alone and split where the noise is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from castwise._graph_index import Floats
from castwise.catalogue import OpClass, load_catalogue
from castwise.onnx._apply import narrow
from castwise.onnx._capture import Captured
from castwise.onnx._constants import value_array
from castwise.onnx._evaluate import Evaluator
from castwise.onnx._scopes import Value
from castwise.onnx._unmix import contributions
from castwise.plan import Plan
from castwise.risk import Risks, measure_groups

__all__ = ["Noise"]

log = logging.getLogger("castwise.onnx")

_MEASUREMENTS = 3
_LEAST, _SHARE, _MOST = 8, 14, 32
"""Of the runs of a measurement with all signs, and with single tensors: one for so many tensors, within these bounds;
half as many where it is not the first."""
_RUNS = 40
"""Trials that measuring groups may take."""
_GROUPS = 8
_HUGE = 1e30
"""In place of an infinite noise."""
_SMALL = 4096
"""Elements up to which a constant is looked at to see whether rounding changes it at all."""
_MAKES_VALUES = (OpClass.CREATE, OpClass.RANDOM, OpClass.CAST, OpClass.QUANTIZE)


@dataclass
class Noise:
    """The noise of a model's tensors, as far as it was measured."""

    evaluator: Evaluator
    captured: Captured
    can_refine: bool = True
    """False where another measurement would tell the same."""
    _amounts: dict[str, float] = field(default_factory=dict)
    _alone: set[str] = field(default_factory=set)
    _times: int = 0
    _paths: list[str] | None = None
    _run: Callable[[Floats], Floats] | None = None

    def measure(self, plan: Plan, allowed: float = 0.0) -> tuple[Risks, str]:
        """Risks with the noise of all that ``plan`` rounds, and what was done, in words.

        ``allowed`` is the share of that noise that may stay: what makes so little of it is not told apart.
        Call it first with the plan that rounds the most. Raises RuntimeError where the model does not run.
        """
        before, paths = self.evaluator.runs, self._rounded(plan)
        if self._paths is None:
            self._paths = []
            try:
                found = self.evaluator.disturbed(paths, self.captured.low)
                if found is not None:
                    self._paths, self._run = found
                    self._add(paths, allowed)
            except RuntimeError as error:
                log.info("single tensors cannot be measured: %s", " ".join(str(error).split())[:200])
                self._run = None
        elif self._run is not None:
            self._add(paths, allowed)
        if self._run is None:
            self.can_refine = False
            return self._by_groups(plan)
        total = np.array([self._amounts.get(tensor.name, 0.0) for tensor in self.captured.graph.tensors])
        count = sum(path in paths for path in self._paths)
        return self._risks(total), f"measured {count} tensors' noise in {self.evaluator.runs - before} runs"

    def _add(self, paths: set[str], allowed: float) -> None:
        assert self._paths is not None and self._run is not None
        run, dials = self._run, np.zeros(len(self._paths))
        places = [i for i, path in enumerate(self._paths) if path in paths]

        def some(values: Floats) -> Floats:
            dials[places] = values
            return run(dials)

        count = min(_MOST, max(_LEAST, len(places) // _SHARE)) // (2 if self._times else 1)
        amounts, alone = contributions(some, len(places), count, count, allowed)
        for place, amount, seen_alone in zip(places, amounts, alone, strict=True):
            path = self._paths[place]
            if seen_alone or path not in self._alone:
                self._amounts[path] = float(amount)
            if seen_alone:
                self._alone.add(path)
        known = all(self._paths[place] in self._alone for place in places)
        self.can_refine = not known and self._times + 1 < _MEASUREMENTS
        self._times += 1

    def _risks(self, total: Floats) -> Risks:
        graph = self.captured.graph
        noise = np.zeros(len(graph.ops))
        for position, op in enumerate(graph.ops):
            if self._selects(position):  # it hands on values of what it reads: rounding its result rounds those
                total[list(op.outputs)] = max((float(total[tensor]) for tensor in op.inputs), default=0.0)
            else:
                noise[position] = float(total[list(op.outputs)].sum())
        return replace(Risks.from_sensitivities(graph, self.captured.fmt, total), op_values=noise)

    def _rounded(self, plan: Plan) -> set[str]:
        """Tensors that a plan rounds, by path: what lowered ops read, and write other than by selecting."""
        graph = self.captured.graph
        tensors: set[int] = set()
        for position in np.flatnonzero(plan.labels).tolist():
            op = graph.ops[position]
            tensors.update(op.inputs)
            if not self._selects(position):
                tensors.update(op.outputs)
        handed_on = {tensor for i, op in enumerate(graph.ops) if self._selects(i) for tensor in op.outputs}
        exact = {value.path for value in self.captured.tree.values() if self._is_exact(value)}
        return {graph.tensors[i].name for i in tensors - handed_on} - exact

    def _is_exact(self, value: Value) -> bool:
        """Whether it is a constant that rounding does not change."""
        if not (value.constant and value.floating) or math.prod(dim or 0 for dim in value.shape or ()) > _SMALL:
            return False
        array = value_array(value, self.evaluator.weights)
        return array is not None and np.array_equal(narrow(array, self.captured.fmt).astype(np.float32), array)

    def _selects(self, position: int) -> bool:
        op = self.captured.graph.ops[position]
        if op.id not in self.captured.nodes:
            return True
        entry = load_catalogue().entries.get(op.name)
        return entry is not None and entry.selects and entry.op_class not in _MAKES_VALUES

    # ---- without a twin ----

    def _by_groups(self, plan: Plan) -> tuple[Risks, str]:
        graph, labels = self.captured.graph, plan.labels
        lowered = [int(i) for i in np.flatnonzero(labels)]
        makes = [i for i in lowered if not self._selects(i)] or lowered

        def evaluate(ops: frozenset[int]) -> float:
            chosen = {op.id: i in ops for i, op in enumerate(graph.ops)}
            return min(self.evaluator.try_plan(self.captured, chosen).noise, _HUGE)

        size = max(1, math.ceil(len(makes) / _GROUPS))
        groups = [makes[start : start + size] for start in range(0, len(makes), size)]
        report = measure_groups(evaluate, groups, max(_RUNS, len(groups) + 1))
        total = np.zeros(len(graph.tensors))
        for op, amount in report:
            total[list(graph.ops[op].outputs)] = amount / max(1, len(graph.ops[op].outputs))
        return self._risks(total), f"measured the noise of {len(makes)} ops in {report.runs} trials"
