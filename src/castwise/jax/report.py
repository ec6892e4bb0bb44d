"""``report``: what a region does to a function, operation by operation, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from castwise.policy import Policy

from ._dtypes import DType, format_name
from ._rewrite import Rewriter
from ._rules import resolve, rules_for
from ._values import Record
from .autocast import _Region, region_call

__all__ = ["OpReport", "Report", "report"]


@dataclass(frozen=True, slots=True)
class OpReport:
    """One operation.

    Attributes:
        path: where its equation is: positions from the outermost jaxpr inwards, such as ``3/0``.
        layer: dotted path of the named scopes it was written in.
        op: its name in the catalogue, or the primitive's.
        primitive: JAX's name.
        shapes: of its inputs.
        inputs: formats of its floating inputs as it reads them, after casts.
        outputs: formats of its floating results.
        casts: how many casts were made for it; one that serves several operations counts where it was made.
        reason: the rule, class or hazard that decided.
    """

    path: str
    layer: str
    op: str
    primitive: str
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    casts: int
    reason: str


@dataclass(frozen=True)
class Report:
    """Every operation on floating-point numbers, in order; what ``print`` shows is a summary and the table."""

    policy: Policy | None
    ops: tuple[OpReport, ...]

    @property
    def casts(self) -> int:
        """Casts between formats that the region adds inside, those of inner jaxprs counted once."""
        return sum(op.casts for op in self.ops)

    @property
    def by_format(self) -> dict[str, int]:
        """How many operations compute in each format."""
        return dict(Counter(_widest_name(op.inputs) for op in self.ops if op.inputs))

    @property
    def wide_products(self) -> tuple[OpReport, ...]:
        """Products that stayed in fp32 or wider, to see at a glance what a policy missed and why."""
        products = ("dot_general", "conv_general_dilated", "ragged_dot_general")
        return tuple(op for op in self.ops if op.primitive in products and not {"bf16", "fp16"} & set(op.inputs))

    def explain(self, word: str) -> str:
        """The lines about operations whose name, primitive, layer or path is or contains ``word``."""
        found = [op for op in self.ops if word in (op.op, op.primitive, op.path) or (word and word in op.layer)]
        return "\n".join(map(_line, found)) or f"No operation here is called {word!r}, or is in a layer of that name."

    def __str__(self) -> str:
        formats = ", ".join(f"{count} in {name}" for name, count in sorted(self.by_format.items()))
        head = f"{len(self.ops)} operations: {formats or 'none on floating-point numbers'}; {self.casts} casts"
        wide = len(self.wide_products)
        return "\n".join([f"{head}; {wide} products stay wide", *map(_line, self.ops)])


def report(fn: Callable[..., Any], *args: Any, policy: Any = None, plan: Any = None, **kwargs: Any) -> Report:
    """What ``autocast`` decides for a call, and why. Traces the function; runs nothing.

    Args:
        fn: a function, or what ``autocast`` made of one; its policy is the default then.
        args: of the call; ``jax.ShapeDtypeStruct`` will do for arrays.
        policy: as for ``autocast``; default ``"auto"``.
        plan: as for ``autocast``.
        kwargs: of the call.
    """
    region = getattr(fn, "_castwise_region", None)
    if policy is not None or plan is not None or region is None:
        inner = region.fn if region is not None else fn
        region = _Region(inner, "auto" if policy is None else policy, plan)
    records: list[Record] = []
    arrays, traceable = region.prepared(args, kwargs)
    outer = traceable.traced(arrays)[0].jaxpr
    call = region_call(outer)
    jaxpr = outer if call is None else call.params["jaxpr"].jaxpr
    if region.plan is not None:
        region.plan.check_function(jaxpr)
        region.plan.rewriter(records).whole(jaxpr)
        return Report(None, tuple(_op_report(record) for record in records if record.given or record.result))
    _recording(region.policy, records).whole(jaxpr)
    resolved = resolve(region.policy)
    return Report(resolved, tuple(_op_report(record) for record in records if record.given or record.result))


def _recording(policy: Policy, records: list[Record]) -> Rewriter:
    rules = rules_for(resolve(policy))
    return Rewriter(rules, layered=rules.layered, records=records)


def _op_report(record: Record) -> OpReport:
    return OpReport(
        record.path,
        record.layer,
        record.choice.op,
        record.primitive,
        record.shapes,
        _names(record.computed),
        _names(record.result),
        record.casts,
        record.choice.reason + (", with a wide result" if record.choice.wide_result else ""),
    )


def _names(dtypes: tuple[DType, ...]) -> tuple[str, ...]:
    return tuple(format_name(dtype) for dtype in dtypes)


def _widest_name(names: tuple[str, ...]) -> str:
    return max(names, key=("fp16", "bf16", "fp32", "fp64").index)


def _line(op: OpReport) -> str:
    shapes = " ".join("×".join(map(str, shape)) or "·" for shape in op.shapes)
    formats = f"{'/'.join(dict.fromkeys(op.inputs))}→{'/'.join(dict.fromkeys(op.outputs)) or '-'}"
    casts = f" +{op.casts} cast" + "s" * (op.casts > 1) if op.casts else ""
    return f"  {op.path:<8} {op.layer or '·':<24} {op.primitive:<22} {formats:<12} {shapes:<24} {op.reason}{casts}"
