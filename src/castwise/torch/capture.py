"""A model as the planner's graph: captured once with torch.export, described without torch.

`torch.export` follows the model's own Python once, with its example inputs, and gives a graph of ATen calls before
autograd: the calls that will run, with the module path and source line of each. Its parameters are the model's own
tensors, so what is applied to the graph trains the model itself.

Control flow that depends on data cannot be captured; the caller is told where, and keeps the model eager.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from castwise.catalogue import load_catalogue
from castwise.errors import PlanError
from castwise.graph import Graph, GraphBuilder, Kind

from ._functions import base_name
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
    training: bool


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments: a mapping is keywords, a tuple or list positions."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def capture(model: nn.Module, example_inputs: Any, *, training: bool, dynamic: bool = True) -> Captured:
    """Capture `model` in its present mode (train or eval) for calls like `example_inputs`.

    Args:
        model: is not changed; its buffers are not updated.
        example_inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        training: whether a backward pass follows.
        dynamic: let batch and sequence lengths vary wherever the model allows it.

    Raises:
        CaptureError: torch.export cannot follow the model; the message says where.
    """
    args, kwargs = as_call(example_inputs)
    module = export(model, args, kwargs, dynamic)
    return _Describer(module, (args, kwargs), training, type(model).__name__).describe()


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool) -> fx.GraphModule:
    """The model as a module of ATen calls that shares its parameters."""
    shapes = _dynamic_shapes((args, kwargs)) if dynamic else None
    attempts = [shapes, None] if shapes is not None else [None]
    error: Exception | None = None
    for attempt in attempts:
        try:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=attempt, strict=False)
            return program.module()
        except Exception as failure:  # torch raises many kinds; what they say is passed on
            error = failure
            if attempt is not None:
                log.info("%s has shapes that cannot vary: captured for the example's shapes", type(model).__name__)
    first = str(error).strip().splitlines()[0] if error is not None and str(error).strip() else repr(error)
    raise CaptureError(
        f"{type(model).__name__} cannot be captured as one graph: {first} Run it eagerly under a preset "
        "(castwise.torch.Amp or autocast), or plan the parts of it whose control flow does not depend on data."
    ) from error


def _dynamic_shapes(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    def dims(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return {i: torch.export.Dim.AUTO for i, size in enumerate(x.shape) if size > 1}
        return None

    tree = torch.utils._pytree.tree_map(dims, call)
    args, kwargs = tree
    if kwargs and args:
        return None
    return kwargs or args


class _Describer:
    """Walks the FX graph once and builds the planner's graph."""

    def __init__(self, module: fx.GraphModule, call: Any, training: bool, name: str) -> None:
        self.module, self.call, self.training = module, call, training
        self.build = GraphBuilder(name, framework="torch")
        self.names: dict[fx.Node, str] = {}
        self.ops: dict[str, fx.Node] = {}
        self.values = _example_values(module, call)
        self.returned = {n for node in module.graph.nodes if node.op == "output" for n in node.all_input_nodes}

    def describe(self) -> Captured:
        for node in self.module.graph.nodes:
            value = self.values.get(node)
            if node.op == "placeholder":
                self._given(node, value, Kind.INPUT)
            elif node.op == "get_attr":
                weight = isinstance(_attribute(self.module, str(node.target)), nn.Parameter)
                self._given(node, value, Kind.WEIGHT if weight else Kind.CONSTANT)
            elif node.op == "call_function":
                self._call(node, value)
        graph = self.build.build(training=self.training)
        tensors = {name: node for node, name in self.names.items()}
        return Captured(self.module, graph, self.ops, tensors, self.training)

    def _given(self, node: fx.Node, value: Any, kind: Kind) -> None:
        if isinstance(value, _Seen):
            wants = kind is Kind.WEIGHT and value.requires_grad
            self._declare(node, value, kind, requires_grad=wants)

    def _declare(self, node: fx.Node, value: _Seen, kind: Kind, **more: Any) -> str:
        fmt = format_of(value.dtype).name if value.dtype in _FLOATS else str(value.dtype).removeprefix("torch.")
        keeps = kind is Kind.OUTPUT and value.dtype in _FLOATS
        name = self.build.tensor(
            node.name, value.shape, kind=kind, format=fmt, itemsize=value.dtype.itemsize, keeps_format=keeps, **more
        )
        self.names[node] = name
        return name

    def _call(self, node: fx.Node, value: Any) -> None:
        target = node.target
        reads = [n for n in node.all_input_nodes if n in self.names]
        if target is operator.getitem:
            source = node.args[0]
            if source in self.names and isinstance(value, _Seen):
                self.names[node] = self.build.view(node.name, self.names[source])  # type: ignore[index]
            return
        if not isinstance(value, _Seen | tuple | list) or not isinstance(target, torch._ops.OpOverload):
            return  # sizes and other numbers
        if _is_view(target) and reads:
            first = value if isinstance(value, _Seen) else next((v for v in value if isinstance(v, _Seen)), None)
            if first is not None:
                self.names[node] = self.build.view(node.name, self.names[reads[0]])
            return
        mutates = [self.names[n] for n in _mutated(node) if n in self.names]
        entry = load_catalogue().lookup("torch", base_name(target)[0])
        outputs = [] if mutates else self._outputs(node, value)
        if not outputs and not mutates:
            return
        self.ops[node.name] = node
        self.build.op(
            node.name,
            entry.name if entry is not None else base_name(target)[0],
            [self.names[n] for n in reads],
            outputs,
            layer=_layer(node),
            source=_source(node),
            attributes=_attributes(node),
            flops=_flops(node, self.values),
            saves=[self.names[n] for n in self.values.saved.get(node, ()) if n in self.names] if self.training else (),
            mutates=mutates,
            accumulates=0,
        )
        if mutates:
            self.names[node] = self.build.view(node.name, mutates[0])

    def _outputs(self, node: fx.Node, value: Any) -> list[str]:
        kind = Kind.OUTPUT if self._leaves(node) else Kind.ACTIVATION
        if isinstance(value, _Seen):
            return [self._declare(node, value, kind, requires_grad=value.requires_grad)]
        first = next((v for v in value if isinstance(v, _Seen)), None)
        return [] if first is None else [self._declare(node, first, kind, requires_grad=first.requires_grad)]

    def _leaves(self, node: fx.Node) -> bool:
        """Whether the caller gets this node's value, itself or through views of it."""
        todo = [node]
        while todo:
            n = todo.pop()
            if n in self.returned:
                return True
            for user in n.users:
                view = user.target is operator.getitem or (
                    isinstance(user.target, torch._ops.OpOverload) and _is_view(user.target)
                )
                if view and user.args and user.args[0] is n:
                    todo.append(user)
        return False


# ---- what the example run shows --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is kept of a tensor of the example run: nothing that holds memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


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
        if kept:
            owners = (self._owner.get(address) for address in dict.fromkeys(kept))
            mine = {n, *n.all_input_nodes}
            roots = {_root(m): m for m in mine}
            self.seen.saved[n] = tuple(o for o in owners if o is not None and (o in mine or o in roots))
        self.seen[n] = _look(result)
        return result


def _example_values(module: fx.GraphModule, call: Any) -> _Values:
    args, kwargs = call
    run = _ExampleRun(module)
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    state = torch.get_rng_state()
    try:
        with torch.enable_grad():
            run.run(*_flat_inputs(module, args, kwargs))
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for name, b in module.named_buffers():
                b.copy_(buffers[name])
    return run.seen


def _flat_inputs(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    codegen = module.graph._codegen
    process = getattr(codegen, "process_inputs", None)
    if process is not None and getattr(codegen, "pytree_info", None) is not None:
        info = codegen.pytree_info  # type: ignore[attr-defined]
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        del info
        return flat
    return [*args, *kwargs.values()]


def _look(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return _Seen(tuple(x.shape), x.dtype, x.requires_grad)
    if isinstance(x, tuple | list):
        return tuple(_look(y) for y in x)
    return x


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.numel() else id(x)


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory a chain of views shows."""
    while node.op == "call_function" and node.all_input_nodes:
        view = node.target is operator.getitem or (
            isinstance(node.target, torch._ops.OpOverload) and _is_view(node.target)
        )
        if not view:
            break
        node = node.all_input_nodes[0]
    return node


# ---- reading ATen schemas --------------------------------------------------------------------------------------------


def _is_view(target: torch._ops.OpOverload) -> bool:
    """Whether an op returns memory of its first argument: said by the schema, or known of `reshape`-like composites."""
    schema = target._schema
    if schema.is_mutable:
        return False
    alias = any(r.alias_info is not None for r in schema.returns)
    entry = load_catalogue().lookup("torch", base_name(target)[0])
    return alias or (entry is not None and entry.view)


def _mutated(node: fx.Node) -> Sequence[fx.Node]:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return ()
    found = []
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            found.append(value)
    return found


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _layer(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and not entry[0].startswith("_empty")]
    return paths[-1] if paths else ""


def _source(node: fx.Node) -> str:
    """File and line of the user's code that made the call: the innermost frame outside torch."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if 'File "' in line]
    for line in reversed(lines):
        path, _, rest = line.partition('File "')[2].partition('", line ')
        if "/torch/" not in path:
            return f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
    return ""


def _attributes(node: fx.Node) -> str:
    """The arguments that are no tensors, as text: what a kernel's time depends on besides shapes."""
    plain = [repr(a) for a in node.args if not isinstance(a, fx.Node) and not _holds_node(a)]
    named = [f"{k}={v!r}" for k, v in node.kwargs.items() if not isinstance(v, fx.Node) and not _holds_node(v)]
    return f"{node.target}:{','.join(plain + named)}"


def _holds_node(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(v, fx.Node) for v in value)


def _flops(node: fx.Node, values: Mapping[fx.Node, Any]) -> float:
    """Forward floating-point operations of a product, two per multiply-add; one per output value of any other op."""
    target = node.target
    out = values.get(node)
    assert isinstance(target, torch._ops.OpOverload)
    shapes = [v.shape for v in (values.get(n) for n in node.all_input_nodes) if isinstance(v, _Seen)]
    size = float(torch.Size(out.shape).numel()) if isinstance(out, _Seen) else 0.0
    name = base_name(target)[0]
    if name == "linear" and len(shapes) >= 2:
        return 2.0 * size * shapes[1][-1]
    if name in ("matmul", "mm", "bmm") and shapes:
        return 2.0 * size * shapes[0][-1]
    if name.startswith("conv") and len(shapes) >= 2:
        kernel = torch.Size(shapes[1][1:]).numel()
        return 2.0 * size * kernel
    if name == "scaled_dot_product_attention" and len(shapes) >= 3:
        return 2.0 * torch.Size(shapes[0]).numel() * shapes[1][-2] + 2.0 * size * shapes[2][-2]
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        steps = torch.Size(shapes[0][:-1]).numel() if shapes else 0
        return 2.0 * steps * sum(float(torch.Size(s).numel()) for s in shapes if len(s) == 2)
    if target.overloadpacket in flop_registry:
        return size * 2.0
    return size
