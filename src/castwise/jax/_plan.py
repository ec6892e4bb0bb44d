"""A plan of a JAX function: the neutral plan, which function it belongs to, and the rewriting that follows it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Self

from jax.extend.core import ClosedJaxpr, Jaxpr

from castwise._function_plan import FunctionPlan
from castwise.catalogue import load_catalogue
from castwise.errors import PlanError
from castwise.formats import parse_format
from castwise.graph import Kind, Op
from castwise.policy import Policy, Rule

from ._dtypes import DType, dtype_of
from ._rewrite import Rewriter
from ._rules import Choice, rules_for
from ._values import Record
from .capture import OUT, capture, castable_for

__all__ = ["Plan", "structure_of"]

_EQUATION = re.compile(r"\d+(/\d+)*")


@dataclass(frozen=True, eq=False)
class Plan(FunctionPlan):
    """A ``castwise.plan.Plan`` of a JAX function.

    Operations are named by the path of their equation (``3/0``); what a product of that name is rounded to is decided
    by the operation ``3/0.out``.
    """

    framework, title = "jax", "JAX"

    rounded: frozenset[str] = frozenset()
    """Products that are fastest in 16 bits with a wide result that is rounded afterwards."""

    def check_function(self, jaxpr: Jaxpr) -> None:
        """Raise PlanError unless the plan was made for a function like this one."""
        if structure_of(jaxpr) != self.structure:
            raise PlanError(
                f"This plan was made for another function: JAX traces other operations for these arguments than it did "
                f"for those of the plan. {self._difference(jaxpr)} Make one with castwise.jax.plan(fn, *args) for such "
                f"arguments."
            )

    def _difference(self, jaxpr: Jaxpr) -> str:
        """The first thing that differs between the planned function and this one."""
        planned = self.problem.graph
        found = capture(ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars)), self.fmt).graph
        was, now = ([one for one in graph.tensors if one.kind is Kind.INPUT] for graph in (planned, found))
        if len(was) != len(now):
            return f"{planned.name!r} was planned for {len(was)} arrays and gets {len(now)}."
        for at, (old, new) in enumerate(zip(was, now, strict=True)):
            if (old.format, len(old.shape)) != (new.format, len(new.shape)):
                return (
                    f"Its array {at} was {old.format} of {len(old.shape)} axes and is {new.format} of {len(new.shape)}."
                )
        for one, other in zip_longest(planned.ops, found.ops):
            if one is None or other is None or (one.id, one.name) != (other.id, other.name):
                return f"The first that differs was {_shown(one)} and is {_shown(other)}."
        return "What differs is a constant, or within a part that plans do not look into."

    def rewriter(self, records: list[Record] | None = None) -> Rewriter:
        """What rewrites the function as planned."""
        wide = dtype_of(parse_format(self.wide))
        return Rewriter(
            _unplanned,
            records=records,
            castable=castable_for(self.fmt),
            planned=self._choices(wide),
            wide=wide,
            rules=rules_for(Policy(format=parse_format(self.fmt).long_name)),
        )

    def _choices(self, wide: DType) -> dict[str, Choice]:
        low, entries, found = dtype_of(parse_format(self.fmt)), load_catalogue().entries, {}
        positions, causes = self.problem.graph.positions, self.causes
        for position, op in enumerate(self.problem.graph.ops):
            if not _EQUATION.fullmatch(op.id):
                continue
            entry, label, pin = entries.get(op.name), bool(self.labels[position]), self.problem.pins.get(position)
            why = f"planned: {pin.reason if pin is not None else f'decided by {causes[position].value}'}"
            stores = entry is not None and entry.stores_constant
            if op.pin and not label:
                found[op.id] = Choice(op.name, None, None, why, stores)
                continue
            result = positions.get(op.id + OUT)
            rounds = low if result is not None and self.labels[result] else None
            rule, dtype = (Rule.LOW, low) if label else (Rule.HIGH, wide)
            kernel = label and result is not None and (rounds is None or op.id in self.rounded)
            found[op.id] = Choice(op.name, rule, dtype, why, stores, wide_result=kernel, rounds=rounds)
        return found

    def timed(self, seconds: Mapping[str, float]) -> Self:
        """The plan, with times of whole calls."""
        return replace(self, seconds=dict(seconds))

    def _own(self) -> dict[str, object]:
        return {**super()._own(), "rounded": sorted(self.rounded)}

    @classmethod
    def _read(cls, own: Any) -> dict[str, Any]:
        return {**own, "rounded": frozenset(own["rounded"])}


def _shown(op: Op | None) -> str:
    return "nothing" if op is None else f"{op.name} ({op.source or op.id})"


def _unplanned(primitive: str, layer: str) -> Choice:
    """What is no operation of the plan: views follow their input, all else is as it was written."""
    entry = load_catalogue().lookup("jax", primitive)
    if primitive == "optimization_barrier":
        return Choice(primitive, Rule.WIDEST, reason="passes on what it gets")
    if entry is None or not entry.view:
        return Choice(primitive, None, reason="not part of the plan: as written")
    return Choice(entry.name, Rule.WIDEST, reason="a view follows its input", view=True)


def structure_of(jaxpr: Jaxpr) -> str:
    """A digest of a jaxpr's operations, at every depth, and of the dtypes and ranks between them; not of sizes."""
    digest = hashlib.sha256()

    def shown(atom: Any) -> str:
        aval = atom.aval
        return f"{getattr(aval, 'dtype', '')}{len(getattr(aval, 'shape', ()))}"

    def walk(inner: Jaxpr) -> None:
        digest.update(" ".join(map(shown, (*inner.constvars, *inner.invars))).encode())
        for eqn in inner.eqns:
            digest.update(f";{eqn.primitive.name} {[shown(atom) for atom in (*eqn.invars, *eqn.outvars)]}".encode())
            for held in eqn.params.values():
                for one in held if isinstance(held, tuple | list) else (held,):
                    if isinstance(one, Jaxpr | ClosedJaxpr):
                        walk(one.jaxpr if isinstance(one, ClosedJaxpr) else one)

    walk(jaxpr)
    return digest.hexdigest()
