"""A model as the planner sees it: operations, the tensors between them, and nothing of the framework they came from.

A front end captures a model once and describes it here. What the planner needs of a model is little: which operation
reads and writes which tensor, how large the tensors are, what each operation computes, and which tensors the backward
pass will ask for again. Three simplifications are made while the graph is built, so that nothing after it has to think
of them:

- a *view* (reshape, transpose, split) moves no bytes and changes no values. It is no operation of the graph: reading a
  view is reading the tensor it views;
- a *mutation* (``x.add_(y)``, a write through a view) makes a new version of the tensor. All versions live in one
  storage, which has one format, so whoever writes it is marked and the planner leaves it in fp32;
- *integer tensors* have no number format to choose and take no part in casts.

Build a graph with :class:`castwise.graph.GraphBuilder`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from castwise._graph_index import GraphIndex
from castwise.catalogue import OpClass, OpEntry, load_catalogue
from castwise.errors import PlanError, did_you_mean
from castwise.formats import FORMATS

__all__ = ["Graph", "GraphBuilder", "Kind", "Op", "Tensor"]


class Kind(StrEnum):
    """Where a tensor comes from, and so who decides its format and what keeping it costs."""

    ACTIVATION = "activation"
    """Written by an operation and read inside the graph only."""
    OUTPUT = "output"
    """Written by an operation and handed to the caller."""
    INPUT = "input"
    """Handed in by the caller at each call."""
    WEIGHT = "weight"
    """A parameter: lives between calls and is changed by an optimizer."""
    CONSTANT = "constant"
    """A buffer or literal: lives between calls and never changes."""

    @property
    def stored(self) -> bool:
        """True where the tensor lives between calls, so that a low copy of it can be kept."""
        return self in (Kind.WEIGHT, Kind.CONSTANT)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the graph. One that is written several times in place is several tensors, one per version."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = Kind.ACTIVATION
    format: str = "fp32"
    """Castwise's name of the format in which it is produced, or any other name ("int64", "bool") for integers."""
    itemsize: int = 4
    """Bytes per element as produced."""
    requires_grad: bool = True
    """Whether the backward pass computes its gradient. Irrelevant where the graph is for inference."""
    keeps_format: bool = False
    """Of an output: whether the caller must get it in ``format``, whatever the planner would like."""

    @property
    def floating(self) -> bool:
        return self.format in FORMATS

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of the graph. Tensors are named by their position in :attr:`Graph.tensors`."""

    id: str
    """Unique in the graph; the front end's own name for the node."""
    name: str
    """Canonical name in the op catalogue ("matmul", "softmax"), or the framework's name where it has no entry."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    layer: str = ""
    """Path of the module it belongs to, such as ``blocks.0.attn``."""
    source: str = ""
    """Where the user wrote it, such as ``model.py:41``."""
    attributes: str = ""
    """What else its cost depends on besides shapes, such as ``stride=2``; measured times are looked up by it."""
    flops: float = 0.0
    """Floating-point operations of the forward computation; a multiply-add counts as two."""
    bytes: float | None = None
    """Bytes it moves in fp32, where that is not the sum of its tensors (a gather reads a few rows of its table)."""
    saves: tuple[int, ...] = ()
    """Inputs and outputs that it keeps for its backward pass, in the format in which it reads or writes them."""
    promotes: tuple[int, ...] = ()
    """Positions in ``inputs`` that it reads in 16 bits although it computes in fp32, so that no up-cast is needed."""
    selects: bool = False
    """Only selects or copies values: what it writes was rounded before, so writing 16 bits adds no noise."""
    accumulates: int = 0
    """Terms summed into each output element in the op's own format; 0 where it sums none, or sums in fp32 inside."""
    fused: bool = False
    """Runs inside a generated kernel together with its neighbours: a cast of what it reads or writes is free.

    Rounding counts all the same. Where such a kernel keeps values wider inside, their sensitivity is 0.
    """
    pin: str = ""
    """Why the front end wants it in fp32 whatever it costs; empty where it does not."""


@dataclass(frozen=True)
class Graph:
    """Operations in execution order and the tensors between them. Checked when made, never changed."""

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    training: bool = False
    """Whether a backward pass follows: costs then count both passes and saved tensors count as memory."""
    name: str = ""
    views: Mapping[str, int] = field(default_factory=dict)
    """Names of views that were collapsed, and the tensor each one shows."""
    mutated: Mapping[int, str] = field(default_factory=dict)
    """Tensors that share their storage with other versions of themselves, and the op that writes in place."""
    parts: tuple[int, ...] = ()
    """Ops in each of the graphs that this one is joined from; empty where the model was captured as one graph."""
    eager: tuple[str, ...] = ()
    """What of the model is between the parts and runs as it is written: where, and why it was not captured."""

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def index(self) -> GraphIndex:
        """The graph as arrays: who writes and reads what, for code that is fast on 100,000 ops."""
        return GraphIndex.of(self)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Position in :attr:`ops` by op id."""
        return {op.id: position for position, op in enumerate(self.ops)}

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Layer paths that ops belong to, in order of first use."""
        return tuple(dict.fromkeys(op.layer for op in self.ops))

    def tensor(self, name: str) -> int:
        """Position of the newest tensor called ``name``, or of the tensor that the view called ``name`` shows."""
        try:
            return self.views[name] if name in self.views else self._tensor_positions[name]
        except KeyError:
            hint = did_you_mean(name, [*self._tensor_positions, *self.views])
            raise PlanError(f"The graph has no tensor {name!r}.{hint} Ask for one of graph.tensors.") from None

    @cached_property
    def _tensor_positions(self) -> Mapping[str, int]:
        return {tensor.name: position for position, tensor in enumerate(self.tensors)}

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that a plan for this graph depends on, in hexadecimal."""
        digest = hashlib.sha256(b"training" if self.training else b"inference")
        for part in _structure(self):
            digest.update(part.encode())
        return digest.hexdigest()


def _structure(graph: Graph) -> Iterator[str]:
    """Shapes and wiring, without source lines and tensor names, which may change while the model stays the same."""
    for tensor in graph.tensors:
        yield f"{tensor.shape}{tensor.kind}{tensor.format}{tensor.requires_grad}{tensor.keeps_format};"
    for op in graph.ops:
        yield f"{op.id}|{op.name}|{op.attributes}|{op.layer}|{op.inputs}{op.outputs}{op.saves}{op.promotes}{op.fused};"


def _check(graph: Graph) -> None:
    """Raise PlanError unless ids are unique and every tensor is written at most once and before it is read."""
    given = (Kind.INPUT, Kind.WEIGHT, Kind.CONSTANT)
    available = [tensor.kind in given for tensor in graph.tensors]
    ids: set[str] = set()
    for op in graph.ops:
        if op.id in ids:
            raise PlanError(f"Two ops are called {op.id!r}. Give each op of the graph an id of its own.")
        ids.add(op.id)
        _check_tensors(op, available)
        for tensor in op.outputs:
            available[tensor] = True
    if not all(available):
        name = graph.tensors[available.index(False)].name
        raise PlanError(f"No op writes tensor {name!r}. Declare it as an input, weight or constant, or leave it out.")


def _check_tensors(op: Op, available: list[bool]) -> None:
    known = range(len(available))
    if any(tensor not in known for tensor in (*op.inputs, *op.outputs)):
        raise PlanError(f"Op {op.id!r} names a tensor that the graph does not have. Add the tensor before the op.")
    for tensor in op.inputs:
        if not available[tensor]:
            raise PlanError(f"Op {op.id!r} reads tensor {tensor} before it is written. List ops in execution order.")
    for tensor in op.outputs:
        if available[tensor]:
            raise PlanError(
                f"Op {op.id!r} writes tensor {tensor}, which exists already. A mutation makes a new tensor: declare it "
                "with GraphBuilder.op(..., mutates=...)."
            )
    if not set(op.saves) <= {*op.inputs, *op.outputs}:
        raise PlanError(f"Op {op.id!r} saves a tensor that it neither reads nor writes. Correct its `saves`.")
    if any(position not in range(len(op.inputs)) for position in op.promotes):
        raise PlanError(f"Op {op.id!r} promotes an input that it does not have. `promotes` holds input positions.")


class GraphBuilder:
    """Collects ops and tensors by name, in execution order, and collapses views and mutations on the way.

    >>> build = GraphBuilder("mlp")
    >>> x = build.tensor("x", (8, 64), kind="input")
    >>> w = build.tensor("w", (64, 64), kind="weight")
    >>> h = build.op("matmul_1", "matmul", [x, w], [("h", (8, 64))], flops=2 * 8 * 64 * 64, saves=[x, w])
    >>> flat = build.view("h_flat", "h")
    >>> y = build.op("relu_1", "relu", [flat], [("y", (8, 64))], saves=["y"], output=True)
    >>> graph = build.build(training=True)
    >>> [graph.tensors[t].name for t in graph.ops[1].inputs]
    ['h']
    """

    def __init__(self, name: str = "", *, framework: str = "") -> None:
        self.name, self.framework = name, framework
        self._ops: list[Op] = []
        self._tensors: list[Tensor] = []
        self._current: dict[str, int] = {}
        self._views: dict[str, str] = {}
        self._mutated: dict[int, str] = {}

    def __len__(self) -> int:
        """How many ops there are so far."""
        return len(self._ops)

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        *,
        kind: Kind | str = Kind.ACTIVATION,
        format: str = "fp32",
        itemsize: int | None = None,
        requires_grad: bool | None = None,
        keeps_format: bool = False,
    ) -> str:
        """Declare a tensor and return its name. Inputs, weights and constants are declared; op outputs need not be.

        ``format`` is the format in which it is produced; ``itemsize`` defaults to that format's bytes, and to 8 for
        other (integer) formats. ``requires_grad`` defaults to what its kind suggests: inputs and constants get none.
        Raises PlanError where a tensor or view of that name exists.
        """
        kind = Kind(kind)
        if name in self._current or name in self._views:
            raise PlanError(f"A tensor called {name!r} exists already. Give each tensor a name of its own.")
        if itemsize is None:
            itemsize = FORMATS[format].bytes if format in FORMATS else 8
        if requires_grad is None:
            requires_grad = format in FORMATS and kind not in (Kind.INPUT, Kind.CONSTANT)
        new = Tensor(name, tuple(map(int, shape)), kind, format, itemsize, requires_grad, keeps_format)
        self._current[name] = len(self._tensors)
        self._tensors.append(new)
        return name

    def view(self, name: str, of: str) -> str:
        """Declare ``name`` as a view of tensor or view ``of``: reading it is reading that tensor. Returns ``name``."""
        if name in self._current or name in self._views:
            raise PlanError(f"A tensor called {name!r} exists already. Give each view a name of its own.")
        self._position(of)
        self._views[name] = self._views.get(of, of)
        return name

    def op(
        self,
        id: str,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str | tuple[str, Sequence[int]]],
        *,
        layer: str = "",
        source: str = "",
        attributes: str = "",
        flops: float = 0.0,
        bytes: float | None = None,
        saves: Sequence[str] = (),
        promotes: Sequence[int] | bool | None = None,
        selects: bool | None = None,
        accumulates: int = 0,
        fused: bool = False,
        pin: str = "",
        mutates: Sequence[str] = (),
        output: bool = False,
        keeps_format: bool = False,
    ) -> str:
        """Add an op that reads ``inputs`` and writes ``outputs``, and return the name of its first output.

        What is not listed here is explained at :class:`Op`.

        An output is the name of a tensor declared before, or a ``(name, shape)`` pair that declares an fp32 one on the
        spot, as an output of the graph where ``output`` is true. ``mutates`` names tensors that it changes in place:
        each gets a new version, which later ops read under the same name. ``selects`` and ``promotes`` default to what
        the op catalogue says of ``name`` in the builder's framework, and an op that writes only integers reads its
        inputs as they are; ``promotes=True`` means every input.
        """
        reads = tuple(self._position(tensor) for tensor in inputs)
        kind = Kind.OUTPUT if output else Kind.ACTIVATION
        names = [
            written if isinstance(written, str) else self.tensor(*written, kind=kind, keeps_format=keeps_format)
            for written in outputs
        ]
        keeps = tuple(dict.fromkeys(self._position(tensor) for tensor in saves))  # versions before any mutation
        writes = tuple(self._position(tensor) for tensor in names) + tuple(self._mutate(t, id) for t in mutates)
        entry = load_catalogue().entries.get(name)
        if selects is None:
            selects = entry is not None and entry.selects
        if promotes is None:
            promotes = self._reads_any_format(entry, writes)
        if isinstance(promotes, bool):
            promotes = range(len(reads)) if promotes else ()
        self._ops.append(
            Op(
                id=id,
                name=name,
                inputs=reads,
                outputs=writes,
                layer=layer,
                source=source,
                attributes=attributes,
                flops=flops,
                bytes=bytes,
                saves=keeps,
                promotes=tuple(promotes),
                selects=selects,
                accumulates=accumulates,
                fused=fused,
                pin=pin,
            )
        )
        return names[0] if names else next(iter(mutates), "")

    def build(self, *, training: bool = False) -> Graph:
        """The finished graph. Raises PlanError where it makes no sense: see :class:`Graph`."""
        views = {view: self._current[of] for view, of in self._views.items()}
        return Graph(tuple(self._ops), tuple(self._tensors), training, self.name, views, dict(self._mutated))

    def _position(self, name: str) -> int:
        try:
            return self._current[self._views.get(name, name)]
        except KeyError:
            hint = did_you_mean(name, [*self._current, *self._views])
            raise PlanError(f"No tensor {name!r} was declared.{hint} Declare it before it is used.") from None

    def _reads_any_format(self, entry: OpEntry | None, writes: tuple[int, ...]) -> bool:
        """Whether an op takes its inputs as they come: a kernel for mixed formats, a cast, a writer of integers."""
        if not any(self._tensors[tensor].floating for tensor in writes):
            return True
        return entry is not None and (entry.op_class is OpClass.CAST or entry.promotes_natively(self.framework))

    def _mutate(self, name: str, op_id: str) -> int:
        """Give the storage behind ``name`` a new version, written by op ``op_id``, and return its position."""
        name = self._views.get(name, name)
        old = self._current[name]
        before = self._tensors[old]
        new = len(self._tensors)
        self._tensors.append(before if before.kind is Kind.OUTPUT else replace(before, kind=Kind.ACTIVATION))
        self._current[name] = new
        self._mutated.setdefault(old, op_id)
        self._mutated[new] = op_id
        return new
