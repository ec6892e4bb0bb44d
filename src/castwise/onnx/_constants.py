"""Constants that a 16-bit format cannot hold: who must then stay wide, and which masks can be made to fit.

Nothing is clipped or flushed without a word. A constant beyond the format's range, or one that rounding would turn into
something else (an epsilon of 1e-12 into 0), keeps whoever reads it in fp32. A weight with a few values too small to
keep is rounded, and the report says how many and how large they were. One kind of constant is changed on purpose: the
huge negative number that hides positions from a softmax. Any number far below the scores does that, so it is brought
within the range, which the report says and the final check against the unchanged model covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import numpy_helper

from castwise.catalogue import OpClass, load_catalogue
from castwise.formats import NumberFormat, parse_format, round_to_nearest
from castwise.onnx._apply import constant_array
from castwise.onnx._capture import Captured
from castwise.onnx._scopes import Node, Tree, Value
from castwise.onnx._source import Array, Weights, tensor_array

__all__ = ["Findings", "bring_masks_within_range", "examine"]

_COARSE = 2.0**-6
"""Relative change (root mean square) of a constant by rounding from which on it is no longer the same constant. A value
in the normal range changes by 2^-12 in fp16 and 2^-9 in bf16 at most."""

_SMALL = 16
"""Elements up to which a constant is a parameter such as an epsilon rather than a weight: none of it may become 0."""

_MASK_SHARE = 0.25
"""A mask becomes this share of the format's largest value, so that scores can be added to it and the sum still stays
below half of the range, as is asked of every measured tensor."""


@dataclass
class Findings:
    """What examining all constants found."""

    pins: dict[str, str] = field(default_factory=dict)
    """Node id -> why it must stay fp32."""
    notes: list[str] = field(default_factory=list)
    """What rounding changes, and by how much."""


def value_array(value: Value, weights: Mapping[str, Array]) -> Array | None:
    """The values of a constant, None for one that is not to be had."""
    if value.node is not None:
        return constant_array(value.node.proto)
    if value.scope.parent is None and value.name in weights:
        return weights[value.name]
    tensor = next((tensor for tensor in value.scope.graph.initializer if tensor.name == value.name), None)
    return tensor_array(tensor) if tensor is not None else None


def examine(captured: Captured, weights: Mapping[str, Array]) -> Findings:
    """Look at every constant that some op could read in 16 bits."""
    fmt = parse_format(captured.fmt)
    readers: dict[Value, list[Node]] = {}
    for node in captured.tree.nodes():
        for index, value in enumerate(node.inputs):
            if value is not None and value.constant and value.floating and (node.id, index) in captured.reader:
                readers.setdefault(value, []).append(node)
    found = Findings()
    for value, nodes in readers.items():
        array = value_array(value, weights)
        if array is None or not array.size:
            continue
        _examine_one(captured, value, array, nodes, fmt, found)
    return found


def _examine_one(
    captured: Captured, value: Value, array: Array, nodes: list[Node], fmt: NumberFormat, found: Findings
) -> None:
    finite = array[np.isfinite(array)].astype(np.float64)
    if not finite.size:
        return
    rounded = round_to_nearest(finite, fmt)
    lost = ~np.isfinite(rounded)
    if lost.any():
        worst = finite[np.argmax(np.abs(finite))]
        reason = f"its constant {value.name!r} holds {worst:.4g}, beyond {fmt.name}'s largest, {fmt.max:.6g}"
        found.pins.update({node.id: reason for node in nodes})
        return
    flushed = (rounded == 0) & (finite != 0)
    change = float(np.linalg.norm(rounded - finite) / (np.linalg.norm(finite) or 1.0))
    if (flushed.any() and finite.size <= _SMALL) or change > _COARSE:
        worst = finite[np.argmax(np.abs(rounded - finite) / np.where(finite == 0, 1, np.abs(finite)))]
        becomes = float(round_to_nearest(np.array(worst), fmt))
        reason = f"its constant {value.name!r} holds {worst:.4g}, which {fmt.name} turns into {becomes:.4g}"
        found.pins.update({node.id: reason for node in nodes})
        if flushed.any():
            _guard_readers(captured, nodes, float(np.abs(finite[flushed]).max()), found)
    elif flushed.any():
        largest = float(np.abs(finite[flushed]).max())
        found.notes.append(
            f"{int(flushed.sum())} of {finite.size} values of {value.name!r} become 0 in {fmt.name}; the largest of "
            f"them is {largest:.3g}, {largest / float(np.abs(finite).max()):.1g} of its largest value"
        )


def _guard_readers(captured: Captured, nodes: list[Node], guard: float, found: Findings) -> None:
    """What was kept away from 0 by a tiny constant may not be read in a format in which it is 0."""
    guarded = {value for node in nodes for value in node.outputs if value is not None}
    for node in captured.tree.nodes():
        for value in node.inputs:
            if value in guarded and value is not None and node.id in captured.nodes:
                reason = f"it reads {value.name!r}, which only {guard:.3g} keeps away from 0"
                found.pins.setdefault(node.id, reason)


# ---- masks -----------------------------------------------------------------------------------------------------------

_HANDS_ON = frozenset({"mul", "where", "add", "maximum", "cat"})
_MOVES = frozenset({OpClass.VIEW, OpClass.COPY, OpClass.INDEX})


def bring_masks_within_range(tree: Tree, weights: Weights, fmt: str) -> list[str]:
    """Replace mask constants that ``fmt`` cannot hold, in the tree's own model, and say so.

    A constant counts as a mask where every way from it ends in a softmax, through additions, selections and products.
    """
    number_format = parse_format(fmt)
    limit = -_MASK_SHARE * number_format.max
    users = _users(tree)
    notes = []
    for value in [value for value in tree.values() if value.constant and value.floating]:
        if value.origin == "initializer" and value in tree.top.outputs:
            continue
        array = value_array(value, weights)
        if array is None or not array.size or not _holds_masks(array, number_format) or not _is_mask(value, users):
            continue
        lowest = float(array[np.isfinite(array)].min())
        _replace(
            value, np.where(np.isfinite(array) & (array < limit), np.float32(limit), array).astype(np.float32), weights
        )
        notes.append(f"mask constant {value.name!r}: {lowest:.4g} became {limit:.6g}; a softmax makes 0 of both")
    return notes


def _holds_masks(array: Array, fmt: NumberFormat) -> bool:
    """Whether it has huge negative values, and no other values that the format cannot hold."""
    finite = array[np.isfinite(array)]
    return bool(finite.size and finite.min() < -fmt.max / 2 and finite.max() <= fmt.max)


def _users(tree: Tree) -> dict[Value, list[tuple[Node, int] | None]]:
    """Who reads each value; None stands for a graph that ends with it."""
    users: dict[Value, list[tuple[Node, int] | None]] = {}
    for node in tree.nodes():
        for index, value in enumerate(node.inputs):
            if value is not None:
                users.setdefault(value, []).append((node, index))
    for scope in tree.scopes():
        for value in scope.outputs:
            if value is not None:
                users.setdefault(value, []).append(None)
    return users


def _is_mask(value: Value, users: Mapping[Value, list[tuple[Node, int] | None]]) -> bool:
    stack, seen = [value], {value}
    while stack:
        current = stack.pop()
        readers = users.get(current, [])
        if not readers:
            return current is not value
        for reader in readers:
            if reader is None:
                return False
            onward = _onward(*reader)
            if onward is None:
                return False
            for out in onward:
                if out not in seen:
                    seen.add(out)
                    stack.append(out)
    return True


def _onward(node: Node, index: int) -> list[Value] | None:
    """What a mask goes into next: nothing after a softmax; None where the node is no place for a mask."""
    entry = load_catalogue().lookup("onnx", node.op_type) if not node.domain else None
    if entry is None or node.bodies:
        return None
    if entry.name == "softmax" or (entry.op_class is OpClass.ATTENTION and index > 2):
        return []
    if entry.name in _HANDS_ON or (entry.op_class in _MOVES and index == 0):
        return [value for value in node.outputs if value is not None]
    return None


def _replace(value: Value, array: Array, weights: Weights) -> None:
    if value.node is not None:
        tensor = numpy_helper.from_array(array)
        del value.node.proto.attribute[:]
        value.node.proto.attribute.append(onnx.helper.make_attribute("value", tensor))
        return
    for tensor in value.scope.graph.initializer:
        if tensor.name == value.name:
            tensor.CopyFrom(numpy_helper.from_array(array, value.name))
            return
    weights.put(numpy_helper.from_array(array, value.name), lambda: array)
