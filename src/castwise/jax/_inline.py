"""Running a region inside a program that is being traced, at the cost that its own functions would have there.

Differentiating a call makes JAX trace what is called twice more, and differentiating a bare primitive makes it trace
that primitive. What users write is fast to differentiate because the functions of ``jax.numpy`` are calls, each of
which JAX differentiates once and remembers. So a region that is differentiated inside a larger program is no call, and
its operations are: each with the casts before it, and the same object for operations that are the same.

A scope marks what a region has made, in place of the call's name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import DynamicJaxprTracer

from ._layers import REGION
from ._values import CONVERT

__all__ = ["differentiated_while_traced", "inlined"]

_calls: weakref.WeakKeyDictionary[Jaxpr, Jaxpr] = weakref.WeakKeyDictionary()
_closed: dict[Any, ClosedJaxpr] = {}  # some operations, by what they are
_MOST_CALLS = 4096


def differentiated_while_traced(values: Iterable[Any]) -> bool:
    """Whether values belong to a program that is being traced, and another transformation is between it and them."""
    return any(not isinstance(value, DynamicJaxprTracer) and _traced(value) for value in values)


def _traced(value: Any) -> bool:
    while isinstance(value, jax.core.Tracer):
        if isinstance(value, DynamicJaxprTracer):
            return True
        value = getattr(value, "primal", getattr(value, "val", None))
    return False


def inlined(
    outer: Jaxpr, call: JaxprEqn, consts: Sequence[Any], arrays: Sequence[Any], *, as_calls: bool = True
) -> list[Any]:
    """What a traced region, a jaxpr of one call, computes from ``arrays``, without the call around it.

    Each operation is a call of its own ``as_calls``, else just itself.
    """
    env: dict[Any, Any] = dict(zip([*outer.constvars, *outer.invars], [*consts, *arrays], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    inner = call.params["jaxpr"]
    jaxpr = _calls.get(inner.jaxpr) if as_calls else inner.jaxpr
    if jaxpr is None:
        jaxpr = _calls[inner.jaxpr] = _with_calls(inner.jaxpr, call)
    with jax.named_scope(REGION):
        results = jax.core.eval_jaxpr(jaxpr, inner.consts, *map(read, call.invars))
    env.update(zip(call.outvars, results, strict=True))
    return [read(atom) for atom in outer.outvars]


def _with_calls(jaxpr: Jaxpr, like: JaxprEqn) -> Jaxpr:
    """The jaxpr with a call in place of each operation and the casts before it."""
    last_use = {var: at for at, eqn in enumerate(jaxpr.eqns) for var in eqn.invars if isinstance(var, Var)}
    last_use |= {var: len(jaxpr.eqns) for var in jaxpr.outvars if isinstance(var, Var)}
    eqns: list[JaxprEqn] = []
    waiting: list[JaxprEqn] = []
    for at, eqn in enumerate(jaxpr.eqns):
        if eqn.effects or eqn.primitive.call_primitive or _holds_jaxpr(eqn):
            eqns += [*waiting, eqn]
            waiting = []
            continue
        waiting.append(eqn)
        if eqn.primitive is not CONVERT:
            eqns.append(_as_call(waiting, at, last_use, like))
            waiting = []
    return Jaxpr(
        jaxpr.constvars,
        jaxpr.invars,
        jaxpr.outvars,
        [*eqns, *waiting],
        jaxpr.effects,
        jaxpr.debug_info,
        jaxpr.is_high,
    )


def _holds_jaxpr(eqn: JaxprEqn) -> bool:
    held = (one for value in eqn.params.values() for one in (value if isinstance(value, tuple) else (value,)))
    return any(isinstance(one, Jaxpr | ClosedJaxpr) or callable(one) for one in held)


def _as_call(group: list[JaxprEqn], at: int, last_use: dict[Var, int], like: JaxprEqn) -> JaxprEqn:
    """One call that does what some equations do; the last of them lends it its name and place."""
    made = {var: number for number, var in enumerate(out for eqn in group for out in eqn.outvars)}
    invars = list(dict.fromkeys(v for eqn in group for v in eqn.invars if isinstance(v, Var) and v not in made))
    outvars = [var for var in made if last_use.get(var, -1) > at]
    given = {var: number for number, var in enumerate(invars)}

    def seen(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return ("literal", str(atom.val), str(atom.aval))
        return ("given", given[atom]) if atom in given else ("made", made[atom])

    try:
        key = (
            tuple((eqn.primitive, tuple(sorted(eqn.params.items())), tuple(map(seen, eqn.invars))) for eqn in group),
            tuple(var.aval for var in invars),
            tuple(made[var] for var in outvars),
        )
        closed = _closed.get(key)
    except TypeError:  # a parameter without a hash or an order: differentiated anew each time
        key, closed = None, None
    if closed is None:
        closed = _operations(group, invars, outvars)
        if key is not None and len(_closed) < _MOST_CALLS:
            _closed[key] = closed
    params = _call_params(closed, group[-1], like)
    call: JaxprEqn = group[-1].replace(primitive=like.primitive, invars=[*invars], outvars=[*outvars], params=params)
    return call


def _operations(group: list[JaxprEqn], invars: list[Var], outvars: list[Var]) -> ClosedJaxpr:
    """Equations as a jaxpr of their own, without the scopes of whoever was the first to have them."""
    eqns = [
        eqn.replace(source_info=eqn.source_info.replace(name_stack=type(eqn.source_info.name_stack)())) for eqn in group
    ]
    debug_info = jax.make_jaxpr(lambda *_: ())(*range(len(invars))).jaxpr.debug_info
    return ClosedJaxpr(Jaxpr([], invars, outvars, eqns, frozenset(), debug_info), [])


def _call_params(closed: ClosedJaxpr, eqn: JaxprEqn, like: JaxprEqn) -> dict[str, Any]:
    """The parameters of a call, after those of another. The call disappears once all around it is traced."""
    ins, outs = len(closed.jaxpr.invars), len(closed.jaxpr.outvars)
    free = like.params["in_shardings"][:1]  # the region's own are unspecified, and it has an input
    sized = {"in_shardings": free * ins, "out_shardings": free * outs, "in_layouts": (None,) * ins}
    sized |= {"out_layouts": (None,) * outs, "donated_invars": (False,) * ins}
    return {**like.params, **sized, "jaxpr": closed, "name": eqn.primitive.name, "inline": True}
