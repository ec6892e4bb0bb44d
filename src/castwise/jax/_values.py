"""What a rewriting is told and what it tells: types of inputs, variables as they have become, records of equations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var

from ._dtypes import DType, float_dtype
from ._rules import Choice

__all__ = ["BROADCAST", "CONVERT", "InType", "Record", "Rewritten", "Value", "coerced", "literal", "retyped"]

CONVERT: Primitive = jax.lax.convert_element_type_p
BROADCAST: Primitive = jax.lax.broadcast_in_dim_p


@dataclass(frozen=True, slots=True)
class InType:
    """What is known of a jaxpr's input: its dtype (None: not castable), and its value if it is a constant."""

    dtype: DType | None
    constant: float | None = None


@dataclass(frozen=True)
class Rewritten:
    """A rewritten jaxpr, and the dtype of each result (None where it is not castable)."""

    jaxpr: Jaxpr
    out: tuple[DType | None, ...]
    _closed: list[ClosedJaxpr] = field(default_factory=list, repr=False)

    def closed(self, consts: Sequence[Any]) -> ClosedJaxpr:
        """The jaxpr with its constants: the same object for every call of it, by which JAX finds its derivatives."""
        for made in self._closed:
            if len(made.consts) == len(consts) and all(a is b for a, b in zip(made.consts, consts, strict=True)):
                return made
        self._closed.append(ClosedJaxpr(self.jaxpr, consts))
        return self._closed[-1]


@dataclass(slots=True)
class Value:
    """What a variable has become: its own dtype, the atom that holds it there, and casts of it made so far."""

    atom: Any
    dtype: DType | None  # None: not castable
    constant: float | None = None
    casts: dict[DType, Any] | None = None

    @property
    def type(self) -> InType:
        return InType(self.dtype, self.constant)


@dataclass(frozen=True, slots=True)
class Record:
    """One equation as it was decided; what reports and tests read."""

    path: str
    layer: str
    primitive: str
    choice: Choice
    given: tuple[DType, ...]  # the castable inputs as they came
    computed: tuple[DType, ...]  # ... and as the equation reads them
    result: tuple[DType, ...]
    casts: int  # casts made for it
    shapes: tuple[tuple[int, ...], ...]


def coerced(done: Rewritten, dtypes: Sequence[DType | None], like: Sequence[Any] | None = None) -> Jaxpr:
    """The rewritten jaxpr with results in ``dtypes`` (None: as they are), and as weakly typed as ``like``."""
    jaxpr, eqns, outs = done.jaxpr, list(done.jaxpr.eqns), list[Any]()
    made: dict[tuple[int, DType, bool], Var] = {}
    for index, (out, dtype) in enumerate(zip(jaxpr.outvars, dtypes, strict=True)):
        aval: Any = out.aval
        weak = bool(like is not None and getattr(like[index].aval, "weak_type", False))
        if dtype is None or (float_dtype(aval) == dtype and aval.weak_type == weak):
            outs.append(out)
            continue
        if isinstance(out, Literal):  # it stays a number that is known
            outs.append(literal(np.asarray(out.val, dtype)[()], aval.update(dtype=dtype, weak_type=weak)))
            continue
        key = (id(out), dtype, weak)
        if key not in made:
            made[key] = Var(aval.update(dtype=dtype, weak_type=weak))
            params = {"new_dtype": dtype, "weak_type": weak, "sharding": None}
            eqns.append(jax.extend.core.new_jaxpr_eqn([out], [made[key]], CONVERT, params, frozenset()))
        outs.append(made[key])
    return Jaxpr(jaxpr.constvars, jaxpr.invars, outs, eqns, jaxpr.effects, jaxpr.debug_info, jaxpr.is_high)


def literal(value: Any, aval: Any) -> Literal:
    """A literal of a jaxpr."""
    return Literal(value, aval)  # type: ignore[no-untyped-call]


def retyped(aval: Any, dtype: DType) -> Any:
    """An abstract value in another dtype, and no longer weakly typed."""
    if aval.dtype == dtype and not aval.weak_type:
        return aval
    return aval.update(dtype=dtype, weak_type=False)
