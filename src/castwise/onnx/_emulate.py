"""A mixed-precision model as an fp32 model that computes the same numbers, rounding for rounding.

Runtimes without a 16-bit kernel quietly compute in fp32, so that an overflow passes on a CPU and fails on a GPU, and
some do not load bfloat16 at all. Here every 16-bit tensor becomes an fp32 tensor whose values are on the 16-bit grid:
after each node that writes one, two Casts round it (to nearest even, overflow to infinity), exactly where the real
model rounds. What a node sums inside is summed in fp32, as the units for 16-bit products do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from castwise.catalogue import OpClass, load_catalogue
from castwise.onnx._scopes import fresh_name
from castwise.onnx._source import tensor_array

__all__ = ["emulated", "is_narrow", "round_inputs"]

_FLOAT = onnx.TensorProto.FLOAT
_NARROW = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_MAKES_VALUES = (OpClass.CREATE, OpClass.RANDOM, OpClass.CAST, OpClass.QUANTIZE)
_TYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "output_dtype")


def is_narrow(elem: int) -> bool:
    """Whether an ONNX element type is a 16-bit floating format."""
    return elem in _NARROW


def emulated(model: onnx.ModelProto) -> onnx.ModelProto:
    """The fp32 model that computes what ``model``, whose types were inferred, computes. The given one is not changed.

    Graph inputs and outputs of 16 bits become fp32 as well.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    names = {name for graph in _all_graphs(copy.graph) for node in graph.node for name in node.output}
    _Emulation(names).graph(copy.graph, {})
    return copy


def round_inputs(model: onnx.ModelProto, names: Collection[str], elem: int) -> dict[str, str]:
    """Let an fp32 model round some of its inputs to a 16-bit type itself, in place. Returns their new names by old."""
    taken = {name for graph in _all_graphs(model.graph) for node in graph.node for name in (*node.input, *node.output)}
    work, renamed, first = _Emulation(taken | {info.name for info in model.graph.input}), dict[str, str](), []
    for info in model.graph.input:
        if info.name in names:
            renamed[info.name] = work.fresh(f"{info.name}_unrounded")
            first += work.rounding(renamed[info.name], info.name, elem)
            info.name = renamed[info.name]
    nodes = [*first, *(onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return renamed


def _all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _all_graphs(attribute.g)


class _Emulation:
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def graph(self, graph: onnx.GraphProto, outer: dict[str, int]) -> None:
        """Rewrite a graph in place. ``outer`` are the element types of the names around it."""
        types = dict(outer)
        for tensor in graph.initializer:
            types[tensor.name] = tensor.data_type
            if tensor.data_type in _NARROW:
                wide = np.asarray(tensor_array(tensor), np.float32)
                tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
        for info in [*graph.input, *graph.value_info, *graph.output]:
            if info.type.HasField("tensor_type"):
                types[info.name] = info.type.tensor_type.elem_type
            _widen(info.type)
        nodes = list(graph.node)
        del graph.node[:]
        del graph.value_info[:]
        for node in nodes:
            graph.node.extend(self._node(node, types))

    def _node(self, node: onnx.NodeProto, types: dict[str, int]) -> list[onnx.NodeProto]:
        entry = load_catalogue().lookup("onnx", node.op_type) if node.domain in ("", "ai.onnx") else None
        for attribute in node.attribute:
            self._attribute(attribute, types)
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            return [node]
        exact = entry is not None and (entry.selects or entry.op_class is OpClass.CONTROL)
        exact = exact and entry is not None and entry.op_class not in _MAKES_VALUES
        made = [node]
        if _is_plain_widening(node, types):
            node.op_type = "Identity"
            del node.attribute[:]
            return made
        for index, name in enumerate(node.output):
            elem = types.get(name, 0)
            if elem in _NARROW and not exact:
                raw = self.fresh(f"{name}_unrounded")
                node.output[index] = raw
                made += self.rounding(raw, name, elem)
        return made

    def rounding(self, source: str, target: str, elem: int) -> list[onnx.NodeProto]:
        middle = self.fresh(f"{target}_rounded")
        return [
            helper.make_node("Cast", [source], [middle], f"{middle}_down", to=elem),
            helper.make_node("Cast", [middle], [target], f"{middle}_up", to=_FLOAT),
        ]

    def _attribute(self, attribute: onnx.AttributeProto, types: dict[str, int]) -> None:
        if attribute.type == onnx.AttributeProto.GRAPH:
            self.graph(attribute.g, types)
        elif (
            attribute.name in _TYPE_ATTRIBUTES and attribute.type == onnx.AttributeProto.INT and attribute.i in _NARROW
        ):
            attribute.i = _FLOAT
        elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in _NARROW:
            wide = np.asarray(tensor_array(attribute.t), np.float32)
            attribute.t.CopyFrom(numpy_helper.from_array(wide, attribute.t.name))

    def fresh(self, name: str) -> str:
        return fresh_name(name, self._names)


def _is_plain_widening(node: onnx.NodeProto, types: dict[str, int]) -> bool:
    """A cast from 16 bits to fp32: every value is there already."""
    if node.op_type != "Cast" or not node.input:
        return False
    return types.get(node.input[0], 0) in _NARROW and types.get(node.output[0], 0) == _FLOAT


def _widen(kind: onnx.TypeProto) -> None:
    which = kind.WhichOneof("value")
    if which == "tensor_type" and kind.tensor_type.elem_type in _NARROW:
        kind.tensor_type.elem_type = _FLOAT
    elif which == "sequence_type":
        _widen(kind.sequence_type.elem_type)
    elif which == "optional_type":
        _widen(kind.optional_type.elem_type)
