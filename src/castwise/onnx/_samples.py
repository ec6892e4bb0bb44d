"""Calibration inputs: as given, read again for each pass, or made up from the model's input types.

Samples are read one at a time, so that a folder of any number of them needs the memory of one.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from castwise._npz import read_npz
from castwise.errors import did_you_mean
from castwise.onnx._errors import ConversionError

__all__ = ["Array", "Feed", "Samples", "made_up"]

log = logging.getLogger("castwise.onnx")

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]

_SEED = 0
_UNKNOWN_SIZES = (2, 1, 3, 4, 64, 32, 16, 8, 224)
"""Sizes that are tried, in this order, for dimensions that the model leaves open."""


class Samples:
    """Feeds that can be read any number of times, checked against the model's inputs.

    Args:
        given: a feed (mapping of input name to array), several of them, an ``.npz`` file, or a folder of such files.
        inputs: the model's inputs that a caller must feed, and those that may be left out.
    """

    def __init__(self, given: object, inputs: Sequence[onnx.ValueInfoProto], optional: frozenset[str]) -> None:
        self._inputs = {info.name: info for info in inputs}
        self._optional = optional
        self._sources = _sources(given)
        if not self._sources:
            raise ConversionError("calibration: there is no sample in it. Give at least one, or leave it out.")

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Feed]:
        for number, source in enumerate(self._sources):
            yield self._checked(source(), number)

    def _checked(self, feed: Mapping[str, object], number: int) -> Feed:
        where = f"calibration sample {number}"
        for name in feed:
            if name not in self._inputs:
                hint = did_you_mean(str(name), self._inputs)
                raise ConversionError(
                    f"{where}: the model has no input {name!r}.{hint} Inputs: {', '.join(self._inputs)}."
                )
        checked: Feed = {}
        for name, info in self._inputs.items():
            if name in feed:
                checked[name] = _fitted(feed[name], info, where)
            elif name not in self._optional:
                raise ConversionError(f"{where}: input {name!r} is missing. Give every input of the model.")
        return checked


def _sources(given: object) -> list[Callable[[], Mapping[str, object]]]:
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not all(file.is_file() for file in files):
            raise ConversionError(f"calibration: {path} does not exist. Give an .npz file or a folder of such files.")
        return [_reader(file) for file in files]
    if isinstance(given, Mapping):
        return [lambda: given]
    if isinstance(given, Iterable):
        feeds = list(given)
        for feed in feeds:
            if not isinstance(feed, Mapping):
                raise ConversionError(
                    f"calibration: {type(feed).__name__} is no sample. A sample maps each input's name to an array."
                )
        return [lambda feed=feed: feed for feed in feeds]  # type: ignore[misc]
    raise ConversionError(
        f"calibration: {type(given).__name__} is not understood. Give a mapping of input names to arrays, a list of "
        "those, an .npz file or a folder of such files."
    )


def _reader(path: Path) -> Callable[[], Mapping[str, object]]:
    def read() -> Mapping[str, object]:
        try:
            return read_npz(path)
        except ValueError as error:
            raise ConversionError(
                f"calibration: {path} cannot be read ({error}). Write it with numpy.savez."
            ) from error

    return read


def _fitted(value: object, info: onnx.ValueInfoProto, where: str) -> Array:
    """A sample's array in the input's dtype. Raises ConversionError where type or shape do not fit."""
    if not info.type.HasField("tensor_type"):
        return value  # type: ignore[return-value]  # a sequence or optional: passed on as it is
    array = np.asarray(value)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))
    if array.dtype != dtype and info.type.tensor_type.elem_type != onnx.TensorProto.STRING:
        if not (np.can_cast(array.dtype, dtype, "same_kind") or array.dtype.kind == "V"):
            raise ConversionError(
                f"{where}: input {info.name!r} is {array.dtype}, the model takes {dtype}. Convert it."
            )
        array = array.astype(dtype)
    if info.type.tensor_type.HasField("shape"):
        dims = info.type.tensor_type.shape.dim
        fits = len(dims) == array.ndim and all(
            not dim.HasField("dim_value") or dim.dim_value < 0 or dim.dim_value == size
            for dim, size in zip(dims, array.shape, strict=False)
        )
        if not fits:
            wanted = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims]
            raise ConversionError(
                f"{where}: input {info.name!r} has shape {list(array.shape)}, the model takes {wanted}. Reshape it."
            )
    return array


def made_up(inputs: Sequence[onnx.ValueInfoProto], runs: Callable[[Feed], bool]) -> Feed | None:
    """A feed of made-up numbers of the right types and shapes that the model runs on; None if none is found."""
    named = {dim.dim_param for info in inputs for dim in info.type.tensor_type.shape.dim if dim.dim_param}
    open_ = any(
        not dim.HasField("dim_value") or dim.dim_value < 0 for info in inputs for dim in info.type.tensor_type.shape.dim
    )
    sizes = _UNKNOWN_SIZES if named or open_ else _UNKNOWN_SIZES[:1]
    for size, batch in itertools.product(sizes, (1,) if not open_ else (1, 0)):
        feed = {info.name: made for info in inputs if (made := _random(info, size, bool(batch))) is not None}
        if len(feed) < len(inputs):
            return None
        if runs(feed):
            return feed
    return None


def _random(info: onnx.ValueInfoProto, size: int, one_first: bool) -> Array | None:
    """Values for one input; ``one_first`` makes an open first dimension (the batch) 1."""
    if not info.type.HasField("tensor_type"):
        return None
    dims = info.type.tensor_type.shape.dim
    shape = [
        int(dim.dim_value) if dim.HasField("dim_value") and dim.dim_value >= 0 else (1 if not i and one_first else size)
        for i, dim in enumerate(dims)
    ]
    elem = info.type.tensor_type.elem_type
    random = np.random.default_rng(_SEED)
    if elem == onnx.TensorProto.STRING:
        return np.full(shape, "a", object)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem))
    if dtype.kind == "b":
        return np.ones(shape, bool)
    if dtype.kind in "iu":
        return random.integers(0, 2, shape).astype(dtype)
    if "mask" in info.name.lower():
        return np.ones(shape, dtype)  # numbers that are no mask would turn what they mask into nonsense
    return random.standard_normal(shape).astype(np.float32).astype(dtype)
