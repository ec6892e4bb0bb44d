"""One graph of a model with graph breaks, as a module that can be captured and applied like a whole model.

The tracer of torch.compile gives parameters, buffers and sizes to its graphs as arguments. Here parameters and buffers
are attributes again, as the planner prices rounding them in its own way, and sizes are read from the tensors whose
sizes they are. Layers get the paths that they have in the model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

__all__ = ["Part", "name_layers", "weight_positions"]

_ROOT = re.compile(r"^L\['\w+'\]")
_OUR_FRAME = re.compile(rf'  File "{re.escape(os.path.dirname(__file__))}.*\n(?:    .*\n?)*')
_STEP = re.compile(r"\._modules(?=\[)")
_KEY = re.compile(r"""\[['"]?([^'"\]]+)['"]?\]""")


class Part(nn.Module):
    """A graph that the tracer made, with certain weights: layers that are alike share a graph.

    Args:
        graph: what the tracer gave its backend.
        flat: the graph's arguments at its first call.
        paths: the model's parameters and buffers, by `id`: their paths.
        layer: the path of the layer whose forward was traced; None where weights have to tell.
    """

    def __init__(
        self, graph: fx.GraphModule, flat: Sequence[Any], paths: Mapping[int, str], layer: str | None = None
    ) -> None:
        super().__init__()
        self.traced, self.layer = graph, layer
        self.weights: dict[int, str] = {}
        """Names of the attributes that stand for some of the graph's arguments, by position,"""
        self.paths: dict[str, str] = {}
        """and what these are called in the model."""
        for position in weight_positions(flat, paths):
            name, x = f"given_{position}", flat[position]
            self.weights[position], self.paths[name] = name, paths.get(id(x), "")
            if isinstance(x, nn.Parameter):
                self.register_parameter(name, x)
            else:
                self.register_buffer(name, x)
        self.sizes = _sizes(graph)

    def own(self, flat: Sequence[Any]) -> list[Any]:
        """What a call gives besides weights and sizes."""
        return [x for position, x in enumerate(flat) if position not in self.weights and position not in self.sizes]

    def forward(self, *given: Any) -> Any:
        """The graph's results for what `own` gives."""
        rest = iter(given)
        count = len(self.weights) + len(self.sizes) + len(given)
        flat: list[Any] = [None] * count
        for position in range(count):
            if position in self.weights:
                flat[position] = getattr(self, self.weights[position])
            elif position not in self.sizes:
                flat[position] = next(rest)
        for position, (source, dimension) in self.sizes.items():
            flat[position] = flat[source].shape[dimension]
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(self.traced).run(*flat)


def weight_positions(flat: Sequence[Any], paths: Mapping[int, str]) -> list[int]:
    """Which arguments of a graph are parameters or buffers."""
    tensors = ((position, x) for position, x in enumerate(flat) if isinstance(x, torch.Tensor))
    return [position for position, x in tensors if id(x) in paths or isinstance(x, nn.Parameter)]


def _sizes(graph: fx.GraphModule) -> dict[int, tuple[int, int]]:
    """The graph's arguments that are sizes of others: which argument's, and along which dimension."""
    examples = [n.meta.get("example_value") for n in graph.graph.nodes if n.op == "placeholder"]
    places: dict[str, tuple[int, int]] = {}
    for position, example in enumerate(examples):
        if isinstance(example, torch.Tensor):
            for dimension, size in enumerate(example.shape):
                places.setdefault(str(size), (position, dimension))
    known = {
        position: places.get(str(example))
        for position, example in enumerate(examples)
        if isinstance(example, torch.SymInt)
    }
    return {position: place for position, place in known.items() if place is not None}


def name_layers(module: fx.GraphModule, part: Part) -> None:
    """Give the nodes of a captured part the paths that their layers have in the model, and the user's own lines.

    The tracer names layers from the function that it traced, which may be a submodule's forward.
    """
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {"": ("", "")}
        node.meta["nn_module_stack"] = {key: (_path(path), kind) for key, (path, kind) in stack.items()}
        if "stack_trace" in node.meta:
            node.meta["stack_trace"] = _OUR_FRAME.sub("", str(node.meta["stack_trace"]))
    above = next(_above(module, part), "") if part.layer is None else part.layer
    for node in module.graph.nodes:
        stack = node.meta["nn_module_stack"]
        node.meta["nn_module_stack"] = {
            key: (f"{above}.{path}".strip("."), kind) for key, (path, kind) in stack.items()
        }


def _above(module: fx.GraphModule, part: Part) -> Iterator[str]:
    """Paths of the module whose forward was traced, as the layers of weights tell them."""
    for node in module.graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        layer = stack[-1][0] if stack else ""
        for read in node.all_input_nodes:
            owner = part.paths.get(str(read.target), "").rpartition(".")[0] if read.op == "get_attr" else ""
            if layer and owner == layer:
                yield ""
            elif layer and owner.endswith(f".{layer}"):
                yield owner.removesuffix(f".{layer}")


def _path(name: str) -> str:
    """`L['self'].blocks[0].out` as `blocks.0.out`."""
    return _KEY.sub(r".\1", _STEP.sub("", _ROOT.sub("", name))).strip(".")
