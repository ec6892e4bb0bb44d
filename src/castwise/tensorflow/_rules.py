"""How one node is computed: what the policy or a plan decides, as TensorFlow can follow it.

A node's formats are those of its type attributes, and TensorFlow promotes nothing: inputs that share an attribute share
a dtype. A node that holds or changes state (variables, other resources) keeps the dtypes it was written with.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from castwise.catalogue import AS_WRITTEN, Mixed, OpEntry, load_catalogue
from castwise.hardware import Device, detected
from castwise.policy import Policy, Rule, decide

from ._types import dtype_of, has_kernel, typing_of

__all__ = ["Choice", "choice_for", "device_here", "lowered_attrs", "resolve", "written"]

log = logging.getLogger("castwise.tensorflow")


@dataclass(frozen=True, slots=True)
class Choice:
    """How one node is computed.

    Attributes:
        op: the op's canonical name, or TensorFlow's where the catalogue has none.
        rule: LOW, HIGH or WIDEST; None: with exactly the dtypes it was written with.
        dtype: of LOW, what its open inputs are brought to.
        reason: what decided.
        stores_constant: a constant lands in the result, so it saturates instead of becoming infinite.
    """

    op: str
    rule: Rule | None
    dtype: Any = None
    reason: str = ""
    stores_constant: bool = False


@functools.lru_cache(maxsize=8192)
def choice_for(policy: Policy, op_type: str, layer: str) -> Choice:
    """What a resolved policy says of a kind of node in a layer, before it is known whether TensorFlow can do it."""
    entry = load_catalogue().lookup("tensorflow", op_type)
    if entry is None:
        decision = decide(policy, None, layer=layer, name=op_type)
        if decision.rule is Rule.WIDEST:
            return Choice(op_type, None, reason="not in the catalogue: computed as written")
        name, stores = op_type, False
    else:
        if entry.op_class in AS_WRITTEN:
            return Choice(entry.name, None, reason=f"class {entry.op_class.value}: its dtypes are as written")
        decision = decide(policy, entry, layer=layer, name=op_type)
        name, stores = entry.name, entry.stores_constant
    dtype = dtype_of(decision.fmt) if decision.fmt is not None and decision.rule is Rule.LOW else None
    if dtype == tf.float32:
        return Choice(name, Rule.HIGH, reason=decision.reason, stores_constant=stores)
    return Choice(name, decision.rule, dtype, decision.reason, stores)


def written(op: Any) -> str:
    """Why a node keeps the dtypes it was written with; "" where it need not."""
    if any(tensor.dtype in (tf.resource, tf.variant) for tensor in (*op.inputs, *op.outputs)):
        return "it holds or changes state"
    if op.op_def.is_stateful:
        return "it has side effects"
    typing = typing_of(op)
    if typing.lists and op.type != "IdentityN":
        return "its tensors have dtypes of their own"
    return "" if typing.inputs else "it has no float32 input"


def lowered_attrs(op: Any, dtype: Any) -> tuple[str, ...]:
    """Which type attributes of a node can be ``dtype`` together; none where there is no kernel of it."""
    entry = load_catalogue().lookup("tensorflow", op.type)
    return _lowered(op.type, dtype, typing_of(op).attrs, _fixed(op), entry is not None and entry.mixed is Mixed.KEEP)


def _fixed(op: Any) -> tuple[tuple[str, Any], ...]:
    named = [attr.name for attr in op.op_def.attr if attr.type == "type"]
    return tuple((name, op.get_attr(name)) for name in named)


@functools.lru_cache(maxsize=4096)
def _lowered(
    op_type: str, dtype: Any, attrs: tuple[str, ...], fixed: tuple[tuple[str, Any], ...], apart: bool
) -> tuple[str, ...]:
    for some in (attrs, attrs[:1]) if not apart else (attrs[:1], attrs):
        types = dict(fixed) | dict.fromkeys(some, dtype)
        if some and has_kernel(op_type, tuple(sorted(types.items(), key=lambda item: item[0]))):
            return some
    if attrs:
        log.info("TensorFlow has no %s kernel of %s: it is computed in float32", dtype.name, op_type)
    return ()


def entry_of(op: Any) -> OpEntry | None:
    """What the catalogue says of a node."""
    return load_catalogue().lookup("tensorflow", op.type)


def device_here() -> Device | None:
    """TensorFlow's default device in Castwise's table, if it is there."""
    return detected("cuda" if tf.config.list_physical_devices("GPU") else "cpu")


def resolve(policy: Policy) -> Policy:
    """The policy for TensorFlow's device: its overrides applied, "auto" turned into what it computes natively."""
    if policy.format != "auto" and not policy.devices:
        return policy
    return policy.resolve(device_here())
