"""Reading FX nodes of ATen calls: what a call views, changes, computes and belongs to, by its schema and metadata."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from castwise.catalogue import Mixed, OpClass, OpEntry, load_catalogue

from ._functions import base_name


@dataclass(frozen=True, slots=True)
class Seen:
    """What is kept of a tensor of the example run: nothing that holds memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


Values = Mapping[fx.Node, Any]
"""Per node what its value looked like: a `Seen`, a tuple of them, or a number."""

_TORCH = os.path.dirname(torch.__file__) + os.sep

# Classes whose kernels a compiler generates and fuses with their neighbours.
_GENERATED = frozenset(
    {
        OpClass.ELEMENTWISE,
        OpClass.EXP_LOG,
        OpClass.NORM,
        OpClass.REDUCTION,
        OpClass.COMPARE,
        OpClass.INDEX,
        OpClass.COPY,
        OpClass.CAST,
        OpClass.LOSS,
    }
)


def entry_of(node: fx.Node) -> OpEntry | None:
    """The catalogue's entry for a call, if it has one."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    return load_catalogue().lookup("torch", base_name(node.target)[0])


def viewed(node: fx.Node, values: Values) -> fx.Node | None:
    """The node whose memory this one shows in the same format, one step back; None for nodes that compute.

    A cast to the format that a tensor has already is such a view. So is what a call with several results returns.
    """
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if not isinstance(values.get(source), Seen | tuple):
        return None
    if node.target is operator.getitem:
        return source
    if not isinstance(node.target, torch._ops.OpOverload) or not is_view(node.target):
        return None
    return source if dtype_seen(values.get(node)) is dtype_seen(values.get(source)) else None


def root(node: fx.Node, values: Values) -> fx.Node:
    """The node whose memory a chain of views shows."""
    while (before := viewed(node, values)) is not None:
        node = before
    return node


def dtype_seen(value: Any) -> torch.dtype | None:
    """The dtype of a tensor, or of the first tensor of several."""
    if isinstance(value, Seen):
        return value.dtype
    if isinstance(value, tuple | list):
        return next((d for d in map(dtype_seen, value) if d is not None), None)
    return None


def planned_inputs(node: fx.Node) -> list[fx.Node]:
    """The tensors whose format an op's plan decides: not the fp32 statistics and parameters beside a normalised one."""
    entry = entry_of(node)
    if entry is not None and entry.op_class is OpClass.NORM and entry.mixed is Mixed.KEEP:
        return node.all_input_nodes[:1]
    return node.all_input_nodes


def is_generated(node: fx.Node) -> bool:
    """Whether a compiler generates the kernel of this call and fuses it with its neighbours."""
    entry = entry_of(node)
    return entry is not None and entry.op_class in _GENERATED


def summed_terms(node: fx.Node, values: Values) -> int:
    """How many terms a reduction sums into each result in the op's own format; 0 where it sums none, or wide."""
    entry = entry_of(node)
    before, after = (values.get(n) for n in (node.all_input_nodes[0], node))
    if entry is None or entry.accumulates_wide or not isinstance(before, Seen) or not isinstance(after, Seen):
        return 0
    inside, outside = torch.Size(before.shape).numel(), torch.Size(after.shape).numel()
    return inside // max(1, outside) if inside > outside else 0


def moved_bytes(node: fx.Node, values: Values) -> float | None:
    """Bytes that a gather moves: the rows it reads and writes, not its table. None for ops that read all they get."""
    entry, out = entry_of(node), values.get(node)
    if entry is None or entry.op_class is not OpClass.INDEX or not isinstance(out, Seen):
        return None
    return 2.0 * torch.Size(out.shape).numel() * out.dtype.itemsize


def is_view(target: torch._ops.OpOverload) -> bool:
    """Whether an op returns memory of its first argument: said by the schema, or known of `reshape`-like composites."""
    schema = target._schema
    if schema.is_mutable:
        return False
    alias = any(r.alias_info is not None for r in schema.returns)
    entry = load_catalogue().lookup("torch", base_name(target)[0])
    return alias or (entry is not None and entry.view)


def mutated(node: fx.Node) -> Sequence[fx.Node]:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return ()
    found = []
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            found.append(value)
    return found


def attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def layer(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and not entry[0].startswith("_empty")]
    return paths[-1] if paths else ""


def source(node: fx.Node) -> str:
    """File and line of the user's code that made the call: the innermost frame outside torch."""
    path, _, rest = program_line(node).rpartition(":")
    return f"{path.rsplit('/', 1)[-1]}:{rest.partition(' ')[0]}" if path else ""


def program_line(node: fx.Node) -> str:
    """As `source`, with the whole path, and the function."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if 'File "' in line]
    for line in reversed(lines):
        path, _, rest = line.partition('File "')[2].partition('", line ')
        if not path.startswith(_TORCH):
            number, _, function = rest.partition(", in ")
            return f"{path}:{number} in {function}"
    return ""


def attributes(node: fx.Node) -> str:
    """The arguments that are no tensors, as text: what a kernel's time depends on besides shapes."""
    plain = [repr(a) for a in node.args if not isinstance(a, fx.Node) and not _holds_node(a)]
    named = [f"{k}={v!r}" for k, v in node.kwargs.items() if not isinstance(v, fx.Node) and not _holds_node(v)]
    return f"{node.target}:{','.join(plain + named)}"


def _holds_node(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(v, fx.Node) for v in value)


def flops(node: fx.Node, values: Mapping[fx.Node, Any]) -> float:
    """Forward floating-point operations of a product, two per multiply-add; one per output value of any other op."""
    target = node.target
    out = values.get(node)
    assert isinstance(target, torch._ops.OpOverload)
    shapes = [v.shape for v in (values.get(n) for n in node.all_input_nodes) if isinstance(v, Seen)]
    size = float(torch.Size(out.shape).numel()) if isinstance(out, Seen) else 0.0
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
