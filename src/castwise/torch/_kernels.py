"""Which kernel of several that compute the same runs: chosen by the clock, here, for the shapes of a call.

- A linear layer of a model for inference may keep its weight in oneDNN's own layout, with gelu or relu inside.
- Convolutions may run on channels-last memory: then all that is 4-D and comes after the first of them does.

A choice is made only where it was faster by more than a clock errs, and stays with the module (`_chosen`).
`benchmarks/kernels.py` shows what they are worth.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from castwise.graph import Graph

from . import _aten
from ._chosen import Chosen, call_of
from ._cold import evict, leave, reads_weights
from ._flat import FlatRun
from ._rewrite import EMULATED
from ._run import StudyRun, floating, random_state_kept
from .measure import alternating

__all__ = ["channels_last_pays", "on_channels_last", "with_packed_weights"]

log = logging.getLogger("castwise.torch.kernels")

_WORTH = 0.97
"""Share of the other kernel's time below which one is taken."""
_SECONDS = 0.2
_pointwise = torch.ops.mkldnn._linear_pointwise
_FUSED = {"gelu": "gelu", "relu": "relu"}
_MOST_TOKENS = 4096


def with_packed_weights(
    module: fx.GraphModule, flat: Sequence[Any], chosen: Chosen, *, cold: bool = False
) -> fx.GraphModule:
    """The graph of a CPU model with oneDNN's kernels for linear layers, where they are faster on kept weights.

    Each layer is timed by itself, and then the graph with all of them on ``flat``, the inputs of a call: a kernel that
    wins alone may lose among others. Where weights are ``cold``, each is read from memory while its layer is timed. The
    module that is given stays as it is.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return module
    other = _copied(module)
    packed = 0
    for node in list(other.graph.nodes):
        layer = _Layer.of(other, node)
        if layer is not None and layer.pays(chosen, cold):
            layer.replace(f"castwise_packed_{packed}")
            packed += 1
    if not packed:
        return module
    other.graph.eliminate_dead_code()
    other.recompile()
    call = call_of(other, flat)
    faster = chosen.whether("packed layers", call, device_type="cpu", ask=lambda: _is_faster(other, module, flat))
    return other if faster else module


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.set_codegen(module.graph._codegen)
    new: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    return fx.GraphModule(module, graph)


def _is_faster(other: fx.GraphModule, module: fx.GraphModule, flat: Sequence[Any]) -> bool:
    """Whether a graph with packed layers is faster as a whole; so it is taken to be where it cannot be tried."""
    if not flat or any(_aten.mutated(node) for node in module.graph.nodes):
        return True
    runs = [_plain_call(one, flat) for one in (module, other)]
    with torch.no_grad(), random_state_kept():
        as_is, packed = alternating(runs, "cpu", time.perf_counter() + _SECONDS)
    log.info("packed linear layers take %.2f of the graph's time", packed / as_is)
    return packed < _WORTH * as_is


def _plain_call(module: fx.GraphModule, flat: Sequence[Any]) -> Callable[[], None]:
    flat_run = FlatRun(module, None)

    def run() -> None:
        flat_run.values(flat)

    return run


class _Layer:
    """A linear layer of a graph, and the activation that alone reads it."""

    def __init__(self, module: fx.GraphModule, node: fx.Node, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.module, self.node, self.weight, self.bias = module, node, weight, bias
        readers = list(node.users)
        name = _name(readers[0]) if len(readers) == 1 else ""
        self.activation = readers[0] if name in _FUSED and readers[0].args[0] is node else None
        tanh = self.activation is not None and self.activation.kwargs.get("approximate") == "tanh"
        self.algorithm = "tanh" if tanh else "none"
        self.attribute = "none" if self.activation is None else _FUSED[name]
        self.tokens = _tokens(node)
        self.key = (tuple(weight.shape), weight.dtype, bias is None, self.attribute, self.algorithm, self.tokens)

    @classmethod
    def of(cls, module: fx.GraphModule, node: fx.Node) -> _Layer | None:
        """The layer that a node computes; None where it is none, or its weight is not kept on a CPU."""
        if node.target is not torch.ops.aten.linear.default:
            return None
        operands = [_kept(module, a) if isinstance(a, fx.Node) else None for a in node.args[1:]]
        weight, bias = operands[0], operands[1] if len(operands) > 1 else None
        if weight is None or (bias is None and len(node.args) > 2 and node.args[2] is not None):
            return None
        if weight.device.type != "cpu" or weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
            return None
        return cls(module, node, weight, bias)

    def pays(self, chosen: Chosen, cold: bool) -> bool:
        """Whether oneDNN's kernel is faster."""
        return chosen.whether("packed layer", self.key, cold, device_type="cpu", ask=lambda: self._is_faster(cold))

    def _is_faster(self, cold: bool) -> bool:
        x = torch.randn(self.tokens, self.weight.shape[1]).to(self.weight.dtype)

        def plain() -> None:
            y = torch.nn.functional.linear(x, self.weight, self.bias)
            if self.attribute == "relu":
                torch.relu(y)
            elif self.attribute == "gelu":
                torch.nn.functional.gelu(y, approximate=self.algorithm)

        def fused() -> None:
            _pointwise(x, packed, self.bias, self.attribute, [], self.algorithm)

        try:
            with torch.no_grad():
                packed = self._packed()
                before = evict if cold and reads_weights(self.weight, x) else leave
                one, other = alternating([plain, fused], "cpu", time.perf_counter() + _SECONDS, before)
        except RuntimeError as error:  # a format or shape that this oneDNN does not take
            log.debug("oneDNN's linear layer does not run here: %s", error)
            return False
        return other < _WORTH * one

    def replace(self, name: str) -> None:
        """Let oneDNN compute the layer and its activation."""
        self.module.register_buffer(name, self._packed(), persistent=False)
        graph, last = self.module.graph, self.activation or self.node
        with graph.inserting_before(last):
            bias = self.node.args[2] if len(self.node.args) > 2 else None
            arguments: Any = (self.node.args[0], graph.get_attr(name), bias, self.attribute, [], self.algorithm)
            made = graph.call_function(_pointwise.default, arguments)
        made.meta = dict(last.meta)
        last.replace_all_uses_with(made)
        graph.erase_node(last)
        if last is not self.node:
            graph.erase_node(self.node)

    def _packed(self) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(self.weight, self.tokens)
        return packed


def _name(node: fx.Node) -> str:
    entry = _aten.entry_of(node)
    return "" if entry is None or _aten.mutated(node) else entry.name


def _kept(module: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    value = _aten.attribute(module, str(node.target)) if node.op == "get_attr" else None
    return value.detach() if isinstance(value, torch.Tensor) else None


def _tokens(node: fx.Node) -> int:
    """Rows of a linear layer's result on the example; 1 where that is not known."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 1
    rows = 1
    for size in value.shape[:-1]:
        hint = size if isinstance(size, int) else getattr(size.node, "hint", None)
        rows *= hint if isinstance(hint, int) else 1
    return max(1, min(rows, _MOST_TOKENS))


# ---- convolutions ----------------------------------------------------------------------------------------------------

_FEWEST_CONVOLUTIONS = 2  # one alone gains less than what its result is copied back for
_WORTH_TRYING = 5e7  # operations of all convolutions: below, a step takes a millisecond or two either way


def channels_last_pays(
    module: fx.GraphModule, planned: Graph, flat: Sequence[Any], training: bool, chosen: Chosen
) -> bool:
    """Whether a call as this one is faster with convolutions on channels-last memory.

    Parameters stay as they are, and results have the memory layout that they have without it.
    """
    flops = sum(op.flops for op in planned.ops if op.name.startswith("conv"))
    other = on_channels_last(module) if flops > _WORTH_TRYING else None
    if other is None:
        return False
    device_type = next((x.device.type for x in flat if isinstance(x, torch.Tensor)), "cpu")
    return chosen.whether(
        "channels last",
        call_of(module, flat),
        training,
        device_type=device_type,
        ask=lambda: _is_faster_last(other, module, flat, training, device_type),
    )


def _is_faster_last(
    other: fx.GraphModule, module: fx.GraphModule, flat: Sequence[Any], training: bool, device_type: str
) -> bool:
    # What other graphs made is not to be differentiated here.
    flat = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in flat]  # and a graph may write it
    runs = [_call(one, flat, training) for one in (module, other)]
    try:
        with random_state_kept():
            as_is, last = alternating(runs, device_type, time.perf_counter() + 10 * _SECONDS)
    except RuntimeError as error:
        log.debug("the graph does not run on channels-last memory: %s", error)
        return False
    log.info("channels-last memory takes %.2f of the time", last / as_is)
    return last < _WORTH * as_is


def _call(module: fx.GraphModule, flat: Sequence[Any], training: bool) -> Callable[[], None]:
    def run() -> None:
        with torch.set_grad_enabled(training):
            results = [y for y in floating(StudyRun(module, gradients=training).run(*flat)) if y.requires_grad]
            if results:
                torch.autograd.backward(results, [torch.ones_like(y) for y in results])

    return run


def on_channels_last(module: fx.GraphModule) -> fx.GraphModule | None:
    """The graph with images in channels-last memory; None where there are few convolutions, or memory is shared."""
    graph = fx.Graph()
    graph.set_codegen(module.graph._codegen)
    new: dict[fx.Node, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    count = 0

    def in_layout(node: fx.Node, layout: torch.memory_format) -> fx.Node:
        return graph.call_function(torch.ops.aten.contiguous.default, (new[node],), {"memory_format": layout})

    for node in module.graph.nodes:
        if any(source.target is torch.ops.aten.view.default for source in _aten.mutated(node)):
            return None  # what is written is another tensor's memory, which a copy would not be
        image = _image_of(node)
        if node.op == "output":
            new[node] = graph.node_copy(
                node, lambda n: in_layout(n, torch.contiguous_format) if _is_image(n) else new[n]
            )
            continue
        if image is not None:
            count += 1
            if image not in copies:
                copies[image] = in_layout(image, torch.channels_last)
        given = {**new, image: copies[image]} if image is not None else new
        new[node] = graph.node_copy(node, given.__getitem__)
        if node.target is torch.ops.aten.view.default:
            new[node].target = torch.ops.aten.reshape.default
    return fx.GraphModule(module, graph) if count >= _FEWEST_CONVOLUTIONS else None


def _image_of(node: fx.Node) -> fx.Node | None:
    """What a 2-D convolution convolves."""
    args = node.args[2:] if node.target in EMULATED else node.args
    target = node.args[0] if node.target in EMULATED else node.target
    if target is not torch.ops.aten.conv2d.default or not isinstance(args[0], fx.Node):
        return None
    return args[0]


def _is_image(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 4
