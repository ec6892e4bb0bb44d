"""TensorLists: what a TensorArray is in a graph, and where loops keep what their gradients need.

All that is written to a list and read from it has one dtype, so a list is one step of the planner's graph that reads
what is written and gives what is read. That step stands where the list is read first; a list that is written after
that, or that goes where its other readers are not seen, keeps the dtype it was written with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from castwise.policy import Rule

from ._rules import Choice, lowered_attrs
from ._types import typing_of

if TYPE_CHECKING:
    from .capture import Captured

__all__ = ["LATE", "LEAVES", "LISTS", "PASSES", "TENSOR_LIST", "TensorList", "is_list", "low_lists", "places"]

TENSOR_LIST = "tensor list"
#: Nodes that make, write or read lists.
LISTS = frozenset(
    {
        "EmptyTensorList",
        "TensorListConcat",
        "TensorListConcatV2",
        "TensorListElementShape",
        "TensorListFromTensor",
        "TensorListGather",
        "TensorListGetItem",
        "TensorListLength",
        "TensorListPopBack",
        "TensorListPushBack",
        "TensorListReserve",
        "TensorListResize",
        "TensorListScatterIntoExistingList",
        "TensorListScatterV2",
        "TensorListSetItem",
        "TensorListSplit",
        "TensorListStack",
    }
)
#: Nodes that give a list with elements of the dtype of the one they read.
PASSES = frozenset({"ZerosLike", "AddN"})

LEAVES = "its elements go where their readers are not seen"
LATE = "it is read before all of it is written"


@dataclass(eq=False)
class TensorList:
    """A list, and all others that must have its dtype, while a graph is walked."""

    path: str
    """Of the node that makes it."""
    paths: list[str] = field(default_factory=list)
    """Of all nodes that make, write and read it."""
    written: list[str] = field(default_factory=list)
    """Tensors that are written to it."""
    step: str = ""
    """Its step in the planner's graph."""
    value: str = ""
    """The tensor that is read from it."""
    why: str = ""
    """Why it keeps the dtype it was written with."""


def low_lists(captured: Captured, choose: Callable[[Any, str, str], Choice]) -> Mapping[str, Any]:
    """The lists to which op-by-op rules write 16-bit numbers alone, by step, and the dtype: they are kept as they are.

    Args:
        captured: the graph.
        choose: the rules.
    """
    graph, steps = captured.graph, set(captured.lists.values())
    dtypes: dict[int, Any] = {}  # of tensors that are in 16 bits
    found = {}
    for op in graph.ops:
        floats = [t for t in op.inputs if graph.tensors[t].format == "fp32" and graph.tensors[t].kind != "constant"]
        given = {dtypes.get(tensor) for tensor in floats}
        same = given.pop() if len(given) == 1 else None
        if op.pin:
            continue
        if op.id in steps:
            dtype = found[op.id] = same
        elif op.id in captured.ops:
            dtype = _chosen(captured.ops[op.id], choose(captured.ops[op.id], op.id, op.layer), same)
        else:
            continue
        if dtype is not None:
            dtypes.update(dict.fromkeys(op.outputs, dtype))
    return {step: dtype for step, dtype in found.items() if dtype is not None}


def _chosen(op: Any, choice: Choice, given: Any) -> Any:
    dtype = choice.dtype if choice.rule is Rule.LOW else given if choice.rule is Rule.WIDEST else None
    if dtype is None or not lowered_attrs(op, dtype):
        return None
    attrs = lowered_attrs(op, dtype)
    return dtype if typing_of(op).outputs.get(0) in attrs else None


def is_list(tensor: Any) -> bool:
    """Whether a tensor may be a list."""
    return bool(tensor.dtype == tf.variant)


def places(op: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Which inputs of a node are written to a list, and which of its outputs are read from one."""
    typing = typing_of(op)
    return (
        [at for at, attr in typing.inputs.items() if attr == "element_dtype"],
        [at for at, attr in typing.outputs.items() if attr == "element_dtype"],
    )
