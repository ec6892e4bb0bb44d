"""A function's jaxpr as the planner's graph.

An operation is named by the path of its equation (``3/0/7``), which is also how reports and rewritings name it. Calls
are looked into, each by itself, so that two calls of one function may be planned differently. A loop's body is in the
graph once: what it computes counts for all iterations, and what it carries stays wide, as it would be rounded in each.
The branches of a conditional are all there, and what they return stays wide. What is left as it was written: functions
on shards, linear solvers, callbacks and custom kernels, whose insides are not the planner's to change.

A product is two operations. The first reads its operands and sums in the wide format inside; the second, named after
the first with ``.out``, is the result, which is rounded or not. So a product of 16-bit operands with a 32-bit result is
a plan like any other, and costs what that kernel costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from castwise._terms import wide_of
from castwise.catalogue import OpClass, OpEntry, load_catalogue
from castwise.graph import Graph, GraphBuilder, Kind

from ._dtypes import BF16, FP16, FP32, FP64, DType, float_dtype, format_name, left_alone
from ._layers import layer_path, source_line
from ._rules import contraction_length, demands

__all__ = ["CALLS", "OUT", "Captured", "capture", "castable_for", "inside"]

#: Calls that are looked into, and the parameter that holds what they call.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}
OUT = ".out"
_NO_FORMAT = frozenset({OpClass.CREATE, OpClass.QUERY, OpClass.RANDOM, OpClass.QUANTIZE})
_GENERATED = frozenset(
    {
        OpClass.ELEMENTWISE,
        OpClass.EXP_LOG,
        OpClass.REDUCTION,
        OpClass.NORM,
        OpClass.LOSS,
        OpClass.CAST,
        OpClass.COPY,
        OpClass.COMPARE,
    }
)
"""Classes whose operations XLA computes in one kernel with their neighbours."""


def castable_for(low: str) -> frozenset[DType]:
    """The dtypes that a plan with the low format ``low`` may change."""
    return frozenset({FP64, FP32}) if wide_of(low) == "fp64" else frozenset({FP32, BF16, FP16})


def inside(holder: Any) -> Jaxpr:
    """The jaxpr that a parameter holds, closed or not."""
    jaxpr: Jaxpr = holder.jaxpr if isinstance(holder, ClosedJaxpr) else holder
    return jaxpr


@dataclass(frozen=True)
class Captured:
    """A graph, and what the front end needs to come back from it."""

    graph: Graph
    closed: ClosedJaxpr
    low: str
    eqns: Mapping[str, JaxprEqn]
    """Equations by the id of the operation; of a product's two operations, of the first."""
    times: Mapping[str, int]
    """How often each operation runs in one call."""
    inputs: Mapping[int, int]
    """Position among the arguments -> tensor."""
    written: Mapping[str, int]
    """Path of an equation -> the tensor that its first result is."""
    reads: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Path of an equation -> (operand, tensor), for tensors that several operations read."""


def capture(
    closed: ClosedJaxpr,
    low: str,
    trips: Mapping[str, int] | None = None,
    training: bool = False,
    name: str = "function",
) -> Captured:
    """The graph of a jaxpr.

    Args:
        closed: the function; its results leave in the formats they were written in.
        low: the plan's low format.
        trips: how often loops run whose length is not known before they do, by path.
        training: whether the function will be differentiated.
        name: of the function.
    """
    walker = _Walker(low, trips or {}, name)
    names = {var: walker.tensor(var.aval, Kind.INPUT, requires_grad=training) for var in closed.jaxpr.invars}
    inputs = dict(enumerate(names.values()))
    names |= {var: walker.tensor(var.aval, Kind.CONSTANT) for var in closed.jaxpr.constvars}
    outs = walker.jaxpr(closed.jaxpr, names, "", "", 1)
    for number, (out, var) in enumerate(zip(outs, closed.jaxpr.outvars, strict=True)):
        if not isinstance(var, Literal) and float_dtype(var.aval) in walker.castable:
            result = walker.tensor(var.aval, Kind.OUTPUT, keeps_format=True)
            pin = "what the caller gets keeps its dtype"
            walker.build.op(
                f"result{number}", "identity", [out], [result], selects=True, promotes=True, fused=True, pin=pin
            )
    graph = walker.build.build(training=training)
    read_by_several = _read_by_several(graph)
    reads = {
        path: tuple((at, graph.tensor(name)) for at, name in operands if graph.tensor(name) in read_by_several)
        for path, operands in walker.operands.items()
    }
    return Captured(
        graph,
        closed,
        low,
        walker.eqns,
        walker.times,
        {at: graph.tensor(name) for at, name in inputs.items() if graph.tensors[graph.tensor(name)].floating},
        {path: graph.tensor(name) for path, name in walker.written.items()},
        {path: found for path, found in reads.items() if found},
    )


def _read_by_several(graph: Graph) -> set[int]:
    """Tensors with several readers, of which at least one may be LOW: only there does it matter who reads."""
    readers: dict[int, list[str]] = {}
    for op in graph.ops:
        for tensor in set(op.inputs):
            readers.setdefault(tensor, []).append(op.id)
    ids = {op.id for op in graph.ops if not op.pin}
    return {tensor for tensor, ops in readers.items() if len(ops) > 1 and not ids.isdisjoint(ops)}


class _Walker:
    """Walks a jaxpr once and builds the graph."""

    def __init__(self, low: str, trips: Mapping[str, int], name: str) -> None:
        self.build = GraphBuilder(name, framework="jax")
        self.castable, self.trips = castable_for(low), trips
        self.wide_sums = wide_of(low) == "fp32"
        self.eqns: dict[str, JaxprEqn] = {}
        self.times: dict[str, int] = {}
        self.written: dict[str, str] = {}
        self.operands: dict[str, list[tuple[int, str]]] = {}
        self._count = 0

    def tensor(self, aval: Any, kind: Kind, repeats: int = 1, **more: Any) -> str:
        """Declare a tensor for an abstract value, as large as all its repetitions together."""
        self._count += 1
        known, dtype = float_dtype(aval), getattr(aval, "dtype", None)
        name = format_name(known) if known is not None else str(dtype)
        shape = tuple(getattr(aval, "shape", ()))
        shape = (repeats, *shape) if repeats > 1 else shape
        size = getattr(dtype, "itemsize", 8)
        if known is None:
            more = {**more, "requires_grad": False}
        return self.build.tensor(f"t{self._count}", shape, kind=kind, format=name, itemsize=size, **more)

    def jaxpr(self, jaxpr: Jaxpr, names: dict[Any, str], layer: str, path: str, repeats: int) -> list[str]:
        """Add the equations of a jaxpr; ``names`` says which tensors its inputs are. Returns those of its results."""
        for index, eqn in enumerate(jaxpr.eqns):
            self.equation(eqn, names, layer_path(layer, eqn.source_info.name_stack), f"{path}{index}", repeats)
        return [self.read(atom, names) for atom in jaxpr.outvars]

    def read(self, atom: Any, names: dict[Any, str]) -> str:
        """The tensor of an atom. A literal, or a constant of an inner jaxpr, is a constant of the graph."""
        if isinstance(atom, Literal):
            return self.tensor(atom.aval, Kind.CONSTANT)
        if atom not in names:
            names[atom] = self.tensor(atom.aval, Kind.CONSTANT)
        return names[atom]

    def equation(self, eqn: JaxprEqn, names: dict[Any, str], layer: str, path: str, repeats: int) -> None:
        """Add one equation, or what it holds."""
        primitive = eqn.primitive.name
        if primitive in CALLS:
            inner = inside(eqn.params[CALLS[primitive]])
            outs = self.jaxpr(inner, self.bound(inner.invars, eqn.invars, names), layer, f"{path}/", repeats)
            names.update(zip(eqn.outvars, outs, strict=True))
        elif primitive == "scan":
            self.scan(eqn, names, layer, path, repeats)
        elif primitive == "while":
            self.while_loop(eqn, names, layer, path, repeats)
        elif primitive == "cond":
            self.branches(eqn, names, layer, path, repeats)
        else:
            self.plain(eqn, names, layer, path, repeats)

    def bound(self, inner: Sequence[Any], outer: Sequence[Any], names: dict[Any, str]) -> dict[Any, str]:
        """Which tensors the inputs of an inner jaxpr are."""
        return {var: self.read(atom, names) for var, atom in zip(inner, outer, strict=True)}

    def plain(self, eqn: JaxprEqn, names: dict[Any, str], layer: str, path: str, repeats: int) -> None:
        """Add an equation that holds no jaxpr, unless it has no format to choose."""
        entry = load_catalogue().lookup("jax", eqn.primitive.name)
        floats = [atom for atom in eqn.invars if float_dtype(atom.aval) in self.castable]
        if _views(entry, eqn):
            first = eqn.invars[0]
            name = self.read(first, names)
            # One that shows another dtype, or several results, is still the same numbers.
            names.update((var, name) for var in eqn.outvars)
        elif _passes_on(eqn):
            names.update((var, self.read(atom, names)) for atom, var in zip(eqn.invars, eqn.outvars, strict=True))
        elif not floats or (entry is not None and entry.op_class in _NO_FORMAT):
            self.without_format(eqn, entry, names, layer, path, repeats)
        else:
            self.operation(eqn, entry, names, layer, path, repeats)

    def without_format(
        self, eqn: JaxprEqn, entry: OpEntry | None, names: dict[Any, str], layer: str, path: str, repeats: int
    ) -> None:
        """Add an operation that has no format to choose: it is there for what it reads, such as an index."""
        reads = [self.read(atom, names) for atom in eqn.invars if not isinstance(atom, Literal)]
        writes = [self.tensor(var.aval, Kind.ACTIVATION, repeats) for var in eqn.outvars]
        names.update(zip(eqn.outvars, writes, strict=True))
        name = entry.name if entry is not None else eqn.primitive.name
        if writes:
            pin = "it has no floating-point operand"
            self.build.op(path, name, reads, writes, layer=layer, fused=True, promotes=True, pin=pin)

    def operation(
        self, eqn: JaxprEqn, entry: OpEntry | None, names: dict[Any, str], layer: str, path: str, repeats: int
    ) -> None:
        """Add an operation of the graph, or a product's two."""
        variables = [(at, atom) for at, atom in enumerate(eqn.invars) if not isinstance(atom, Literal)]
        reads = [self.read(atom, names) for _, atom in variables]
        self.operands[path] = [
            (at, name)
            for (at, atom), name in zip(variables, reads, strict=True)
            if float_dtype(atom.aval) in self.castable
        ]
        shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in eqn.invars]
        terms = contraction_length(eqn.primitive.name, eqn.params, shapes)
        size = sum(math.prod(getattr(var.aval, "shape", ())) for var in eqn.outvars)
        pin = _pinned(entry, eqn, terms, self.castable)
        split = "preferred_element_type" in eqn.params and not pin and self.wide_sums
        writes = [self.tensor(var.aval, Kind.ACTIVATION, repeats, requires_grad=True) for var in eqn.outvars]
        self.build.op(
            path,
            entry.name if entry is not None else eqn.primitive.name,
            reads,
            writes,
            layer=layer,
            source=source_line(eqn),
            flops=float(repeats * size * (2 * terms if terms else 1)),
            selects=split or (entry is not None and entry.selects),
            promotes=False,
            accumulates=0 if split else self.accumulated(entry, eqn, terms),
            fused=entry is not None and entry.op_class in _GENERATED,
            pin=pin,
        )
        self.eqns[path], self.times[path] = eqn, repeats
        if split:
            result = self.tensor(eqn.outvars[0].aval, Kind.ACTIVATION, repeats, requires_grad=True)
            self.build.op(
                path + OUT,
                "identity",
                writes,
                [result],
                layer=layer,
                source=source_line(eqn),
                selects=False,
                fused=False,
            )
            writes = [result]
            self.times[path + OUT] = repeats
        names.update(zip(eqn.outvars, writes, strict=True))
        if len(writes) == 1 and float_dtype(eqn.outvars[0].aval) in self.castable:
            self.written[path] = writes[0]

    def accumulated(self, entry: OpEntry | None, eqn: JaxprEqn, terms: int | None) -> int:
        """How many terms an operation sums in its own format: 16-bit kernels sum in fp32, fp32 kernels in fp32."""
        if entry is None or (entry.accumulates_wide and self.wide_sums):
            return 0
        if terms is not None:
            return terms
        if entry.op_class is OpClass.LINALG:
            return max((int(size) for size in getattr(eqn.invars[0].aval, "shape", ())[-1:]), default=1)
        if entry.op_class is not OpClass.REDUCTION:
            return 0
        read = math.prod(getattr(eqn.invars[0].aval, "shape", ()))
        return max(1, read // max(1, math.prod(getattr(eqn.outvars[0].aval, "shape", ()))))

    # ---- loops and branches ----

    def scan(self, eqn: JaxprEqn, names: dict[Any, str], layer: str, path: str, repeats: int) -> None:
        """Add a scan: its body once, for all iterations."""
        params = eqn.params
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        inner, runs = inside(params["jaxpr"]), repeats * max(1, params["length"])
        inputs = self.bound(inner.invars, eqn.invars, names)
        inputs |= self.carried(f"{path}/in", inner.invars[first:last], eqn.invars[first:last], names, layer, runs)
        outs = self.jaxpr(inner, inputs, layer, f"{path}/", runs)
        count = params["num_carry"]
        self.passed_out(f"{path}/out", outs[:count], eqn.outvars[:count], names, layer, runs)
        names.update(zip(eqn.outvars[count:], outs[count:], strict=True))

    def while_loop(self, eqn: JaxprEqn, names: dict[Any, str], layer: str, path: str, repeats: int) -> None:
        """Add a while loop: its body for as many iterations as were seen. Its test stays as it was written."""
        params = eqn.params
        skip, consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        inner, runs = inside(params["body_jaxpr"]), repeats * max(1, self.trips.get(path, 1))
        own = params["body_nconsts"]
        inputs = self.bound(inner.invars[:own], eqn.invars[skip:consts], names)
        inputs |= self.carried(f"{path}/in", inner.invars[own:], eqn.invars[consts:], names, layer, runs)
        outs = self.jaxpr(inner, inputs, layer, f"{path}/", runs)
        self.passed_out(f"{path}/out", outs, eqn.outvars, names, layer, runs)

    def branches(self, eqn: JaxprEqn, names: dict[Any, str], layer: str, path: str, repeats: int) -> None:
        """Add all branches, each as if it were taken."""
        results = []
        for number, branch in enumerate(eqn.params["branches"]):
            inner = inside(branch)
            inputs = self.bound(inner.invars, eqn.invars[1:], names)
            results.append(self.jaxpr(inner, inputs, layer, f"{path}/{number}/", repeats))
        for at, (var, *outs) in enumerate(zip(eqn.outvars, *results, strict=True)):
            reads = [self.read(eqn.invars[0], names), *outs]
            self.passed_out(f"{path}/out{at}", reads, [var], names, layer, repeats, "branches return it")

    def carried(
        self, path: str, inner: Sequence[Any], outer: Sequence[Any], names: dict[Any, str], layer: str, runs: int
    ) -> dict[Any, str]:
        """What a loop carries, as its body reads it."""
        found: dict[Any, str] = {}
        self.passed_out(path, [self.read(atom, names) for atom in outer], inner, found, layer, runs)
        return found

    def passed_out(
        self,
        path: str,
        reads: Sequence[str],
        variables: Sequence[Any],
        names: dict[Any, str],
        layer: str,
        repeats: int,
        why: str = "a loop carries it, and would round it in every iteration",
    ) -> None:
        """Add a step that stays wide: into a loop's body, out of it, or out of a branch."""
        for var in variables:
            names[var] = self.tensor(var.aval, Kind.ACTIVATION, repeats, requires_grad=True)
        writes = [names[var] for var in variables]
        if writes:
            # A cast of what it passes on is the loop's, not free: it is no fused operation.
            self.build.op(path, "identity", list(reads), writes, layer=layer, selects=True, pin=why)
            self.times[path] = repeats


def _views(entry: OpEntry | None, eqn: JaxprEqn) -> bool:
    if eqn.primitive.name == "convert_element_type":
        before, after = float_dtype(eqn.invars[0].aval), float_dtype(eqn.outvars[0].aval)
        return before is not None and before == after
    return entry is not None and entry.view


def _passes_on(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "optimization_barrier"


def _pinned(entry: OpEntry | None, eqn: JaxprEqn, terms: int | None, castable: frozenset[DType]) -> str:
    """Why an equation keeps the dtypes it was written with; "" where it need not."""
    if entry is None:
        return f"{eqn.primitive.name} is not in the op catalogue"
    if eqn.primitive.name == "convert_element_type":
        return ""
    if entry.op_class is OpClass.CAST or entry.name in ("reference", "foreign_call", "scaled_dot"):
        return "its dtypes are part of what was written"
    if any(isinstance(value, Jaxpr | ClosedJaxpr) and _is_program(value) for value in _flat(eqn.params.values())):
        return "it holds a program that plans do not look into"
    if "preferred_element_type" in eqn.params and (why := demands(eqn.params) or left_alone(eqn, castable)):
        return why
    if terms == 1:
        return "it sums a single term: nothing to gain, digits to lose"
    return ""


def _is_program(holder: Any) -> bool:
    """Whether a jaxpr is more than a scatter's or reduction's way to combine two numbers."""
    return any(getattr(var.aval, "shape", ()) for var in inside(holder).invars)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, tuple | list) else (value,)
