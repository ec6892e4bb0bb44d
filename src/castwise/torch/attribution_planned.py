"""Repeating a step of a planned model: its ops run from graphs, which know the layers and lines that they came from."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from . import _aten
from ._paths import named_layers
from .attribution_lines import of_program
from .attribution_trace import Trace
from .capture import flat_inputs

__all__ = ["PartsTrace", "run_planned"]


class PartsTrace(Trace):  # type: ignore[no-untyped-call]
    """A trace of a model that runs graph by graph with Python between: a plan's, of a model with graph breaks.

    Hooks on its modules would have all of it traced anew, and so would a mode that wants to see a tracer at work. Who
    runs a graph says which layers it enters; between graphs, the stack tells which module's forward is running.
    """

    def __init__(self, model: nn.Module, sources: Iterable[tuple[str, str, torch.Tensor]] = ()) -> None:
        super().__init__(model, sources)
        self._paths = {id(module): path for path, module in named_layers(model)}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def _hook(self) -> None:
        pass

    @property
    def layer(self) -> str | None:
        inside: str | None = super().layer
        if inside != "":
            return inside
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path: str | None = self._paths.get(id(frame.f_locals.get("self"))) if of_program(frame) else None
            if path is not None:
                return path
            frame = frame.f_back
        return inside


class _Layers(fx.Interpreter):
    """Runs a planned graph and tells the trace which layer and line of the program each node belongs to."""

    def __init__(self, module: fx.GraphModule, trace: Trace) -> None:
        super().__init__(module)
        self.trace = trace
        self.places = _places(module.graph)

    def run_node(self, n: fx.Node) -> Any:
        layer, self.trace.line = self.places.get(n, ("", ""))
        self.trace.enter_layer(layer, self.fetch_args_kwargs_from_env(n))
        try:
            return super().run_node(n)
        finally:
            self.trace.leave_layer()
            self.trace.line = ""

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None if target == "_guards_fn" else super().call_module(target, args, kwargs)


def _places(graph: fx.Graph) -> dict[fx.Node, tuple[str, str]]:
    """Layer and line of each node. A cast, which the plan put there, belongs to the first that reads it."""
    found: dict[fx.Node, tuple[str, str]] = {}
    for node in reversed(graph.nodes):
        if node.meta.get("nn_module_stack"):
            found[node] = _aten.layer(node), _aten.program_line(node)
        else:
            reader = next((user for user in node.users if user in found), None)
            if reader is not None:
                found[node] = found[reader]
    return found


def run_planned(planned: Any, args: Any, kwargs: Any, trace: Trace) -> Any:
    """The results of a call of an applied plan under a trace, which is told of the layers that its graphs are of."""

    def run(applied: Any, own_args: Any, own_kwargs: Any) -> Any:
        graph = applied.graph_for(own_args, own_kwargs).module
        return _Layers(graph, trace).run(*flat_inputs(own_args, own_kwargs))

    if not planned.has_breaks:
        return run(planned, args, kwargs)
    trace.enter_layer("", (args, kwargs))  # which is where its Python runs
    try:
        with torch.compiler.set_stance("default"):  # it is torch.compile's tracer that takes it apart
            return planned._in_parts.run_by(lambda part, own: run(part, tuple(own), {}), *args, **kwargs)
    finally:
        trace.leave_layer()
