"""The parameters of an equation whose inputs have changed dtype: result dtypes of products, ways to combine numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ._dtypes import FP32, DType, float_dtype, widest
from ._rules import Choice
from ._values import literal, retyped

__all__ = ["holds_program", "params_for", "passes_through"]

# Parameters that say how two numbers are combined: they hold one equation, and take the dtype of the operation.
_COMBINERS = frozenset({"update_jaxpr", "jaxpr", "select_jaxpr", "scatter_jaxpr"})


def params_for(eqn: JaxprEqn, dtype: DType, choice: Choice, castable: frozenset[DType]) -> tuple[dict[str, Any], DType]:
    """The parameters of an equation whose ``castable`` inputs are now of ``dtype``, and the dtype of its results."""
    params = eqn.params
    if "preferred_element_type" in params:
        return _product_params(eqn, dtype, choice)
    combiners = {
        key: ClosedJaxpr(_with_dtype(value.jaxpr, dtype, castable), value.consts)
        if isinstance(value, ClosedJaxpr)
        else _with_dtype(value, dtype, castable)
        for key, value in params.items()
        if isinstance(value, ClosedJaxpr | Jaxpr)
    }
    return ({**params, **combiners} if combiners else params), dtype


def _product_params(eqn: JaxprEqn, dtype: DType, choice: Choice) -> tuple[dict[str, Any], DType]:
    """A product's result has the dtype of its inputs, unless it was written to be wider than they are."""
    preferred = eqn.params["preferred_element_type"]
    written = widest(d for var in eqn.invars if (d := float_dtype(var.aval)) is not None)
    result = dtype
    if preferred is not None and widest([np.dtype(preferred), written]) != written:
        result = widest([np.dtype(preferred), dtype])
    if choice.wide_result:
        result = widest([FP32, dtype])
    if preferred is None and result == dtype:
        return eqn.params, dtype
    return {**eqn.params, "preferred_element_type": result}, result


def passes_through(eqn: JaxprEqn) -> bool:
    """Whether each result is its own input's (a barrier, a sum over devices): inputs need no common dtype."""
    ins, outs = eqn.invars, eqn.outvars
    if not eqn.primitive.multiple_results or len(ins) != len(outs):
        return False
    return all(getattr(a.aval, "dtype", None) == getattr(b.aval, "dtype", None) for a, b in zip(ins, outs, strict=True))


def holds_program(params: dict[str, Any]) -> bool:
    """Whether an equation holds a program, rather than a scatter's or reduction's way to combine two numbers."""
    for key, value in params.items():
        if isinstance(value, ClosedJaxpr | Jaxpr):
            inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            if key not in _COMBINERS or any(getattr(var.aval, "shape", ()) for var in inner.invars):
                return True
    return False


def _with_dtype(jaxpr: Jaxpr, dtype: DType, castable: frozenset[DType]) -> Jaxpr:
    """A combiner for numbers of another dtype; those that are not ``castable`` keep theirs."""
    new: dict[Var, Var] = {}

    def var(old: Any) -> Any:
        aval = retyped(old.aval, dtype) if float_dtype(old.aval) in castable else old.aval
        if isinstance(old, Literal):
            return literal(old.val, aval)
        return new.setdefault(old, Var(aval))

    invars, constvars = [var(v) for v in jaxpr.invars], [var(v) for v in jaxpr.constvars]
    eqns = [
        eqn.replace(invars=[var(v) for v in eqn.invars], outvars=[var(v) for v in eqn.outvars]) for eqn in jaxpr.eqns
    ]
    return Jaxpr(constvars, invars, [var(v) for v in jaxpr.outvars], eqns, jaxpr.effects, jaxpr.debug_info)
