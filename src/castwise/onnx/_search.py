"""Finding a plan that keeps the tolerance: ranges first, one trial, and measured noise only where the trial fails.

Most models keep a tolerance with everything lowered that the ranges allow, and the first trial shows it. Where results
are not finite, the node at fault is found and kept in fp32. Where they are too far off, groups of ops are lowered alone
and split where the noise is (far fewer runs than ops), the planner weighs the noise against wide nodes, and each trial
that still misses the tolerance tightens the noise allowed to the next, until it is kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from castwise._pins import Cause, Pin
from castwise.catalogue import OpClass, load_catalogue
from castwise.cost import Costs
from castwise.errors import PlanError
from castwise.onnx._capture import Captured
from castwise.onnx._evaluate import Evaluator, Outcome, records
from castwise.onnx._fused import REASON, patterns, torn
from castwise.onnx._noise import Noise
from castwise.plan import Plan, solve
from castwise.policy import Policy
from castwise.risk import Risks

__all__ = ["Search", "Step", "fewest_wide"]

log = logging.getLogger("castwise.onnx")

# What one wide op and one cast count for where as few wide ops as possible are wanted, and then as few casts: a wide op
# that could only become narrow between two casts of its own stays, a product never does.
_WIDE_PRODUCT, _WIDE_OP, _WIDE_MOVE, _CAST = 100.0, 1.0, 1e-3, 0.6

_MOST_FAULTS = 24
_MOST_TRIALS = 8
_SAFETY = 0.7
"""The share of the tolerated noise that a new plan aims for: predicted noise adds up only on average."""
_CLOSE = 1.6
"""Noise that did not pass and noise that did within this factor: a plan between them is hardly worth a trial."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that the search did, for the report."""

    what: str
    wide: int
    """Ops in fp32 at that point."""
    error: float | None = None


def fewest_wide(captured: Captured, unavailable: Mapping[int, str] | None = None) -> Costs:
    """Costs that make the best plan the one with the fewest wide ops, and then the fewest casts. No seconds."""
    entries = load_catalogue().entries
    graph = captured.graph
    products = set(captured.products())
    wide = np.full(len(graph.ops), _WIDE_OP)
    for position, op in enumerate(graph.ops):
        entry = entries.get(op.name)
        if op.id in products:
            wide[position] = _WIDE_PRODUCT
        elif op.id not in captured.nodes or (entry is not None and entry.op_class in (OpClass.VIEW, OpClass.COPY)):
            wide[position] = _WIDE_MOVE
    stored = graph.index.stored
    cast = np.where(stored, 0.0, _CAST)
    low = np.zeros(len(graph.ops))
    lacking = dict(unavailable or {})
    low[list(lacking)] = np.inf
    return Costs(captured.fmt, wide, low, cast, np.where(stored, 0.0, cast), np.asarray(stored), "", lacking)


@dataclass
class Search:
    """The search for one plan. ``evaluator`` is None where the model cannot be run."""

    captured: Captured
    costs: Costs
    policy: Policy
    evaluator: Evaluator | None
    tolerance: float
    calibrated: bool
    usual: dict[str, float] = field(default_factory=dict)
    """The largest |value| of each tensor in fp32, by path."""
    steps: list[Step] = field(default_factory=list)
    pins: dict[str, str] = field(default_factory=dict)
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        self.fused = patterns(self.captured.tree)

    def run(self) -> Plan:
        """The plan with the fewest wide ops that keeps the tolerance; with everything in fp32, if need be."""
        risks = self._risks()
        plan = self._solve(risks)
        if self.evaluator is None or not len(self.captured.graph):
            return plan
        plan = self._finite(plan)
        if self.outcome is not None and self.outcome.error > self.tolerance:
            plan = self._within_tolerance(plan)
        return plan

    def labels(self, plan: Plan) -> dict[str, bool]:
        return {op.id: bool(label) for op, label in zip(self.captured.graph.ops, plan.labels, strict=True)}

    def _risks(self) -> Risks:
        graph = self.captured.graph
        seen = records(self.usual, self.captured.fmt)
        ranges = {i: seen[tensor.name] for i, tensor in enumerate(graph.tensors) if tensor.name in seen}
        return replace(Risks.unmeasured(graph, self.captured.fmt), measured=self.calibrated, ranges=ranges)

    def _solve(self, risks: Risks, budget: float | None = None) -> Plan:
        lam = 0.0 if budget is None else None
        plan = solve(self.captured.graph, self.costs, risks, self.policy, lam=lam, budget=budget)
        missing = {op: reason for op, reason in self.pins.items() if op in self.captured.graph.positions}
        plan = plan.raised(missing) if missing else plan
        asked = {plan.problem.graph.ops[i].id for i, pin in plan.problem.pins.items() if pin.low}
        while apart := torn(self.fused, self.labels(plan)) - asked:
            plan = plan.raised(dict.fromkeys(apart, REASON))
        return plan

    def _note(self, what: str, plan: Plan) -> None:
        wide = int((~plan.labels).sum())
        error = self.outcome.error if self.outcome is not None else None
        self.steps.append(Step(what, wide, error))
        log.info("%s: %d wide ops, error %s", what, wide, error)

    def _finite(self, plan: Plan) -> Plan:
        """Try the plan; while results are not finite where fp32's are, keep the nodes at fault in fp32."""
        assert self.evaluator is not None
        for _ in range(_MOST_FAULTS):
            self.outcome = self.evaluator.try_plan(self.captured, self.labels(plan))
            self._note("tried", plan)
            if math.isfinite(self.outcome.error):
                return plan
            guilty = self.evaluator.first_not_finite(self.captured, self.labels(plan), self.usual)
            asked = {plan.problem.graph.ops[i].id for i, pin in plan.problem.pins.items() if pin.low}
            guilty = [op for op in self._ops_of(guilty) if op not in self.pins | dict.fromkeys(asked)]
            guilty = [op for op in guilty if self.labels(plan).get(op)]
            if not guilty:
                break
            why = f"its result is not finite in {self.captured.fmt} although all it reads is"
            self.pins.update(dict.fromkeys(guilty, why))
            plan = plan.raised(dict.fromkeys(guilty, why))
        return plan

    def _ops_of(self, nodes: list[str]) -> list[str]:
        """The planner's ops behind nodes of a written model: a cast that overflows is its readers' fault."""
        ops = []
        for node in nodes:
            if node in self.captured.graph.positions:
                ops.append(node)
            elif node.endswith("_cast"):
                path = node.removesuffix("_cast").removesuffix(f"_{self.captured.fmt}")
                tensors = {i for i, t in enumerate(self.captured.graph.tensors) if t.name.rpartition("/")[2] == path}
                ops += [op.id for op in self.captured.graph.ops if tensors & set(op.inputs)]
        return ops

    # ---- too far off ----

    def _within_tolerance(self, plan: Plan) -> Plan:
        """The cheapest plan found that keeps the tolerance: by less noise until one does, then by as much as goes."""
        assert self.evaluator is not None and self.outcome is not None
        noise = Noise(self.evaluator, self.captured)
        share = self._missed(self.outcome.error) * _SAFETY
        risks = self._measured(noise, plan, share)
        kept: tuple[float, Plan, Outcome] | None = None
        failed = self._predicted(risks)
        budget = failed * share
        for _ in range(_MOST_TRIALS):
            try:
                tried = self._solve(risks, budget)
            except PlanError as error:  # pinned low by the policy
                log.warning("the tolerance cannot be planned for: %s", error)
                break
            self.outcome = self.evaluator.try_plan(self.captured, self.labels(tried))
            self._note(f"allowed a predicted noise of {budget:.2g}", tried)
            if self.outcome.error <= self.tolerance:
                kept = (budget, tried, self.outcome)
            else:
                failed = min(budget, tried.score.noise)
            if kept is not None:
                if failed < kept[0] * _CLOSE:
                    break
                budget = math.sqrt(failed * kept[0])
                continue
            share = self._missed(self.outcome.error) * _SAFETY
            if noise.can_refine:  # what is still rounded is louder than it seemed
                risks = self._measured(noise, tried, share)
                failed = replace(tried.problem, risks=risks).score(tried.labels).noise
            budget = failed * share
            if not budget:
                break
        if kept is None:
            return self._all_wide(plan)
        self.outcome = kept[2]
        return kept[1]

    def _measured(self, noise: Noise, plan: Plan, allowed: float) -> Risks:
        risks, what = noise.measure(plan, allowed)
        self.steps.append(Step(what, int((~plan.labels).sum())))
        return replace(risks, ranges=self._risks().ranges, measured=self.calibrated)

    def _predicted(self, risks: Risks) -> float:
        """The noise of a plan that was solved without knowing any, to first order."""
        return max(self._solve(risks).score.noise, 1e-30)

    def _missed(self, error: float) -> float:
        """By which factor the noise must fall so that the error keeps the tolerance."""
        return (self.tolerance / max(error, 1e-30)) ** 2 if math.isfinite(error) else 1e-6

    def _all_wide(self, plan: Plan) -> Plan:
        """Raise everything that may be raised."""
        assert self.evaluator is not None
        why = f"no plan with it in {self.captured.fmt} kept the tolerance of {self.tolerance:g}"
        pins = {i: Pin(False, Cause.RANGE, why) for i in np.flatnonzero(plan.labels).tolist()}
        pins = {i: pin for i, pin in pins.items() if not (i in plan.problem.pins and plan.problem.pins[i].low)}
        ids = {self.captured.graph.ops[i].id: pin.reason for i, pin in pins.items()}
        plan = plan.raised(ids) if ids else plan
        self.outcome = self.evaluator.try_plan(self.captured, self.labels(plan))
        self._note("raised everything", plan)
        return plan
