"""Which operands of a node change format with it, as the operator's schema says.

ONNX types an operator with variables: all operands of one variable have one element type. A node that is lowered moves
the variables that hold its data. What a variable does not allow in 16 bits, and what the schema fixes to
``tensor(float)`` (the scales of Resize), stays fp32 whatever the node's label. No operator is named here where a schema
or the catalogue can say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from castwise.catalogue import Mixed, OpClass, OpEntry, load_catalogue
from castwise.onnx._scopes import CONTROL, Node, Value, operand_types, schema_of

__all__ = ["ELEMENT", "Slots", "casts_to", "hands_on", "slots_of"]

ELEMENT = {"fp32": onnx.TensorProto.FLOAT, "fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}
"""ONNX's element type of each format that a node can be given."""

_TYPE = {"fp16": "tensor(float16)", "bf16": "tensor(bfloat16)"}
# Classes whose further type variables are parameters (a region of interest, a grid), not data.
_ONE_VARIABLE = frozenset({OpClass.INTERPOLATE})
# Classes whose results have the type that an attribute asks for: it can be left as it is and the result be cast.
_MADE = frozenset({OpClass.CREATE, OpClass.RANDOM})
# Whether a value is NaN or infinite does not change with its format, as long as it is within the format's range.
_ANY_FORMAT = frozenset({"isnan", "isinf"})


@dataclass(frozen=True, slots=True)
class Slots:
    """What happens to a node's fp32 operands."""

    moving_in: tuple[int, ...] = ()
    """Inputs that are read in the format that the node is computed in."""
    moving_out: tuple[int, ...] = ()
    """Outputs that are written in it."""
    fixed_in: tuple[int, ...] = ()
    """Inputs that are read in fp32, always."""
    attribute: str = ""
    """An attribute that says which type the node writes, and has to follow: ``to`` of a Cast, ``value``, ``dtype``."""
    narrows: bool = False
    """A cast of the model's own from fp32 to the plan's format."""
    widens: bool = False
    """A cast of the model's own from the plan's format to fp32."""
    reason: str = ""
    """Why a node with fp32 operands cannot be lowered at all; empty where it can."""

    @property
    def movable(self) -> bool:
        return bool(self.moving_in or self.moving_out) and not self.reason


def slots_of(node: Node, fmt: str, opsets: Mapping[str, int]) -> Slots:
    """The slots of a node for a plan in ``fmt`` ("fp16" or "bf16")."""
    floats_in = tuple(i for i, value in enumerate(node.inputs) if _has_floats(value))
    floats_out = tuple(i for i, value in enumerate(node.outputs) if _has_floats(value))
    entry = load_catalogue().lookup("onnx", node.op_type) if not node.domain else None
    schema = schema_of(node, opsets)
    if node.bodies and node.op_type in CONTROL and not node.domain:
        return Slots(fixed_in=floats_in if node.op_type == "SequenceMap" else ())
    if schema is None or entry is None or node.bodies:
        where = node.domain or "ONNX"
        return Slots(fixed_in=floats_in, reason=f"{node.op_type} of {where!r} is not known, so it keeps its types")
    if entry.op_class is OpClass.CAST:
        slots = _cast_slots(node, fmt, floats_in, floats_out)
        return slots if hands_on(node, fmt, opsets) else Slots(fixed_in=floats_in)
    if (
        entry.op_class is OpClass.QUERY
        or entry.name in _ANY_FORMAT
        or (entry.op_class in _MADE and _says_its_type(node))
    ):
        return Slots()  # looks at shapes only: any format will do
    if any(value is not None and not value.tensor for value in (*node.inputs, *node.outputs)):
        return Slots(fixed_in=floats_in, reason="sequences and optionals keep their element type")
    if entry.op_class is OpClass.QUANTIZE:
        return Slots(fixed_in=floats_in, reason="quantization keeps its scales in fp32")
    if entry.op_class in _MADE and not floats_in:
        retype = "value" if node.op_type == "ConstantOfShape" and floats_out and hands_on(node, fmt, opsets) else ""
        return Slots(moving_out=floats_out if retype else (), attribute=retype)
    return _by_schema(node, fmt, opsets, schema, entry, floats_in, floats_out)


def hands_on(node: Node, fmt: str, opsets: Mapping[str, int]) -> bool:
    """Whether a node that holds graphs can hand on tensors of ``fmt``, in the version that the model imports."""
    schema = schema_of(node, opsets)
    return schema is not None and any(_TYPE[fmt] in item.allowed_type_strs for item in schema.type_constraints)


def casts_to(fmt: str, opsets: Mapping[str, int]) -> bool:
    """Whether tensors of ``fmt`` can be cast at all in the version that the model imports."""
    try:
        schema = onnx.defs.get_schema("Cast", opsets.get("", 0), "")
    except onnx.defs.SchemaError:
        return False
    return any(_TYPE[fmt] in item.allowed_type_strs for item in schema.type_constraints)


def _has_floats(value: Value | None) -> bool:
    return value is not None and value.floating


def _says_its_type(node: Node) -> bool:
    """Whether a generator writes a type of its own, so that its inputs' types do not matter."""
    return any(attribute.name == "dtype" for attribute in node.proto.attribute)


def _cast_slots(node: Node, fmt: str, floats_in: tuple[int, ...], floats_out: tuple[int, ...]) -> Slots:
    """Casts of the model's own. Between floating formats they stay; those from integers can make 16 bits at once."""
    source = node.inputs[0].elem if node.inputs and node.inputs[0] is not None else 0
    target = node.outputs[0].elem if node.outputs and node.outputs[0] is not None else 0
    if node.op_type != "Cast" or target == source:
        return Slots(fixed_in=floats_in, reason="it takes its type from another tensor" if floats_in else "")
    floats = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
    if floats_out and source and source not in floats and source != onnx.TensorProto.STRING:
        return Slots(moving_out=floats_out, attribute="to")
    if floats_out:
        return Slots(widens=source == ELEMENT[fmt])
    if target == ELEMENT[fmt]:
        return Slots(narrows=True)
    return Slots(fixed_in=floats_in) if target in floats else Slots(moving_in=floats_in)


def _by_schema(
    node: Node,
    fmt: str,
    opsets: Mapping[str, int],
    schema: onnx.defs.OpSchema,
    entry: OpEntry,
    floats_in: tuple[int, ...],
    floats_out: tuple[int, ...],
) -> Slots:
    reads, writes = operand_types(schema, len(node.inputs), False), operand_types(schema, len(node.outputs), True)
    allowed = {item.type_param_str: item.allowed_type_strs for item in schema.type_constraints}
    used = {reads[i] for i in floats_in} | {writes[i] for i in floats_out}
    moving = {kind for kind in used if _TYPE[fmt] in allowed.get(kind, ())}
    data = writes[floats_out[0]] if floats_out else reads[floats_in[0]] if floats_in else ""
    if entry.mixed is Mixed.KEEP and data in moving and entry.op_class not in (OpClass.VIEW, OpClass.COPY):
        moving = {data}
    elif entry.op_class in _ONE_VARIABLE:
        moving &= {data}
    if data not in moving:
        version = opsets.get(node.domain, 0)
        reason = f"{node.op_type} of opset {version} does not take {_TYPE[fmt]}" if used else ""
        return Slots(fixed_in=floats_in, reason=reason)
    return Slots(
        moving_in=tuple(i for i in floats_in if reads[i] in moving),
        moving_out=tuple(i for i in floats_out if writes[i] in moving),
        fixed_in=tuple(i for i in floats_in if reads[i] not in moving),
    )
