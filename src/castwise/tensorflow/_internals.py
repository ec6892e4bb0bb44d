"""What TensorFlow has no public name for: the graphs behind functions, nodes, and how a node is added to a graph.

All of it is here, so that a new TensorFlow release is met in one file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager import record as tape
from tensorflow.python.framework import func_graph as func_graphs
from tensorflow.python.framework import kernels, ops
from tensorflow.python.ops import cond_v2, control_flow_util, control_flow_util_v2, resource_variable_ops, while_v2

from castwise.errors import PlanError

__all__ = [
    "BRANCHES",
    "CALLS",
    "LOOPS",
    "add_node",
    "branch_graphs",
    "called",
    "called_graph",
    "cond_op",
    "control_inputs",
    "copy_functions",
    "in_order",
    "is_compiled_by_xla",
    "is_traced_for_xla",
    "kernels_of",
    "loop_graphs",
    "not_recorded",
    "ops_of",
    "outside",
    "watch_variables",
    "while_op",
]

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
LOOPS = ("While", "StatelessWhile")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_V1_CONTROL = frozenset({"Switch", "Merge", "Enter", "Exit", "NextIteration", "RefSwitch", "RefMerge", "RefEnter"})
# What belongs to the graph that a node was in.
_NOT_COPIED = ("_class", "_output_shapes", "_num_original_outputs")


def ops_of(graph: Any) -> list[Any]:
    """The nodes of a graph, each after what it reads and waits for, else in the order in which they were made."""
    ordered: list[Any] = []
    state: dict[str, bool] = {}  # False while what it depends on is visited
    for root in graph.get_operations():
        stack = [root]
        while stack:
            op = stack[-1]
            if op.name in state:
                stack.pop()
                if not state[op.name]:
                    state[op.name] = True
                    ordered.append(op)
                continue
            state[op.name] = False
            if op.type in _V1_CONTROL:
                raise PlanError(
                    f"Node {op.name!r} of function {graph.name!r} is a {op.type}: control flow of TensorFlow 1, which "
                    "castwise.tensorflow does not rewrite. Build the model with "
                    "tf.compat.v1.enable_control_flow_v2()."
                )
            if any(tensor.dtype._is_ref_dtype for tensor in op.outputs):
                raise PlanError(
                    f"Node {op.name!r} of function {graph.name!r} is a {op.type}: a variable of TensorFlow 1, which a "
                    "function cannot hold. Save the model again with tf.compat.v1.enable_resource_variables()."
                )
            before = [t.op for t in op.inputs] + list(op.control_inputs)
            stack += [one for one in reversed(before) if one.name not in state and one.graph is graph]
    return ordered


def in_order(graph: Any) -> list[Any]:
    """The nodes of a graph that do something: all but its inputs."""
    given = {tensor.op.name for tensor in graph.inputs}
    return [op for op in ops_of(graph) if op.name not in given]


def control_inputs(op: Any) -> Sequence[Any]:
    """The nodes that must have run before."""
    found: Sequence[Any] = op.control_inputs
    return found


def called_graph(op: Any) -> Any:
    """The graph of the function that a call node calls."""
    return called(op).graph


def called(op: Any) -> Any:
    """The function that a call node calls."""
    return _function(op.graph, op.get_attr("f").name, op)


def _function(graph: Any, name: str, op: Any) -> Any:
    at = graph
    while at is not None:
        found = at._get_function(name)
        if found is not None:
            return found
        at = getattr(at, "outer_graph", None)
    raise PlanError(
        f"Node {op.name!r} of function {graph.name!r} calls {name!r}, which its graph does not have. Save the model "
        "again with the TensorFlow version that made it."
    )


def is_compiled_by_xla(op: Any) -> bool:
    """Whether a call's function is one that XLA must compile."""
    both = (op.node_def.attr, called(op).cached_definition.attr)
    return any("_XlaMustCompile" in attrs and attrs["_XlaMustCompile"].b for attrs in both)


def is_traced_for_xla() -> bool:
    """Whether what is being traced, or a function around it, is one that XLA must compile."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def loop_graphs(op: Any) -> tuple[Any, Any]:
    """The graphs of a loop's condition and body."""
    return while_v2._get_graph(op, "cond", "_cond_graph"), while_v2._get_graph(op, "body", "_body_graph")


def branch_graphs(op: Any) -> list[Any]:
    """The graphs of a conditional's branches; of an If, the one for true first."""
    shapes = [tensor.shape for tensor in op.inputs[1:]]
    if op.type.endswith("If"):
        kept: list[Any] = [getattr(op, "_true_graph", None), getattr(op, "_false_graph", None)]
        names = [op.get_attr("then_branch").name, op.get_attr("else_branch").name]
    else:
        names = [branch.name for branch in op.get_attr("branches")]
        kept = [None] * len(names)
    return [
        graph if graph is not None else control_flow_util_v2.get_func_graph(op, shapes, name)
        for graph, name in zip(kept, names, strict=True)
    ]


def add_node(
    op: Any,
    inputs: Sequence[Any],
    *,
    name: str,
    after: Sequence[Any] = (),
    types: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> Any:
    """Add a node like ``op`` to the graph that is being built.

    Args:
        op: the node that it is to be like, of another graph.
        inputs: its tensors.
        name: its name, made unique.
        after: nodes that must have run before.
        types: attributes that hold a dtype, where they differ from those of ``op``.
        attrs: other attributes that differ, as ``AttrValue``.
    """
    graph = ops.get_default_graph()
    every = {key: value for key, value in op.node_def.attr.items() if key not in _NOT_COPIED}
    for key, dtype in (types or {}).items():
        every[key] = _attr(dtype)
    every.update(attrs or {})
    copy_functions(op, every, graph)
    with graph.control_dependencies(list(after)), graph.device(op.device):
        return graph._create_op_internal(op.type, list(inputs), name=name, attrs=every, op_def=op.op_def)


def _attr(value: Any) -> Any:
    from tensorflow.core.framework import attr_value_pb2

    if isinstance(value, list):
        listed = attr_value_pb2.AttrValue.ListValue(type=[dtype.as_datatype_enum for dtype in value])
        return attr_value_pb2.AttrValue(list=listed)
    return attr_value_pb2.AttrValue(type=value.as_datatype_enum)


def copy_functions(op: Any, attrs: Mapping[str, Any], graph: Any) -> None:
    """Make functions that a node's attributes name known to the graph that the node is added to."""
    for value in attrs.values():
        for func in [value.func] if value.HasField("func") else value.list.func:
            found = op.graph._get_function(func.name) if func.name else None
            if found is not None:
                graph._add_function_recursive(found)


def while_op(
    name: str, cond: Any, body: Any, loop_vars: list[Any], shapes: list[Any], parallel_iterations: int
) -> list[Any]:
    """Add a loop whose first two variables are its counter and the most iterations; returns what they end as.

    The tensors of the graph around that ``cond`` and ``body`` use become further variables, which never change.
    """
    outer = ops.get_default_graph()
    signature = [tf.TensorSpec(shape, var.dtype) for var, shape in zip(loop_vars, shapes, strict=True)]
    adds = outer._add_control_dependencies
    with ops.name_scope(name) as scope:
        with ops.name_scope(None):
            cond_name = control_flow_util_v2.unique_fn_name(scope, "cond")
            body_name = control_flow_util_v2.unique_fn_name(scope, "body")

        def with_handles(function: Any) -> Any:
            def build(*args: Any) -> Any:
                while_v2._copy_handle_data(loop_vars, args)
                return function(*args)

            return build

        cond_graph = func_graphs.func_graph_from_py_func(
            cond_name,
            with_handles(cond),
            [],
            {},
            signature=signature,
            func_graph=control_flow_util_v2.WhileCondFuncGraph(cond_name, collections=outer._collections),
            add_control_dependencies=adds,
        )

        def build_body(*args: Any) -> Any:
            for tensor in cond_graph.external_captures:
                ops.get_default_graph().capture(tensor)
            return with_handles(body)(*args)

        body_graph = func_graphs.func_graph_from_py_func(
            body_name,
            build_body,
            [],
            {},
            signature=signature,
            func_graph=control_flow_util_v2.WhileBodyFuncGraph(body_name, collections=outer._collections),
            add_control_dependencies=adds,
        )
        captured = list(body_graph.external_captures)
        body_graph.outputs.extend(body_graph.internal_captures)
        with cond_graph.as_default():
            known = len(cond_graph.external_captures)
            while_v2._duplicate_body_captures_in_cond(cond_graph, captured[known:])
        every = loop_vars + captured
        out_shapes = shapes + [tensor.shape for tensor in body_graph.outputs[len(shapes) :]]
        outputs = while_v2._build_while_op(
            every,
            cond_graph,
            body_graph,
            output_shapes=out_shapes,
            parallel_iterations=parallel_iterations,
            name=scope,
            num_original_outputs=len(body_graph.outputs),
        )
    return list(outputs[: len(loop_vars)])


def cond_op(name: str, pred: Any, branches: Sequence[Any]) -> list[Any]:
    """Add a conditional of functions without arguments; ``branches`` begin with the one for true."""
    if len(branches) == 2 and pred.dtype == tf.bool:
        return _listed(cond_v2.cond_v2(pred, branches[0], branches[1], name=name))
    return _listed(cond_v2.indexed_case(pred, list(branches), name=name))


def _listed(found: Any) -> list[Any]:
    if found is None or isinstance(found, tf.Operation):
        return []
    return list(found) if isinstance(found, (list, tuple)) else [found]


def kernels_of(op_type: str) -> Any:
    """The kernels of a kind of node that this TensorFlow has."""
    return kernels.get_registered_kernels_for_op(op_type).kernel


@contextlib.contextmanager
def not_recorded() -> Iterator[None]:
    """What is added meanwhile is not recorded by gradient tapes: they see the call of the finished function."""
    with tape.stop_recording():
        yield


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Out of all functions that are being traced, so that one traced now is a function of its own.

    ``tf.init_scope`` does that too, and stops gradient tapes besides: those inside the function would record nothing.
    """
    if context.executing_eagerly():
        yield
        return
    with ops.control_dependencies(None), context.eager_mode():
        yield


def watch_variables(variables: Sequence[Any]) -> None:
    """Tell the graph that is being built, and tapes, that these variables are read in it."""
    for variable in variables:
        resource_variable_ops.variable_accessed(variable)
