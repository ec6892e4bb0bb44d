"""Loops over a dataset inside a function: ``for batch in dataset``, and ``dataset.reduce``.

TensorFlow makes them nodes that hold a function for one step, which takes what the loop carries, an element, and what
the step reads from around it. The step is rewritten inside; its signature stays, so what the loop carries keeps its
dtypes. Other functions that datasets hold, such as those of ``map``, prepare data on the CPU: they stay as written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph as func_graphs
from tensorflow.python.framework import ops
from tensorflow.python.ops import handle_data_util

from ._internals import add_node, called, called_graph
from ._replay import Body, joined, scope_of, value_of, wide

__all__ = ["DATASET_LOOPS", "dataset_loop", "step_graph", "step_inputs"]

DATASET_LOOPS = ("ReduceDataset", "ScanDataset")
_NOT_COPIED = ("_input_shapes", "_construction_context")
_numbers = itertools.count()


def step_graph(op: Any) -> Any:
    """The graph of one step of a loop over a dataset; None where the node is not one."""
    if op.type == "ScanDataset" and op.get_attr("use_default_device"):
        return None  # ``dataset.scan``, which prepares data on the CPU; loops of autograph say otherwise
    return called_graph(op) if op.type in DATASET_LOOPS else None


def step_inputs(op: Any, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Of a node's inputs, those that the loop begins with and those that each step reads."""
    carried = len(op.get_attr("Tstate"))
    return list(given[1 : 1 + carried]), list(given[1 + carried :])


def dataset_loop(body: Body, op: Any) -> None:
    """Add a loop over a dataset, rewritten inside. Where numbers inside are asked for, it is added as it is."""
    old = step_graph(op)
    if old is None or body.rewriter.hook is not None or body.rewriter.update is not None:
        body.plain(op)
        return
    values = [body.read(tensor) for tensor in op.inputs]
    for value in values:
        if value.tensor.dtype == tf.resource:
            body.forget(value)
    graph = _rewritten(body, op, old)
    outer = ops.get_default_graph()
    attrs = {key: value for key, value in called(op).cached_definition.attr.items() if key not in _NOT_COPIED}
    func = atomic_function.from_func_graph(graph.name, graph, attrs)
    outer._add_function_recursive(func)
    named = attr_value_pb2.AttrValue(func=attr_value_pb2.NameAttrList(name=func.name))
    inputs = [wide(value) for value in values]
    new = add_node(op, inputs, name=body.prefix + op.name, after=body.after(op), attrs={"f": named})
    body.write(op, [value_of(t, was.dtype) for t, was in zip(new.outputs, op.outputs, strict=True)], [new])


def _rewritten(body: Body, op: Any, old: Any) -> Any:
    """The step's graph, rewritten. It takes and returns what it did."""
    path, layer = f"{body.path}{op.name}:step:", joined(body.layer, scope_of(op.name))

    def step(*args: Any) -> list[Any]:
        for given, was in zip(args, old.inputs, strict=True):
            if was.dtype in (tf.resource, tf.variant):
                handle_data_util.copy_handle_data(was, given)
        inputs = [value_of(given, was.dtype) for given, was in zip(args, old.inputs, strict=True)]
        return [wide(value) for value in Body(body.rewriter, old, inputs, path=path, layer=layer).run()]

    name = f"castwise_step_{next(_numbers)}"
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in old.inputs]
    return func_graphs.func_graph_from_py_func(name, tf.autograph.experimental.do_not_convert(step), specs, {})
