"""A model as the planner's graph: captured once with torch.export, described without torch.

`torch.export` follows the model's own Python once, with its example inputs, and gives a graph of ATen calls before
autograd: the calls that will run, with the module path and source line of each. Its parameters are the model's own
tensors, so what is applied to the graph trains the model itself.

Control flow that depends on data cannot be captured; `castwise.torch.parts` captures what is around it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from castwise.errors import PlanError
from castwise.graph import Graph, GraphBuilder, Kind

from . import _aten, _caches
from ._aten import Seen
from ._caches import Returned, carried, packed_forward
from ._functions import base_name
from ._part import Part, name_layers
from .emulation import format_of

log = logging.getLogger("castwise.torch.capture")

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CaptureError(PlanError):
    """The model's control flow or inputs cannot be captured as one graph."""


@dataclass(frozen=True)
class Captured:
    """A model's graph in both forms, and how they belong together."""

    module: fx.GraphModule
    """ATen calls; its parameters and buffers are the model's own."""
    graph: Graph
    """The planner's description of it."""
    ops: Mapping[str, fx.Node]
    """FX nodes by op id."""
    tensors: Mapping[str, fx.Node]
    """FX nodes by tensor name."""
    values: Mapping[fx.Node, Any]
    """Per node what its value looked like on the example inputs."""
    training: bool
    returned: Returned
    """How the caller gets back the key-value caches that the graph returns as tensors."""

    @property
    def parts(self) -> tuple[Captured, ...]:
        """The graphs that the model was captured as: this one."""
        return (self,)

    def run(self, batch: Any, handler: Callable[[int, list[Any]], Any]) -> Any:
        """The results for a batch where ``handler`` computes each part, from its number and flat inputs."""
        return handler(0, flat_inputs(*as_call(batch)))

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """Around runs: nothing of the model is touched by them."""
        return contextlib.nullcontext()


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments: a mapping is keywords, a tuple or list positions."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    training: bool,
    dynamic: bool = True,
    fused: bool = False,
    separate: bool = False,
) -> Captured:
    """Capture `model` in its present mode (train or eval) for calls like `example_inputs`.

    Args:
        model: is not changed; its buffers are not updated.
        example_inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        training: whether a backward pass follows.
        fused: describe what a compiler makes of it, which computes chains of cheap ops in one kernel.
        separate: `example_inputs` is a pair of positional and keyword arguments.
        dynamic: let batch and sequence lengths vary wherever the model allows it.

    Raises:
        CaptureError: torch.export cannot follow the model; the message says where.
    """
    args, kwargs = example_inputs if separate else as_call(example_inputs)
    returned = Returned()
    if not _caches.needs_packing(model.forward):
        module = export(model, args, kwargs, dynamic)
    else:
        with _packing_forward(model, args, kwargs, returned) as packed:
            module = export(model, *packed, dynamic)
    if isinstance(model, Part):
        name_layers(module, model)
    return _Describer(module, (args, kwargs), training, type(model).__name__, fused).describe(returned)


@contextlib.contextmanager
def _packing_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Returned
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Inside, the model's forward takes and returns tensors in place of key-value caches."""
    before = model.__dict__.get("forward")
    run, packed_args, packed_kwargs = packed_forward(model.forward, args, kwargs, returned)
    model.__dict__["forward"] = run
    try:
        yield packed_args, packed_kwargs
    finally:
        model.__dict__.pop("forward")
        if before is not None:
            model.__dict__["forward"] = before


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool) -> fx.GraphModule:
    """The model as a module of ATen calls that shares its parameters."""
    shapes = _dynamic_shapes(model, args, kwargs) if dynamic else None
    attempts = [shapes, None] if shapes is not None else [None]
    error: Exception | None = None
    for attempt in attempts:
        try:
            with warnings.catch_warnings():
                # Recurrent layers set their own list of weights in each call, to what it was.
                warnings.filterwarnings("ignore", message="The tensor attributes? .* assigned during export")
                program = torch.export.export(model, args, kwargs, dynamic_shapes=attempt, strict=False)
            return program.module()
        except Exception as failure:  # torch raises many kinds; what they say is passed on
            error = failure
            if attempt is not None:
                log.info("%s has shapes that cannot vary: captured for the example's shapes", type(model).__name__)
                log.debug("%s", failure)
    first = str(error).strip().splitlines()[0] if error is not None and str(error).strip() else repr(error)
    raise CaptureError(
        f"{type(model).__name__} cannot be captured as one graph: {first} Run it eagerly under a preset "
        "(castwise.torch.Amp or autocast), or plan the parts of it whose control flow does not depend on data."
    ) from error


def _dynamic_shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By name of each argument of forward, which sizes may vary: all but those that are one."""

    def dims(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return {i: torch.export.Dim.AUTO for i, size in enumerate(x.shape) if size > 1}
        return None

    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None  # the call does not fit, which torch.export will say better
    return torch.utils._pytree.tree_map(dims, dict(bound))


class _Describer:
    """Walks the FX graph once and builds the planner's graph."""

    def __init__(self, module: fx.GraphModule, call: Any, training: bool, name: str, fused: bool) -> None:
        self.module, self.call, self.training, self.fused = module, call, training, fused
        self.build = GraphBuilder(name, framework="torch")
        self.names: dict[fx.Node, str] = {}
        self.ops: dict[str, fx.Node] = {}
        self.values = _example_values(module, call)
        self.returned = {n for node in module.graph.nodes if node.op == "output" for n in node.all_input_nodes}

    def describe(self, returned: Returned) -> Captured:
        for node in self.module.graph.nodes:
            value = self.values.get(node)
            if node.op == "placeholder":
                self._given(node, value, Kind.INPUT)
            elif node.op == "get_attr":
                weight = isinstance(_aten.attribute(self.module, str(node.target)), nn.Parameter)
                self._given(node, value, Kind.WEIGHT if weight else Kind.CONSTANT)
            elif node.op == "call_function":
                self._call(node, value)
        graph = self.build.build(training=self.training)
        tensors = {name: node for node, name in self.names.items()}
        return Captured(self.module, graph, self.ops, tensors, self.values, self.training, returned)

    def _given(self, node: fx.Node, value: Any, kind: Kind) -> None:
        if isinstance(value, Seen):
            wants = kind is Kind.WEIGHT and value.requires_grad
            self._declare(node, value, kind, requires_grad=wants)

    def _declare(self, node: fx.Node, value: Seen, kind: Kind, **more: Any) -> str:
        fmt = format_of(value.dtype).name if value.dtype in _FLOATS else str(value.dtype).removeprefix("torch.")
        keeps = kind is Kind.OUTPUT and value.dtype in _FLOATS
        name = self.build.tensor(
            node.name, value.shape, kind=kind, format=fmt, itemsize=value.dtype.itemsize, keeps_format=keeps, **more
        )
        self.names[node] = name
        return name

    def _call(self, node: fx.Node, value: Any) -> None:
        before = _aten.viewed(node, self.values)
        if before is not None:
            if before in self.names:
                self.names[node] = self.build.view(node.name, self.names[before])
            return
        if not isinstance(value, Seen | tuple | list) or not isinstance(node.target, torch._ops.OpOverload):
            return  # sizes and other numbers
        mutates = [self.names[n] for n in _aten.mutated(node) if n in self.names]
        outputs = [] if mutates else self._outputs(node, value)
        if outputs or mutates:
            self.ops[node.name] = node
            self._op(node, outputs, mutates)
        if mutates:
            self.names[node] = self.build.view(node.name, mutates[0])

    def _op(self, node: fx.Node, outputs: list[str], mutates: list[str]) -> None:
        entry = _aten.entry_of(node)
        assert isinstance(node.target, torch._ops.OpOverload)
        reads = [n for n in _aten.planned_inputs(node) if n in self.names]
        shown = {_aten.root(n, self.values) for n in (node, *reads)}
        saved = [n for n in self.values.saved.get(node, ()) if _aten.root(n, self.values) in shown]
        # Batch statistics and the like stay fp32 and are beside the plan; what makes tensors out of numbers only
        # makes them in the format that the model asked for.
        floats = any(_aten.dtype_seen(self.values.get(n)) in _FLOATS for n in reads)
        self.build.op(
            node.name,
            entry.name if entry is not None else base_name(node.target)[0],
            [self.names[n] for n in reads],
            outputs,
            layer=_aten.layer(node),
            source=_aten.source(node),
            attributes=_aten.attributes(node),
            flops=_aten.flops(node, self.values),
            bytes=_aten.moved_bytes(node, self.values),
            saves=[self.names[n] for n in saved if n in self.names] if self.training else (),
            mutates=mutates,
            accumulates=_aten.summed_terms(node, self.values) if reads else 0,
            fused=self.fused and _aten.is_generated(node),
            pin="" if floats else "it has no floating-point operand",
        )

    def _outputs(self, node: fx.Node, value: Any) -> list[str]:
        kind = Kind.OUTPUT if self._leaves(node) else Kind.ACTIVATION
        first = value if isinstance(value, Seen) else next((v for v in value if isinstance(v, Seen)), None)
        return [] if first is None else [self._declare(node, first, kind, requires_grad=first.requires_grad)]

    def _leaves(self, node: fx.Node) -> bool:
        """Whether the caller gets this node's value, itself or through views of it."""
        todo = [node]
        while todo:
            n = todo.pop()
            if n in self.returned:
                return True
            todo += [user for user in n.users if _aten.viewed(user, self.values) is n]
        return False


# ---- what the example run shows --------------------------------------------------------------------------------------


class _Values(dict[fx.Node, Any]):
    """Per node what its value looked like, and in `saved` which nodes' tensors its backward keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[fx.Node, tuple[fx.Node, ...]] = {}


class _ExampleRun(fx.Interpreter):
    """Runs the graph once in its own formats and notes shapes and what autograd keeps.

    What an op saves is not guessed from its kind but seen: saved-tensor hooks around the one call, matched by storage.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.seen = _Values()
        self._owner: dict[int, fx.Node] = {}

    def run_node(self, n: fx.Node) -> Any:
        kept: list[int] = []

        def pack(x: torch.Tensor) -> torch.Tensor:
            kept.append(_storage(x))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            result = super().run_node(n)
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self._owner.setdefault(_storage(x), n)
        self.seen[n] = _look(result)
        if kept:
            owners = (self._owner.get(address) for address in dict.fromkeys(kept))
            mine = {n, *n.all_input_nodes}
            roots = {_aten.root(m, self.seen) for m in mine}
            self.seen.saved[n] = tuple(o for o in owners if o is not None and (o in mine or o in roots))
        return result


def _example_values(module: fx.GraphModule, call: Any) -> _Values:
    args, kwargs = call
    run = _ExampleRun(module)
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    state = torch.get_rng_state()
    try:
        with torch.enable_grad():
            run.run(*flat_inputs(args, kwargs))
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for name, b in module.named_buffers():
                b.copy_(buffers[name])
    return run.seen


def flat_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """A call's arguments as the graph's placeholders take them."""
    return carried(torch.utils._pytree.tree_flatten((args, kwargs))[0])[0]


def _look(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Seen(tuple(x.shape), x.dtype, x.requires_grad)
    if isinstance(x, tuple | list):
        return tuple(_look(y) for y in x)
    return x


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.numel() else id(x)
