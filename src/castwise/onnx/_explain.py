"""Small questions about a plan and about messages, asked while a conversion goes on."""

from __future__ import annotations

from castwise.catalogue import OpClass, load_catalogue
from castwise.onnx._source import Weights
from castwise.plan import Plan

__all__ = ["copied", "is_product", "is_random", "named_in", "reason"]


def named_in(message: str, plan: Plan) -> str | None:
    """The op that an error message names, where the plan lowers one of that name."""
    lowered = [op.id for op, label in zip(plan.problem.graph.ops, plan.labels, strict=True) if label]
    return next((op for op in sorted(lowered, key=len, reverse=True) if _names(message, op)), None)


def _names(message: str, op: str) -> bool:
    return any(spelling in message for spelling in (f"'{op}'", f"({op})", f"node name: {op})", f"Name: {op} "))


def reason(plan: Plan, op: str) -> str:
    """Why a plan computes an op in fp32."""
    position = plan.problem.graph.positions[op]
    pin = plan.problem.pins.get(position)
    if pin is not None:
        return pin.reason
    if plan.lam > 0:
        return "its rounding would cost more of the tolerance than that of the ops that were lowered"
    return "lowering it would take more casts than it is worth"


def is_product(op_type: str) -> bool:
    """Whether an operator of ONNX is a matrix product or a convolution, in the catalogue's sense."""
    entry = load_catalogue().lookup("onnx", op_type)
    return entry is not None and entry.product


def is_random(op_type: str) -> bool:
    """Whether an operator of ONNX may draw numbers, so that two runs of it differ."""
    entry = load_catalogue().lookup("onnx", op_type)
    return entry is not None and (entry.op_class is OpClass.RANDOM or entry.name == "dropout")


def copied(weights: Weights) -> Weights:
    """A store of its own with the same arrays, none of which is read or copied."""
    copy = Weights()
    copy.update(weights)
    return copy
