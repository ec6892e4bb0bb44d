"""How much noise rounding each tensor causes, from far fewer runs than there are tensors.

The model is run beside a twin of itself. Each rounding error, as it is in fp32's own run, is added in the twin with a
sign of its own that changes from run to run. To first order the twin's outputs then differ by a sum of the tensors'
contributions with known signs, and what goes with a tensor's signs is its contribution. The tensors that seem to matter
most are then disturbed alone; what they do is taken out of the other runs, in which the next ones come to light.

Rounding errors must be the same ones in every run, hence the twin: rounding what is disturbed already would give new
errors each time. A model whose outputs move mostly in one direction (on a detector's mask, 84 % of the noise came from
40 of 657 tensors) needs the single runs; one whose outputs have many independent elements would do without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from castwise._graph_index import Bools, Floats
from castwise.onnx._run import Runner
from castwise.onnx._samples import Array, Feed
from castwise.onnx._scopes import Node, Scope, Tree, Value, fresh_name

__all__ = ["beside_twin", "can_twin", "contributions", "difference"]

_FLOAT = onnx.TensorProto.FLOAT
_BROADCASTS = 7
"""The opset from which on Add and Mul broadcast by themselves."""
_ITERATIONS = 30
_AT_ONCE = 8
_MOST_ELEMENTS = 1 << 16
"""Of one output, of which the noise is measured."""


@dataclass(frozen=True)
class _Twin:
    """A model with every output twice, first those of fp32, and one scalar input per tensor that can be disturbed."""

    model: onnx.ModelProto
    dials: Mapping[Value, str]
    """Name of the input that says how much of a tensor's rounding error is added in the twin: 1, 0 or -1."""


def can_twin(tree: Tree, wanted: Collection[Value]) -> bool:
    """Whether all of these tensors can be disturbed: not inside loops, which would have to run beside their twins."""
    if tree.opsets.get("", 0) < _BROADCASTS:
        return False
    return all(value.scope.parent is None or _in_branches(tree, value.scope) for value in wanted)


def _in_branches(tree: Tree, scope: Scope) -> bool:
    holders = {id(body): node for node in tree.nodes() for body in node.bodies.values()}
    while scope.parent is not None:
        if holders[id(scope)].op_type != "If":
            return False
        scope = scope.parent
    return True


def beside_twin(
    model: onnx.ModelProto,
    tree: Tree,
    wanted: Sequence[Value],
    elem: int,
    weights: Mapping[str, Array],
    feed: Feed,
) -> Callable[[Floats], Floats]:
    """A function from dials, in the order of ``wanted``, to the difference of the outputs.

    ``model`` is an fp32 model, ``tree`` its scope tree, in which nodes are named as there, and ``elem`` the ONNX type
    that tensors are rounded to. Raises KeyError where :func:`can_twin` says no, RuntimeError where it does not run.
    """
    twinned = _twin(model, tree, wanted, elem)
    runner = Runner(twinned.model, weights)
    names = [twinned.dials[value] for value in wanted]

    def run(dials: Floats) -> Floats:
        given = {name: np.array(dial, np.float32) for name, dial in zip(names, dials, strict=True)}
        return difference(runner.run({**feed, **given}))

    return run


def _twin(model: onnx.ModelProto, tree: Tree, wanted: Collection[Value], elem: int) -> _Twin:
    """Put a twin beside ``model``."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    work = _Twinning(set(wanted), elem, set(tree.names))
    renamed = work.scope(tree.top, copy.graph, {})
    ends = [(info.name, renamed.get(info.name, info.name)) for info in copy.graph.output]
    for name in work.dials.values():
        copy.graph.input.append(helper.make_tensor_value_info(name, _FLOAT, ()))
    for own, other in ends:
        if other == own:  # nothing disturbs it
            other = work.fresh(f"{own}_twin")
            copy.graph.node.append(helper.make_node("Identity", [own], [other]))
        info = onnx.ValueInfoProto()
        info.CopyFrom(next(item for item in copy.graph.output if item.name == own))
        info.name = other
        copy.graph.output.append(info)
    return _Twin(copy, dict(work.dials))


@dataclass
class _Twinning:
    wanted: set[Value]
    elem: int
    taken: set[str]
    dials: dict[Value, str] = field(default_factory=dict)

    def fresh(self, stem: str) -> str:
        return fresh_name(stem, self.taken)

    def scope(self, scope: Scope, graph: onnx.GraphProto, outer: Mapping[str, str]) -> dict[str, str]:
        """Twin the nodes of a graph in place. Returns what each disturbed name, of here or outside, is in the twin."""
        twins = {name: other for name, other in outer.items() if name not in scope.values}
        protos = list(graph.node)
        written: list[onnx.NodeProto] = []
        for value in scope.values.values():
            if value.origin in ("input", "initializer") and value in self.wanted:
                written += self._disturbed(value, value.name, twins)
        for node, proto in zip(scope.nodes, protos, strict=True):
            own = onnx.NodeProto.FromString(proto.SerializeToString())
            written += self._node(node, own, twins)
        del graph.node[:]
        graph.node.extend(written)
        return twins

    def _node(self, node: Node, proto: onnx.NodeProto, twins: dict[str, str]) -> list[onnx.NodeProto]:
        if node.op_type == "If" and node.bodies and not node.domain:
            return [*self._branches(node, proto, twins)]
        made = [proto]
        if any(name in twins for name in _names_read(proto)):
            other = onnx.NodeProto.FromString(proto.SerializeToString())
            _rename(other, twins)
            other.name = ""
            for index, name in enumerate(other.output):
                if name:
                    other.output[index] = twins[name] = self.fresh(f"{name}_twin")
            made.append(other)
        for value in node.outputs:
            if value is not None and value in self.wanted:
                made += self._disturbed(value, twins.get(value.name, value.name), twins)
        return made

    def _branches(self, node: Node, proto: onnx.NodeProto, twins: dict[str, str]) -> list[onnx.NodeProto]:
        """Both runs of a branch in one: an If whose twins would be chosen by a disturbed condition has no meaning."""
        count = len(proto.output)
        for attribute in proto.attribute:
            if attribute.name not in node.bodies:
                continue
            inner = self.scope(node.bodies[attribute.name], attribute.g, twins)
            for info in list(attribute.g.output)[:count]:
                copy = attribute.g.output.add()
                copy.CopyFrom(info)
                copy.name = self.fresh(f"{info.name}_twin")
                end = inner.get(info.name, info.name)
                attribute.g.node.append(helper.make_node("Identity", [end], [copy.name]))
        made = [proto]
        for name in list(proto.output):
            other = self.fresh(f"{name or node.id}_twin")
            proto.output.append(other)
            if name:
                twins[name] = other
        for value in node.outputs:
            if value is not None and value in self.wanted:
                made += self._disturbed(value, twins[value.name], twins)
        return made

    def _disturbed(self, value: Value, source: str, twins: dict[str, str]) -> list[onnx.NodeProto]:
        """Nodes that add a share of the rounding error of a tensor to its twin, here called ``source``."""
        dial = self.dials[value] = self.fresh(f"castwise_dial_{len(self.dials)}")
        low, high, error, share = (self.fresh(f"{value.name}_{part}") for part in ("low", "high", "error", "share"))
        result = twins[value.name] = self.fresh(f"{value.name}_disturbed")
        return [
            helper.make_node("Cast", [value.name], [low], to=self.elem),
            helper.make_node("Cast", [low], [high], to=_FLOAT),
            helper.make_node("Sub", [high, value.name], [error]),
            helper.make_node("Mul", [error, dial], [share]),
            helper.make_node("Add", [source, share], [result]),
        ]


def _names_read(proto: onnx.NodeProto) -> set[str]:
    names = {name for name in proto.input if name}
    for attribute in proto.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                names |= _names_read(inner)
            names |= {info.name for info in attribute.g.output}
    return names


def _rename(proto: onnx.NodeProto, twins: Mapping[str, str]) -> None:
    for index, name in enumerate(proto.input):
        proto.input[index] = twins.get(name, name)
    for attribute in proto.attribute:
        if attribute.type != onnx.AttributeProto.GRAPH:
            continue
        graph = attribute.g
        own = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {name for inner in graph.node for name in inner.output}
        outside = {name: other for name, other in twins.items() if name not in own}
        for inner in graph.node:
            _rename(inner, outside)
        for info in graph.output:
            if info.name in outside:  # a body may end with a value of the graph around it
                graph.node.append(helper.make_node("Identity", [outside[info.name]], [f"{info.name}_inner_twin"]))
                info.name = f"{info.name}_inner_twin"


# ---- the numbers -----------------------------------------------------------------------------------------------------


def difference(results: Sequence[Any]) -> Floats:
    """How the twin's outputs differ from fp32's, in one vector whose square is the noise.

    That is the mean square of difference / max(1, max |fp32 value|), summed over the outputs.
    """
    half, parts = len(results) // 2, []
    for want, have in zip(results[:half], results[half:], strict=True):
        if want is None or isinstance(want, (list, tuple)) or np.asarray(want).dtype.kind in "OUSc":
            continue
        a, b = np.asarray(want, np.float64).reshape(-1), np.asarray(have, np.float64).reshape(-1)
        if a.shape != b.shape or not a.size:
            continue
        finite = np.isfinite(a)
        scale = max(1.0, float(np.abs(a[finite]).max(initial=0.0)))
        step = -(-a.size // _MOST_ELEMENTS)
        part = np.where(finite, b - a, 0.0)[::step] / scale
        parts.append(part / part.size**0.5)
    return np.concatenate(parts) if parts else np.zeros(0)


def contributions(
    run: Callable[[Floats], Floats], count: int, signed: int, single: int, allowed: float = 0.0
) -> tuple[Floats, Bools]:
    """[count] the noise of each tensor, that is what it adds to the square of the outputs' difference; and whether it
    was seen alone, so that it is no estimate.

    Args:
        run: the outputs' difference for dials at these values.
        count: of dials.
        signed: runs with all tensors disturbed at once.
        single: runs with one tensor disturbed, for those that seem to add most. What they add is then known, and is
            taken out of the signed runs, so that the others are seen better.
        allowed: the share of the noise that may stay. No more single runs are made once what was not seen alone is
            half of that: all that has to go is known then.

    Raises RuntimeError where a difference is not finite.
    """
    if count <= signed + single:
        return np.array([_square(run(row)) for row in np.eye(count)]), np.ones(count, bool)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (signed, count))
    seen = np.stack([run(row) for row in signs])
    known: dict[int, float] = {}
    enough = 0.5 * allowed * float((seen**2).sum()) / len(seen)
    while True:
        rest = _square(seen) / len(seen)
        alone = np.zeros(count, bool)
        alone[list(known)] = True
        amounts = _unmixed(signs, seen @ seen.T, ~alone)
        if len(known) >= single or rest <= enough:
            amounts[list(known)] = list(known.values())
            return amounts, alone
        for i in np.argsort(-amounts, kind="stable")[: min(_AT_ONCE, -(-single // 4), single - len(known))].tolist():
            difference = run(np.eye(1, count, i)[0])
            known[i] = _square(difference)
            seen -= np.outer(signs[:, i], difference)


def _square(difference: Floats) -> float:
    square = float((difference**2).sum())
    if not np.isfinite(square):
        raise RuntimeError("the disturbed model's outputs are not finite")
    return square


def _unmixed(signs: Floats, moments: Floats, free: Bools) -> Floats:
    """Non-negative amounts per tensor, 0 where not ``free``, that explain the runs' products [runs, runs] best.

    The updates multiply. They are damped towards equal shares, in which what the runs cannot tell apart then ends.
    """
    runs = len(signs)
    s = signs[:, free]
    share = float(np.trace(moments)) / runs / max(1, s.shape[1])
    amounts = np.zeros(len(free))
    if share <= 0:
        return amounts
    seen = np.einsum("ki,kl,li->i", s, moments, s, optimize=True) / runs**2
    x = np.full(s.shape[1], share)
    for _ in range(_ITERATIONS):
        explained = np.einsum("ki,kl,li->i", s, (s * x) @ s.T, s, optimize=True) / runs**2
        x = x * (seen + share) / (explained + x)
    amounts[free] = x
    return amounts
