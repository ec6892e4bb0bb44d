"""Which operation made the first bad value: a trace of one replay, and the walk back from its symptoms.

A dispatch mode sees every kernel of the forward and of the backward. An operation whose result is not finite is written
down, together with where its own bad inputs came from. A walk from what was seen to be wrong (an output, a gradient)
back along these links ends where the fault began. Walking back, instead of taking the first infinity there is, is what
keeps masks apart from faults: a -inf that ends in a softmax is never walked to.

A kernel of the forward belongs to the module that is running. One of the backward belongs to the module that made its
autograd node: nodes carry numbers that count up, and the trace knows which module was running at each number.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ._hooks import after_forward, before_forward
from ._paths import named_layers
from .attribution_lines import line_of_hook, line_of_program
from .attribution_trees import mapped, tensors_in
from .attribution_values import (
    Values,
    as_they_are,
    as_they_were,
    constant_in,
    described,
    is_bad,
    mutated,
    scalars,
    storage_of,
    values_of,
)

_UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
# Kernels of products, in the spelling that reaches the dispatcher.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "addmv", "mv", "dot"})
# Sources in the order in which they are believed. A buffer may be handed to an operation that does not read it (running
# statistics, in training), and so comes after operations that made something bad.
_ORDER = ("input", "parameter", "gradient", "buffer", "constant")
_CERTAIN = frozenset({"input", "parameter", "gradient"})
_COLLECTIVES = "_c10d_functional"
_ACCUMULATE = 2**63  # sequence numbers of nodes that add to leaves are above this


@dataclass(slots=True, eq=False)
class Source:
    """Where bad values may come from without an operation.

    kind: "input", "parameter", "buffer", "gradient" (of an output, from the loss) or "constant".
    rank: the one that it was seen on, where others did not; -1 where there are no others.
    layer, line: where a constant was read first; no layer where that is not in the model.
    """

    kind: str
    name: str
    values: Values
    rank: int = -1
    layer: str | None = ""
    line: str = ""

    @property
    def is_data(self) -> bool:
        """Whether the program gave it to the model, or to the loss that it makes of the model's outputs."""
        return self.kind == "input" or (self.kind == "constant" and self.layer is None)


@dataclass(slots=True, eq=False)
class Made:
    """One operation that gave a bad result."""

    index: int
    op: str
    phase: str
    layer: str
    inside: bool  # of the model; else of what the program does around it
    line: str
    inputs: tuple[Values, ...]
    reads: str  # what came from outside among them
    outputs: tuple[Values, ...]
    causes: tuple[Made | Source, ...]
    on_purpose: bool  # an infinity that the program itself asked for, in an argument
    alone: _Alone | None  # the call, where nothing that went in was bad
    rank: int = -1  # that it was seen on, where others did not see it
    received: bool = False  # bad values came from another rank, or from adding up those of several
    constant: float = 0.0  # see `constant_in`

    @property
    def nan(self) -> bool:
        return any(v.nan for v in self.outputs)


class _Alone:
    """One kernel call, to be made again by itself."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def finite(self, factor: float = 1.0) -> bool:
        """Whether the call is finite in float32, its 16-bit inputs multiplied by `factor`."""

        def widened(x: torch.Tensor) -> torch.Tensor:
            return x.detach().to(torch.float32) * factor if x.is_floating_point() else x

        args, kwargs = mapped((self.args, self.kwargs), widened)
        if kwargs.get("dtype") is not None:
            kwargs["dtype"] = torch.float32
        with torch.no_grad():
            return not any(is_bad(y) for _, y in tensors_in(self.func(*args, **kwargs)))


@dataclass(slots=True)
class _Mark:
    number: int  # autograd nodes up to and including this number ...
    layer: str | None  # ... were made in this layer (None: outside of the model),
    line: str  # at this line


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches kernels while it is entered.

    Args:
        model: whose module paths are named.
        sources: tensors that may be bad from the start, by kind and name.
    """

    def __init__(self, model: nn.Module, sources: Iterable[tuple[str, str, torch.Tensor]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.made: list[Made] = []
        self.bytes: dict[str, int] = {}
        self.feeds: dict[str, list[str]] = {}  # per layer, those that made what it was given
        self._makers: dict[int, tuple[StorageWeakRef, str]] = {}
        self.entered = False  # whether kernels are being watched right now
        self.line = ""  # of the program, where whoever runs it knows better than the stack
        self._stack: list[str] = []
        self._last = ""
        self._marks: list[_Mark] = []
        self._writers: dict[int, tuple[StorageWeakRef, Made | Source]] = {}
        self._handles: list[Any] = []
        self._outside: dict[int, tuple[StorageWeakRef, str]] = {}
        for kind, name, x in sources:
            self.add_source(kind, name, x)

    def add_source(self, kind: str, name: str, x: torch.Tensor) -> None:
        """Note a tensor that came from outside."""
        key = storage_of(x)
        if key is not None:
            self._outside[key._cdata] = (StorageWeakRef(key), f"{kind} {name}")  # type: ignore[no-untyped-call]
        values = values_of(x)
        if values is not None and values.bad:
            self._write(x, Source(kind, name, values))

    # ---- the modules that are running ----

    def _hook(self) -> None:
        for path, module in named_layers(self.model):
            enter = before_forward(module, _Enter(self, path), prepend=True)
            self._handles += [enter, after_forward(module, _Leave(self, path), always_call=True)]

    def __enter__(self) -> Trace:
        self._hook()
        self.entered = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.entered = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def enter_layer(self, path: str, given: Any = ()) -> None:
        """A module's forward begins, with the arguments that it is given."""
        self._mark()
        keys = [key for _, x in tensors_in(given) if (key := storage_of(x)) is not None]
        makers = [self._makers[key._cdata][1] for key in keys if key._cdata in self._makers]
        self.feeds[path] = [*dict.fromkeys([*self.feeds.get(path, []), *makers])]
        self._stack.append(path)

    def leave_layer(self) -> None:
        """A module's forward ends, also by an exception."""
        self._mark()
        if self._stack:
            self._stack.pop()

    @property
    def layer(self) -> str | None:
        """The module that is running; None outside of the model."""
        return self._stack[-1] if self._stack else None

    def _mark(self, line: str = "") -> None:
        number = torch._C._autograd._get_sequence_nr() - 1
        if not self._marks or number > self._marks[-1].number:
            self._marks.append(_Mark(number, self.layer, line))

    def _of_node(self, node: Any) -> _Mark | None:
        number = node._sequence_nr()
        if number >= _ACCUMULATE:
            return None
        place = bisect_left(self._marks, number, key=lambda mark: mark.number)
        return self._marks[place] if place < len(self._marks) else None

    # ---- kernels ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:  # a tracer is at work, and nothing is computed
            return func(*args, **kwargs)
        node = torch._C._current_autograd_node()
        in_backward = node is not None and not self._stack
        if not in_backward:
            self._mark(self.line or line_of_program())
        name = func._schema.name.partition("::")[2]
        writes = func._schema.is_mutable or "batch_norm" in name  # which writes statistics that its schema hides
        before = as_they_were(args, kwargs) if writes else None
        result = func(*args, **kwargs)
        if func.namespace == _COLLECTIVES:
            _arrived(result)
        if func.is_view or name in _UNWRITTEN or name in ("detach", "_unsafe_view"):
            return result
        name = self._computed(name, args)
        written = [x for _, x in tensors_in(result)] or mutated(func, args, kwargs)
        if not in_backward:
            self._count(written)
        bad = [x for x in written if is_bad(x)]
        if bad:
            mark = self._of_node(node) if in_backward else None
            inputs = described(before if before is not None else as_they_are((args, kwargs)))
            self._note(name, func, inputs, bad, args, kwargs, in_backward, mark)
        return result

    def _computed(self, name: str, args: Any) -> str:
        """The op that a kernel belongs to: an emulated product ends in a cast of its result, which is part of it."""
        before, self._last = self._last, name
        return before if name == "_to_copy" and before in _PRODUCTS and args[0].dtype is torch.float32 else name

    def _note(
        self,
        name: str,
        func: Any,
        inputs: list[tuple[torch.Tensor, Values]],
        bad: list[torch.Tensor],
        args: Any,
        kwargs: Any,
        in_backward: bool,
        mark: _Mark | None,
    ) -> None:
        layer = (mark.layer if mark is not None else None) if in_backward else self.layer
        line = self.line or line_of_program()
        if in_backward:
            line = mark.line if mark is not None else line_of_hook()
        causes = tuple(self._writer(x, v, name, layer, line) for x, v in inputs if v.bad)
        alone = None if causes or func._schema.is_mutable else _Alone(func, args, kwargs)
        made = Made(
            len(self.made),
            name,
            "backward" if in_backward else "forward",
            layer or "",
            layer is not None,
            line,
            tuple(v for _, v in inputs),
            next((name for x, _ in inputs if (name := self._from_outside(x))), ""),
            tuple(v for v in map(values_of, bad) if v is not None),
            causes,
            not causes and any(isinstance(a, float) and math.isinf(a) for a in scalars(args)),
            alone,
            received=not causes and func.namespace == _COLLECTIVES,
            constant=constant_in(args, bad[0]) if not causes and not in_backward else 0.0,
        )
        self.made.append(made)
        for x in bad:
            self._write(x, made)

    def _count(self, written: list[torch.Tensor]) -> None:
        size = sum(x.numel() * x.element_size() for x in written if x.is_floating_point())
        for path in {*self._stack, *_above(self._stack[-1] if self._stack else "")}:
            self.bytes[path] = self.bytes.get(path, 0) + size
        for x in written:
            key = storage_of(x)
            if key is not None and self._stack:
                self._makers[key._cdata] = (StorageWeakRef(key), self._stack[-1])  # type: ignore[no-untyped-call]

    def _write(self, x: torch.Tensor, by: Made | Source) -> None:
        key = storage_of(x)
        if key is not None:
            self._writers[key._cdata] = (StorageWeakRef(key), by)  # type: ignore[no-untyped-call]

    def _from_outside(self, x: torch.Tensor) -> str:
        key = storage_of(x)
        return self._outside[key._cdata][1] if key is not None and key._cdata in self._outside else ""

    def _writer(
        self, x: torch.Tensor, values: Values, reader: str = "", layer: str | None = "", line: str = ""
    ) -> Made | Source:
        """What made a tensor bad, which an op of a layer reads at a line."""
        key = storage_of(x)
        known = self._writers.get(key._cdata) if key is not None else None
        if known is not None:
            return known[1]
        name = f"that {reader}{f' in {layer}' if layer else ''} reads" if reader else "from outside of the model"
        return Source("constant", name, values, layer=layer, line=line)

    # ---- the walk back ----

    def root(self, symptoms: Iterable[torch.Tensor]) -> Made | Source | None:
        """Where the bad values of `symptoms` began: the earliest such place, or None where they were meant."""
        found: list[Made | Source] = []
        seen: set[int] = set()
        waiting: list[Made | Source] = []
        for x in symptoms:
            values = values_of(x)
            if values is not None and values.bad:
                waiting.append(self._writer(x, values))
        while waiting:
            place = waiting.pop()
            if id(place) in seen or _meant(place):
                continue
            seen.add(id(place))
            if isinstance(place, Source):
                found.append(place)
                continue
            causes = [c for c in _explaining(place) if not _meant(c)]
            if not causes:
                found.append(place)
            waiting += causes
        sources = sorted((f for f in found if isinstance(f, Source)), key=lambda source: _ORDER.index(source.kind))
        if sources and sources[0].kind in _CERTAIN:
            return sources[0]
        made = [f for f in found if isinstance(f, Made)]
        return min(made, key=lambda m: m.index) if made else sources[0] if sources else None


class _Enter:
    def __init__(self, trace: Trace, path: str) -> None:
        self.trace, self.path = trace, path

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.trace.enter_layer(self.path, args)


class _Leave(_Enter):
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self.trace.leave_layer()


def _above(path: str) -> list[str]:
    """The paths of the modules around one."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts))]


def _explaining(made: Made) -> list[Made | Source]:
    """The causes that explain a result: NaN among the inputs explains everything, else infinities do."""
    with_nan = [c for c in made.causes if (c.nan if isinstance(c, Made) else c.values.nan)]
    return with_nan if made.nan and with_nan else list(made.causes)


def _meant(place: Made | Source) -> bool:
    """Whether these are infinities that the program asked for: a mask, and what became of it without NaN."""
    waiting, seen = [place], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Source):
            if one.kind not in ("constant", "buffer") or one.values.nan:
                return False
        elif one.nan or not (one.on_purpose or one.causes):
            return False
        else:
            waiting += one.causes
    return True


def _arrived(result: Any) -> None:
    """Wait for what other ranks send: until then, the memory for it holds anything."""
    for _, x in tensors_in(result):
        if type(x) is torch.Tensor:
            torch.ops._c10d_functional.wait_tensor(x)
