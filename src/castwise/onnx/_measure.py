"""The largest value of every tensor, from a run that keeps none of them.

A model is extended with one reduction per tensor, in inner graphs too: a branch hands its maxima out (and zeros for
those of the other branch), a loop stacks one per iteration. A run thus needs the memory of the plain run and returns
one number per tensor.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from castwise.onnx._scopes import Node, Scope, Tree, Value

__all__ = ["Instrumented", "instrument"]

_FLOAT = onnx.TensorProto.FLOAT
_INITIALIZERS_ALONE = 4
"""The IR version from which on initializers need not be inputs."""
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Instrumented:
    """A model with extra outputs, which come after its own."""

    model: onnx.ModelProto
    paths: tuple[str, ...]
    """The tensor (by :attr:`Value.path`) that each extra output is of."""


def instrument(
    model: onnx.ModelProto, tree: Tree, wanted: Collection[Value], *, finite_only: bool = False
) -> Instrumented:
    """Extend a copy of ``model``, whose scope tree is ``tree`` and whose nodes are named as in it.

    ``finite_only`` leaves infinities and NaN out of the maxima.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.ir_version = max(int(copy.ir_version), _INITIALIZERS_ALONE)
    work = _Instrumentation(set(wanted), finite_only, set(tree.names))
    stats = work.scope(tree.top, copy.graph)
    for name, array in work.constants():
        copy.graph.initializer.append(numpy_helper.from_array(array, name))
    for name, _ in stats:
        copy.graph.output.append(helper.make_tensor_value_info(name, _FLOAT, None))
    return Instrumented(copy, tuple(path for _, path in stats))


@dataclass
class _Instrumentation:
    wanted: set[Value]
    finite_only: bool
    taken: set[str]
    count: int = 0
    stats: list[str] = field(default_factory=list)

    def constants(self) -> list[tuple[str, np.ndarray]]:
        return [
            ("castwise_flat", np.array([-1], np.int64)),
            ("castwise_zero", np.zeros(1, np.float32)),
            ("castwise_none", np.zeros((), np.float32)),
            ("castwise_largest", np.array(_LARGEST, np.float32)),
        ]

    def fresh(self) -> str:
        self.count += 1
        name = f"castwise_stat_{self.count}"
        while name in self.taken:
            self.count += 1
            name = f"castwise_stat_{self.count}"
        return name

    def scope(self, scope: Scope, graph: onnx.GraphProto) -> list[tuple[str, str]]:
        """Add the reductions of a graph and those in it. Returns (name in this graph, path of the tensor)."""
        found: list[tuple[str, str]] = []
        extra: dict[str, list[onnx.NodeProto]] = {}
        holders = {node.id: node for node in scope.nodes if node.bodies and not node.domain}
        nodes = list(graph.node)
        for proto in nodes:
            if proto.name in holders:
                found += self._body(holders[proto.name], proto, extra.setdefault(proto.name, []))
        copies = [(onnx.NodeProto.FromString(proto.SerializeToString()), extra.get(proto.name, [])) for proto in nodes]
        del graph.node[:]
        for proto, after in copies:
            graph.node.append(proto)
            graph.node.extend(after)
        for value in scope.values.values():
            if value in self.wanted and value.floating:
                added, name = self._reduction(value.name, _is_plain(value))
                graph.node.extend(added)
                found.append((name, value.path))
        return found

    def _reduction(self, source: str, plain: bool) -> tuple[list[onnx.NodeProto], str]:
        a, b, c, d, out = (self.fresh() for _ in range(5))
        nodes = [helper.make_node("Abs", [source], [a])]
        if self.finite_only:
            more = self.fresh()
            nodes += [
                helper.make_node("Less", ["castwise_largest", a], [b]),
                helper.make_node("IsNaN", [a], [more]),
                helper.make_node("Or", [b, more], [f"{b}_bad"]),
                helper.make_node("Where", [f"{b}_bad", "castwise_none", a], [f"{a}_finite"]),
            ]
            a = f"{a}_finite"
        if not plain:  # a reduction of nothing has no value: add a zero
            nodes.append(helper.make_node("Reshape", [a, "castwise_flat"], [c]))
            nodes.append(helper.make_node("Concat", [c, "castwise_zero"], [d], axis=0))
            a = d
        nodes.append(helper.make_node("ReduceMax", [a], [out], keepdims=0))
        return nodes, out

    def _body(self, node: Node, proto: onnx.NodeProto, after: list[onnx.NodeProto]) -> list[tuple[str, str]]:
        graphs = {attribute.name: attribute.g for attribute in proto.attribute if attribute.name in node.bodies}
        if node.op_type == "If":
            return self._branches(node, proto, graphs)
        if node.op_type not in ("Loop", "Scan"):
            return []
        body, graph = next(iter(node.bodies.values())), next(iter(graphs.values()))
        if node.op_type == "Scan" and len(body.graph.input) != len(node.inputs):
            return []
        stats = self.scope(body, graph)
        found = []
        for stat, path in stats:
            stacked = self.fresh()
            graph.output.append(helper.make_tensor_value_info(stat, _FLOAT, ()))
            proto.output.append(stacked)
            reduced, out = self._reduction(stacked, False)
            after.extend(reduced)
            found.append((out, path))
        for attribute in proto.attribute:
            if attribute.name in ("scan_output_axes", "scan_output_directions"):
                attribute.ints.extend([0] * len(stats))
        return found

    def _branches(self, node: Node, proto: onnx.NodeProto, graphs: dict[str, onnx.GraphProto]) -> list[tuple[str, str]]:
        stats = {name: self.scope(node.bodies[name], graph) for name, graph in graphs.items()}
        found = []
        for name, own in stats.items():
            for stat, path in own:
                out = self.fresh()
                proto.output.append(out)
                found.append((out, path))
                for other, graph in graphs.items():
                    given = stat
                    if other != name:
                        given = self.fresh()
                        graph.node.append(helper.make_node("Identity", ["castwise_none"], [given]))
                    graph.output.append(helper.make_tensor_value_info(given, _FLOAT, ()))
        return found


def _is_plain(value: Value) -> bool:
    return bool(value.shape) and all(dim is not None and dim > 0 for dim in value.shape or ())
