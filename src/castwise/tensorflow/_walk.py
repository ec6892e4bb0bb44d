"""The walk from node to node that makes the planner's graph of a function's graph. See ``capture.py``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from castwise.catalogue import AS_WRITTEN, OpClass, OpEntry
from castwise.graph import GraphBuilder, Kind

from ._control import changed_inputs, unchanged
from ._datasets import step_graph
from ._in_place import IN_PLACE, sums_of
from ._internals import BRANCHES, CALLS, LOOPS, branch_graphs, called_graph, in_order, loop_graphs
from ._lists import LATE, LEAVES, LISTS, PASSES, TensorList, is_list, places
from ._replay import READS, joined, scope_of
from ._rules import entry_of, written
from ._types import format_of
from ._work import flops, shape_of, terms

__all__ = ["CARRIED", "Walker"]

CARRIED = "a loop carries its result: rounded, it would be in every iteration"
_GENERATED = frozenset(
    {OpClass.ELEMENTWISE, OpClass.EXP_LOG, OpClass.REDUCTION, OpClass.NORM, OpClass.LOSS, OpClass.COPY, OpClass.COMPARE}
)
"""Classes whose operations XLA computes in one kernel with their neighbours."""


class Walker:
    """Walks a function graph once and builds the planner's."""

    def __init__(self, trips: Mapping[str, int] | int, name: str, training: bool, fused: bool) -> None:
        self.build = GraphBuilder(name, framework="tensorflow")
        self.trips, self.training, self.fused = trips, training, fused
        self.ops: dict[str, Any] = {}
        self.times: dict[str, int] = {}
        self.written: dict[str, str] = {}
        self.reads: dict[str, str] = {}  # the newest value of a variable, by the tensor of its handle
        self.digest = hashlib.sha256()
        self.in_place: set[str] = set()
        self.loops: list[str] = []
        self.lists: dict[str, TensorList] = {}  # by tensor
        self.every_list: list[TensorList] = []
        self.sizes: dict[str, int] = {}
        self.steps: dict[str, Any] = {}  # nodes that loop over a dataset, by path
        self._count = 0

    def tensor(self, tensor: Any, kind: Kind = Kind.ACTIVATION, repeats: int = 1, **more: Any) -> str:
        """Declare a tensor, as large as all its repetitions together."""
        self._count += 1
        shape = shape_of(tensor)
        shape = (repeats, *shape) if repeats > 1 else shape
        more.setdefault("requires_grad", self.training and tensor.dtype == tf.float32 and kind is not Kind.CONSTANT)
        size = tensor.dtype.size or 8
        self.sizes[f"t{self._count}"] = math.prod(shape)
        return self.build.tensor(
            f"t{self._count}", shape, kind=kind, format=format_of(tensor.dtype), itemsize=size, **more
        )

    def graph(self, graph: Any, names: dict[str, str], layer: str, path: str, repeats: int) -> list[str]:
        """Add the nodes of a graph; ``names`` says which tensors its inputs are. Returns those of its results."""
        for op in in_order(graph):
            self.node(op, names, joined(layer, scope_of(op.name)), path + op.name, repeats, layer)
        return [names[tensor.name] for tensor in graph.outputs]

    def node(self, op: Any, names: dict[str, str], layer: str, path: str, repeats: int, around: str) -> None:
        """Add one node, or what it holds."""
        given = [names[tensor.name] for tensor in op.inputs]
        if op.type in CALLS:
            inner = called_graph(op)
            bound = {tensor.name: name for tensor, name in zip(inner.inputs, given, strict=True)}
            # A function that was differentiated has more outputs than the call takes.
            self.bind(op, self.graph(inner, bound, layer, f"{path}:", repeats)[: len(op.outputs)], names)
        elif op.type in LOOPS:
            self.loop(op, given, names, layer, path, repeats)
        elif op.type in BRANCHES:
            self.branches(op, given, names, layer, path, repeats)
        elif op.type == "Const":
            names[op.outputs[0].name] = self.written[path] = self.tensor(op.outputs[0], Kind.CONSTANT)
        elif op.type == "ReadVariableOp":
            if given[0] not in self.reads:
                self.reads[given[0]] = self.written[path] = self.tensor(op.outputs[0], Kind.WEIGHT)
            names[op.outputs[0].name] = self.reads[given[0]]
        elif op.type in ("Identity", "IdentityN"):
            self.bind(op, given, names)
        elif op.type in LISTS and self.list_node(op, given, names, path):
            pass
        elif op.type in PASSES and given[0] in self.lists and len({self.lists.get(name) for name in given}) == 1:
            self.bind(op, given[:1], names)
        else:
            self.plain(op, given, names, layer, path, repeats)

    @staticmethod
    def bind(op: Any, found: Sequence[str], names: dict[str, str]) -> None:
        """Say which tensors a node's results are."""
        names.update((tensor.name, name) for tensor, name in zip(op.outputs, found, strict=True))

    def plain(self, op: Any, given: list[str], names: dict[str, str], layer: str, path: str, repeats: int) -> None:
        """Add a node that holds no function, unless it has no format to choose."""
        entry = entry_of(op)
        for name in given:
            if name in self.lists:
                self.lists[name].why = LEAVES
            if op.type not in READS:
                self.reads.pop(name, None)
        floats = [at for at, tensor in enumerate(op.inputs) if tensor.dtype == tf.float32]
        if step_graph(op) is not None:
            self.steps[path] = op
        why = written(op) or (IN_PLACE if path in self.in_place else "")
        if not why and entry is None:
            why = "not in the catalogue: computed as written"
        if not why and entry is not None and entry.op_class in AS_WRITTEN:
            why = "its dtypes are part of what was written"
        if entry is not None and entry.view and not why and len(floats) == 1:
            self.bind(op, [given[floats[0]]] * len(op.outputs), names)
            return
        writes = [self.tensor(tensor, repeats=repeats) for tensor in op.outputs]
        self.bind(op, writes, names)
        self.ops[path], self.times[path] = op, repeats
        if not writes and not floats:
            return
        self.digest.update(f"{op.type}{[f'{t.dtype.name}{t.shape.rank}' for t in op.outputs]};".encode())
        summed = terms(op)
        self.build.op(
            path,
            entry.name if entry is not None else op.type,
            given,
            writes,
            layer=layer,
            flops=repeats * flops(op),
            selects=entry is not None and entry.selects,
            promotes=not floats,
            accumulates=self.accumulated(entry, op, summed),
            fused=self.fused and entry is not None and entry.op_class in _GENERATED,
            pin=why,
        )
        if len(writes) >= 1 and op.outputs[0].dtype == tf.float32:
            self.written[path] = writes[0]

    def list_node(self, op: Any, given: list[str], names: dict[str, str], path: str) -> bool:
        """Add a node that makes, writes or reads a list of float32; False where it is none of those."""
        at = next((at for at, tensor in enumerate(op.inputs) if is_list(tensor)), None)
        if at is None:
            if op.get_attr("element_dtype") != tf.float32:
                return False
            found = TensorList(path)
            self.every_list.append(found)
            name = self.tensor(op.outputs[0], Kind.CONSTANT)  # the list itself: no operation computes it
            self.lists[name] = found
        elif given[at] in self.lists:
            name, found = given[at], self.lists[given[at]]
        else:
            return False
        found.paths.append(path)
        writes, reads = places(op)
        if writes and found.value:
            found.why = LATE
            self.step(f"{path}:late", [given[at] for at in writes], LATE)
        else:
            found.written += [given[at] for at in writes]
        if reads and not found.value:
            found.step = path
            found.value = self.step(path, found.written, "" if found.written else "nothing is written to it")
        for number, tensor in enumerate(op.outputs):
            names[tensor.name] = (
                found.value if number in reads else name if is_list(tensor) else self.tensor(tensor, Kind.CONSTANT)
            )
        return True

    def step(self, path: str, written: Sequence[str], pin: str) -> str:
        """Add the step that a list is: it rounds what is written, and costs nothing of its own."""
        self._count += 1
        size = sum(self.sizes.get(name, 1) for name in written)
        value = self.build.tensor(f"t{self._count}", (size,), requires_grad=self.training)
        self.sizes[value] = size
        self.build.op(path, "identity", written, [value], selects=True, promotes=False, fused=True, pin=pin)
        return value

    def leave(self, names: Sequence[str]) -> None:
        """Lists go where it is not seen who reads them."""
        for name in names:
            if name in self.lists:
                self.lists[name].why = LEAVES
        # In those that nothing here reads, what is written counts all the same.
        for found in self.every_list:
            if not found.step:
                found.step, found.why = f"{found.path}:unread", LEAVES
                self.step(found.step, found.written, LEAVES)

    def accumulated(self, entry: OpEntry | None, op: Any, summed: int | None) -> int:
        """How many terms a node sums in its own format."""
        if entry is None or entry.accumulates_wide:
            return 0
        if summed is not None or entry.op_class is not OpClass.REDUCTION or not op.outputs:
            return summed or 0
        read, wrote = (float(flops_of) for flops_of in (_elements(op.inputs[0]), _elements(op.outputs[0])))
        return max(1, int(read // max(1.0, wrote)))

    def passed(self, path: str, found: list[str], tensor: Any, pin: str, repeats: int = 1, **more: Any) -> str:
        """Add a step that only passes a tensor on, in the dtype it was written with."""
        kept = {"keeps_format": True} if more.get("kind") is Kind.OUTPUT else {}
        result = self.written[path] = self.tensor(tensor, more.get("kind", Kind.ACTIVATION), repeats, **kept)
        self.build.op(path, "identity", found, [result], selects=True, promotes=False, fused=True, pin=pin)
        return result

    def loop(self, op: Any, given: list[str], names: dict[str, str], layer: str, path: str, repeats: int) -> None:
        """Add a loop: its body once, for all iterations, then its condition."""
        cond, body = loop_graphs(op)
        self.loops.append(path)
        runs = repeats * self.trips if isinstance(self.trips, int) else max(1, self.trips.get(path, repeats))
        same = unchanged(body)
        changes = changed_inputs(body) | changed_inputs(cond)
        for at in changes:
            self.reads.pop(given[at], None)
        starts = [
            name
            if same[at] or tensor.dtype != tf.float32
            else self.passed(f"{path}:in{at}", [name], tensor, "a loop carries it: as written", runs)
            for at, (name, tensor) in enumerate(zip(given, body.inputs, strict=True))
        ]
        if not self.fused:
            for name, found in sums_of(body).items():
                self.in_place.update(f"{path}:body:{one}" for one in (name, *(node.name for node in found.slices)))
        outs = self.graph(
            body, dict(zip([t.name for t in body.inputs], starts, strict=True)), layer, f"{path}:body:", runs
        )
        self.graph(cond, dict(zip([t.name for t in cond.inputs], starts, strict=True)), layer, f"{path}:cond:", runs)
        for at in changes:
            self.reads.pop(given[at], None)
        ends = [
            given[at]
            if same[at]
            else out
            if tensor.dtype != tf.float32
            else self.passed(f"{path}:out{at}", [out], tensor, CARRIED, runs)
            for at, (out, tensor) in enumerate(zip(outs, op.outputs, strict=True))
        ]
        for start, end in zip(given, ends, strict=True):
            self.agree([start, end])
        self.bind(op, ends, names)

    def agree(self, names: Sequence[str]) -> None:
        """Lists that take each other's place keep their dtypes, unless they are one."""
        found = {self.lists.get(name) for name in names}
        for one in found if len(found) > 1 else ():
            if one is not None:
                one.why = LEAVES

    def branches(self, op: Any, given: list[str], names: dict[str, str], layer: str, path: str, repeats: int) -> None:
        """Add all branches of a conditional."""
        every = []
        graphs = branch_graphs(op)
        changes = set().union(*map(changed_inputs, graphs))
        for number, graph in enumerate(graphs):
            bound = dict(zip([t.name for t in graph.inputs], given[1:], strict=True))
            every.append(self.graph(graph, bound, layer, f"{path}:{number}:", repeats))
        for at in changes:
            self.reads.pop(given[at + 1], None)
        for at, tensor in enumerate(op.outputs):
            found = [outs[at] for outs in every]
            self.agree(found)
            names[tensor.name] = (
                self.passed(f"{path}:out{at}", found, tensor, "the branches of a conditional agree in it", repeats)
                if tensor.dtype == tf.float32
                else found[0]
            )


def _elements(tensor: Any) -> int:
    size = 1
    for one in shape_of(tensor):
        size *= one
    return size
