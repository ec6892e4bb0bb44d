"""A tensor of the old graph in the new one: the same numbers in one or more dtypes, so that no cast is made twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops, tensor_util

from castwise.formats import parse_format

__all__ = ["Value", "constant_of", "fits", "saturated"]


@dataclass(eq=False)
class Value:
    """One tensor.

    A cast is added where the tensor itself is, not where it is asked for: a loop's body that asks for a tensor of the
    graph around finds it cast once, before the loop. Tensors that are known before the graph runs are cast there and
    then, and constants become constants.
    """

    tensor: Any
    dtype: Any = None
    """Of a tensor whose format may change, its dtype now; None of all others."""
    constant: Any = None
    """Its numbers, where they are known: an array."""
    casts: dict[Any, Any] = field(default_factory=dict)

    def inside(self) -> Value:
        """The value for a conditional's branch: casts made in there stay in there."""
        if self.dtype is None:
            return self
        return _Inside(self.tensor, self.dtype, self.constant, dict(self.casts))

    def in_dtype(self, dtype: Any) -> Any:
        """The tensor in ``dtype`` (None: as it is)."""
        if dtype is None or self.dtype is None or self.dtype == dtype:
            return self.tensor
        made = self.casts.get(dtype)
        if made is None:
            made = self.casts[dtype] = self._cast(dtype)
        return made

    def _cast(self, dtype: Any) -> Any:
        if self.constant is not None:
            with self._home():
                return tf.constant(saturated(self.constant, dtype), dtype)
        if not isinstance(self.tensor, ops.EagerTensor):
            with self._home(), tf.device(self.tensor.op.device):
                return tf.cast(self.tensor, dtype)
        with tf.init_scope():
            return tf.cast(self.tensor, dtype)

    def _home(self) -> Any:
        return self.tensor.graph.as_default()


class _Inside(Value):
    """A value of the graph around, as one branch of a conditional sees it."""

    def _home(self) -> Any:
        return ops.get_default_graph().as_default()


def constant_of(op: Any) -> Any:
    """The numbers of a Const node, as an array."""
    return tensor_util.MakeNdarray(op.get_attr("value"))


def fits(array: Any, dtype: Any) -> bool:
    """Whether constants keep their size in ``dtype``: none overflows, or falls below its smallest normal number."""
    limits = _limits(dtype)
    size = np.abs(np.asarray(array, np.float64))
    size = size[np.isfinite(size) & (size > 0)]
    return bool(not size.size or (size.max() <= limits[1] and size.min() >= limits[0]))


def saturated(array: Any, dtype: Any) -> Any:
    """Finite constants within the range of ``dtype``: -1e9 in a float16 mask is -65504, not -inf."""
    largest = _limits(dtype)[1]
    wide = np.asarray(array, np.float64)
    clipped = np.where(np.isfinite(wide), np.clip(wide, -largest, largest), wide)
    return clipped.astype(dtype.as_numpy_dtype)


def _limits(dtype: Any) -> tuple[float, float]:
    fmt = parse_format(dtype.name)
    return float(fmt.smallest_normal), float(fmt.max)
