"""Nodes that hold functions: calls, loops, conditionals, and gradients of the user's own.

What a loop carries keeps its dtype, since it would be rounded anew in each iteration. What a loop only reads is cast
before it begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework import func_graph as func_graphs
from tensorflow.python.framework import ops

from castwise.errors import PlanError

from ._datasets import DATASET_LOOPS, dataset_loop
from ._in_place import add_slice, sums_of
from ._internals import (
    BRANCHES,
    CALLS,
    LOOPS,
    add_node,
    branch_graphs,
    called_graph,
    cond_op,
    in_order,
    is_compiled_by_xla,
    loop_graphs,
    while_op,
)
from ._lists import LISTS, TENSOR_LIST, places
from ._replay import READS, Body, joined, scope_of, value_of, wide
from ._values import Value

__all__ = ["HANDLERS", "changed_inputs", "unchanged"]

_numbers = itertools.count()


def unchanged(body: Any) -> list[bool]:
    """[loop variables] whether a loop's body returns the variable as it got it."""
    kept = []
    for given, returned in zip(body.inputs, body.outputs, strict=True):
        tensor = returned
        while tensor.op.type == "Identity" and not tensor.op.control_inputs:
            tensor = tensor.op.inputs[0]
        kept.append(tensor.name == given.name)
    return kept


def changed_inputs(graph: Any) -> set[int]:
    """Which of a graph's inputs are resources that it may change."""
    place = {tensor.name: at for at, tensor in enumerate(graph.inputs)}
    found: set[int] = set()
    for op in in_order(graph):
        if op.type in READS:
            continue
        given = [(at, place[t.name]) for at, t in enumerate(op.inputs) if t.dtype == tf.resource and t.name in place]
        if not given:
            continue
        if op.type in CALLS:
            inner = changed_inputs(called_graph(op))
            found |= {outer for at, outer in given if at in inner}
        elif op.type in LOOPS:
            inner = set().union(*map(changed_inputs, loop_graphs(op)))
            found |= {outer for at, outer in given if at in inner}
        elif op.type in BRANCHES:
            inner = set().union(*map(changed_inputs, branch_graphs(op)))
            found |= {outer for at, outer in given if at - 1 in inner}
        else:
            found |= {outer for _, outer in given}
    return found


def _call(body: Body, op: Any) -> None:
    values = [body.read(tensor) for tensor in op.inputs]
    graph = called_graph(op)
    layer = joined(body.layer, scope_of(op.name))
    path = f"{body.path}{op.name}:"
    if is_compiled_by_xla(op):
        _compiled_call(body, op, graph, values, path, layer)
        return
    with ops.get_default_graph().control_dependencies(body.after(op)):
        inner = Body(
            body.rewriter,
            graph,
            values,
            prefix=f"{body.prefix}{op.name}/",
            outer=body.outer,
            changed=body.changed,
            reads=body.reads,
            path=path,
            layer=layer,
        )
        results = inner.run()[: len(op.outputs)]  # one that was differentiated has more than the call takes
    body.updates += inner.updates
    ran = [new for old in graph.control_outputs for new in inner.done.get(old.name, ())]
    ran += [value.tensor.op for value in results if not isinstance(value.tensor, ops.EagerTensor)]
    body.write(op, results, ran)


def _compiled_call(body: Body, op: Any, graph: Any, values: Sequence[Value], path: str, layer: str) -> None:
    """A function that XLA compiles stays one: it is rewritten inside."""
    for at in changed_inputs(graph):
        body.forget(values[at])

    def compiled() -> Any:
        rewriter = body.rewriter.for_xla()
        inner = Body(rewriter, graph, [value.inside() for value in values], path=path, layer=layer)
        return [wide(value) for value in inner.run()[: len(op.outputs)]]

    with ops.get_default_graph().control_dependencies(body.after(op)):
        results = tf.function(compiled, jit_compile=True, autograph=False)()
    ran = [results[0].op] if results else []
    body.write(op, [value_of(t, old.dtype) for t, old in zip(results, op.outputs, strict=True)], ran)


def _loop(body: Body, op: Any) -> None:
    cond, inner = loop_graphs(op)
    values = [body.read(tensor) for tensor in op.inputs]
    same = unchanged(inner)
    # Its counter and the most iterations stand first: where TensorFlow looks for them when it differentiates a loop.
    carried = [at for at, kept in enumerate(same) if at < 2 or not kept]
    changes = changed_inputs(inner) | changed_inputs(cond)
    for at in changes:
        body.forget(values[at])
    changed = frozenset(id(values[at]) for at in changes)
    layer = joined(body.layer, scope_of(op.name))

    def build(graph: Any, name: str) -> Callable[..., tuple[list[Value], list[Any]]]:
        def run(*args: Any) -> tuple[list[Value], list[Any]]:
            given = dict(zip(carried, args, strict=False))  # updates are behind them
            inputs = [
                _hooked(body, op, f"in{at}", value_of(given[at], old.dtype), graph is inner)
                if at in given
                else values[at]
                for at, old in enumerate(graph.inputs)
            ]
            path = f"{body.path}{op.name}:{name}:"
            added = Body(body.rewriter, graph, inputs, path=path, layer=layer, outer=body, changed=changed)
            if graph is inner and body.rewriter.in_place:
                added.sums = sums_of(inner)
            counter = body.rewriter.counters.get(body.path + op.name)
            if graph is inner and counter is not None:
                counter.assign_add(1)
            return added.run(), added.updates

        return run

    run_cond, run_body = build(cond, "cond"), build(inner, "body")
    priced = [tf.zeros(2)] if changes and body.rewriter.update is not None else []

    def step(*args: Any) -> list[Any]:
        values, updates = run_body(*args)
        return [wide(values[at]) for at in carried] + [tf.add_n([args[-1], *updates]) for _ in priced]

    shapes = [tf.TensorShape(shape) for shape in op.get_attr("output_shapes")] or [t.shape for t in op.inputs]
    with ops.get_default_graph().control_dependencies(body.after(op)), tf.device(op.device):
        results = while_op(
            body.prefix + op.name,
            lambda *args: wide(run_cond(*args)[0][0]),
            step,
            [wide(values[at]) for at in carried] + priced,
            [shapes[at] for at in carried] + [tf.TensorShape(2) for _ in priced],
            op.get_attr("parallel_iterations"),
        )
    body.updates += results[len(carried) :]
    ended = dict(zip(carried, results, strict=False))
    outs = [
        _hooked(body, op, f"out{at}", value_of(ended[at], old.dtype)) if at in ended else values[at]
        for at, old in enumerate(op.outputs)
    ]
    body.write(op, outs, [results[0].op])


def _hooked(body: Body, op: Any, name: str, value: Value, hooked: bool = True) -> Value:
    """What takes the place of a value that a loop or a conditional passes on."""
    return body.rewriter.hooked(f"{body.path}{op.name}:{name}", value) if hooked else value


def _branches(body: Body, op: Any) -> None:
    values = [body.read(tensor) for tensor in op.inputs]
    layer = joined(body.layer, scope_of(op.name))
    graphs = branch_graphs(op)
    changes = set().union(*map(changed_inputs, graphs))
    for at in changes:
        body.forget(values[at + 1])
    priced = bool(changes) and body.rewriter.update is not None

    def build(graph: Any, number: int) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            path = f"{body.path}{op.name}:{number}:"
            inputs = [value.inside() for value in values[1:]]
            added = Body(body.rewriter, graph, inputs, path=path, layer=layer)
            found = [wide(value) for value in added.run()]
            return found + ([tf.add_n([tf.zeros(2), *added.updates])] if priced else [])

        return run

    with ops.get_default_graph().control_dependencies(body.after(op)), tf.device(op.device):
        results = cond_op(
            body.prefix + op.name, values[0].tensor, [build(graph, number) for number, graph in enumerate(graphs)]
        )
    if priced:
        body.updates.append(results[-1])
    outs = [
        _hooked(body, op, f"out{at}", value_of(tensor, old.dtype))
        for at, (tensor, old) in enumerate(zip(results, op.outputs, strict=False))
    ]
    body.write(op, outs, [results[0].op] if results else [])


def _identity_n(body: Body, op: Any) -> None:
    """An IdentityN. One that carries a gradient of the user's own gets that gradient, rewritten like all else."""
    name = op.node_def.attr["_gradient_op_type"].s.decode() if "_gradient_op_type" in op.node_def.attr else ""
    try:
        registered = ops.gradient_registry.lookup(name) if name else None
    except LookupError:
        registered = None
    if registered is None:
        body.plain(op)
        return
    new_name = f"CastwiseGradient-{next(_numbers)}"

    tensors = [body.read(tensor).tensor for tensor in op.inputs]
    dtypes = [tensor.dtype for tensor in tensors]

    def gradient(_: Any, *grads: Any) -> Any:  # when a model is saved, it is asked without a node
        return _own_gradient(body, op, registered, dtypes, grads)

    ops.RegisterGradient(new_name)(tf.autograph.experimental.do_not_convert(gradient))
    new = add_node(
        op,
        tensors,
        name=body.prefix + op.name,
        after=body.after(op),
        types={"T": dtypes},
        attrs={"_gradient_op_type": attr_value_pb2.AttrValue(s=new_name.encode())},
    )
    body.write(op, [value_of(t, old.dtype) for t, old in zip(new.outputs, op.outputs, strict=True)], [new])


def _own_gradient(body: Body, op: Any, registered: Any, dtypes: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    given = [at for at, grad in enumerate(grads) if grad is not None]

    def of(*some: Any) -> Any:
        every = dict(zip(given, some, strict=True))
        return [
            None if one is None else tf.convert_to_tensor(one)
            for one in registered(op, *map(every.get, range(len(grads))))
        ]

    specs = [tf.TensorSpec(op.outputs[at].shape, op.outputs[at].dtype) for at in given]
    with op.graph.as_default():
        graph = func_graphs.func_graph_from_py_func("gradient", of, specs, {})
    inputs = [value_of(grads[at], op.outputs[at].dtype) for at in given]
    for tensor in graph.external_captures:
        if isinstance(tensor, ops.EagerTensor):
            inputs.append(value_of(tensor, tensor.dtype))
        elif tensor.graph is op.graph:
            inputs.append(body.read(tensor))
        else:
            raise PlanError(
                f"The gradient of node {op.name!r} of function {op.graph.name!r} reads {tensor.name!r}, which is of "
                "another function. Compute what it needs inside the function with the custom gradient."
            )
    results = iter(
        Body(body.rewriter, graph, [value.inside() for value in inputs], path=f"{body.path}{op.name}:grad:").run()
    )
    found = [None if one is None else next(results) for one in tf.nest.flatten(graph.structured_outputs)]
    return [
        None if value is None else value.in_dtype(dtype) if value.dtype is not None else value.tensor
        for value, dtype in zip(found, dtypes, strict=True)
    ]


def _slice_gradient(body: Body, op: Any) -> None:
    """A gradient of a slice. One that is added in place is added where the sum is."""
    if any(one.name == op.name for found in body.sums.values() for one in found.slices):
        body.done[op.name] = body.after(op)
    else:
        body.plain(op)


def _add_n(body: Body, op: Any) -> None:
    found = body.sums.get(op.name)
    if found is None:
        body.plain(op)
        return
    with ops.get_default_graph().control_dependencies(body.after(op)):
        total = wide(body.read(op.inputs[found.base]))
        for one in found.slices:
            _, *place, gradient = (wide(body.read(tensor)) for tensor in one.inputs)
            total = add_slice(one, total, place, gradient, body.prefix + op.name)
    body.write(op, [value_of(total, op.outputs[0].dtype)], [total.op])


def _list_node(body: Body, op: Any) -> None:
    """A node that makes, writes or reads a TensorList."""
    choice = body.rewriter.choose(op, body.path + op.name, body.layer_of(op))
    low = choice.dtype if choice.op == TENSOR_LIST else None
    writes, _ = places(op)
    values = [body.read(tensor) for tensor in op.inputs]
    tensors = [value.in_dtype(low) if low and at in writes else wide(value) for at, value in enumerate(values)]
    types = {"element_dtype": low} if low and "element_dtype" in op.node_def.attr else None
    new = add_node(op, tensors, name=body.prefix + op.name, after=body.after(op), types=types)
    body.write(op, [value_of(t, old.dtype) for t, old in zip(new.outputs, op.outputs, strict=True)], [new])


HANDLERS: dict[str, Callable[[Body, Any], None]] = {
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(LOOPS, _loop),
    **dict.fromkeys(BRANCHES, _branches),
    **dict.fromkeys(DATASET_LOOPS, dataset_loop),
    "AddN": _add_n,
    "IdentityN": _identity_n,
    "StridedSliceGrad": _slice_gradient,
    **dict.fromkeys(LISTS, _list_node),
}
