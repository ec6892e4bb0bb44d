"""A model as the planner sees it, and which of the planner's ops decides the format of what.

Every node with operands that can change format is one op. How values enter and leave bodies of ``If``, ``Loop`` and
``Scan`` is written as small ops of their own: a *join* gives the outputs of two branches (or of all iterations) one
format, a *slice* gives the body of a Scan its part of a sequence. State that a loop carries from one iteration to the
next stays in the type it has: rounding it would compound.

What is no op: nodes that keep their types (quantization, sequences, custom domains, what the model computes in 16 bits
already). The tensors they write enter the graph like inputs; what they read in fp32 is marked by an op that is pinned.
Views are ops here, unlike elsewhere: an ONNX view is a node that has a type, and casting before or after a Split is not
the same number of casts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from castwise.catalogue import PRODUCTS, OpClass, load_catalogue
from castwise.graph import Graph, GraphBuilder, Kind
from castwise.onnx._scopes import Node, Scope, Tree, Value
from castwise.onnx._slots import ELEMENT, Slots, casts_to, hands_on, slots_of

__all__ = ["Captured", "capture"]

_CARRIED = "what enters or leaves a graph keeps its type where a loop carries it, or where ONNX asks for that"
_PASSES_ON = "identity"
"""The catalogue's name for an op that hands on what it gets: joins, slices, and numbers made from integers."""


@dataclass(frozen=True)
class Captured:
    """A model, its planner graph, and the links between the two."""

    tree: Tree
    fmt: str
    keep_io: bool
    graph: Graph
    slots: Mapping[str, Slots]
    """By node id."""
    writer: Mapping[Value, str]
    """Op that decides in which format a value is produced; others are produced in the type they have."""
    reader: Mapping[tuple[str, int], str]
    """Op that decides in which format a node (by id) reads its n-th input; others are read in fp32."""
    sink: Mapping[tuple[str, int], str]
    """The same for the n-th output of a body (by scope path)."""
    nodes: Mapping[str, Node]
    """The node of each op that is one."""
    stays: Mapping[str, str]
    """Nodes with fp32 operands that are no ops, and why they keep their types."""

    @property
    def low(self) -> int:
        return int(ELEMENT[self.fmt])

    def products(self) -> list[str]:
        """Ids of all ops that are products or convolutions."""
        entries = load_catalogue().entries
        return [op.id for op in self.graph.ops if op.name in entries and entries[op.name].op_class in PRODUCTS]


def capture(tree: Tree, fmt: str, *, keep_io: bool, pins: Mapping[str, str], name: str = "") -> Captured:
    """The planner's view of a model. ``pins`` says of node ids why they must stay fp32."""
    return _Capture(tree, fmt, keep_io, pins, name).run()


@dataclass
class _Capture:
    tree: Tree
    fmt: str
    keep_io: bool
    pins: Mapping[str, str]
    name: str
    slots: dict[str, Slots] = field(default_factory=dict)
    writer: dict[Value, str] = field(default_factory=dict)
    reader: dict[tuple[str, int], str] = field(default_factory=dict)
    sink: dict[tuple[str, int], str] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    stays: dict[str, str] = field(default_factory=dict)

    def run(self) -> Captured:
        self.build = GraphBuilder(self.name, framework="onnx")
        self.known: set[Value] = set()
        self.leaving = {value for value in self.tree.top.outputs if value is not None}
        self.readers = _count_readers(self.tree)
        casts = casts_to(self.fmt, self.tree.opsets)
        for value in self.tree.top.values.values():
            if value.origin == "input" and value.floating and not self.keep_io and casts:
                self._op(f"input:{value.name}", _PASSES_ON, [], [value])
        self._scope(self.tree.top)
        graph = self.build.build()
        return Captured(
            self.tree,
            self.fmt,
            self.keep_io,
            graph,
            self.slots,
            self.writer,
            self.reader,
            self.sink,
            self.nodes,
            self.stays,
        )

    def _scope(self, scope: Scope) -> None:
        for node in scope.nodes:
            slots = self.slots[node.id] = slots_of(node, self.fmt, self.tree.opsets)
            if node.bodies:
                self._enter(node)
                for body in node.bodies.values():
                    self._scope(body)
                self._leave(node)
                self._fixed_reads(node, slots)
            elif slots.widens and (source := node.inputs[0]) is not None and (made := node.outputs[0]) is not None:
                self._declare(source, format=self.fmt)
                if made not in self.leaving:
                    self.build.view(made.path, source.path)
                    self.known.add(made)
            elif slots.narrows and (source := node.inputs[0]) is not None:
                self._declare(source)
                self.reader[node.id, 0] = f"{node.id}#narrows"
                out = self.build.tensor(f"{node.id}#narrow", (), format=self.fmt)
                self.build.op(f"{node.id}#narrows", "convert", [source.path], [out])
            elif slots.movable:
                self._node(node, slots)
            else:
                self._fixed_reads(node, slots)

    def _node(self, node: Node, slots: Slots) -> None:
        entry = load_catalogue().lookup("onnx", node.op_type)
        name = _PASSES_ON if entry is None or slots.attribute == "to" or not slots.moving_out else entry.name
        if not slots.moving_out and entry is not None and entry.op_class is not OpClass.CAST:
            name = entry.name
        reads = [value for i in slots.moving_in if (value := node.inputs[i]) is not None]
        writes = [value for i in slots.moving_out if (value := node.outputs[i]) is not None]
        whole = [v for v in node.outputs if v is not None and v.tensor and v.elem in _WHOLE]
        self.nodes[node.id] = node
        for i in slots.moving_in:
            self.reader[node.id, i] = node.id
        self._op(
            node.id,
            name,
            reads,
            writes,
            integers=whole,
            layer=node.layer,
            flops=_flops(node),
            pin=self.pins.get(node.id, "") or self._quantized(node),
            asks=bool(reads) and entry is not None and entry.op_class is not OpClass.CAST,
        )
        self._fixed_reads(node, slots)

    def _op(
        self,
        op_id: str,
        name: str,
        reads: list[Value],
        writes: list[Value],
        *,
        integers: list[Value] | None = None,
        layer: str = "",
        flops: float = 0.0,
        pin: str = "",
        asks: bool = False,
    ) -> None:
        for value in reads:
            self._declare(value)
        outputs = []
        for value in writes:
            self.writer[value] = op_id
            outputs.append(self._declare(value, made=True))
        for value in integers or []:
            asked = asks and self.readers.get(value, 0) > 0
            kind = Kind.OUTPUT if asked else Kind.ACTIVATION
            self.known.add(value)
            outputs.append(self.build.tensor(value.path, _shape(value), kind=kind, format="int64"))
        self.build.op(op_id, name, [value.path for value in reads], outputs, layer=layer, flops=flops, pin=pin)

    def _declare(self, value: Value, *, made: bool = False, format: str = "fp32") -> str:
        """Declare a value's tensor where that was not done yet, and return its name."""
        if value not in self.known:
            self.known.add(value)
            leaves = value in self.leaving
            kind = Kind.CONSTANT if value.constant else Kind.INPUT
            if made:
                kind = Kind.OUTPUT if leaves else Kind.ACTIVATION
            keeps = made and leaves and self.keep_io
            self.build.tensor(value.path, _shape(value), kind=kind, format=format, keeps_format=keeps)
        return value.path

    def _fixed_reads(self, node: Node, slots: Slots) -> None:
        """Mark what a node reads in fp32 whatever its label, and say why a node keeps its types."""
        reads = [value for i in slots.fixed_in if (value := node.inputs[i]) is not None and not value.constant]
        if slots.reason:
            self.stays[node.id] = slots.reason
        if reads:
            why = slots.reason or f"{node.op_type} takes this input in fp32 only"
            self._op(f"{node.id}#reads", _PASSES_ON, reads, [], pin=why)

    def _quantized(self, node: Node) -> str:
        """Why a node between a DequantizeLinear and a QuantizeLinear is left alone: runtimes fuse the three."""
        sources = [
            value.node for value in node.inputs if value is not None and value.floating and value.node is not None
        ]
        readers = [reader for value in node.outputs if value is not None for reader in self.tree_readers(value)]
        from_integers = bool(sources) and all(source.op_type == "DequantizeLinear" for source in sources)
        to_integers = bool(readers) and all(reader == "QuantizeLinear" for reader in readers)
        if from_integers or to_integers:
            return "it runs in 8 bits together with the QuantizeLinear and DequantizeLinear around it"
        return ""

    def tree_readers(self, value: Value) -> list[str]:
        if not hasattr(self, "_types_of_readers"):
            found: dict[Value, list[str]] = {}
            for node in self.tree.nodes():
                for read in node.inputs:
                    if read is not None:
                        found.setdefault(read, []).append(node.op_type)
            self._types_of_readers = found
        return self._types_of_readers.get(value, [])

    # ---- bodies ----

    def _enter(self, node: Node) -> None:
        """What a body gets: a Scan's slices follow their sequence, all else keeps its type."""
        body = next(iter(node.bodies.values()))
        states = _scan_states(node)
        given = len(node.inputs) if node.op_type in ("Loop", "Scan") else 0
        for i in range(given):
            outer = node.inputs[i]
            if outer is None or not outer.floating:
                continue
            if states is None or i < states or not hands_on(node, self.fmt, self.tree.opsets):
                self._op(f"{node.id}#state{i}", _PASSES_ON, [outer], [], pin=_CARRIED)
                continue
            slot = next((v for v in body.values.values() if v.origin == "input" and v.index == i), None)
            self.reader[node.id, i] = f"{node.id}#in{i}"
            self._op(f"{node.id}#in{i}", _PASSES_ON, [outer], [slot] if slot is not None and slot.floating else [])

    def _leave(self, node: Node) -> None:
        """What a body gives: one op per output of the node, which reads what the bodies end with."""
        for i, value in enumerate(node.outputs):
            offset, carried = _outputs_of(node, i)
            ends = [(scope, scope.outputs[offset]) for scope in node.bodies.values() if offset < len(scope.outputs)]
            reads = [end for _, end in ends if end is not None and end.floating]
            carried = carried or not hands_on(node, self.fmt, self.tree.opsets)
            if value is None or not value.floating or carried or len(reads) != len(ends):
                self._keep(node, i, reads)
                continue
            op_id = f"{node.id}#out{i}"
            for scope, _ in ends:
                self.sink[scope.path, offset] = op_id
            self._op(op_id, _PASSES_ON, list(dict.fromkeys(reads)), [value])

    def _keep(self, node: Node, index: int, reads: list[Value]) -> None:
        if reads:
            why = _CARRIED
            self._op(f"{node.id}#end{index}", _PASSES_ON, list(dict.fromkeys(reads)), [], pin=why)


_WHOLE = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)


def _scan_states(node: Node) -> int | None:
    """How many of a Scan's inputs are state; None where all of a node's are (Loop, and Scan as it was in opset 8)."""
    if node.op_type != "Scan":
        return None
    count = next((int(a.i) for a in node.proto.attribute if a.name == "num_scan_inputs"), 0)
    body = next(iter(node.bodies.values()))
    given = len(body.graph.input)
    return len(node.inputs) - count if count and given == len(node.inputs) else None


def _outputs_of(node: Node, index: int) -> tuple[int, bool]:
    """Which output of the body feeds output ``index`` of a node, and whether it is state or kept for another reason."""
    if node.op_type == "If":
        return index, False
    if node.op_type == "Loop":
        return index + 1, index < len(node.inputs) - 2
    states = _scan_states(node)
    return index, states is None or index < states


def _count_readers(tree: Tree) -> dict[Value, int]:
    count: dict[Value, int] = {}
    for node in tree.nodes():
        for value in node.inputs:
            if value is not None:
                count[value] = count.get(value, 0) + 1
    for scope in tree.scopes():
        for value in scope.outputs:
            if value is not None:
                count[value] = count.get(value, 0) + 1
    return count


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(1 if dim is None else dim for dim in value.shape or ())


def _flops(node: Node) -> float:
    """Multiply-adds of products, counted twice: output elements times what each of them sums. 0 for other nodes."""
    if len(node.inputs) < 2 or node.inputs[1] is None or not node.outputs or node.outputs[0] is None:
        return 0.0
    entry = load_catalogue().lookup("onnx", node.op_type)
    if entry is None or entry.op_class not in PRODUCTS:
        return 0.0
    other, out = _shape(node.inputs[1]), math.prod(_shape(node.outputs[0]))
    summed = math.prod(other[1:]) if entry.op_class is OpClass.CONV else (other[-2] if len(other) > 1 else 1)
    return 2.0 * out * summed
