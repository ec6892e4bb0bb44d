"""How much a node computes: terms that a product sums, and floating-point operations."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["flops", "shape_of", "terms"]


def shape_of(tensor: Any) -> tuple[int, ...]:
    """A tensor's shape; what is not known until it runs counts as 1."""
    if tensor.shape.rank is None:
        return ()
    return tuple(1 if size is None else int(size) for size in tensor.shape)


def terms(op: Any) -> int | None:
    """How many terms a product sums into each element of its result; None of what is none."""
    shapes = [shape_of(tensor) for tensor in op.inputs]
    if op.type == "MatMul":
        return shapes[0][-2 if op.get_attr("transpose_a") else -1] if len(shapes[0]) == 2 else 1
    if op.type in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        return shapes[0][-2 if op.get_attr("adj_x") else -1] if len(shapes[0]) >= 2 else 1
    if op.type in ("Conv2D", "Conv3D"):
        return math.prod(shapes[1][:-1])
    if op.type == "DepthwiseConv2dNative":
        return math.prod(shapes[1][:2])
    if op.type == "Einsum":
        return _einsum_terms(op.get_attr("equation").decode(), shapes)
    if op.type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"):
        return max(1, math.prod(shapes[1][:-2]) * (shapes[1][-1] if shapes[1] else 1))
    if op.type in ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"):
        return max(1, math.prod(shapes[2][:-1]))
    return None


def _einsum_terms(equation: str, shapes: list[tuple[int, ...]]) -> int:
    given, _, result = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for labels, shape in zip(given.split(","), shapes, strict=False):
        before, dots, after = labels.partition("...")
        if dots:
            sizes.update(zip(reversed(after), reversed(shape), strict=False))
        sizes.update(zip(before, shape, strict=False))
    return max(1, math.prod(size for label, size in sizes.items() if label not in result))


def flops(op: Any) -> float:
    """Floating-point operations of a node; a multiply-add counts as two."""
    summed = terms(op)
    size = sum(math.prod(shape_of(tensor)) for tensor in op.outputs)
    return float(size * (2 * summed if summed else 1))
