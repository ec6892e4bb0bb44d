"""Writing a plan into a model: types, casts, and constants in the format that their readers want.

A value exists in the format in which it is produced, and in the other one where somebody wants it: then one Cast right
after the node that makes it serves all its readers, in inner graphs too, so that the order stays topological and a loop
does not cast the same thing again and again. Constants are rounded here and never cast at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from castwise.formats import parse_format, round_to_nearest
from castwise.onnx._capture import Captured
from castwise.onnx._scopes import Node, Scope, Value, fresh_name
from castwise.onnx._source import tensor_array

__all__ = ["Applied", "apply", "narrow"]

_FLOAT = int(onnx.TensorProto.FLOAT)


@dataclass(frozen=True)
class Applied:
    """A mixed-precision model, as a skeleton."""

    model: onnx.ModelProto
    narrowed: Mapping[str, str]
    """Stored initializers to be rounded: name in the model -> name in the store. Those not named keep their values."""
    kept: frozenset[str]
    """Stored initializers that some reader still wants as they are."""
    casts: int
    """Cast nodes that the plan added."""


def apply(captured: Captured, skeleton: onnx.ModelProto, labels: Mapping[str, bool]) -> Applied:
    """The model that computes ops labelled true in the plan's 16-bit format. ``skeleton`` is not changed."""
    model = onnx.ModelProto()
    model.CopyFrom(skeleton)
    return _Writer(captured, labels, model).run()


def narrow(array: np.ndarray[Any, Any], fmt: str) -> np.ndarray[Any, Any]:
    """An fp32 array rounded to the nearest values of a format, in that format's dtype."""
    number_format = parse_format(fmt)
    rounded = round_to_nearest(np.ascontiguousarray(array, np.float32), number_format)
    with np.errstate(over="ignore"):
        return rounded.astype(number_format.numpy_dtype).reshape(array.shape)


@dataclass
class _Writer:
    captured: Captured
    labels: Mapping[str, bool]
    model: onnx.ModelProto
    wants: dict[Value, set[int]] = field(default_factory=dict)
    names: dict[tuple[Value, int], str] = field(default_factory=dict)
    narrowed: dict[str, str] = field(default_factory=dict)
    casts: int = 0

    def run(self) -> Applied:
        self.low = self.captured.low
        self.taken = set(self.captured.tree.names)
        self.node_names = {node.id for node in self.captured.tree.nodes()}
        self._collect()
        top = self.captured.tree.top
        self._scope(top, self.model.graph)
        kept = frozenset(
            value.name
            for value in top.values.values()
            if value.origin == "initializer" and (value.elem != _FLOAT or _FLOAT in self.wants.get(value, {_FLOAT}))
        )
        if not self.captured.keep_io:
            self._retype_io(top)
        return Applied(self.model, self.narrowed, kept, self.casts)

    # ---- which formats are wanted ----

    def _is_low(self, op_id: str | None) -> bool:
        return op_id is not None and bool(self.labels.get(op_id, False))

    def produced(self, value: Value) -> int:
        """The element type in which a value of fp32 is made."""
        return self.low if self._is_low(self.captured.writer.get(value)) else value.elem

    def _wanted(self, value: Value, op_id: str | None) -> int:
        """The element type in which a reader takes a value."""
        if not value.floating:
            return value.elem
        return self.low if self._is_low(op_id) else _FLOAT

    def _collect(self) -> None:
        for node in self.captured.tree.nodes():
            for index, value in enumerate(node.inputs):
                if value is not None:
                    self._want(value, self._reads(node, index, value))
        for scope in self.captured.tree.scopes():
            for index, value in enumerate(scope.outputs):
                if value is not None:
                    self._want(value, self._leaves(scope, index, value))

    def _want(self, value: Value, elem: int) -> None:
        self.wants.setdefault(value, set()).add(elem)

    def _reads(self, node: Node, index: int, value: Value) -> int:
        slots = self.captured.slots[node.id]
        if slots.narrows:  # a cast of a tensor that is 16 bits already is none
            return self.produced(value) if not value.constant else _FLOAT
        free = not (slots.reason or slots.fixed_in or slots.moving_in or node.bodies or slots.widens)
        if free and value.floating and not value.constant:
            return self.produced(value)  # it looks at the shape only
        return self._wanted(value, self.captured.reader.get((node.id, index)))

    def _leaves(self, scope: Scope, index: int, value: Value) -> int:
        if scope.parent is None:
            if self.captured.keep_io or value.origin != "node":
                return value.elem
            return self.produced(value)
        return self._wanted(value, self.captured.sink.get((scope.path, index)))

    # ---- names ----

    def name(self, value: Value, elem: int) -> str:
        """What a value is called in a format. The format that must keep the old name does, the other gets a new one."""
        if not value.floating:
            return value.name
        key = (value, elem)
        if key not in self.names:
            own = self.low if self._owns_low(value) else _FLOAT
            self.names[key] = value.name if elem == own else self._new_name(value, elem)
        return self.names[key]

    def _owns_low(self, value: Value) -> bool:
        if value.constant:
            return _FLOAT not in self.wants.get(value, {_FLOAT})
        leaves = value.scope.parent is None and value in value.scope.outputs
        return self.produced(value) == self.low and not (leaves and self.captured.keep_io)

    def _new_name(self, value: Value, elem: int) -> str:
        suffix = "fp32" if elem == _FLOAT else self.captured.fmt
        return fresh_name(f"{value.name}_{suffix}", self.taken)

    # ---- writing ----

    def _scope(self, scope: Scope, graph: onnx.GraphProto) -> None:
        old = list(graph.node)
        fresh: list[onnx.NodeProto] = []
        for value in list(scope.values.values()):
            if value.origin == "input":
                self._retype_input(value, graph)
                fresh += self._casts_of(value)
            elif value.origin == "initializer":
                self._initializer(value, graph)
        for node, proto in zip(scope.nodes, old, strict=True):
            proto.name = node.id
            fresh += self._node(node, proto)
        kept = [proto for proto in fresh if not self._is_dead(proto)]
        del graph.node[:]
        graph.node.extend(kept)
        for index, (info, end) in enumerate(zip(graph.output, scope.outputs, strict=True)):
            if end is not None and end.floating:
                elem = self._leaves(scope, index, end)
                info.name = self.name(end, elem)
                if info.type.HasField("tensor_type"):
                    info.type.tensor_type.elem_type = elem
        self._retype_infos(scope, graph)

    def _retype_input(self, value: Value, graph: onnx.GraphProto) -> None:
        if value.floating and self.produced(value) == self.low:
            graph.input[value.index].type.tensor_type.elem_type = self.low

    def _node(self, node: Node, proto: onnx.NodeProto) -> list[onnx.NodeProto]:
        slots = self.captured.slots[node.id]
        if proto.op_type == "Constant" and node.outputs and node.outputs[0] is not None and node.outputs[0].floating:
            return self._constant(node, proto)
        for index, value in enumerate(node.inputs):
            if value is not None:
                proto.input[index] = self.name(value, self._reads(node, index, value))
                self._shortcut(proto, index, value, node)
        if slots.narrows and (source := node.inputs[0]) is not None and self.produced(source) == self.low:
            proto.op_type = "Identity"
            del proto.attribute[:]
        if slots.attribute and self._is_low(node.id):
            self._retype_attribute(proto, slots.attribute)
        for name, body in node.bodies.items():
            self._scope(body, next(attribute.g for attribute in proto.attribute if attribute.name == name))
        made = [proto]
        for index, value in enumerate(node.outputs):
            if value is not None:
                proto.output[index] = self.name(value, self.produced(value))
                made += self._casts_of(value)
        return made

    def _shortcut(self, proto: onnx.NodeProto, index: int, value: Value, node: Node) -> None:
        """Read the 16-bit tensor that a cast of the model's own widened, in place of casting there and back."""
        maker = value.node
        if value.floating and maker is not None and self.captured.slots[maker.id].widens:
            source = maker.inputs[0]
            if source is not None and self._reads(node, index, value) == self.low:
                proto.input[index] = source.name

    def _casts_of(self, value: Value) -> list[onnx.NodeProto]:
        """The cast of a value to the format it is not made in, where that is wanted and cannot be had otherwise."""
        if not value.floating or value.constant:
            return []
        made = self.produced(value)
        others = self.wants.get(value, set()) - {made}
        if value.node is not None and self.captured.slots[value.node.id].widens:
            if self._ends_narrow(value):
                others = {self.low}
            else:
                return []
        casts = []
        for elem in sorted(others):
            name = self.name(value, elem)
            node = helper.make_node("Cast", [self.name(value, made)], [name], self._node_name(name), to=elem)
            self.casts += 1
            casts.append(node)
        return casts

    def _ends_narrow(self, value: Value) -> bool:
        """Whether a body ends with a value in 16 bits: what a graph gives must be called by its own name."""
        return any(
            end is value and self._leaves(scope, index, value) == self.low
            for scope in self.captured.tree.scopes()
            for index, end in enumerate(scope.outputs)
        )

    def _node_name(self, output: str) -> str:
        name, count = f"{output}_cast", 1
        while name in self.node_names:
            name, count = f"{output}_{count}_cast", count + 1
        self.node_names.add(name)
        return name

    def _is_dead(self, proto: onnx.NodeProto) -> bool:
        """Whether it is a widening cast of the model's own whose readers all take the 16-bit tensor now."""
        node = self._by_name().get(proto.name)
        if node is None or not self.captured.slots[node.id].widens or node.outputs[0] is None:
            return False
        value = node.outputs[0]
        return value in self.wants and _FLOAT not in self.wants[value] and not self._ends_narrow(value)

    def _by_name(self) -> dict[str, Node]:
        if not hasattr(self, "_nodes"):
            self._nodes = {node.id: node for node in self.captured.tree.nodes()}
        return self._nodes

    def _retype_attribute(self, proto: onnx.NodeProto, name: str) -> None:
        attribute = next((item for item in proto.attribute if item.name == name), None)
        if name != "value":
            assert attribute is not None
            attribute.i = self.low
            return
        array = np.zeros(1, np.float32) if attribute is None else tensor_array(attribute.t)
        fresh = helper.make_attribute("value", numpy_helper.from_array(narrow(array, self.captured.fmt)))
        if attribute is None:
            proto.attribute.append(fresh)
        else:
            attribute.CopyFrom(fresh)

    # ---- constants ----

    def _constant(self, node: Node, proto: onnx.NodeProto) -> list[onnx.NodeProto]:
        value = node.outputs[0]
        assert value is not None
        wanted = self.wants.get(value, {_FLOAT})
        made = [proto] if _FLOAT in wanted else []
        if self.low in wanted:
            rounded = numpy_helper.from_array(narrow(constant_array(proto), self.captured.fmt))
            name = self.name(value, self.low)
            own = self._node_name(name) if made else proto.name
            made.append(helper.make_node("Constant", [], [name], own, value=rounded))
        return made

    def _initializer(self, value: Value, graph: onnx.GraphProto) -> None:
        wanted = self.wants.get(value, {_FLOAT})
        if not value.floating or self.low not in wanted:
            return
        name = self.name(value, self.low)
        both = _FLOAT in wanted
        position = next((i for i, tensor in enumerate(graph.initializer) if tensor.name == value.name), None)
        listed = next((info for info in graph.input if info.name == value.name), None)
        if position is None:  # stored: only its declaration is here
            self.narrowed[name] = value.name
            assert listed is not None
            if both:
                graph.input.append(helper.make_tensor_value_info(name, self.low, listed_shape(listed)))
            else:
                listed.type.tensor_type.elem_type = self.low
            return
        rounded = numpy_helper.from_array(narrow(tensor_array(graph.initializer[position]), self.captured.fmt), name)
        if both:
            graph.initializer.append(rounded)
        else:
            graph.initializer[position].CopyFrom(rounded)
            if listed is not None:
                listed.type.tensor_type.elem_type = self.low

    # ---- declared types ----

    def _retype_infos(self, scope: Scope, graph: onnx.GraphProto) -> None:
        infos = list(graph.value_info)
        del graph.value_info[:]
        for info in infos:
            value = scope.values.get(info.name)
            if value is not None and not value.floating:
                graph.value_info.append(info)
                continue
            if value is None or value.constant:  # declared twice, or not of this graph: exporters do that
                continue
            own = self.low if self._owns_low(value) else _FLOAT
            info.type.tensor_type.elem_type = own
            graph.value_info.append(info)
        existing = {info.name for info in [*graph.value_info, *graph.output, *graph.input]}
        for value in scope.values.values():
            for elem in (_FLOAT, self.low):
                name = self.names.get((value, elem))
                new = name and name != value.name and name not in existing and value.origin in ("node", "input")
                used = elem in {self.produced(value), *self.wants.get(value, set())}
                if name and new and used and value.shape is not None:
                    graph.value_info.append(_info_like(scope, value, name, elem))

    def _retype_io(self, top: Scope) -> None:
        for info, value in zip(self.model.graph.output, top.outputs, strict=True):
            if value is not None and value.floating and value.origin == "node":
                info.type.tensor_type.elem_type = self.produced(value)


def _info_like(scope: Scope, value: Value, name: str, elem: int) -> onnx.ValueInfoProto:
    """The declaration of a value under another name and type, with its symbolic dimensions."""
    graph = scope.graph
    for info in [*graph.value_info, *graph.output, *graph.input]:
        if info.name == value.name:
            copy = onnx.ValueInfoProto()
            copy.CopyFrom(info)
            copy.name = name
            copy.type.tensor_type.elem_type = elem
            return copy
    return helper.make_tensor_value_info(name, elem, list(value.shape or ()))


def listed_shape(info: onnx.ValueInfoProto) -> list[int]:
    return [int(dim.dim_value) for dim in info.type.tensor_type.shape.dim]


def constant_array(proto: onnx.NodeProto) -> np.ndarray[Any, Any]:
    """The value of a Constant node that holds fp32."""
    attribute = proto.attribute[0]
    if attribute.name == "value":
        return tensor_array(attribute.t)
    if attribute.name == "value_float":
        return np.array(attribute.f, np.float32)
    if attribute.name == "value_floats":
        return np.array(attribute.floats, np.float32)
    return np.zeros(0, np.float32)
