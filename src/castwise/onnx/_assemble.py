"""Putting a converted model back together, in memory or on the disk.

In memory a model is a ``ModelProto`` with all its weights, up to the 2 GB that a protocol buffer can hold. On the disk
a larger one has its weights in a file of their own, written one after the other, so that no more than one is in memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from castwise import _files
from castwise.onnx._apply import Applied, narrow
from castwise.onnx._errors import ConversionError
from castwise.onnx._source import Array, Source, subgraphs, tensor_bytes

__all__ = ["LIMIT", "assemble", "save", "small_bytes", "total_bytes"]

LIMIT = 2_000_000_000
"""Bytes from which on a model does not go into one protocol buffer: 2 GiB less room for all that is no weight."""

_ALIGNMENT = 4096
"""Of tensors in an external file, so that they can be mapped into memory."""


def _stored(source: Source, applied: Applied, fmt: str) -> Iterator[tuple[str, int, tuple[int, ...], Array | None]]:
    """Name, type, shape of every stored initializer of the result, and its array once it is asked for."""
    low = onnx.TensorProto.FLOAT16 if fmt == "fp16" else onnx.TensorProto.BFLOAT16
    by_origin: dict[str, list[str]] = {}
    for name, origin in applied.narrowed.items():
        by_origin.setdefault(origin, []).append(name)
    for origin, (elem, shape) in source.weights.types.items():
        if origin in applied.kept and origin not in applied.narrowed:
            yield origin, elem, shape, None
        for name in by_origin.get(origin, []):
            yield name, int(low), shape, None


def total_bytes(source: Source, applied: Applied, fmt: str) -> int:
    """Bytes of all initializers of the result."""
    size = 0
    for _, elem, shape, _ in _stored(source, applied, fmt):
        size += int(np.prod(shape, dtype=np.int64)) * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem)).itemsize
    return size + small_bytes(applied.model)


def small_bytes(model: onnx.ModelProto) -> int:
    """Bytes of all constants that a skeleton still holds: small initializers, inner graphs' ones and Constant nodes."""
    size = 0
    for graph in (model.graph, *subgraphs(model.graph)):
        size += sum(tensor_bytes(tensor) for tensor in graph.initializer)
        for node in graph.node:
            if node.op_type == "Constant":
                size += sum(tensor_bytes(attribute.t) for attribute in node.attribute if attribute.HasField("t"))
    return size


def _bare(source: Source, applied: Applied, fmt: str) -> onnx.ModelProto:
    """The result without its stored initializers, and without their declarations as inputs."""
    model = onnx.ModelProto()
    model.CopyFrom(applied.model)
    listed = source.listed
    stored = {name for name, _, _, _ in _stored(source, applied, fmt)} | set(source.weights)
    inputs = [info for info in model.graph.input if info.name not in stored or info.name in listed]
    kept = [onnx.ValueInfoProto.FromString(info.SerializeToString()) for info in inputs]
    del model.graph.input[:]
    if not source.overridable:  # such models list every initializer as an input
        declared = {info.name for info in kept}
        kept += [
            info for info in applied.model.graph.input if info.name in applied.narrowed and info.name not in declared
        ]
        declared = {info.name for info in kept}
        for tensor in model.graph.initializer:
            if tensor.name not in declared:
                kept.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tuple(tensor.dims)))
    model.graph.input.extend(kept)
    return model


def _array(source: Source, applied: Applied, fmt: str, name: str) -> Array:
    if name in applied.narrowed:
        return narrow(source.weights[applied.narrowed[name]], fmt)
    return source.weights[name]


def assemble(source: Source, applied: Applied, fmt: str) -> onnx.ModelProto:
    """The whole result. Raises ConversionError where it is too large for that."""
    size = total_bytes(source, applied, fmt)
    if size > LIMIT:
        raise ConversionError(
            f"The converted model has {size / 1e9:.1f} GB of weights, more than a ModelProto holds. Save it to a file: "
            "Conversion.save(path)."
        )
    model = _bare(source, applied, fmt)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, _, _, _ in _stored(source, applied, fmt):
        tensors[name] = numpy_helper.from_array(np.ascontiguousarray(_array(source, applied, fmt, name)), name)
    rank = {name: i for i, name in enumerate(source.order)}
    origin = {**{name: name for name in tensors}, **applied.narrowed}
    ordered = sorted(tensors.values(), key=lambda tensor: rank.get(origin[tensor.name], len(rank)))
    copies = [
        onnx.TensorProto.FromString(t.SerializeToString()) if t in model.graph.initializer else t for t in ordered
    ]
    del model.graph.initializer[:]
    model.graph.initializer.extend(copies)
    return model


def save(source: Source, applied: Applied, fmt: str, path: str | os.PathLike[str], external: bool) -> Path:
    """Write the result. With ``external``, weights go to ``<name>.data`` beside it, one after the other."""
    path = Path(path)
    for written in (path, path.with_name(f"{path.name}.data")) if external else (path,):
        if written.resolve() in source.files:
            raise ConversionError(
                f"{written} holds the weights of {source.name}, so it is not overwritten. Give the result another name."
            )
    if not external:
        return _files.write_bytes(path, assemble(source, applied, fmt).SerializeToString())
    model = _bare(source, applied, fmt)
    data = path.with_name(f"{path.name}.data")
    temporary = data.with_name(f".castwise-{secrets.token_hex(8)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            for name, elem, shape, _ in _stored(source, applied, fmt):
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                start = file.tell()
                np.ascontiguousarray(_array(source, applied, fmt, name)).tofile(file)
                tensor = model.graph.initializer.add(name=name, data_type=elem, dims=shape)
                tensor.data_location = onnx.TensorProto.EXTERNAL
                for key, text in (("location", data.name), ("offset", start), ("length", file.tell() - start)):
                    tensor.external_data.add(key=key, value=str(text))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, data)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    return _files.write_bytes(path, model.SerializeToString())
