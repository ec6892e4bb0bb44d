"""Several graphs of one model as one planning problem: what is left between them runs as it is written.

A front end captures a model with breaks in parts. Rounding in any of them reaches the same outputs, so they share one
budget and are decided together. Ids and names get the number of their part in front: ``1.linear`` is in the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from castwise._graph_index import Floats
from castwise.cost import Costs
from castwise.graph import Graph, Op, Tensor
from castwise.risk import Risks

__all__ = ["in_part", "join_costs", "join_graphs", "join_risks"]


def in_part(number: int, name: str) -> str:
    """The id, in the joined graph, of an op or tensor of one part."""
    return f"{number}.{name}"


def join_graphs(graphs: Sequence[Graph], name: str, eager: Sequence[str]) -> Graph:
    """One graph of all ``graphs`` in order; ``eager`` says what of the model is in none of them, and why."""
    ops: list[Op] = []
    tensors: list[Tensor] = []
    views: dict[str, int] = {}
    mutated: dict[int, str] = {}
    for number, (graph, first) in enumerate(zip(graphs, _starts([len(g.tensors) for g in graphs]), strict=False)):

        def moved(positions: tuple[int, ...], first: int = first) -> tuple[int, ...]:
            return tuple([first + position for position in positions])

        for op in graph.ops:
            given, made, saved = moved(op.inputs), moved(op.outputs), moved(op.saves)
            ops.append(replace(op, id=in_part(number, op.id), inputs=given, outputs=made, saves=saved))
        tensors += [replace(tensor, name=in_part(number, tensor.name)) for tensor in graph.tensors]
        views |= {in_part(number, view): first + shown for view, shown in graph.views.items()}
        mutated |= {first + tensor: in_part(number, op) for tensor, op in graph.mutated.items()}
    parts = tuple([len(graph.ops) for graph in graphs])
    training = any(graph.training for graph in graphs)
    return Graph(tuple(ops), tuple(tensors), training, name, views, mutated, parts, tuple(eager))


def join_costs(parts: Sequence[Costs]) -> Costs:
    """The costs of the joined graph, from those of its parts, all of one device and format."""
    starts = _starts([len(costs.high) for costs in parts])
    unavailable = {
        first + op: why for first, costs in zip(starts, parts, strict=False) for op, why in costs.unavailable.items()
    }
    arrays: dict[str, Any] = {name: _all(parts, name) for name in ("high", "low", "down", "up", "kept", "measured")}
    return Costs(fmt=parts[0].fmt, device=parts[0].device, unavailable=unavailable, **arrays)


def join_risks(graphs: Sequence[Graph], parts: Sequence[Risks], reference: float) -> Risks:
    """The risks of the joined graph. ``reference`` is the mean square of the whole model's outputs."""
    starts = _starts([len(graph.tensors) for graph in graphs])
    arrays: dict[str, Any] = {
        name: _all(parts, name) for name in ("op_values", "op_accumulation", "cast_noise", "range_share")
    }
    reads = [
        risks.read_noise if len(risks.read_noise) else np.zeros(len(graph.index.reads.op))
        for graph, risks in zip(graphs, parts, strict=True)
    ]
    read_noise: Floats = np.concatenate(reads) if any(part.any() for part in reads) else np.zeros(0)

    def by_tensor(of: Callable[[Risks], Any]) -> dict[int, Any]:
        return {
            first + tensor: seen
            for first, risks in zip(starts, parts, strict=False)
            for tensor, seen in of(risks).items()
        }

    return Risks(
        parts[0].fmt,
        **arrays,
        reference=reference,
        ranges=by_tensor(lambda risks: risks.ranges),
        gradient_ranges=by_tensor(lambda risks: risks.gradient_ranges),
        measured=any(risks.measured for risks in parts),
        read_noise=read_noise,
    )


def _all(parts: Sequence[Any], name: str) -> Any:
    return np.concatenate([getattr(part, name) for part in parts])


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))
