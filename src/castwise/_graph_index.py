"""The graph as flat arrays, so that work per tensor and per reader runs at NumPy's speed on 100,000 ops.

Relations are kept as pairs: ``reads.tensor[k]`` is read by ``reads.op[k]``. "Does any low op read t" is then one
``bincount`` over the pairs; no code needs to know how many readers a tensor has.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from castwise.graph import Graph

__all__ = ["Bools", "Floats", "GraphIndex", "Ints", "Pairs"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Pairs:
    """A relation between tensors and ops, each pair once, sorted by tensor and then by op."""

    tensor: Ints
    op: Ints

    @classmethod
    def of(cls, tensor: Ints, op: Ints, ops: int) -> tuple[Self, Ints]:
        """The relation without repeated pairs, and for each given pair its position in the relation."""
        ops = max(ops, 1)
        keys, position = np.unique(tensor * ops + op, return_inverse=True)
        return cls(keys // ops, keys % ops), position

    def any(self, tensors: int) -> Bools:
        """[tensors] whether each has a pair at all; ``tensors`` is how many there are."""
        return np.bincount(self.tensor, minlength=tensors) > 0

    def keep(self, per_pair: Bools) -> Pairs:
        """The pairs for which ``per_pair`` holds."""
        return Pairs(self.tensor[per_pair], self.op[per_pair])


@dataclass(frozen=True, slots=True)
class GraphIndex:
    """Arrays over ops, over tensors, and over (tensor, op) pairs. All positions are those of the graph's own tuples."""

    ops: int
    tensors: int

    producer: Ints
    """[tensors] the op that writes each; -1 for inputs, weights and constants."""
    elements: Floats
    """[tensors] as floats, since bytes of large models pass 2^53 nowhere but do pass 2^31."""
    itemsize: Floats
    """[tensors] bytes per element as produced."""
    floating: Bools
    stored: Bools
    """[tensors] weights and constants, which live between calls."""
    keeps_format: Bools
    requires_grad: Bools

    reads: Pairs
    promoted: Bools
    """[pairs of ``reads``] whether the op reads the tensor in 16 bits even where it computes in fp32."""
    saves: Pairs
    writes: Pairs

    flops: Floats
    fused: Bools
    selects: Bools
    accumulates: Floats

    @classmethod
    def of(cls, graph: Graph) -> Self:
        ops, tensors = graph.ops, graph.tensors
        read_tensor, read_op = _flat([op.inputs for op in ops])
        reads, position = Pairs.of(read_tensor, read_op, len(ops))
        wide = np.zeros(len(reads.op), bool)
        wide[position[~_promoted_per_read(graph)]] = True  # one operand that must be fp32 is enough to need the cast
        write_tensor, write_op = _flat([op.outputs for op in ops])
        producer = np.full(len(tensors), -1, np.int64)
        producer[write_tensor] = write_op
        return cls(
            ops=len(ops),
            tensors=len(tensors),
            producer=producer,
            elements=np.array([tensor.elements for tensor in tensors], float),
            itemsize=np.array([tensor.itemsize for tensor in tensors], float),
            floating=np.array([tensor.floating for tensor in tensors], bool),
            stored=np.array([tensor.kind.stored for tensor in tensors], bool),
            keeps_format=np.array([tensor.keeps_format for tensor in tensors], bool),
            requires_grad=np.array([tensor.requires_grad for tensor in tensors], bool),
            reads=reads,
            promoted=~wide,
            saves=Pairs.of(*_flat([op.saves for op in ops]), len(ops))[0],
            writes=Pairs.of(write_tensor, write_op, len(ops))[0],
            flops=np.array([op.flops for op in ops], float),
            fused=np.array([op.fused for op in ops], bool),
            selects=np.array([op.selects for op in ops], bool),
            accumulates=np.array([op.accumulates for op in ops], float),
        )

    def read(self, tensor: int, op: int) -> int:
        """Position in ``reads`` of the pair of a tensor and an op that reads it."""
        first, last = np.searchsorted(self.reads.tensor, (tensor, tensor + 1))
        return int(first + np.searchsorted(self.reads.op[first:last], op))

    def touching(self, per_tensor: Bools) -> Bools:
        """[ops] whether each reads or writes a tensor for which ``per_tensor`` holds."""
        found = np.zeros(self.ops, bool)
        for pairs in (self.reads, self.writes):
            found[pairs.op[per_tensor[pairs.tensor]]] = True
        return found

    def of_producer(self, per_op: NDArray[_Scalar], missing: bool | float) -> NDArray[_Scalar]:
        """[tensors] the value of ``per_op`` at the op that writes each tensor, ``missing`` where none does."""
        values = np.full(self.tensors, missing, per_op.dtype)
        written = self.producer >= 0
        values[written] = per_op[self.producer[written]]
        return values


def _flat(per_op: list[tuple[int, ...]]) -> tuple[Ints, Ints]:
    """Lists of tensors per op as two flat arrays: tensors, and the op each belongs to."""
    lengths = np.array([len(tensors) for tensors in per_op], np.int64)
    tensors = np.fromiter(chain.from_iterable(per_op), np.int64, int(lengths.sum()))
    return tensors, np.repeat(np.arange(len(per_op), dtype=np.int64), lengths)


def _promoted_per_read(graph: Graph) -> Bools:
    """For each input of each op, in order: whether that op reads that operand in either format."""
    return np.fromiter((position in op.promotes for op in graph.ops for position in range(len(op.inputs))), bool)
