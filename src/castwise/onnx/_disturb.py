"""The model with rounding errors added to its tensors, a dial for each.

The errors are those of fp32's own run. They are computed once, kept, and fed to a copy of the model in which every
tensor that can be disturbed is a sum of itself and its error, so that a run costs little more than a run of the model.
Keeping them takes the memory of one sample's activations; a model with more weights than :data:`MOST_BYTES` is run
beside its twin instead (``_unmix``), which computes all errors again in each run and keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper

from castwise._graph_index import Floats
from castwise.onnx._explain import is_random
from castwise.onnx._run import Runner
from castwise.onnx._samples import Array, Feed
from castwise.onnx._scopes import Tree, Value, fresh_name
from castwise.onnx._source import Weights
from castwise.onnx._unmix import can_twin, difference

__all__ = ["MOST_BYTES", "can_disturb", "disturb"]

_FLOAT = onnx.TensorProto.FLOAT
MOST_BYTES = 1 << 30
"""Of weights whose errors are kept."""


def can_disturb(tree: Tree, wanted: Collection[Value], weights: Weights) -> bool:
    """Whether errors can be computed once for all runs: not where a branch may be taken or a number be drawn anew."""
    if any(value.scope.parent is not None for value in wanted) or not can_twin(tree, wanted):
        return False
    stored = sum(weights.size(value.name) for value in wanted if value.name in weights)
    return stored <= MOST_BYTES and not any(node.op_type == "If" or is_random(node.op_type) for node in tree.nodes())


def disturb(
    model: onnx.ModelProto, wanted: Collection[Value], elem: int, weights: Mapping[str, Array], feed: Feed
) -> tuple[list[Value], Callable[[Floats], Floats]]:
    """The tensors of ``wanted`` that rounding to the ONNX type ``elem`` changes on this feed, and a function from dials
    (how much of each one's error is added) to the difference of the outputs.

    ``model`` is an fp32 model whose node names are unique. Raises RuntimeError where it does not run.
    """
    reference = Runner(_with_errors(model, wanted, elem), weights)
    results = reference.run(feed)
    outputs = len(model.graph.output)
    errors: dict[Value, Array] = {}
    for value, error in zip(wanted, results[outputs:], strict=True):
        found = np.where(np.isfinite(error), error, np.float32(0))  # infinities are masks: rounding leaves them alone
        if found.any():
            errors[value] = found
    results = results[:outputs]
    changed = list(errors)
    work = _Disturbed(model, changed)
    runner = Runner(work.model, {work.renamed.get(name, name): array for name, array in weights.items()})
    given = {work.renamed.get(name, name): array for name, array in feed.items()}
    none = np.zeros((), np.float32)

    def run(dials: Floats) -> Floats:
        shares: Feed = {}
        for value, dial in zip(changed, dials.tolist(), strict=True):
            share = errors[value] if dial == 1 else none if dial == 0 else errors[value] * np.float32(dial)
            shares[work.shares[value]] = share
        return difference([*results, *runner.run({**given, **shares})])

    return changed, run


def _with_errors(model: onnx.ModelProto, wanted: Collection[Value], elem: int) -> onnx.ModelProto:
    """The model with the rounding error of each tensor as one more output."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    names = _Names(copy.graph)
    for value in wanted:
        low, high, error = (names.fresh(f"{value.name}_{part}") for part in ("low", "high", "error"))
        copy.graph.node.add().CopyFrom(helper.make_node("Cast", [value.name], [low], to=elem))
        copy.graph.node.add().CopyFrom(helper.make_node("Cast", [low], [high], to=_FLOAT))
        copy.graph.node.add().CopyFrom(helper.make_node("Sub", [high, value.name], [error]))
        copy.graph.output.append(helper.make_tensor_value_info(error, _FLOAT, None))
    return copy


class _Names:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self.taken = {name for node in graph.node for name in (*node.input, *node.output)}
        self.taken |= {item.name for item in (*graph.input, *graph.initializer, *graph.output)}
        for node in graph.node:  # a name outside must not become one that a graph inside has for something else
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    self.taken |= _Names(attribute.g).taken

    def fresh(self, stem: str) -> str:
        return fresh_name(stem, self.taken)


@dataclass
class _Disturbed:
    """A copy of a model in which each tensor's name stands for the tensor plus a share that is fed."""

    original: onnx.ModelProto
    changed: Collection[Value]
    shares: dict[Value, str] = field(default_factory=dict)
    """Names of the inputs for the shares: arrays of the tensor's shape, or a scalar 0."""
    renamed: dict[str, str] = field(default_factory=dict)
    """New names of inputs and initializers, whose old ones are now their sums'."""

    def __post_init__(self) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(self.original)
        graph, names = self.model.graph, _Names(self.original.graph)
        first: list[onnx.NodeProto] = []
        after: dict[str, list[onnx.NodeProto]] = {}
        for number, value in enumerate(self.changed):
            plain, share = names.fresh(f"{value.name}_plain"), names.fresh(f"castwise_share_{number}")
            self.shares[value] = share
            graph.input.append(helper.make_tensor_value_info(share, _FLOAT, None))
            added = helper.make_node("Add", [plain, share], [value.name])
            if value.node is None:
                self.renamed[value.name] = plain
                first.append(added)
            else:
                after.setdefault(value.node.id, []).append(added)
        for item in (*graph.input, *graph.initializer):
            item.name = self.renamed.get(item.name, item.name)
        nodes = list(graph.node)
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(first)
        for node in copies:
            sums = after.get(node.name, [])
            plain_names = {added.output[0]: added.input[0] for added in sums}
            for index, name in enumerate(node.output):
                node.output[index] = plain_names.get(name, name)
            graph.node.append(node)
            graph.node.extend(sums)
