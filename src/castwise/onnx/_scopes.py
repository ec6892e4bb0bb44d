"""The scope tree of a model: graphs inside graphs, and who reads which value of which graph.

A name means the value of the innermost graph that has it. ``If``, ``Loop`` and ``Scan`` bodies read values of the
graphs around them, and two branches may use one name for two values, so everything after this works on :class:`Value`
objects and never on names. Element types come from ONNX's own inference; where that gives up (behind an operator of a
domain it does not know) the operator schemas say which other operands have the same type.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import onnx

__all__ = ["CONTROL", "Node", "Scope", "Tree", "Value", "build_tree", "fresh_name", "operand_types", "schema_of"]

CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""Operators of ONNX that hold graphs. How values enter and leave their bodies is part of the language."""


@dataclass(eq=False, slots=True)
class Value:
    """A tensor (or sequence, or optional) of one graph."""

    name: str
    scope: Scope
    origin: str
    """``"input"``, ``"initializer"``, ``"constant"`` (written by a Constant node) or ``"node"``."""
    elem: int = 0
    """ONNX element type where it is a tensor; 0 where that is not known or it is no tensor."""
    tensor: bool = True
    """False for sequences, optionals and maps."""
    shape: tuple[int | None, ...] | None = None
    node: Node | None = None
    index: int = 0
    """Which input of its graph, or which output of its node."""

    @property
    def path(self) -> str:
        """The name with the graphs it is in: unique in the model."""
        return f"{self.scope.path}{self.name}"

    @property
    def floating(self) -> bool:
        """Whether it is a tensor of fp32, whose format can be chosen."""
        return self.tensor and self.elem == onnx.TensorProto.FLOAT

    @property
    def constant(self) -> bool:
        return self.origin in ("initializer", "constant")


@dataclass(eq=False, slots=True)
class Node:
    """A node of one graph, with its operands as values."""

    id: str
    """Unique in the model: its name where it has one of its own."""
    proto: onnx.NodeProto
    scope: Scope
    position: int
    """In its graph."""
    inputs: list[Value | None] = field(default_factory=list)
    outputs: list[Value | None] = field(default_factory=list)
    bodies: dict[str, Scope] = field(default_factory=dict)
    """By attribute name."""

    @property
    def domain(self) -> str:
        return "" if self.proto.domain == "ai.onnx" else str(self.proto.domain)

    @property
    def op_type(self) -> str:
        return str(self.proto.op_type)

    @property
    def layer(self) -> str:
        """Where in the user's model it is: the module path that the exporter wrote down, else its name, with dots."""
        for prop in self.proto.metadata_props:
            if prop.key == "pkg.torch.onnx.name_scopes":
                try:
                    scopes = ast.literal_eval(prop.value)
                    return str(scopes[-2])
                except (ValueError, SyntaxError, IndexError, TypeError):
                    break
        return self.id.strip("/").replace("/", ".")


@dataclass(eq=False, slots=True)
class Scope:
    """A graph and its values. ``path`` is empty for the model's own graph."""

    graph: onnx.GraphProto
    parent: Scope | None = None
    path: str = ""
    values: dict[str, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value | None] = field(default_factory=list)

    def find(self, name: str) -> Value | None:
        """The value that ``name`` means here."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        return None


@dataclass(eq=False, slots=True)
class Tree:
    """All scopes of a model."""

    top: Scope
    opsets: Mapping[str, int]
    names: set[str]
    """Every name of a value in the model, so that new ones can be told apart."""

    def scopes(self) -> Iterator[Scope]:
        """All scopes, outer ones first."""
        stack = [self.top]
        while stack:
            scope = stack.pop(0)
            yield scope
            for node in scope.nodes:
                stack.extend(node.bodies.values())

    def nodes(self) -> Iterator[Node]:
        """All nodes in the order in which their results exist: a body's before those after the node that holds it."""
        yield from _in_order(self.top)

    def values(self) -> Iterator[Value]:
        for scope in self.scopes():
            yield from scope.values.values()


def _in_order(scope: Scope) -> Iterator[Node]:
    for node in scope.nodes:
        for body in node.bodies.values():
            yield from _in_order(body)
        yield node


def schema_of(node: Node, opsets: Mapping[str, int]) -> onnx.defs.OpSchema | None:
    """What ONNX says of an operator in the version that the model imports; None where it does not know it."""
    try:
        return onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 0), node.domain)
    except onnx.defs.SchemaError:
        return None


def operand_types(schema: onnx.defs.OpSchema, count: int, outputs: bool) -> list[str]:
    """The type (a variable such as ``T`` or a type such as ``tensor(float)``) of each of ``count`` operands."""
    formal = list(schema.outputs if outputs else schema.inputs)
    if not formal:
        return [""] * count
    last = formal[-1]
    repeats = last.option == onnx.defs.OpSchema.FormalParameterOption.Variadic and last.is_homogeneous
    known = [parameter.type_str for parameter in formal]
    if formal[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic and not repeats:
        known.pop()
    return [known[i] if i < len(known) else (last.type_str if repeats else "") for i in range(count)]


def build_tree(
    model: onnx.ModelProto, stored: Mapping[str, tuple[int, tuple[int, ...]]], overridable: frozenset[str] = frozenset()
) -> Tree:
    """The scope tree of a skeleton whose types were inferred.

    ``stored`` are initializers kept outside of it. ``overridable`` are those that a caller may replace, as inputs.
    """
    opsets = {("" if entry.domain == "ai.onnx" else entry.domain): int(entry.version) for entry in model.opset_import}
    tree = Tree(Scope(model.graph), opsets, set())
    taken = {node.name for graph in _graphs(model.graph) for node in graph.node if node.name}
    _fill(tree.top, _Ids(taken), {name: stored[name] for name in stored if name not in overridable})
    for name in overridable:
        tree.top.values[name].origin = "input"
    for scope in tree.scopes():
        tree.names.update(scope.values)
    for node in tree.nodes():
        _complete_types(node, opsets)
    return tree


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


class _Ids:
    """Gives every node a name of its own; the first of a name keeps it."""

    def __init__(self, taken: set[str]) -> None:
        self._taken, self._used, self._count = taken, set[str](), 0

    def give(self, node: onnx.NodeProto) -> str:
        name = str(node.name)
        while not name or name in self._used or (not node.name and name in self._taken):
            name = f"{node.name or node.op_type}_{self._count}"
            self._count += 1
        self._used.add(name)
        return name


def _fill(scope: Scope, ids: _Ids, stored: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
    graph, top = scope.graph, scope.parent is None
    for index, info in enumerate(graph.input):
        kept = top and info.name in stored
        value = Value(info.name, scope, "initializer" if kept else "input", index=index)
        _describe(value, info.type)
        scope.values[info.name] = value
    for tensor in graph.initializer:
        value = scope.values.get(tensor.name) or Value(tensor.name, scope, "initializer")
        value.origin, value.elem, value.shape = "initializer", int(tensor.data_type), tuple(tensor.dims)
        scope.values[tensor.name] = value
    for sparse in graph.sparse_initializer:
        value = Value(sparse.values.name, scope, "input", int(sparse.values.data_type), shape=tuple(sparse.dims))
        scope.values[value.name] = value
    infos = {info.name: info.type for info in [*graph.value_info, *graph.output]}
    for position, proto in enumerate(graph.node):
        node = Node(ids.give(proto), proto, scope, position)
        node.inputs = [scope.find(name) if name else None for name in proto.input]
        for attribute in proto.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                body = Scope(attribute.g, scope, f"{scope.path}{node.id}.{attribute.name}/")
                _fill(body, ids, {})
                node.bodies[attribute.name] = body
        for index, name in enumerate(proto.output):
            made = None
            if name:
                origin = "constant" if proto.op_type == "Constant" and not node.domain else "node"
                made = Value(name, scope, origin, node=node, index=index)
                if name in infos:
                    _describe(made, infos[name])
                scope.values[name] = made
            node.outputs.append(made)
        scope.nodes.append(node)
    scope.outputs = [scope.find(info.name) for info in graph.output]


def _describe(value: Value, info: onnx.TypeProto) -> None:
    kind = info.WhichOneof("value")
    if kind == "tensor_type":
        value.elem = int(info.tensor_type.elem_type)
        if info.tensor_type.HasField("shape"):
            dims = info.tensor_type.shape.dim
            value.shape = tuple(int(dim.dim_value) if dim.HasField("dim_value") else None for dim in dims)
    elif kind is not None:
        value.tensor = False


def _complete_types(node: Node, opsets: Mapping[str, int]) -> None:
    """Types of outputs that inference left open, from operands with the same type variable."""
    if all(value is None or value.elem or not value.tensor for value in node.outputs):
        return
    schema = schema_of(node, opsets)
    if schema is None or node.bodies:
        return
    known: dict[str, int] = {}
    for kind, value in zip(operand_types(schema, len(node.inputs), False), node.inputs, strict=True):
        if value is not None and value.tensor and value.elem:
            known.setdefault(kind, value.elem)
    concrete = {"tensor(float)": onnx.TensorProto.FLOAT, "tensor(int64)": onnx.TensorProto.INT64}
    for kind, value in zip(operand_types(schema, len(node.outputs), True), node.outputs, strict=True):
        if value is not None and value.tensor and not value.elem:
            value.elem = known.get(kind, concrete.get(kind, 0))


def fresh_name(stem: str, taken: set[str]) -> str:
    """A name that is not taken yet, like `stem`; from now on it is."""
    name, count = stem, 1
    while name in taken:
        name, count = f"{stem}_{count}", count + 1
    taken.add(name)
    return name
