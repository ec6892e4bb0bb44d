"""Equations that hold jaxprs: calls, loops, branches, and functions with derivatives of their own.

Each is rewritten from the inside: first the jaxpr it holds, for the dtypes its inputs have now, then the equation
around it. What JAX demands of them is kept without a change by the user: a loop carries what it is given, all branches
return the same.

A loop's carry keeps the dtype it was written with. Carried in 16 bits, a running sum would be rounded in every
iteration; and what was computed in 16 bits loses nothing when it is carried in 32. A policy that wants the memory says
so: ``ops = {"scan": "low", "loop": "low"}``. Loop constants are cast inside the loop, which the compiler moves out of
it, so that their gradients are summed over the iterations in their own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from castwise.policy import Rule

from ._custom import custom_jvp_call, custom_vjp_call, custom_vmap_call
from ._dtypes import DType, widest
from ._layers import REGION
from ._rewrite import Body, Rewriter
from ._rules import Choice
from ._values import InType, Rewritten, coerced

__all__ = ["HANDLERS"]

Handler = Callable[[Body, JaxprEqn, str, str], None]


def _inside(holder: Any) -> Jaxpr:
    jaxpr: Jaxpr = holder.jaxpr if isinstance(holder, ClosedJaxpr) else holder
    return jaxpr


def _like(holder: Any, done: Rewritten) -> Any:
    return done.closed(holder.consts) if isinstance(holder, ClosedJaxpr) else done.jaxpr


def _call(key: str) -> Handler:
    """A call: inputs go in as they are, results come out as they are."""

    def handler(body: Body, eqn: JaxprEqn, layer: str, path: str) -> None:
        if str(eqn.params.get("name", "")).startswith(REGION):
            body.as_written(eqn)
            _tell_of_region(body, _inside(eqn.params[key]), layer, f"{path}/")
            return
        values = [body.read(var) for var in eqn.invars]
        holder = eqn.params[key]
        done = body.rewriter.jaxpr(_inside(holder), [value.type for value in values], layer, f"{path}/")
        params = {**eqn.params, key: _like(holder, done)}
        body.emit(eqn, [value.atom for value in values], done.out, params)

    return handler


def _tell_of_region(body: Body, jaxpr: Jaxpr, layer: str, path: str) -> None:
    """For reports: what a region inside this one computes, which it decided itself."""
    rewriter = body.rewriter
    if rewriter.records is not None:
        types = [InType(rewriter.castable_dtype(var.aval)) for var in jaxpr.invars]
        told = Rewriter(_decided_there, records=rewriter.records, castable=rewriter.castable, wide=rewriter.wide)
        told.jaxpr(jaxpr, types, layer, path)


def _decided_there(primitive: str, layer: str) -> Choice:
    return Choice(primitive, None, reason="decided by a region of its own")


def _scan(body: Body, eqn: JaxprEqn, layer: str, path: str) -> None:
    params = eqn.params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    values = [body.read(var) for var in eqn.invars]
    consts, xs = values[:first], values[last:]
    carry = _carry_dtypes(body, eqn, eqn.invars[first:last], layer, path)
    types = [value.type for value in consts] + [InType(dtype) for dtype in carry] + [InType(x.dtype) for x in xs]
    done = body.rewriter.jaxpr(_inside(params["jaxpr"]), types, layer, f"{path}/")
    out = [*carry, *done.out[len(carry) :]]
    jaxpr = ClosedJaxpr(coerced(done, out), params["jaxpr"].consts)
    inits = [body.cast(value, dtype, eqn) for value, dtype in zip(values[first:last], carry, strict=True)]
    atoms = [*(value.atom for value in consts), *inits, *(x.atom for x in xs)]
    body.emit(eqn, atoms, out, {**params, "jaxpr": jaxpr})


def _while(body: Body, eqn: JaxprEqn, layer: str, path: str) -> None:
    params = eqn.params
    for_cond, for_body = params["cond_nconsts"], params["body_nconsts"]
    values = [body.read(var) for var in eqn.invars]
    consts = values[: for_cond + for_body]
    carry = _carry_dtypes(body, eqn, eqn.invars[len(consts) :], layer, path)
    carried = [InType(dtype) for dtype in carry]
    condition = body.rewriter.jaxpr(
        _inside(params["cond_jaxpr"]), [value.type for value in consts[:for_cond]] + carried, layer, f"{path}/cond/"
    )
    step = body.rewriter.jaxpr(
        _inside(params["body_jaxpr"]), [value.type for value in consts[for_cond:]] + carried, layer, f"{path}/"
    )
    new = {
        "cond_jaxpr": ClosedJaxpr(condition.jaxpr, params["cond_jaxpr"].consts),
        "body_jaxpr": ClosedJaxpr(coerced(step, carry), params["body_jaxpr"].consts),
    }
    inits = [body.cast(value, dtype, eqn) for value, dtype in zip(values[len(consts) :], carry, strict=True)]
    body.emit(eqn, [*(value.atom for value in consts), *inits], carry, {**params, **new})


def _carry_dtypes(body: Body, eqn: JaxprEqn, carried: Sequence[Any], layer: str, path: str) -> list[DType | None]:
    dtypes = [body.rewriter.castable_dtype(var.aval) for var in carried]
    choice = body.rewriter.choice(eqn.primitive.name, layer, path)
    if choice.rule is Rule.LOW:
        return [choice.dtype if dtype is not None else None for dtype in dtypes]
    return dtypes


def _cond(body: Body, eqn: JaxprEqn, layer: str, path: str) -> None:
    index, *operands = [body.read(var) for var in eqn.invars]
    types = [value.type for value in operands]
    branches = eqn.params["branches"]
    done = [
        body.rewriter.jaxpr(_inside(branch), types, layer, f"{path}/{number}/")
        for number, branch in enumerate(branches)
    ]
    out = [_joined(dtypes) for dtypes in zip(*(one.out for one in done), strict=True)]
    if body.rewriter.follows_plan:  # where it is not known how often a branch is taken, results stay wide
        out = [body.rewriter.castable_dtype(var.aval) for var in eqn.outvars]
    closed = tuple(ClosedJaxpr(coerced(one, out), branch.consts) for one, branch in zip(done, branches, strict=True))
    body.emit(eqn, [index.atom, *(value.atom for value in operands)], out, {**eqn.params, "branches": closed})


def _joined(dtypes: tuple[DType | None, ...]) -> DType | None:
    return widest([dtype for dtype in dtypes if dtype is not None]) if dtypes[0] is not None else None


def _linear_solve(body: Body, eqn: JaxprEqn, layer: str, path: str) -> None:
    """A linear solver. It solves as it was written: no backend factors in 16 bits, and iterations need their residuals.

    The linear map itself, which JAX applies only to differentiate the solution by what the map is made of, is computed
    like all else. So are then the products of the derivative.
    """
    castable = body.rewriter.castable_dtype
    jaxprs = eqn.params["jaxprs"]

    def applied(name: str) -> ClosedJaxpr | None:
        written = getattr(jaxprs, name)
        return None if written is None else _same_signature(body, written, layer, f"{path}/{name}/")

    before = len(body.eqns)
    floats = [value for value in map(body.read, eqn.invars) if value.dtype is not None]
    atoms = [body.cast(body.read(var), castable(var.aval), eqn) for var in eqn.invars]
    made = jaxprs._replace(matvec=applied("matvec"), vecmat=applied("vecmat"))
    body.emit(eqn, atoms, [castable(var.aval) for var in eqn.outvars], {**eqn.params, "jaxprs": made})
    body.record(eqn, body.rewriter.choice(eqn.primitive.name, layer, path), layer, path, floats, before)


def _composite(body: Body, eqn: JaxprEqn, layer: str, path: str) -> None:
    """An operation that a compiler may know by its name, and what it is made of elsewhere. Only the latter changes."""
    made = _same_signature(body, eqn.params["jaxpr"], layer, f"{path}/")
    body.as_written(eqn, {**eqn.params, "jaxpr": made})


def _linear_call(body: Body, eqn: JaxprEqn, layer: str, path: str) -> None:
    """A linear function with a transpose of its own: JAX calls one in place of the other, so neither's dtypes move."""
    written: Callable[[], tuple[ClosedJaxpr, Any]] = eqn.params["transpose_thunk"]

    def transpose() -> tuple[ClosedJaxpr, Any]:
        closed, consts = written()
        return _same_signature(body, closed, layer, f"{path}/bwd/"), consts

    callee = _same_signature(body, eqn.params["callee"], layer, f"{path}/")
    body.as_written(eqn, {**eqn.params, "callee": callee, "transpose_thunk": transpose})


def _same_signature(body: Body, written: ClosedJaxpr, layer: str, path: str) -> ClosedJaxpr:
    """A jaxpr rewritten inside, with the inputs and results it had."""
    castable, inner = body.rewriter.castable_dtype, written.jaxpr
    done = body.rewriter.jaxpr(inner, [InType(castable(var.aval)) for var in inner.invars], layer, path)
    return ClosedJaxpr(coerced(done, [castable(var.aval) for var in inner.outvars], inner.outvars), written.consts)


HANDLERS: dict[str, Handler] = {
    "jit": _call("jaxpr"),
    "pjit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "core_call": _call("call_jaxpr"),
    "remat2": _call("jaxpr"),
    "checkpoint": _call("jaxpr"),
    "shard_map": _call("jaxpr"),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    "custom_jvp_call": custom_jvp_call,
    "custom_vjp_call": custom_vjp_call,
    "custom_vmap_call": custom_vmap_call,
    "composite": _composite,
    "linear_call": _linear_call,
}
