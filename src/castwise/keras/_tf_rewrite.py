"""Casts for the nodes that are added to a TensorFlow graph, decided one by one as they are added.

Every float32 tensor that the code sees may have a *narrow twin*: a tensor with the same values in a 16-bit format. A
node that is to run narrow takes twins, and what it gives gets one. Where the device has no arithmetic of that format,
there is no twin but a note: the values of this tensor are those of the format, and products run in float32 on them.
Which formats these are is the policy's to say; nothing here knows an op by name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework import kernels, tensor_util

from castwise.catalogue import AS_WRITTEN, NO_ARITHMETIC, OpClass, OpEntry, load_catalogue
from castwise.errors import PolicyError
from castwise.formats import NumberFormat, parse_format
from castwise.policy import Decision, Policy, Rule, decide

from ._device import device_kind, native
from .record import OpRecord

__all__ = ["Rewriter"]

_BY_NAME = {"fp16": tf.float16, "bf16": tf.bfloat16, "fp32": tf.float32, "fp64": tf.float64}
_UNCHANGED = AS_WRITTEN | {OpClass.COMPARE}


class Rewriter:
    """Takes the place of a graph's way to add nodes, for as long as the context is open.

    Args:
        policy: resolved.
        graph: the graph of the ``tf.function`` that is being traced; no other graph is touched.
        layer: says which layer the code is in.
        log: takes one ``OpRecord`` for each node that computes.
    """

    def __init__(self, policy: Policy, graph: Any, layer: Callable[[], str], log: list[Any] | None) -> None:
        self.policy = policy
        self.graph = graph
        self.layer = layer
        self.log = log
        self._add: Any = None
        self._low: dict[int, tuple[Any, Any, Any]] = {}  # of a float32 tensor: itself, its format's dtype, its twin
        self._rounded: dict[tuple[int, Any], tuple[Any, Any]] = {}  # casts that were made, with what they are of

    def __enter__(self) -> Rewriter:
        self._add = self.graph._create_op_internal
        self.graph._create_op_internal = self._create
        return self

    def __exit__(self, *error: object) -> None:
        del self.graph._create_op_internal  # the class's own method is there again

    # ---- one node ----

    def _create(self, op_type: str, inputs: Any, *rest: Any, **named: Any) -> Any:
        attrs, op_def = named.get("attrs"), named.get("op_def")
        places = _float_places(op_def, attrs, inputs) if attrs is not None and op_def is not None else ()
        if not places:
            return self._add(op_type, inputs, *rest, **named)
        layer = self.layer()
        entry, decision = _decided(self.policy, op_type, layer if self.policy.layers else "")
        inputs = list(inputs)
        if entry is not None and entry.op_class not in _UNCHANGED:
            made = self._narrow(op_type, entry, decision, inputs, places, rest, named)
            if made is not None:
                op, dtype = made
                self._note(layer, entry.name, decision, dtype, inputs, places)
                return op
        op = self._add(op_type, inputs, *rest, **named)
        if entry is not None and entry.op_class not in NO_ARITHMETIC:
            self._note(layer, entry.name, decision, None, inputs, places)
        return op

    def _narrow(
        self, op_type: str, entry: OpEntry, decision: Decision, inputs: Any, places: Any, rest: Any, named: Any
    ) -> tuple[Any, Any] | None:
        """The node computed in 16 bits, and their dtype; None where it is not to be."""
        dtype = self._format_for(entry, decision, inputs, places)
        if dtype is None:
            return None
        keeps = entry.selects or entry.op_class in NO_ARITHMETIC  # its results are its inputs' values
        if not _runs_natively(op_type, dtype, tuple(_types(named["op_def"], named["attrs"]))):
            for place in places:
                inputs[place] = self._in_format(inputs[place], dtype)
            op = self._add(op_type, inputs, *rest, **named)
            return self._with_outputs(op, named, dtype, (lambda t: t) if keeps else (lambda t: _round(t, dtype)))
        for place in places:
            inputs[place] = self._twin(inputs[place], dtype)
        attrs = dict(named["attrs"])
        for attr in _types(named["op_def"], named["attrs"]):
            attrs[attr] = attr_value_pb2.AttrValue(type=dtype.as_datatype_enum)
        op = self._add(op_type, inputs, *_without_types(rest), **{**_without_named_types(named), "attrs": attrs})
        return self._with_outputs(op, named, dtype, None)

    def _format_for(self, entry: OpEntry, decision: Decision, inputs: Any, places: Any) -> Any:
        if decision.rule is Rule.HIGH:
            return None
        if decision.rule is Rule.LOW:
            return _dtype(decision.fmt)
        # WIDEST: narrow where all that come in are narrow already; constants follow, where the format can hold them.
        known = [self._low.get(id(inputs[place])) for place in places]
        formats = {found[1] for found in known if found is not None}
        if len(formats) != 1:
            return None
        dtype = formats.pop()
        strong = [inputs[place] for place, found in zip(places, known, strict=True) if found is None]
        return dtype if all(_fits(tensor, dtype) for tensor in strong) else None

    def _with_outputs(self, op: Any, named: Any, dtype: Any, rounding: Any) -> tuple[Any, Any]:
        """The node as the code sees it, with float32 results, and a note of what they are."""
        typed = _typed_outputs(named["op_def"], named["attrs"])
        seen = list(op.outputs)
        for place in typed:
            if place >= len(seen):
                continue
            result = op.outputs[place]
            if rounding is None:
                seen[place] = tf.cast(result, tf.float32)
                self._low[id(seen[place])] = (seen[place], dtype, result)
            else:
                seen[place] = rounding(result)
                self._low[id(seen[place])] = (seen[place], dtype, None)
        return _Seen(op, seen), dtype

    # ---- values ----

    def _in_format(self, tensor: Any, dtype: Any) -> Any:
        """A float32 tensor whose values are those of the format."""
        found = self._low.get(id(tensor))
        if found is not None and found[1] == dtype:
            return tensor
        key = (id(tensor), dtype)
        made = self._rounded.get(key)
        if made is None:
            made = self._rounded[key] = (tensor, _round(tensor, dtype))
        return made[1]

    def _twin(self, tensor: Any, dtype: Any) -> Any:
        """The tensor in the format's own dtype."""
        found = self._low.get(id(tensor))
        if found is not None and found[1] == dtype and found[2] is not None:
            return found[2]
        key = (id(tensor), dtype)
        made = self._rounded.get(key)
        if made is None:
            made = self._rounded[key] = (tensor, tf.cast(tensor, dtype))
        return made[1]

    def _note(self, layer: str, op: str, decision: Decision, dtype: Any, inputs: Any, places: Any) -> None:
        if self.log is None:
            return
        given = tuple(
            _long(self._low[id(t)][1] if id(t) in self._low else t.dtype) for t in (inputs[p] for p in places)
        )
        fmt = _long(dtype) if dtype is not None else "float32"
        self.log.append(OpRecord(layer, op, decision.rule.value, fmt, given, (fmt,), decision.reason))


class _Seen:
    """A node whose results are others than its own: the casts behind it. All else is the node's."""

    def __init__(self, op: Any, outputs: list[Any]) -> None:
        self._op = op
        self.outputs = outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)


def _round(tensor: Any, dtype: Any) -> Any:
    return tf.cast(tf.cast(tensor, dtype), tf.float32)


def _fits(tensor: Any, dtype: Any) -> bool:
    """Whether a tensor is a constant that the format holds without leaving its range."""
    value = tensor_util.constant_value(tensor)
    if value is None or value.size != 1:
        return False
    number = abs(float(value.reshape(())))
    with np.errstate(over="ignore", under="ignore"):
        return not math.isfinite(number) or number == 0.0 or dtype.as_numpy_dtype(number) not in (0.0, math.inf)


# ---- what TensorFlow says of an op ----


def _float_places(op_def: Any, attrs: Any, inputs: Any) -> tuple[int, ...]:
    """Which inputs are float32 by a type that the op leaves open; empty where lists of tensors make it unclear."""
    places: list[int] = []
    place = 0
    for arg in op_def.input_arg:
        count = attrs[arg.number_attr].i if arg.number_attr else 1
        if arg.type_list_attr:
            return ()
        if arg.type_attr and attrs[arg.type_attr].type == tf.float32.as_datatype_enum:
            places += range(place, place + count)
        place += count
    return tuple(places) if place == len(inputs) else ()


def _types(op_def: Any, attrs: Any) -> set[str]:
    wide = tf.float32.as_datatype_enum
    return {arg.type_attr for arg in op_def.input_arg if arg.type_attr and attrs[arg.type_attr].type == wide}


def _typed_outputs(op_def: Any, attrs: Any) -> list[int]:
    typed: list[int] = []
    place = 0
    for arg in op_def.output_arg:
        count = attrs[arg.number_attr].i if arg.number_attr else 1
        if arg.type_attr and attrs[arg.type_attr].type == tf.float32.as_datatype_enum:
            typed += range(place, place + count)
        place += count
    return typed


def _without_types(rest: Any) -> Any:
    """Positional arguments after the inputs, without the dtypes of results and inputs, which are others now."""
    return (None, None, *rest[2:]) if rest else ()


def _without_named_types(named: Any) -> dict[str, Any]:
    return {key: value for key, value in named.items() if key not in ("dtypes", "input_types")}


@functools.lru_cache(maxsize=4096)
def _decided(policy: Policy, op_type: str, layer: str) -> tuple[OpEntry | None, Decision]:
    entry = load_catalogue().lookup("tensorflow", op_type)
    return entry, decide(policy, entry, layer=layer, name=op_type)


@functools.lru_cache(maxsize=4096)
def _runs_natively(op_type: str, dtype: Any, attrs: tuple[str, ...]) -> bool:
    """Whether the device computes in the format, and TensorFlow has a kernel for this op in it."""
    kind = device_kind()
    fmt = parse_format(dtype.name)
    if not native(kind, fmt):
        return False
    wanted = "CPU" if kind == "cpu" else "GPU"
    for kernel in kernels.get_registered_kernels_for_op(op_type).kernel:
        allowed = {c.name: set(c.allowed_values.list.type) for c in kernel.constraint}
        if kernel.device_type == wanted and all(
            dtype.as_datatype_enum in allowed.get(attr, {dtype.as_datatype_enum}) for attr in attrs
        ):
            return True
    return False


def _dtype(fmt: NumberFormat | None) -> Any:
    if fmt is None or fmt.name not in _BY_NAME:
        raise PolicyError(
            f"format: castwise.keras does not compute in {fmt.long_name if fmt else 'nothing'} on TensorFlow. Choose "
            "float16, bfloat16 or float32."
        )
    return None if fmt.bits >= 32 else _BY_NAME[fmt.name]


def _long(dtype: Any) -> str:
    return parse_format(dtype.name).long_name
