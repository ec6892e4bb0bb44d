"""Plans: the number format of every op of a graph, decided for all of them together.

    Problem  a graph, what ops and casts cost, what roundings do, and what the user asked for
    solve    the best plan for it, as an exact minimum cut: at a price of noise, or within a noise budget
    pareto   many plans, from the fastest to the one with the least noise
    Plan     what was decided, why (``explain``), in short (``summary``), and as a file (``save``, ``load``)

Each op computes HIGH (fp32) or LOW (a 16-bit format). A plan minimises

    seconds of ops and casts + λ · noise at the output + μ · bytes saved for backward

where a tensor is cast at most once per direction however many ops read it, and what an op keeps for its backward pass
it keeps in its own format. An op that promotes mixed inputs reads 16-bit inputs as they are, but if it saves one for
backward while it is HIGH, that counts as fp32: the exact rule cannot be written as a cut.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

import numpy as np

from castwise import _explain, _plan_io
from castwise._energy import Score, Usage, usage
from castwise._explain import Change, Explanation, Verdict
from castwise._front import Point, at_price, front, within_budget
from castwise._graph_index import Bools, Floats
from castwise._pins import HAZARD_HEADROOM, RANGE_HEADROOM, Cause, Pin, preset_labels
from castwise._plan_io import Fingerprint
from castwise._problem import Problem
from castwise._summary import Cast, Summary, casts, summarise
from castwise._terms import HIGH, Weights, wide_of
from castwise.cost import Costs
from castwise.errors import PlanError, did_you_mean
from castwise.graph import Graph
from castwise.policy import Policy
from castwise.risk import Breakdown, Risks

__all__ = [
    "HAZARD_HEADROOM",
    "RANGE_HEADROOM",
    "Cast",
    "Cause",
    "Change",
    "Explanation",
    "Favour",
    "Fingerprint",
    "FormatChoice",
    "Pin",
    "Plan",
    "Problem",
    "Score",
    "Summary",
    "Usage",
    "Verdict",
    "pareto",
    "solve",
    "solve_formats",
]

Favour = Literal["speed", "memory"]
"""What saved bytes are worth where the caller names no price: nothing, or as much in all as the fp32 step's time."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The format of every op, for one problem. Never changes; equal plans have equal ``to_dict()``."""

    problem: Problem
    labels: Bools
    """[ops] true where the op computes in the 16-bit format."""
    lam: float
    """Seconds that a unit of noise is worth; for a plan within a budget, the price at which the budget is met."""
    mu: float
    """Seconds that a byte saved for backward is worth."""
    gap: float
    """How far from the best plan this one can be, at most, in seconds of energy; within a budget, of cost."""
    budget: float | None
    """The noise that was allowed, where a budget was given rather than a price."""
    versions: Mapping[str, str]
    """Of Castwise, and of the libraries whose kernels the costs are for."""

    # ---- what was decided ----

    @property
    def fmt(self) -> str:
        """The 16-bit format, by Castwise's short name."""
        return self.problem.fmt

    @property
    def wide(self) -> str:
        """What ops compute in that are not LOW: fp32, and fp64 in a plan for fp64 and fp32."""
        return wide_of(self.fmt)

    def format_of(self, op: str) -> str:
        """The format in which the op with id ``op`` computes. Raises PlanError where there is none of that id."""
        positions = self.problem.graph.positions
        if op not in positions:
            raise PlanError(f"The plan has no op {op!r}.{did_you_mean(op, positions)} plan.formats lists all ops.")
        return self.fmt if self.labels[positions[op]] else self.wide

    @cached_property
    def formats(self) -> Mapping[str, str]:
        """The format of every op, by op id, in execution order."""
        names = np.where(self.labels, self.fmt, self.wide).tolist()
        return dict(zip(self.problem.graph.positions, names, strict=True))

    @cached_property
    def usage(self) -> Usage:
        """In which formats each tensor exists under this plan."""
        return usage(self.problem.graph, self.fmt, self.labels)

    @cached_property
    def casts(self) -> tuple[Cast, ...]:
        """Every cast that needs a kernel of its own, and every low copy that is kept between steps."""
        return casts(self)

    # ---- what it costs ----

    @cached_property
    def score(self) -> Score:
        """Predicted seconds, noise and saved bytes of a step."""
        return self.problem.score(self.labels)

    @cached_property
    def fp32(self) -> Score:
        """The same for a step in which every op computes in fp32 (``wide``)."""
        return self.problem.score(np.zeros_like(self.labels))

    @property
    def energy(self) -> float:
        """What the plan minimises, in seconds: time, and noise and bytes at their prices."""
        return self.score.energy(Weights(1.0, self.lam, self.mu))

    @property
    def relative_error(self) -> float:
        """Predicted root-mean-square error of the output, relative to the output."""
        return self.problem.risks.relative(self.score.noise)

    @property
    def breakdown(self) -> Breakdown:
        """Where the predicted noise comes from."""
        return self.problem.risks.breakdown(self.problem.graph, self.labels, self.usage.rounded)

    # ---- why ----

    @cached_property
    def changes(self) -> Floats:
        """[ops, 4] what flipping each op alone would add: its own seconds, seconds of casts, noise, saved bytes."""
        return _explain.changes(self)

    @cached_property
    def causes(self) -> list[Cause]:
        """What decided each op, in the graph's order."""
        return _explain.causes(self)

    def explain(self, subject: str) -> Explanation:
        """Which rule, cost or risk decided an op (by id) or the ops of a layer (by path or glob).

        Raises PlanError where there is no such op or layer.
        """
        return _explain.explain(self, subject)

    def summary(self) -> Summary:
        """The plan on a page: ops per format, casts, time, noise, memory; what stays fp32 and why. Prints as text."""
        return summarise(self)

    def most_decisive(self, count: int = 20) -> list[Verdict]:
        """The ops whose flipping alone would cost the most, among those that had a choice."""
        energy = self.changes @ np.array([1.0, 1.0, self.lam, self.mu])
        energy[list(self.problem.pins)] = -np.inf
        order = np.argsort(-energy, kind="stable")[:count]
        ids = [self.problem.graph.ops[position].id for position in order if np.isfinite(energy[position])]
        return [self.explain(op).verdicts[0] for op in ids]

    # ---- what to do with it ----

    def raised(self, reasons: Mapping[str, str]) -> Self:
        """The best plan, by the same price or budget, that computes the named ops in fp32; reasons by op id.

        Raises PlanError where an op is unknown, or the budget can no longer be met.
        """
        positions = self.problem.graph.positions
        for op in reasons:
            self.format_of(op)  # raises where unknown
        pins = {positions[op]: Pin(HIGH, Cause.RANGE, reason) for op, reason in reasons.items()}
        problem = self.problem.with_pins(pins)
        point = _best(problem, None if self.budget is not None else self.lam, self.mu, self.budget)
        return replace(self, problem=problem, labels=point.labels, lam=point.lam, gap=point.gap)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What the plan was made for: the model's structure, the device, the versions."""
        return Fingerprint.of(self.problem.graph, self.problem.costs, self.versions)

    def check(self, here: Fingerprint) -> list[str]:
        """What differs between where the plan was made and ``here``, in words; empty where nothing does."""
        return self.fingerprint.differences(here)

    def to_dict(self) -> dict[str, object]:
        """The plan and its whole problem as plain data for JSON."""
        return _plan_io.to_dict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, atomically. It can be loaded, explained and solved again without the model."""
        _plan_io.save(self, path)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """The plan that ``to_dict`` described. Raises PlanError where the data is no plan."""
        return cls(**_plan_io.fields(data))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan file. Raises PlanError that names the file where it is no plan."""
        return cls(**_plan_io.load(path))


def solve(
    graph: Graph,
    costs: Costs,
    risks: Risks,
    policy: Policy,
    *,
    lam: float | None = None,
    mu: float | None = None,
    budget: float | None = None,
    favour: Favour = "speed",
    versions: Mapping[str, str] | None = None,
) -> Plan:
    """The best plan for ``graph``.

    Give ``lam`` (seconds that a unit of noise is worth) or ``budget`` (the noise allowed, as the risks measure it).
    With neither, the budget is the noise that the policy's own op-by-op rules would make: as exact as the preset, and
    predicted no slower. ``mu`` is what a byte saved for backward is worth in seconds; where not given, ``favour`` says.
    ``versions`` names the libraries whose kernels the costs are for, for the fingerprint.

    At a price the plan is optimal (``gap`` certifies it). Within a budget it is optimal on graphs of up to 1,000 free
    ops, given time; on larger ones it is the best of the convex hull, and ``gap`` says how far from the optimum it can
    be at most.

    ``policy`` must be resolved. Raises PlanError where the parts do not fit together or no plan meets the budget,
    PolicyError where a rule of a strict policy cannot be followed.
    """
    problem = Problem.of(graph, costs, risks, policy)
    if lam is not None and budget is not None:
        raise PlanError("Both lam and budget are given. Give a price of noise or an amount of it, not both.")
    price = _price_of_bytes(problem, mu, favour)
    preset = None
    if lam is None and budget is None:
        preset = preset_labels(problem.graph, problem.fmt, policy, problem.pins)
        budget = problem.score(preset).noise
    return _plan(problem, _best(problem, lam, price, budget, preset), price, budget, versions)


def pareto(
    graph: Graph,
    costs: Costs,
    risks: Risks,
    policy: Policy,
    *,
    points: int = 16,
    mu: float | None = None,
    favour: Favour = "speed",
    versions: Mapping[str, str] | None = None,
) -> list[Plan]:
    """Plans on the front of speed and accuracy, from the fastest to the one with the least noise: at most ``points``.

    Each is optimal at its price of noise ``lam``: no plan is both faster and more exact. Errors as for :func:`solve`.
    """
    if points < 2:
        raise PlanError(f"A front of {points} points makes no sense. Ask for 2 or more, or call solve for one plan.")
    problem = Problem.of(graph, costs, risks, policy)
    price = _price_of_bytes(problem, mu, favour)
    return [_plan(problem, point, price, None, versions) for point in front(problem, points, price)]


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """One plan per 16-bit format, and which is the best."""

    best: Plan
    plans: Mapping[str, Plan]
    """By format name, best first."""
    rejected: Mapping[str, str]
    """Formats in which no plan meets the budget, and why."""


def solve_formats(
    graph: Graph,
    alternatives: Mapping[str, tuple[Costs, Risks]],
    policy: Policy,
    *,
    lam: float | None = None,
    mu: float | None = None,
    budget: float | None = None,
    favour: Favour = "speed",
    versions: Mapping[str, str] | None = None,
) -> FormatChoice:
    """Solve in each 16-bit format (costs and risks by format name) and compare.

    fp16 has the longer mantissa and bf16 the wider range, so neither is always better. Formats are compared at one
    price of noise, or within one budget: where neither is given, the noisiest of the presets sets the budget for all.

    Raises PlanError where no format has a plan.
    """
    problems = {}
    for name, (costs, risks) in alternatives.items():
        formatted = replace(policy, format=name)
        problems[name] = (Problem.of(graph, costs, risks, formatted), formatted)
    if not problems:
        raise PlanError("No format to plan in. Give costs and risks for bf16, fp16 or both.")
    if lam is None and budget is None:
        presets = (preset_labels(graph, problem.fmt, ruled, problem.pins) for problem, ruled in problems.values())
        noises = (problem.score(labels).noise for (problem, _), labels in zip(problems.values(), presets, strict=True))
        budget = max(noises)
    plans: dict[str, Plan] = {}
    rejected: dict[str, str] = {}
    for name, (problem, _) in problems.items():
        price = _price_of_bytes(problem, mu, favour)
        try:
            plans[name] = _plan(problem, _best(problem, lam, price, budget), price, budget, versions)
        except PlanError as error:
            rejected[name] = str(error)
    if not plans:
        raise PlanError(f"No format has a plan. {' '.join(rejected.values())}")

    def cost(plan: Plan) -> float:
        return plan.score.energy(Weights(1.0, 0.0 if budget is not None else plan.lam, plan.mu))

    ranked = dict(sorted(plans.items(), key=lambda item: cost(item[1])))
    return FormatChoice(next(iter(ranked.values())), ranked, rejected)


def _best(problem: Problem, lam: float | None, mu: float, budget: float | None, known: Bools | None = None) -> Point:
    if budget is not None:
        if not budget >= 0:
            raise PlanError(f"A budget of {budget!r} makes no sense. Give the noise that is allowed, 0 or more.")
        return within_budget(problem, budget, mu, known)
    if lam is None or not lam >= 0:
        raise PlanError(f"A price of noise of {lam!r} makes no sense. Give seconds per unit of noise, 0 or more.")
    return at_price(problem, lam, mu)


def _plan(problem: Problem, point: Point, mu: float, budget: float | None, versions: Mapping[str, str] | None) -> Plan:
    from castwise import __version__  # at the package's top, which is imported after this module

    named = {"castwise": __version__, **(versions or {})}
    return Plan(problem, point.labels, point.lam, mu, point.gap, budget, named)


def _price_of_bytes(problem: Problem, mu: float | None, favour: Favour) -> float:
    """Seconds per byte. Favouring memory, halving the saved bytes is worth half of the step's time."""
    if mu is not None:
        if not mu >= 0:
            raise PlanError(f"A price of saved bytes of {mu!r} makes no sense. Give seconds per byte, 0 or more.")
        return mu
    if favour == "speed":
        return 0.0
    if favour == "memory":
        fp32 = problem.score(np.zeros(len(problem.graph), bool))
        return fp32.seconds / fp32.saved_bytes if fp32.saved_bytes else 0.0
    raise PlanError(f"favour={favour!r} is not known. Favour 'speed' or 'memory'.")
