"""One function graph added to another, node by node, in the formats that a policy or a plan decides.

The alternative, editing the serialised graph, leaves a function that TensorFlow cannot differentiate: gradients come
from nodes, not from text. Added anew, each node is registered, differentiable and placed like any other, automatic
control dependencies see it, and what a function calls can be looked into. Calls are replaced by what they call, so that
one cast serves all of a function's callers; loops and conditionals (in ``_control.py``) become loops and conditionals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

from castwise.policy import Rule

from ._in_place import Sum
from ._internals import add_node, control_inputs, in_order
from ._rules import Choice, lowered_attrs, written
from ._types import typing_of
from ._values import Value, constant_of, fits

__all__ = ["READS", "Body", "Rewriter", "joined", "scope_of"]

#: Nodes that look at a resource and do not change it.
READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})

Chooser = Callable[[Any, str, str], Choice]
"""Asked for each node: the node, its path, its layer."""
Hook = Callable[[str, Any], Any]
Update = Callable[[Any, list[Any]], Any]


class Rewriter:
    """What a rewriting follows.

    Args:
        choose: the choice for a node.
        hook: given the path and the first result of each node that computes, constant and variable, returns what takes
            its place.
        in_place: whether loops add to what they sum up in place.
        counters: variables that count how often the bodies of loops run, by the loops' paths.
        update: given a node that changes a variable and its inputs, says what of its change is passed on: numbers that
            loops and conditionals add up. See ``Body.updates``.
    """

    def __init__(
        self,
        choose: Chooser,
        hook: Hook | None = None,
        *,
        in_place: bool = True,
        counters: Mapping[str, Any] | None = None,
        update: Update | None = None,
    ) -> None:
        self.choose, self.hook = choose, hook
        self.in_place = in_place and hook is None
        self.counters, self.update = counters or {}, update
        self.updates: list[Any] = []
        from ._control import HANDLERS  # it needs this module's classes

        self.handlers = HANDLERS

    def for_xla(self) -> Rewriter:
        """The same for what XLA compiles."""
        return Rewriter(self.choose, self.hook, in_place=False, counters=self.counters)

    def run(self, graph: Any, tensors: Sequence[Any], count: int) -> list[Any]:
        """Add all of a function graph to the one that is being built; returns its results, dtypes as written.

        ``count`` is how many results the function has: a graph that was differentiated has more outputs behind them.
        """
        given = [value_of(t, old.dtype) for t, old in zip(tensors, graph.inputs, strict=True)]
        body = Body(self, graph, [self.hooked(f"input {at}", value) for at, value in enumerate(given)])
        results = body.run()
        self.updates = body.updates
        return [wide(value) for value in results[:count]]

    def hooked(self, path: str, value: Value) -> Value:
        """What takes a value's place."""
        if self.hook is None or value.dtype != tf.float32:
            return value
        return Value(self.hook(path, value.tensor), tf.float32)


def value_of(tensor: Any, dtype: Any) -> Value:
    """A tensor of the new graph in place of one that was written with ``dtype``."""
    return Value(tensor, tensor.dtype if dtype == tf.float32 else None)


def wide(value: Value) -> Any:
    """The tensor in the dtype it was written with."""
    return value.in_dtype(tf.float32)


def scope_of(name: str) -> str:
    """The layer that a node's name says it is in, with dots."""
    return name.rpartition("/")[0].replace("/", ".")


def joined(outer: str, inner: str) -> str:
    """The path of a layer inside another."""
    return f"{outer}.{inner}" if outer and inner else outer or inner


class Body:
    """One function graph, while it is added.

    Args:
        rewriter: what is followed.
        old: the graph.
        inputs: what its inputs are in the new graph.
        path: of the node that holds this graph, with a colon; part of the path of each node.
        layer: that the node which holds this graph is in.
        prefix: of new nodes' names.
        outer: for a loop's body, what holds the loop: variables that the loop does not change are read there.
        changed: of a loop's body, the resources that it changes.
        reads: variables' values that are known already, by the resource's value.
    """

    def __init__(
        self,
        rewriter: Rewriter,
        old: Any,
        inputs: Sequence[Value],
        *,
        path: str = "",
        layer: str = "",
        prefix: str = "",
        outer: Body | None = None,
        changed: frozenset[int] = frozenset(),
        reads: dict[int, tuple[Value, Value]] | None = None,
    ) -> None:
        self.rewriter, self.old = rewriter, old
        self.path, self.layer, self.prefix = path, layer, prefix
        self.graph = ops.get_default_graph()
        self.outer, self.changed = outer, changed
        self.reads = {} if reads is None else reads
        self.env = {tensor.name: value for tensor, value in zip(old.inputs, inputs, strict=True)}
        self.sums: Mapping[str, Sum] = {}  # of a loop's body, those that are made in place
        self.updates: list[Any] = []  # what ``Rewriter.update`` said, of calls, loops and conditionals in here too
        self.done: dict[str, list[Any]] = {}

    def run(self) -> list[Value]:
        """Add all nodes; returns what the graph's outputs are."""
        for op in in_order(self.old):
            handler = self.rewriter.handlers.get(op.type)
            try:
                if handler is not None:
                    handler(self, op)
                else:
                    self.plain(op)
            except (ValueError, TypeError, tf.errors.OpError) as error:
                _name(error, op, self.old)
                raise
        return [self.read(tensor) for tensor in self.old.outputs]

    # ---- values ----

    def read(self, tensor: Any) -> Value:
        """What a tensor of the old graph is now."""
        return self.env[tensor.name]

    def write(self, op: Any, values: Sequence[Value], done: Sequence[Any]) -> None:
        """Say what an old node's results are, and which new nodes have run where it has."""
        for tensor, value in zip(op.outputs, values, strict=True):
            self.env[tensor.name] = value
        self.done[op.name] = list(done)

    def after(self, op: Any) -> list[Any]:
        """New nodes that a node's control inputs are."""
        found = [new for old in control_inputs(op) for new in self.done.get(old.name, ())]
        return [new for new in found if new.graph is ops.get_default_graph()]

    def layer_of(self, op: Any) -> str:
        """The layer that a node is in."""
        return joined(self.layer, scope_of(op.name))

    # ---- nodes ----

    def plain(self, op: Any) -> None:
        """Add a node that holds no function of its own."""
        if op.type == "Const":
            self._constant(op)
            return
        if op.type == "ReadVariableOp":
            self._read_variable(op)
            return
        values = [self.read(tensor) for tensor in op.inputs]
        if op.type not in READS:
            for value in values:
                if value.tensor.dtype == tf.resource:
                    self.forget(value)
        path = self.path + op.name
        dtype = None
        if not written(op):
            choice = self.rewriter.choose(op, path, self.layer_of(op))
            dtype = self._narrow(op, choice, values)
        lowered = lowered_attrs(op, dtype) if dtype is not None else ()
        if op.type == "IdentityN":
            self._each(op, values)
        else:
            self._add(op, values, dtype, lowered, path)

    def _add(self, op: Any, values: Sequence[Value], dtype: Any, lowered: tuple[str, ...], path: str) -> None:
        places = typing_of(op).inputs if lowered else {}
        tensors = [
            value.in_dtype(dtype) if places.get(at) in lowered else wide(value) for at, value in enumerate(values)
        ]
        if self.rewriter.update is not None and op.type not in READS and any(t.dtype == tf.resource for t in tensors):
            found = self.rewriter.update(op, tensors)
            self.updates += [] if found is None else [found]
        new = add_node(
            op, tensors, name=self.prefix + op.name, after=self.after(op), types=dict.fromkeys(lowered, dtype)
        )
        results = [value_of(tensor, old.dtype) for tensor, old in zip(new.outputs, op.outputs, strict=True)]
        if results:
            results[0] = self.rewriter.hooked(path, results[0])
        self.write(op, results, [new])

    def _narrow(self, op: Any, choice: Choice, values: Sequence[Value]) -> Any:
        """The 16-bit dtype that a node's open inputs are brought to; None where it computes in float32."""
        if choice.rule is Rule.LOW:
            return choice.dtype
        if choice.rule is not Rule.WIDEST:
            return None
        open_ = [values[at] for at in typing_of(op).inputs]
        dtypes = {value.dtype for value in open_ if value.constant is None}
        if len(dtypes) != 1 or tf.float32 in dtypes:
            return None
        dtype = dtypes.pop()
        if choice.stores_constant:
            return dtype
        return dtype if all(value.constant is None or fits(value.constant, dtype) for value in open_) else None

    def _constant(self, op: Any) -> None:
        new = add_node(op, [], name=self.prefix + op.name, after=self.after(op))
        value = value_of(new.outputs[0], op.outputs[0].dtype)
        if value.dtype is not None:
            value.constant = constant_of(op)
            value = self.rewriter.hooked(self.path + op.name, value)
        self.write(op, [value], [new])

    def _each(self, op: Any, values: Sequence[Value]) -> None:
        """An IdentityN: each tensor passes as it is."""
        tensors = [value.tensor for value in values]
        types = {"T": [tensor.dtype for tensor in tensors]}
        new = add_node(op, tensors, name=self.prefix + op.name, after=self.after(op), types=types)
        results = [value_of(tensor, old.dtype) for tensor, old in zip(new.outputs, op.outputs, strict=True)]
        self.write(op, results, [new])

    # ---- variables ----

    def forget(self, resource: Value) -> None:
        """A variable may have changed: read it again."""
        self.reads.pop(id(resource), None)

    def _read_variable(self, op: Any) -> None:
        value = self.variable(op, self.read(op.inputs[0]), self.path + op.name)
        self.write(op, [value], [value.tensor.op])

    def variable(self, op: Any, resource: Value, path: str) -> Value:
        """A variable's value. It is read once while nothing changes it, and outside of loops that do not change it."""
        around = getattr(resource.tensor, "graph", None) is not self.graph
        if self.outer is not None and around and id(resource) not in self.changed:
            with self.outer.graph.as_default():
                return self.outer.variable(op, resource, path)
        found = self.reads.get(id(resource))
        if found is None:
            after = self.after(op) if op.graph is self.old else []
            new = add_node(op, [resource.tensor], name=self.prefix + op.name, after=after)
            value = self.rewriter.hooked(path, value_of(new.outputs[0], op.outputs[0].dtype))
            found = self.reads[id(resource)] = (resource, value)
        return found[1]


def _name(error: Exception, op: Any, graph: Any) -> None:
    note = f"castwise was adding node {op.name!r} ({op.type}) of function {graph.name!r}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
