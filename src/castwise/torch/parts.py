"""Models with graph breaks: control flow that depends on data, calls that no graph can hold.

torch.compile's tracer follows the model's Python as far as it can, makes a graph of it, lets Python run what it cannot
follow, and goes on from there. Its graphs are captured and planned one by one here, as one problem (see
`castwise._joined`); what is between them runs as it is written, and the plan says where that is and why.

A handler is called for each graph, to capture, price, try or run it; the model's Python, with all that it decides by
its data, runs each time.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from castwise._joined import in_part, join_graphs
from castwise.graph import Graph

from ._part import Part, weight_positions
from ._traced import as_is_inside
from .capture import Captured, CaptureError, as_call, capture

__all__ = ["Broken", "CapturedParts", "capture_parts", "part_formats", "signature"]

Handler = Callable[[Part, list[Any]], Any]

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
_PATH = re.compile(r"(?<=\().*[/\\](?=[^/\\]+ line \d+\))")
_SKIPPED = re.compile(r"frame skipped: (.+)")
_BRANCH = "generic_jump"
_ON_DATA = "control flow depends on data"
_COUNTED_AS = {"Data-dependent branching": _ON_DATA}
"""What torch counts some breaks as, and how they are described where it says where they are."""
_LONGEST_REASON = 100


class Broken:
    """A model whose forward runs graph by graph, with Python between them.

    A function with a break inside a loop is not traced at all, only what it calls. So torch's own layers, which are
    never traced by themselves, are given to the tracer one by one where a function of the user calls them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.breaks: dict[str, None] = {}
        """Where the graph broke so far, and why."""
        self._handler: Handler | None = None
        self._ran = False
        self._compiled = torch.compile(model.forward, backend=self._backend)
        called = _called_by_users(model)
        self._layers = [
            (layer, _traced_alone(layer, functools.partial(self._backend, layer=path)))
            for path, layer in model.named_modules()
            if layer in called
        ]

    def run(self, handler: Handler, *args: Any, **kwargs: Any) -> Any:
        """The model's results where `handler` computes each graph, from the part and what it is called with."""
        before, self._handler = self._handler, handler
        changed = [(layer, run) for layer, run in self._layers if "forward" not in layer.__dict__]
        for layer, run in changed:
            layer.__dict__["forward"] = run
        try:
            if self._ran:
                return self._compiled(*args, **kwargs)
            with warnings.catch_warnings():  # which costs too much for each step
                # The tracer looks at the gradients of its arguments, which are results of other graphs.
                warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
                return self._compiled(*args, **kwargs)
        finally:
            self._ran = True
            for layer, _ in changed:
                layer.__dict__.pop("forward", None)
            self._handler = before

    def _backend(self, graph: fx.GraphModule, _example: Sequence[Any], layer: str | None = None) -> Callable[..., Any]:
        reason: Any = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            self.breaks[_described(reason)] = None
        parts: dict[tuple[int, ...], Part] = {}
        weights: list[int] | None = None

        def run(*flat: Any) -> Any:
            nonlocal weights
            if weights is None:
                weights = weight_positions(flat, self._paths())
            key = tuple([id(flat[position]) for position in weights])
            part = parts.get(key)
            if part is None:
                part = parts[key] = Part(graph, flat, self._paths(), layer)
            return graph(*flat) if self._handler is None else self._handler(part, part.own(flat))

        return run

    def _paths(self) -> dict[int, str]:
        return {id(x): path for path, x in [*self.model.named_parameters(), *self.model.named_buffers()]}


def _called_by_users(model: nn.Module) -> set[nn.Module]:
    """Layers of torch itself that modules of others hold."""
    users = [module for module in model.modules() if not _of_torch(module)]
    held = [child for user in users for child in user.children()]
    inside = [child for layer in held if isinstance(layer, nn.ModuleList | nn.ModuleDict) for child in layer.children()]
    containers = (nn.ModuleList, nn.ModuleDict)
    return {layer for layer in [*held, *inside] if _of_torch(layer) and not isinstance(layer, containers)}


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


def _traced_alone(layer: nn.Module, backend: Any) -> Callable[..., Any]:
    """The layer's forward, traced by itself where no tracer is at work that would take it into a larger graph."""
    forward = layer.forward

    def alone(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # The tracer keeps few graphs per code object, and each layer needs its own.
    fresh = types.FunctionType(alone.__code__.replace(), alone.__globals__, "alone", None, alone.__closure__)
    compiled = torch.compile(fresh, backend=backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if torch.compiler.is_compiling() else compiled(*args, **kwargs)

    return as_is_inside(run)


def _described(reason: Any) -> str:
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = ""
    if frame is not None:
        name = frame.filename.replace("\\", "/").rsplit("/", 1)[-1]
        function = _RESUMED.sub(r"\1", frame.name)
        where = f"{name}:{frame.lineno} in {function}: {(frame.line or '').strip().rstrip(':')}: "
    return where + (_ON_DATA if _BRANCH in reason.reason else _first_line(reason.reason))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:_LONGEST_REASON]


@dataclass(frozen=True)
class CapturedParts:
    """The graphs of a model with breaks, as they were captured, and as one graph for the planner."""

    broken: Broken
    parts: tuple[Captured, ...]
    calls: tuple[list[Any], ...]
    """What each part was called with when it was captured."""
    graph: Graph
    training: bool
    _numbers: dict[Part, int | None] = field(default_factory=dict)

    def run(self, batch: Any, handler: Callable[[int, list[Any]], Any]) -> Any:
        """The model's results for a batch where ``handler`` computes each part, by its number.

        A graph that is none of the parts, on a path through the model that no batch took before, runs as it is.
        """

        def by_number(part: Part, own: list[Any]) -> Any:
            if part not in self._numbers:
                self._numbers[part] = self._number(capture(part, tuple(own), training=self.training))
            number = self._numbers[part]
            return part(*own) if number is None else handler(number, own)

        args, kwargs = as_call(batch)
        return self.broken.run(by_number, *args, **kwargs)

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """Around runs and their backward: afterwards the model is as it was."""
        return untouched(self.broken.model)

    def _number(self, captured: Captured) -> int | None:
        mine = signature(captured.graph)
        return next((n for n, part in enumerate(self.parts) if signature(part.graph) == mine), None)


def signature(graph: Graph) -> list[tuple[str, str, str, str]]:
    """What a graph is known by: its ops in order."""
    return [(op.id, op.name, op.layer, op.source) for op in graph.ops]


def capture_parts(
    model: nn.Module, batches: Sequence[Any], *, training: bool, fused: bool, failure: CaptureError
) -> CapturedParts:
    """Capture the graphs of a model on the paths that ``batches`` take through it.

    Raises:
        CaptureError: ``failure``, that of capturing it as one graph, where there is no graph with an op in it.
    """
    broken = Broken(model)
    parts: list[Captured] = []
    calls: list[list[Any]] = []

    def note(part: Part, own: list[Any]) -> Any:
        kept = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in own]
        captured = capture(part, tuple(own), training=training, fused=fused)
        if captured.graph.ops and all(signature(captured.graph) != signature(known.graph) for known in parts):
            parts.append(captured)
            calls.append(kept)
        return part(*own)

    from torch._dynamo.utils import counters  # takes seconds to import, and is needed where a graph breaks alone

    before = {kind: dict(counters[kind]) for kind in ("graph_break", "unimplemented")}
    with untouched(model), torch.enable_grad():
        for batch in batches:
            args, kwargs = as_call(batch)
            try:
                broken.run(note, *args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise failure from error
    if not parts:
        raise failure
    eager = list(broken.breaks)
    for kind, known in before.items():
        new = [reason for reason, count in counters[kind].items() if count > known.get(reason, 0)]
        eager += _others(new, eager)
    graph = join_graphs([part.graph for part in parts], type(model).__name__, eager)
    return CapturedParts(broken, tuple(parts), tuple(calls), graph, training)


def _others(reasons: Sequence[str], known: Iterable[str]) -> list[str]:
    """Breaks before which there was no graph, so that nothing says where they are, and functions not traced at all."""
    said = "\n".join(known)
    skipped = (_SKIPPED.search(reason) for reason in reasons)
    whole = [
        f"{_PATH.sub('', found[1])}: a graph breaks in a loop of it; what it calls is traced"
        for found in skipped
        if found
    ]
    return [*whole, *(why for why in dict.fromkeys(map(_first_line, reasons)) if _COUNTED_AS.get(why, why) not in said)]


def part_formats(captured: Captured | CapturedParts, number: int, formats: Mapping[str, str]) -> Mapping[str, str]:
    """A plan's formats for one part of what it was made for, by the part's own ids."""
    if isinstance(captured, Captured):
        return formats
    return {op.id: formats[in_part(number, op.id)] for op in captured.parts[number].graph.ops}


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's buffers, gradients and torch's random numbers are as before."""
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    gradients = [(p, p.grad) for p in model.parameters()]
    for p, _ in gradients:
        p.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
