"""Reading an ONNX model so that its weights never have to fit into one message.

A protocol buffer holds at most 2 GB, and copying a model to try a plan on it should not copy its weights. So a model is
kept as a *skeleton*, in which every large initializer is only declared, and a store of arrays beside it. Type
inference, planning, the checker and the evaluator work on the skeleton; the arrays come back when the result is put
together. Weights in external files are mapped, not read, until somebody needs their values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import external_data_helper, helper, numpy_helper

from castwise.onnx._errors import ConversionError

__all__ = ["Array", "Source", "Weights", "read", "subgraphs", "tensor_array"]

Array = np.ndarray[Any, Any]

_LARGE = 256
"""Values beyond which an initializer is kept outside of the skeleton."""

_OLDEST_WITHOUT_INPUTS = 4
"""The IR version from which on an initializer need not be listed as an input, so that one that is may be overridden."""


class Weights(Mapping[str, Array]):
    """Arrays by name, each loaded when it is asked for."""

    def __init__(self) -> None:
        self._load: dict[str, Callable[[], Array]] = {}
        self.types: dict[str, tuple[int, tuple[int, ...]]] = {}
        """ONNX element type and shape of each."""

    def put(self, tensor: onnx.TensorProto, load: Callable[[], Array]) -> None:
        self._load[tensor.name] = load
        self.types[tensor.name] = (tensor.data_type, tuple(tensor.dims))

    def size(self, name: str) -> int:
        """Bytes of an array, which is not loaded for that."""
        elem, shape = self.types[name]
        return math.prod(shape) * int(onnx.helper.tensor_dtype_to_np_dtype(elem).itemsize)

    def update(self, other: Weights) -> None:
        """Add the arrays of another store, without reading them."""
        self._load.update(other._load)
        self.types.update(other.types)

    def __getitem__(self, name: str) -> Array:
        return self._load[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._load)

    def __len__(self) -> int:
        return len(self._load)


@dataclass
class Source:
    """A model as it came: its skeleton, its weights, and how its graph listed them."""

    skeleton: onnx.ModelProto
    weights: Weights
    order: tuple[str, ...]
    """Initializers of the top graph in their order, of the skeleton and of the store."""
    listed: frozenset[str]
    """Stored weights that the model also lists as inputs."""
    size: int
    """Bytes of the stored initializers."""
    name: str = ""
    notes: list[str] = field(default_factory=list)
    files: frozenset[Path] = frozenset()
    """Where the values of external data lie."""

    @property
    def overridable(self) -> bool:
        """Whether an initializer that is listed as an input is there to be overridden."""
        return int(self.skeleton.ir_version) >= _OLDEST_WITHOUT_INPUTS


def read(model: object) -> Source:
    """Read a model from a path, bytes or a ``ModelProto``, which is not changed.

    Raises:
        ConversionError: it is no ONNX model, or its external data is missing or too short.
    """
    if isinstance(model, onnx.ModelProto):
        return _split(model, None, model.graph.name or "model")
    if isinstance(model, (bytes, bytearray, memoryview)):
        return _split(_parse(bytes(model), "the given bytes"), None, "model")
    if not isinstance(model, (str, os.PathLike)):
        raise ConversionError(f"{type(model).__name__} is no ONNX model. Give a path, bytes or an onnx.ModelProto.")
    path = Path(model)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror}). Give the path of an ONNX file.") from error
    return _split(_parse(data, str(path)), path.parent, path.name)


def _parse(data: bytes, name: str) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, ValueError, RuntimeError) as error:
        raise ConversionError(
            f"{name} is no ONNX model ({error}). Export the model again, or copy it again."
        ) from error
    if not model.graph.node and not model.graph.output:
        raise ConversionError(f"{name} holds no graph. Export the model again, or copy it again.")
    return model


def _split(model: onnx.ModelProto, folder: Path | None, name: str) -> Source:
    """Take the large initializers out of a model."""
    _check_names(model, name)
    weights, notes = Weights(), list[str]()
    kept = onnx.GraphProto()
    order: list[str] = []
    size = 0
    dense = [_dense(sparse, name) for sparse in model.graph.sparse_initializer]
    notes += [f"sparse initializer {tensor.name!r} is stored densely" for tensor in dense]
    for tensor in (*model.graph.initializer, *dense):
        order.append(tensor.name)
        external = external_data_helper.uses_external_data(tensor)
        if _is_large(tensor):
            weights.put(tensor, _external(tensor, folder, name) if external else _inside(tensor, name))
            size += tensor_bytes(tensor)
        elif external:
            kept.initializer.append(numpy_helper.from_array(_external(tensor, folder, name)(), tensor.name))
        else:
            kept.initializer.add().CopyFrom(tensor)
    skeleton = _without_initializers(model)
    skeleton.graph.initializer.extend(kept.initializer)
    notes += _densified(skeleton, name)
    for graph in subgraphs(skeleton.graph):
        for tensor in graph.initializer:
            if external_data_helper.uses_external_data(tensor):
                tensor.CopyFrom(numpy_helper.from_array(_external(tensor, folder, name)(), tensor.name))
    _check_values(skeleton, name)
    inputs = {value.name for value in skeleton.graph.input}
    for weight, (elem, shape) in weights.types.items():
        if weight not in inputs:
            skeleton.graph.input.append(onnx.helper.make_tensor_value_info(weight, elem, shape))
    listed = frozenset(inputs & set(weights))
    return Source(skeleton, weights, tuple(order), listed, size, name, notes, _external_files(model, folder))


def _external_files(model: onnx.ModelProto, folder: Path | None) -> frozenset[Path]:
    tensors = [tensor for graph in (model.graph, *subgraphs(model.graph)) for tensor in graph.initializer]
    places = {e.value for tensor in tensors for e in tensor.external_data if e.key == "location"}
    return frozenset((folder / place).resolve() for place in places) if folder is not None else frozenset()


def _is_large(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor goes to the store. The same holds of its copies in other formats, and of one in another file:
    a skeleton, and so the digest of a model, does not depend on either."""
    return tensor.data_type != onnx.TensorProto.STRING and int(np.prod(tensor.dims, dtype=np.int64)) > _LARGE


def _check_values(model: onnx.ModelProto, name: str) -> None:
    """Raise ConversionError where a constant's bytes do not fit its shape, wherever in the model it is."""
    graphs = [model.graph, *subgraphs(model.graph), *(inner for f in model.functions for inner in subgraphs(f))]
    tensors = [tensor for graph in graphs for tensor in graph.initializer]
    for holder in (*graphs, *model.functions):
        tensors += [a.t for node in holder.node for a in node.attribute if a.HasField("t")]
    for tensor in tensors:
        if not external_data_helper.uses_external_data(tensor):
            tensor_array(tensor, name)


def _check_names(model: onnx.ModelProto, name: str) -> None:
    """Raise ConversionError where a name is no text: protocol buffers read such names and do not write them."""
    graphs = [model.graph, *subgraphs(model.graph), *(inner for f in model.functions for inner in subgraphs(f))]
    nodes = [node for graph in (*graphs, *model.functions) for node in graph.node]
    names = [text for node in nodes for text in (node.name, node.op_type, *node.input, *node.output)]
    names += [item.name for graph in graphs for item in (*graph.input, *graph.output, *graph.initializer)]
    odd = next((text for text in names if not isinstance(text, str)), None)
    if odd is not None:
        raise ConversionError(f"{name}: the name {odd!r} is no UTF-8 text. Export the model again, or copy it again.")


def _without_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that never copies an initializer's bytes."""
    copy = onnx.ModelProto()
    for descriptor, value in model.ListFields():
        if descriptor.name == "graph":
            continue
        _assign(copy, descriptor.name, value)
    for descriptor, value in model.graph.ListFields():
        if descriptor.name not in ("initializer", "sparse_initializer"):
            _assign(copy.graph, descriptor.name, value)
    return copy


def _assign(message: Any, name: str, value: Any) -> None:
    field_ = getattr(message, name)
    if hasattr(field_, "MergeFrom") and not isinstance(value, (str, bytes, int, float)):
        field_.MergeFrom(value)
    else:
        setattr(message, name, value)


def subgraphs(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto]:
    """All graphs nested in ``graph``, outer ones first."""
    for node in graph.node:
        for attribute in node.attribute:
            nested = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else list(attribute.graphs)
            for inner in nested:
                yield inner
                yield from subgraphs(inner)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """How many bytes a tensor's values take."""
    try:
        item = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError, ValueError):
        item = 1
    return int(np.prod(tensor.dims, dtype=np.int64)) * item


def tensor_array(tensor: onnx.TensorProto, name: str = "the model") -> Array:
    """The values of a tensor. Raises ConversionError where its bytes do not fit its shape."""
    try:
        return numpy_helper.to_array(tensor)
    except Exception as error:  # onnx raises whatever its parts raise
        raise ConversionError(
            f"{name}: initializer {tensor.name!r} cannot be read ({error}). Export the model again, or copy it again."
        ) from error


def _inside(tensor: onnx.TensorProto, name: str) -> Callable[[], Array]:
    tensor_array(tensor, name)  # a broken one is refused now, not in the middle of the work
    return lambda: tensor_array(tensor, name)


def _external(tensor: onnx.TensorProto, folder: Path | None, name: str) -> Callable[[], Array]:
    """Map a tensor's values from its file. Its path must stay inside the model's folder."""
    if folder is None:
        raise ConversionError(
            f"{name}: the values of {tensor.name!r} are in an external file, whose folder is not known. Give the path "
            "of the model in place of the model, or load it with its external data."
        )
    entry = {item.key: item.value for item in tensor.external_data}
    root = folder.resolve()
    path = (root / entry.get("location", "")).resolve()
    if not path.is_relative_to(root):
        raise ConversionError(f"{name}: {tensor.name!r} lies outside of the model's folder ({path}). Move it there.")
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    wanted = tensor_bytes(tensor)
    offset, length = (_whole(entry, key, default, tensor, name) for key, default in (("offset", 0), ("length", wanted)))
    if length != wanted:
        raise ConversionError(
            f"{name}: {tensor.name!r} has {length} bytes in {path.name}, its shape and type take {wanted}. Export the "
            "model again, or copy it again."
        )
    if not path.is_file() or path.stat().st_size < offset + wanted:
        raise ConversionError(
            f"{name}: {tensor.name!r} should be {wanted} bytes at {offset} of {path.name}, which are not there. Copy "
            "the external data beside the model again."
        )
    shape = tuple(tensor.dims)
    if not wanted:
        return lambda: np.zeros(shape, dtype)
    return lambda: np.memmap(path, dtype, "r", offset, shape)


def _whole(entry: Mapping[str, str], key: str, default: int, tensor: onnx.TensorProto, name: str) -> int:
    """A number of bytes that a tensor's entry says, or the default where it does not."""
    text = entry.get(key, str(default))
    if not (text.isascii() and text.isdigit()):
        raise ConversionError(
            f"{name}: the {key} of {tensor.name!r} in its external file is {text!r}, which is no number of bytes. "
            "Export the model again."
        )
    return int(text)


def _densified(model: onnx.ModelProto, name: str) -> list[str]:
    """Let Constant nodes hold their sparse values densely, in place. Returns what was changed, in words."""
    notes = []
    outer: list[onnx.GraphProto | onnx.FunctionProto] = [model.graph, *model.functions]
    for graph in (*outer, *(inner for each in outer for inner in subgraphs(each))):
        for node in graph.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.name == "sparse_value":
                    value = helper.make_attribute("value", _dense(attribute.sparse_tensor, name))
                    attribute.CopyFrom(value)
                    notes.append(f"sparse constant {node.output[0]!r} is stored densely")
    return notes


def _dense(sparse: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    values = tensor_array(sparse.values, name)
    indices = tensor_array(sparse.indices, name)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except IndexError as error:
        raise ConversionError(
            f"{name}: sparse initializer {sparse.values.name!r} has indices outside of its shape. Export it again."
        ) from error
    return numpy_helper.from_array(dense, sparse.values.name)
