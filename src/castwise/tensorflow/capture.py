"""A function's graph, with all that it calls, as the planner's graph.

An operation is named by the names of the nodes that lead to it, with colons between them (``while:body:MatMul``), which
is also how rewritings and reports name it. Calls are looked into, each by itself. A loop's body is in the graph once:
what it computes counts for all iterations, and what it carries stays wide, as it would be rounded in each. The branches
of a conditional are all there, and what they return stays wide. Variables and whatever else holds state keep the dtypes
they were written with; a TensorList is one step (``_lists.py``).

Two more things stay wide that a list of ops would lower. A product whose result goes into a loss: TensorFlow has no
product of 16-bit tensors with a 32-bit result, and logits that are rounded move the loss by as much as they are large.
And the operation that makes what a loop carries, since its rounding comes back in every iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from castwise.catalogue import OpClass, Rule, default_rule
from castwise.graph import Graph, Kind
from castwise.policy import Policy

from ._datasets import step_graph
from ._rules import Choice, choice_for
from ._walk import CARRIED, Walker

__all__ = ["Captured", "capture"]

_PASSES_LOGITS = frozenset({OpClass.ELEMENTWISE, OpClass.VIEW, OpClass.COPY})
_MOST_STEPS_TO_A_LOSS = 4  # a bias, a temperature, a mask and a scale
_TO_A_LOSS = "its result goes into a loss, and TensorFlow's 16-bit products round it"


@dataclass(frozen=True)
class Captured:
    """A graph, and what the front end needs to come back from it."""

    graph: Graph
    ops: Mapping[str, Any]
    """Nodes by path."""
    times: Mapping[str, int]
    """How often each node runs in one call."""
    wide: Mapping[str, str]
    """Nodes that stay wide although their kind need not, and why, by path."""
    written: Mapping[str, int]
    """Path of a node -> the tensor that its first result is."""
    inputs: Mapping[int, int]
    """Position among the graph's inputs -> tensor."""
    lists: Mapping[str, str]
    """Path of a node that makes, writes or reads a TensorList -> the list's step in the graph."""
    loops: tuple[str, ...]
    """Paths of the loops."""
    steps: Mapping[str, Captured]
    """Each step of a loop over a dataset, by the path of what is in it. Plans leave these as written: TensorFlow has no
    gradient of such a loop, so what rounding in it would do is not known."""
    structure: str
    """A digest of the nodes that the graph holds and of their dtypes, without sizes and names."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Layer paths of all nodes, those in loops over datasets too."""
        inner = [layer for step in self.steps.values() for layer in step.layers]
        return tuple(dict.fromkeys([*self.graph.layers, *inner]))

    def adjusted(self, path: str, choice: Choice, policy: Policy) -> Choice:
        """The choice for a node, once it is seen where its result goes."""
        for start, step in self.steps.items():
            if path.startswith(start):
                return step.adjusted(path[len(start) :], choice, policy)
        reason = self.wide.get(path)
        if reason is None or choice.rule in (Rule.HIGH, None):
            return choice
        usual = choice_for(Policy(format=policy.format), self.ops[path].type, "")
        if choice.rule is not usual.rule or choice.reason != usual.reason:
            return choice  # the user's own word
        return replace(choice, rule=Rule.HIGH, dtype=None, reason=reason)


def capture(
    graph: Any,
    results: int,
    *,
    trips: Mapping[str, int] | int = 1,
    training: bool = False,
    fused: bool = False,
    carried: int = 0,
    name: str = "",
) -> Captured:
    """The planner's graph of a function graph.

    Args:
        graph: the function's.
        results: how many of its outputs are the function's results.
        trips: how often the bodies of loops run in one call, by the loops' paths; or how often each loop repeats.
        training: whether the function will be differentiated.
        fused: whether XLA compiles it.
        carried: how many of its results come back in the next call, as the function is one step of a loop.
        name: of the function.
    """
    walker = Walker(trips, name or graph.name, training, fused)
    captured = {tensor.name for tensor in graph.inputs[len(graph.inputs) - len(graph.captures) :]}
    names = {
        tensor.name: walker.tensor(tensor, Kind.CONSTANT if tensor.name in captured else Kind.INPUT)
        for tensor in graph.inputs
    }
    given = list(names.values())
    outs = walker.graph(graph, names, "", "", 1)
    for number, (out, tensor) in enumerate(zip(outs[:results], graph.outputs[:results], strict=True)):
        if tensor.dtype == tf.float32:
            pin = CARRIED if number < carried else "what the caller gets keeps its dtype"
            walker.passed(f"result{number}", [out], tensor, pin, kind=Kind.OUTPUT)
    walker.leave(outs[:results])
    built = walker.build.build(training=training)
    wide = _wide(built) | {one.step: one.why for one in walker.every_list if one.why}
    ops = tuple(replace(op, pin=wide[op.id]) if op.id in wide and not op.pin else op for op in built.ops)
    return Captured(
        replace(built, ops=ops),
        walker.ops,
        walker.times,
        wide,
        {path: built.tensor(found) for path, found in walker.written.items()},
        {at: built.tensor(found) for at, found in enumerate(given)},
        {path: one.step for one in walker.every_list for path in one.paths},
        tuple(walker.loops),
        {f"{path}:step:": _step(op, name) for path, op in walker.steps.items()},
        walker.digest.hexdigest(),
    )


def _step(op: Any, name: str) -> Captured:
    graph = step_graph(op)
    return capture(graph, len(graph.outputs), carried=len(op.get_attr("Tstate")), name=name)


def _wide(graph: Graph) -> dict[str, str]:
    """Ops that stay wide because of where their results go."""
    from castwise.catalogue import load_catalogue

    entries = load_catalogue().entries
    readers: dict[int, list[int]] = {}
    for position, op in enumerate(graph.ops):
        for tensor in set(op.inputs):
            readers.setdefault(tensor, []).append(position)

    def reaches_loss(position: int, steps: int) -> bool:
        for tensor in graph.ops[position].outputs:
            for reader in readers.get(tensor, ()):
                entry = entries.get(graph.ops[reader].name)
                if entry is None:
                    continue
                # log_softmax is the one exponential that is a loss but for a gather.
                if entry.op_class is OpClass.LOSS or entry.name == "log_softmax":
                    return True
                if steps and entry.op_class in _PASSES_LOGITS and reaches_loss(reader, steps - 1):
                    return True
        return False

    found: dict[str, str] = {}
    for position, op in enumerate(graph.ops):
        entry = entries.get(op.name)
        if entry is not None and entry.product and reaches_loss(position, _MOST_STEPS_TO_A_LOSS):
            found[op.id] = _TO_A_LOSS
    writer = {tensor: op for op in graph.ops for tensor in op.outputs}
    for op in graph.ops:
        if op.pin == CARRIED:
            made = writer.get(op.inputs[0])
            entry = entries.get(made.name) if made is not None else None
            if made is not None and entry is not None and default_rule(entry, "bf16") is Rule.WIDEST:
                found.setdefault(made.id, CARRIED)
    return found
