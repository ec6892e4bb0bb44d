"""Gradients of slices that a loop sums up, added in place.

The gradient of ``x[i]`` is a tensor as large as ``x`` that is zero but for one slice. A loop that reads ``x[i]`` in
each iteration has a gradient loop that makes such a tensor and adds it to another one in each of its own: for a
recurrent net that moves more bytes than all of its products. The sum stays float32, as a loop carries it; adding to the
slice alone makes it cheaper than one in 16 bits would be.

XLA fuses such sums by itself and cannot place slices that it does not know: in what it compiles nothing is changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ._internals import in_order
from ._work import shape_of

__all__ = ["IN_PLACE", "Sum", "add_slice", "sums_of"]

IN_PLACE = "a loop sums it up: added in place"
# Elements of a sum, and how many times a slice it is: below that three small operations take as long as two large ones.
_WORTHWHILE, _TIMES = 16384, 8


@dataclass(frozen=True)
class Sum:
    """One node that adds gradients of slices to what its loop carries."""

    base: int
    """Which of its inputs the loop carries."""
    slices: tuple[Any, ...]
    """The nodes of the gradients; nothing else reads what they give."""


def sums_of(body: Any) -> Mapping[str, Sum]:
    """The sums of a loop's body that can be made in place, by the name of the node that adds."""
    nodes = in_order(body)
    readers = Counter(tensor.name for op in nodes for tensor in op.inputs)
    readers.update(tensor.name for tensor in body.outputs)
    carried = {tensor.name for tensor in body.inputs}
    found = {}
    for op in nodes:
        if op.type != "AddN" or math.prod(shape_of(op.outputs[0])) < _WORTHWHILE:
            continue
        slices = tuple(t.op for t in op.inputs if t.op.type == "StridedSliceGrad" and readers[t.name] == 1)
        others = [at for at, t in enumerate(op.inputs) if t.op.name not in {one.name for one in slices}]
        largest = max((math.prod(shape_of(one.inputs[-1])) for one in slices), default=0)
        if largest * _TIMES > math.prod(shape_of(op.outputs[0])):
            continue
        if slices and len(others) == 1 and _is_carried(op.inputs[others[0]], carried, readers):
            found[op.name] = Sum(others[0], slices)
    return found


def _is_carried(tensor: Any, carried: set[str], readers: Counter[str]) -> bool:
    while tensor.name not in carried:
        if tensor.op.type != "Identity" or readers[tensor.name] != 1:
            return False
        tensor = tensor.op.inputs[0]
    return readers[tensor.name] == 1


def add_slice(op: Any, total: Any, place: Sequence[Any], gradient: Any, name: str) -> Any:
    """Add a slice's gradient to a tensor: what the node ``op``, a StridedSliceGrad, would have been added for.

    ``place`` is where the slice begins and ends, and its strides.
    """
    begin, end, strides = place
    masks = {attr: op.get_attr(attr) for attr in _MASKS}
    with tf.device(op.device):
        now = tf.raw_ops.StridedSlice(input=total, begin=begin, end=end, strides=strides, **masks)
        return tf.raw_ops.TensorStridedSliceUpdate(
            input=total, begin=begin, end=end, strides=strides, value=now + gradient, name=name, **masks
        )


_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
