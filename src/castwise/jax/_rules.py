"""What a policy decides for one equation of a jaxpr: the catalogue and the policy, asked once for each op and layer.

``decide`` knows ops and formats. What only the equation knows is added here: a product that asked for its precision, or
that sums a single term, is left as it is; a primitive that the catalogue does not know keeps the dtypes it was written
with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from castwise.catalogue import OpClass, OpEntry, load_catalogue
from castwise.hardware import Device, detected
from castwise.policy import Policy, Rule, decide

from ._dtypes import DType, dtype_of

__all__ = ["Choice", "Rules", "contraction_length", "resolve"]

# The dtypes of these are part of what the user wrote: casts by bit pattern, references to mutable memory, callbacks.
_AS_WRITTEN = frozenset({OpClass.CAST, OpClass.QUANTIZE, OpClass.QUERY})


@dataclass(frozen=True, slots=True)
class Choice:
    """How one equation is computed.

    Attributes:
        op: the op's canonical name, or the primitive's where the catalogue has none.
        rule: LOW, HIGH or WIDEST; None: with exactly the dtypes it was written with.
        dtype: for LOW and HIGH, what its floating inputs are brought to.
        reason: what decided.
        stores_constant: a constant lands in the result, so it saturates instead of becoming infinite.
        view: it only passes values on, so a constant stays one.
        wide_result: for LOW products, the result is float32.
        rounds: for products, what the result is rounded to once it is there.
    """

    op: str
    rule: Rule | None
    dtype: DType | None = None
    reason: str = ""
    stores_constant: bool = False
    view: bool = False
    wide_result: bool = False
    rounds: DType | None = None


class Rules:
    """The decisions of one resolved policy, each made once."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.layered = bool(policy.layers)
        self._made: dict[tuple[str, str], Choice] = {}
        dtype_of(policy.low_format)  # a format that JAX lacks is an error now, not somewhere inside a model

    def __call__(self, primitive: str, layer: str) -> Choice:
        """The choice for a primitive inside a layer."""
        key = (primitive, layer if self.layered else "")
        choice = self._made.get(key)
        if choice is None:
            choice = self._made[key] = _choose(self.policy, primitive, key[1])
        return choice


def _choose(policy: Policy, primitive: str, layer: str) -> Choice:
    entry = load_catalogue().lookup("jax", primitive)
    decision = decide(policy, entry, layer=layer, name=primitive)
    if entry is None and decision.rule is Rule.WIDEST:
        return Choice(primitive, None, reason="not in the catalogue: computed as written")
    name = entry.name if entry is not None else primitive
    if entry is not None and (entry.op_class in _AS_WRITTEN or name in ("reference", "foreign_call", "scaled_dot")):
        return Choice(name, None, reason=f"class {entry.op_class.value}: its dtypes are part of what was written")
    dtype = dtype_of(decision.fmt) if decision.fmt is not None else None
    rule = decision.rule
    return Choice(name, rule, dtype, decision.reason, *_traits(entry))


def _traits(entry: OpEntry | None) -> tuple[bool, bool]:
    return (False, False) if entry is None else (entry.stores_constant, entry.view)


def demands(params: dict[str, Any]) -> str:
    """Why a product must stay as it was written, from its own parameters; "" where it need not."""
    precision = params.get("precision")
    if precision is None:
        return ""
    both = precision if isinstance(precision, tuple) else (precision,)
    if any(one == jax.lax.Precision.HIGHEST for one in both):
        return "it was written with precision=HIGHEST"
    if any(one is not None and not isinstance(one, jax.lax.Precision) for one in both):
        return f"it was written with the algorithm {both[0]}"
    return ""


def contraction_length(primitive: str, params: dict[str, Any], shapes: list[tuple[int, ...]]) -> int | None:
    """How many terms a product sums into each element of its result; None where the primitive is not one."""
    if primitive == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(int(shapes[0][axis]) for axis in contracted)
    if primitive == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        output_features = numbers.rhs_spec[0]
        return math.prod(size for axis, size in enumerate(shapes[1]) if axis != output_features)
    return None


_DEVICE_KIND: dict[str, str] = {"gpu": "cuda"}


def device_here() -> Device | None:
    """The default backend's device in Castwise's table, if it is there."""
    backend = jax.default_backend()
    return detected(_DEVICE_KIND.get(backend, backend))


def resolve(policy: Policy) -> Policy:
    """The policy for the default backend: its overrides applied, "auto" turned into what it computes natively."""
    if policy.format != "auto" and not policy.devices:
        return policy
    return policy.resolve(device_here())


@functools.lru_cache(maxsize=64)
def rules_for(policy: Policy) -> Rules:
    """The rules of a resolved policy, made once per process."""
    return Rules(policy)


#: What a rewriting asks for each equation: primitive and layer.
Chooser = Callable[[str, str], Choice]
