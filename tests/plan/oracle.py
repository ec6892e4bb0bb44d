"""Random graphs with every feature a graph can have, and their energy by enumeration.

The oracle is deliberately plain: one tensor after the other, straight from the definition of the energy in words, for
all labellings at once (a column per op, a row per labelling). It shares no code with the planner.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from castwise.cost import Costs
from castwise.graph import Graph, Kind, Op, Tensor
from castwise.risk import Risks

LOW_FORMAT = "bf16"


@dataclass(frozen=True)
class Case:
    graph: Graph
    costs: Costs
    risks: Risks
    pins: NDArray[np.int8]  # -1 free, 0 HIGH, 1 LOW

    def read_noise(self, tensor: int, op: int) -> float:
        """What op ``op`` alone pays for reading a rounded copy of ``tensor``."""
        pairs = zip(self.graph.index.reads.tensor, self.graph.index.reads.op, strict=True)
        found = dict(zip(pairs, self.risks.read_noise, strict=False))
        return float(found.get((tensor, op), 0.0))


@dataclass(frozen=True)
class Enumerated:
    """Every labelling that respects the pins, and what each costs."""

    labels: NDArray[np.bool_]
    seconds: NDArray[np.float64]
    noise: NDArray[np.float64]
    saved: NDArray[np.float64]

    def energy(self, lam: float, mu: float) -> NDArray[np.float64]:
        return self.seconds + lam * self.noise + mu * self.saved


def enumerate_labellings(case: Case) -> Enumerated:
    """All 2^n labellings (n: free ops) and their costs, by the words of the definition."""
    graph, costs, risks = case.graph, case.costs, case.risks
    choices = [(False, True) if pin < 0 else (bool(pin),) for pin in case.pins]
    low = np.array(list(itertools.product(*choices)), bool).reshape(-1, len(graph.ops))
    seconds, noise, saved = (np.zeros(len(low)) for _ in range(3))
    nothing, everything = np.zeros(len(low), bool), np.ones(len(low), bool)
    for v in range(len(graph.ops)):
        if case.pins[v] != 1:
            seconds += np.where(low[:, v], 0.0, costs.high[v])
        if case.pins[v] != 0:
            seconds += np.where(low[:, v], costs.low[v], 0.0)
        noise += np.where(low[:, v], risks.op_values[v] + risks.op_accumulation[v], 0.0)

    for t, tensor in enumerate(graph.tensors):
        saver_labels = [low[:, v] for v, op in enumerate(graph.ops) if t in op.saves]
        if tensor.format not in ("fp32", LOW_FORMAT):  # no choice of format: no casts, and saved as it is
            if graph.training and saver_labels and not tensor.kind.stored:
                saved += tensor.elements * tensor.itemsize
            continue
        writers = [v for v, op in enumerate(graph.ops) if t in op.outputs]
        if writers:
            is_low = low[:, writers[0]]
            free_cast = graph.ops[writers[0]].fused
        else:
            is_low = everything if tensor.format == LOW_FORMAT else nothing
            free_cast = False

        needs_rounding, needs_down, needs_up = nothing, nothing, nothing
        for v, op in enumerate(graph.ops):
            operands = [position for position, read in enumerate(op.inputs) if read == t]
            if not operands:
                continue
            needs_rounding = needs_rounding | low[:, v]
            noise += np.where(~is_low & low[:, v], case.read_noise(t, v), 0.0)
            if not op.fused:
                needs_down = needs_down | low[:, v]
                if not all(position in op.promotes for position in operands):
                    needs_up = needs_up | ~low[:, v]
        if tensor.keeps_format and tensor.format == "fp32":
            needs_up = everything
        if tensor.keeps_format and tensor.format == LOW_FORMAT:
            needs_rounding = needs_down = everything
        noise += np.where(~is_low & needs_rounding, risks.cast_noise[t], 0.0)
        if not free_cast:
            seconds += np.where(~is_low & needs_down, costs.down[t], 0.0)
            seconds += np.where(is_low & needs_up, costs.up[t], 0.0)

        if graph.training and saver_labels:
            some_low = np.logical_or.reduce(saver_labels)
            some_high = np.logical_or.reduce([~label for label in saver_labels])
            stored_low = tensor.kind.stored and (bool(costs.kept[t]) or tensor.format == LOW_FORMAT)
            stored_high = tensor.kind.stored and tensor.format == "fp32"
            saved += np.where(some_low & (not stored_low), 2 * tensor.elements, 0)
            saved += np.where(some_high & (not stored_high), 4 * tensor.elements, 0)
    return Enumerated(low, seconds, noise, saved)


def random_case(rng: np.random.Generator, ops: int | None = None) -> Case:
    """A random graph of at most 12 ops, with random costs, risks and pins."""
    count = int(rng.integers(1, 13)) if ops is None else ops
    graph = random_graph(rng, count)
    tensors = len(graph.tensors)
    style = rng.integers(3)

    def times(size: int) -> NDArray[np.float64]:
        if style == 0:  # small integers: many ties
            return rng.integers(0, 4, size).astype(float)
        if style == 1:
            return rng.exponential(1.0, size)
        return 10.0 ** rng.uniform(-7, 0, size) * rng.integers(0, 2, size)  # seven orders of magnitude, and zeros

    kept = np.array([t.kind.stored and rng.random() < 0.5 for t in graph.tensors], bool)
    down = np.where(kept, 0.0, times(tensors))
    costs = Costs(LOW_FORMAT, times(count), times(count), down, times(tensors), kept)
    noise = times(tensors) * rng.integers(0, 2, tensors)
    pairs = len(graph.index.reads.op)
    per_read = np.where(rng.random(pairs) < 0.5, times(pairs), np.nan) if rng.random() < 0.7 else None
    risks = Risks.from_sensitivities(graph, LOW_FORMAT, noise, noise * rng.random(tensors), per_read)
    pins = rng.choice([-1, 0, 1], count, p=[0.8, 0.1, 0.1]).astype(np.int8)
    return Case(graph, costs, risks, pins)


def random_graph(rng: np.random.Generator, count: int) -> Graph:
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def new(kind: Kind) -> int:
        fmt = rng.choice(["fp32", LOW_FORMAT, "fp64", "int64"], p=[0.8, 0.1, 0.05, 0.05])
        itemsize = {"fp32": 4, LOW_FORMAT: 2}.get(fmt, 8)
        shape = tuple(int(size) for size in rng.integers(1, 5, int(rng.integers(0, 3))))
        keeps = kind is Kind.OUTPUT and bool(rng.random() < 0.7)
        tensors.append(Tensor(f"t{len(tensors)}", shape, kind, str(fmt), itemsize, bool(rng.random() < 0.8), keeps))
        return len(tensors) - 1

    for _ in range(int(rng.integers(1, 4))):
        new(Kind.INPUT)
    for _ in range(int(rng.integers(0, 4))):
        new(Kind.WEIGHT if rng.random() < 0.7 else Kind.CONSTANT)
    if rng.random() < 0.3:  # an input or weight that goes out as it came in
        first = tensors[0]
        tensors[0] = Tensor(first.name, first.shape, first.kind, first.format, first.itemsize, keeps_format=True)
    for number in range(count):
        reads = tuple(int(t) for t in rng.integers(0, len(tensors), int(rng.integers(0, 4))))
        writes = tuple(
            new(Kind.OUTPUT if rng.random() < 0.25 else Kind.ACTIVATION) for _ in range(int(rng.integers(1, 3)))
        )
        ops.append(
            Op(
                id=f"op{number}",
                name=str(rng.choice(["matmul", "add", "softmax", "relu"])),
                inputs=reads,
                outputs=writes,
                layer=f"layer{number % 3}",
                saves=tuple(t for t in dict.fromkeys((*reads, *writes)) if rng.random() < 0.4),
                promotes=tuple(position for position in range(len(reads)) if rng.random() < 0.25),
                selects=bool(rng.random() < 0.2),
                accumulates=int(rng.choice([0, 16])),
                fused=bool(rng.random() < 0.25),
            )
        )
    return Graph(tuple(ops), tuple(tensors), training=bool(rng.random() < 0.6))
