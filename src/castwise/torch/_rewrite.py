"""A captured graph written again with the plan's formats: as few casts as the plan counted, and none that it did not.

A tensor is cast once per direction, where it is first needed in the other format; who reads it through views reads the
same views of the cast. What is changed in place is one tensor per change: a cast of it from before is not used after.

Where the machine has no arithmetic for the 16-bit format, products run through `castwise.torch.emulation`: the values
and tensor formats are those that the format's own kernels give. Of a few rows and a matrix of weights they run as they
are, where no backward follows: torch's kernels for that widen the weights as they read them, and sum in float32.
Reading the weights is what takes the time there, and 16-bit ones are half of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from castwise.catalogue import OpClass
from castwise.formats import FORMATS, parse_format

from . import _aten
from ._aten import Seen
from ._functions import base_name
from ._recurrent import stepwise
from .capture import Captured
from .emulation import Arithmetic, arithmetic, dtype_of

__all__ = ["CAST", "EMULATED", "emulated_call", "emulated_steps", "rewrite"]

CAST = torch.ops.aten.to.dtype
"""The op that casts of the plan are written as."""


_FEW_ROWS = 4
"""Up to so many rows torch multiplies 16-bit weights faster than float32 ones without 16-bit arithmetic too."""


def emulated_call(call: Callable[..., Any], fmt: str, *args: Any, **kwargs: Any) -> Any:
    """An op in a format that the machine does not compute: on rounded values in float32, and its result rounded."""
    if call is torch.ops.aten.linear.default and _has_own_kernel(args[0], args[1]):
        return call(*args, **kwargs)
    how = Arithmetic(FORMATS[fmt], dtype_of(FORMATS[fmt]), emulated=True)
    floats = (torch.float32, how.dtype)

    def mapped(value: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            return cast(value) if value.dtype in floats else value
        return type(value)([mapped(v, cast) for v in value]) if isinstance(value, list | tuple) else value

    entered = [mapped(a, how.enter) for a in args]
    return mapped(call(*entered, **{k: mapped(v, how.enter) for k, v in kwargs.items()}), how.leave)


def _has_own_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch computes a linear layer in 16 bits as fast without arithmetic for them; see the module's docstring.

    Its backward is not so: with gradients none is.
    """
    if x.dtype is not weight.dtype or x.device.type != "cpu" or not isinstance(x.shape[-1], int):
        return False
    watched = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return not watched and weight.dim() == 2 and x.numel() <= _FEW_ROWS * x.shape[-1]


def emulated_steps(target: torch._ops.OpOverload, fmt: str, *args: Any, **kwargs: Any) -> Any:
    """`emulated_call` of a recurrent layer, whose state is rounded at every step."""
    how = Arithmetic(FORMATS[fmt], dtype_of(FORMATS[fmt]), emulated=True)
    return emulated_call(stepwise(base_name(target)[0], how) or target, fmt, *args, **kwargs)


EMULATED = (emulated_call, emulated_steps)


def rewrite(
    captured: Captured, formats: Mapping[str, str], fmt: str, device_type: str, *, emulate: bool | None = None
) -> fx.GraphModule:
    """The captured graph with each op computing in its format.

    Args:
        captured: what the plan was made for, or the same model in its other mode.
        formats: per op id "fp32" or `fmt`; ops that are not in it compute in fp32.
        fmt: the 16-bit format.
        device_type: "cpu", "cuda", ...
        emulate: whether products are emulated; None: where this machine does not compute them.

    The result shares the captured module's parameters and buffers.
    """
    return _Rewriter(captured, formats, fmt, device_type, emulate).run()


class _Rewriter:
    def __init__(
        self, captured: Captured, formats: Mapping[str, str], fmt: str, device_type: str, emulate: bool | None
    ) -> None:
        self.captured, self.formats, self.fmt, self.device_type = captured, formats, fmt, device_type
        self.values = captured.values
        self.low = dtype_of(parse_format(fmt))
        self.emulate = arithmetic(device_type, parse_format(fmt)).emulated if emulate is None else emulate
        self.graph = fx.Graph()
        self.graph.set_codegen(captured.module.graph._codegen)
        self.new: dict[fx.Node, fx.Node] = {}
        self.dtypes: dict[fx.Node, torch.dtype | None] = {}  # what each old node's value really is, once rewritten
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def run(self) -> fx.GraphModule:
        for node in self.captured.module.graph.nodes:
            if node.op == "call_module" and node.target == "_guards_fn":
                continue  # checked before a call, see castwise.torch.apply
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                continue  # torch.export's note of the formats without a plan
            if node.op == "output":
                self._copy(node, self._as_captured)
            elif node.name in self.captured.ops:
                self._op(node)
            else:
                self._other(node)
        self._drop_unread_views()
        self.graph.lint()
        return fx.GraphModule(self.captured.module, self.graph)

    # ---- nodes ----

    def _op(self, node: fx.Node) -> None:
        low = self.formats.get(node.name) == self.fmt
        entry = _aten.entry_of(node)
        planned = set(_aten.planned_inputs(node))
        captured = _aten.dtype_seen(self.values.get(node))
        movable = captured in (torch.float32, self.low)
        is_cast = entry is not None and entry.op_class is OpClass.CAST
        if is_cast or not any(self._movable(n) for n in planned):
            new = self._copy(node, lambda n: self.new[n])
            self.dtypes[node] = captured
        elif low:
            new = self._low(node, planned)
            self.dtypes[node] = self.low if movable else captured
        else:
            new = self._high(node, planned)
            self.dtypes[node] = torch.float32 if movable else captured
        for written in _aten.mutated(node):
            self._outdate(written)
        if _aten.mutated(node):
            self.dtypes[node] = self.dtypes[_aten.mutated(node)[0]]
        new.meta["castwise_op"] = node.name

    def _low(self, node: fx.Node, planned: set[fx.Node]) -> fx.Node:
        new = self._copy(node, lambda n: self._as(n, self.low) if n in planned else self.new[n])
        self._set_dtype_arguments(new, node, self.low)
        entry = _aten.entry_of(node)
        if entry is not None and entry.stores_constant:
            limit = parse_format(self.fmt).max
            new.args = (new.args[0], *(_saturated(a, limit) for a in new.args[1:]))
        lacking = entry is not None and entry.lacks_kernel(self.fmt, self.device_type)
        emulated = entry is not None and entry.product and self.emulate and not self._always_few_rows(node)
        if entry is not None and (emulated or lacking):
            assert isinstance(node.target, torch._ops.OpOverload)
            new.args = (node.target, self.fmt, *new.args)
            new.target = emulated_steps if entry.op_class is OpClass.RNN else emulated_call
        return new

    def _always_few_rows(self, node: fx.Node) -> bool:
        """Whether each call of an inference finds a kernel of torch's own, see the module's docstring."""
        if node.target is not torch.ops.aten.linear.default or self.captured.training or self.device_type != "cpu":
            return False
        shown = node.meta.get("val")
        if not isinstance(shown, torch.Tensor) or not all(isinstance(size, int) for size in shown.shape[:-1]):
            return False
        return math.prod(shown.shape[:-1]) <= _FEW_ROWS

    def _high(self, node: fx.Node, planned: set[fx.Node]) -> fx.Node:
        wide = {n for n in planned if self._movable(n)}
        entry = _aten.entry_of(node)
        if entry is not None and (entry.promotes_natively("torch") or not self._writes_floats(node)):
            # Its kernel reads 16 bits beside fp32 as they are, if there is an fp32 operand that it takes heed of.
            leads = [n for n in wide if self._rank(n)] or list(wide)
            if not self._writes_floats(node):
                same = len({self.dtypes[n] for n in wide}) <= 1
                wide = wide if not same else set()
            elif any(self.dtypes[n] is torch.float32 for n in leads):
                wide = set()
            else:
                wide = set(sorted(leads, key=lambda n: n.name)[:1])
        new = self._copy(node, lambda n: self._as(n, torch.float32) if n in wide else self.new[n])
        self._set_dtype_arguments(new, node, torch.float32)
        return new

    def _other(self, node: fx.Node) -> None:
        """Inputs, parameters, views, numbers, and calls that the planner knows nothing of."""
        before = _aten.viewed(node, self.values)
        if before is None:
            self._copy(node, self._as_captured)
            self.dtypes[node] = _aten.dtype_seen(self.values.get(node))
            return
        self.dtypes[node] = self._getitem_dtype(node, before)
        entry = _aten.entry_of(node)
        if entry is not None and entry.op_class is OpClass.CAST:  # to the format it had: no cast without the plan
            self.new[node] = self.new[before]
        else:
            self._copy(node, lambda n: self.new[n])

    def _getitem_dtype(self, node: fx.Node, before: fx.Node) -> torch.dtype | None:
        seen = _aten.dtype_seen(self.values.get(node))
        if node.target is operator.getitem and seen not in (torch.float32, self.low):
            return seen  # an op's integer result
        return self.dtypes[before]

    # ---- values in a format ----

    def _as(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The value of an old node in `dtype`: as it is, or through the one cast of the tensor that it shows."""
        if not self._movable(node) or self.dtypes[node] is dtype:
            return self.new[node]
        key = (node, dtype)
        if key not in self.casts:
            before = _aten.viewed(node, self.values)
            if before is not None and isinstance(self.values.get(before), Seen):
                entry = _aten.entry_of(node)
                source = self._as(before, dtype)
                if entry is not None and entry.op_class is OpClass.CAST:
                    self.casts[key] = source
                else:
                    self.casts[key] = self.graph.node_copy(node, lambda n: source if n is before else self.new[n])
            else:
                self.casts[key] = self._cast_parts(node, dtype)
        return self.casts[key]

    def _cast_parts(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A cast of a tensor that an op made. Of one piece of several views, the whole is cast and cut again."""
        before = _aten.viewed(node, self.values)
        whole = _aten.viewed(before, self.values) if before is not None else None
        if before is None or whole is None or node.target is not operator.getitem:
            return self.graph.call_function(CAST, (self.new[node], dtype))
        key = (before, dtype)
        if key not in self.casts:
            source = self._as(whole, dtype)
            self.casts[key] = self.graph.node_copy(before, lambda n: source if n is whole else self.new[n])
        return self.graph.call_function(operator.getitem, (self.casts[key], node.args[1]))

    def _as_captured(self, node: fx.Node) -> fx.Node:
        seen = _aten.dtype_seen(self.values.get(node))
        return self._as(node, seen) if seen in (torch.float32, self.low) else self.new[node]

    def _movable(self, node: fx.Node) -> bool:
        return isinstance(self.values.get(node), Seen) and self.dtypes.get(node) in (torch.float32, self.low)

    def _outdate(self, written: fx.Node) -> None:
        """Forget casts of a tensor that was changed in place."""
        changed = _aten.root(written, self.values)
        self.casts = {key: cast for key, cast in self.casts.items() if _aten.root(key[0], self.values) is not changed}

    # ---- small things ----

    def _copy(self, node: fx.Node, of: Callable[[fx.Node], fx.Node]) -> fx.Node:
        self.new[node] = self.graph.node_copy(node, of)
        return self.new[node]

    def _set_dtype_arguments(self, new: fx.Node, old: fx.Node, dtype: torch.dtype) -> None:
        """An op that is told its result's format (softmax, sum) is told the plan's."""
        floats = (torch.float32, self.low)
        new.args = tuple(dtype if isinstance(a, torch.dtype) and a in floats else a for a in new.args)
        new.kwargs = {k: dtype if isinstance(v, torch.dtype) and v in floats else v for k, v in new.kwargs.items()}

    def _writes_floats(self, node: fx.Node) -> bool:
        seen = _aten.dtype_seen(self.values.get(node))
        return seen is not None and seen.is_floating_point

    def _rank(self, node: fx.Node) -> int:
        value = self.values[node]
        return len(value.shape)

    def _drop_unread_views(self) -> None:
        made = {new: old for old, new in self.new.items()}
        for new in reversed(self.graph.nodes):
            if new.users or new.op != "call_function":
                continue
            old = made.get(new)
            if old is None or _aten.viewed(old, self.values) is not None:
                self.graph.erase_node(new)


def _saturated(value: Any, limit: float) -> Any:
    finite = isinstance(value, float) and abs(value) != float("inf")
    return max(-limit, min(limit, value)) if finite else value
