"""Nodes that runtimes compute as one: normalisations and activations that exporters write out in small steps.

A runtime knows them by their shape. A cast in the middle hides it, and nine kernels run in place of one. So the nodes
of one such pattern get one format: where some must stay in fp32, all do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from castwise.onnx._scopes import Node, Tree, Value

__all__ = ["REASON", "patterns", "torn"]

REASON = "runtimes fuse it with nodes around it that stay fp32, which a cast between them would prevent"

# Up from the square root: epsilon, mean of squares, the square, and what is squared where that is a difference.
_BEFORE_ROOT = ({"Add"}, {"ReduceMean"}, {"Pow", "Mul"}, {"Sub"}, {"ReduceMean"})
# Down from it: the division (or its reciprocal and a product), then scale and shift.
_AFTER_ROOT = ({"Div", "Reciprocal"}, {"Mul"}, {"Add", "Mul"}, {"Add"})
_AFTER_ERF = ({"Add"}, {"Mul"}, {"Mul"})


def patterns(tree: Tree) -> list[tuple[str, ...]]:
    """Ids of the nodes of each pattern: layer and RMS normalisation, and GELU."""
    users: dict[Value, list[Node]] = {}
    for node in tree.nodes():
        for value in node.inputs:
            if value is not None:
                users.setdefault(value, []).append(node)
    found = []
    for node in tree.nodes():
        if node.domain:
            continue
        if node.op_type == "Sqrt":
            before = list(_up(node, _BEFORE_ROOT))
            if len(before) >= 3:
                found.append((*before, node, *_down(node, _AFTER_ROOT, users)))
        elif node.op_type == "Erf":
            after = list(_down(node, _AFTER_ERF, users))
            if len(after) >= 2:
                found.append((*_up(node, ({"Div", "Mul"},)), node, *after))
    return [tuple(dict.fromkeys(item.id for item in nodes)) for nodes in found]


def _up(node: Node, steps: Sequence[set[str]]) -> Iterator[Node]:
    for wanted in steps:
        makers = (value.node for value in node.inputs if value is not None and value.scope is node.scope)
        maker = next((maker for maker in makers if maker is not None and maker.op_type in wanted), None)
        if maker is None:
            return
        yield maker
        node = maker


def _down(node: Node, steps: Sequence[set[str]], users: Mapping[Value, list[Node]]) -> Iterator[Node]:
    """Nodes that follow one another, each the only reader of the one before."""
    for wanted in steps:
        out = node.outputs[0]
        readers = users.get(out, []) if out is not None else []
        if len(readers) != 1 or readers[0].scope is not node.scope:
            return
        if readers[0].op_type in wanted:
            node = readers[0]
            yield node


def torn(groups: Sequence[tuple[str, ...]], low: Mapping[str, bool]) -> set[str]:
    """The lowered nodes of patterns that have fp32 nodes too."""
    mixed = [group for group in groups if len({low[op] for op in group if op in low}) > 1]
    return {op for group in mixed for op in group if low.get(op)}
