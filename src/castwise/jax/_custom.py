"""Functions that bring their own derivative rules: the rules are rewritten along with the functions.

JAX keeps such a rule as a thunk that is traced when somebody differentiates. It was written for the dtypes of the
original function, so it is traced with those and the result rewritten for the dtypes that are there now: the backward
pass of a custom product is as low as its forward pass, and gradients have the dtypes of what they are gradients of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import ad

from ._dtypes import DType, float_dtype
from ._rewrite import Body, Rewriter
from ._values import InType, coerced

__all__ = ["custom_jvp_call", "custom_vjp_call", "custom_vmap_call"]

Thunk = Callable[..., Any]


def custom_jvp_call(body: Body, eqn: JaxprEqn, layer: str, path: str) -> None:
    """A function with a rule for tangents."""
    params, rewriter = eqn.params, body.rewriter
    values = [body.read(var) for var in eqn.invars]
    types = [InType(value.dtype) for value in values]
    done = rewriter.jaxpr(params["call_jaxpr"].jaxpr, types, layer, f"{path}/")
    own = types[params["num_consts"] :]
    rule: Any = params["jvp_jaxpr_fun"]

    def thunk(*zeros: bool) -> tuple[Jaxpr, Sequence[Any], Sequence[bool]]:
        jaxpr, consts, out_zeros = rule.call_wrapped(*zeros)
        tangents = [type_ for type_, zero in zip(own, zeros, strict=True) if not zero]
        ruled = rewriter.jaxpr(jaxpr, [*own, *tangents], layer, f"{path}/jvp/")
        out = [*done.out, *(dtype for dtype, zero in zip(done.out, out_zeros, strict=True) if not zero)]
        return coerced(ruled, out), consts, out_zeros

    closed = done.closed(params["call_jaxpr"].consts)
    new = {**params, "call_jaxpr": closed, "jvp_jaxpr_fun": _wrapped(thunk, rule)}
    body.emit(eqn, [value.atom for value in values], done.out, new)


def custom_vjp_call(body: Body, eqn: JaxprEqn, layer: str, path: str) -> None:
    """A function with a forward pass that saves residuals, and a backward pass that reads them."""
    params, rewriter = eqn.params, body.rewriter
    values = [body.read(var) for var in eqn.invars]
    types = [InType(value.dtype) for value in values]
    done = rewriter.jaxpr(params["call_jaxpr"].jaxpr, types, layer, f"{path}/")
    first = params["num_consts"]
    written = [var.aval for var in eqn.invars]
    forward: Any = params["fwd_jaxpr_thunk"]
    residuals: list[Any] = []  # avals of the residuals as the rule was written, once the forward pass is traced

    def forward_thunk(*nonzeros: bool) -> tuple[Jaxpr, Sequence[Any]]:
        jaxpr, consts = forward.call_wrapped(*nonzeros)
        _, _, forwarded = params["out_trees"]()
        saved = iter(jaxpr.outvars[: len(jaxpr.outvars) - len(done.out)])
        residuals[:] = [written[at] if at is not None else next(saved).aval for at in forwarded]
        ruled = rewriter.jaxpr(jaxpr, types[first:], layer, f"{path}/fwd/")
        kept = ruled.out[: len(ruled.out) - len(done.out)]
        return coerced(ruled, [*kept, *done.out]), consts

    def backward(*args: Any) -> list[Any]:
        cotangents = args[len(residuals) :]
        avals = [*residuals, *(var.aval.to_ct_aval() for var in eqn.outvars)]
        assert len(args) == len(avals), (len(args), len(residuals), len(cotangents))
        known = {at for at in range(len(residuals)) if _known(args[at], avals[at])}
        return _run_backward(rewriter, params["bwd"], args, avals, known, types[first:], layer, path)

    new = {
        **params,
        "call_jaxpr": done.closed(params["call_jaxpr"].consts),
        "fwd_jaxpr_thunk": _wrapped(forward_thunk, forward),
        "bwd": _wrapped(backward, params["bwd"]),
    }
    body.emit(eqn, [value.atom for value in values], done.out, new)


def custom_vmap_call(body: Body, eqn: JaxprEqn, layer: str, path: str) -> None:
    """A function that says how it is batched. Its rule is traced for the dtypes it was written for, and rewritten."""
    params, rewriter = eqn.params, body.rewriter
    values = [body.read(var) for var in eqn.invars]
    done = rewriter.jaxpr(params["call"].jaxpr, [InType(value.dtype) for value in values], layer, f"{path}/")
    rule = params["rule"]
    avals: list[Any] = [var.aval for var in eqn.invars]

    def batched(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
        flat, tree = jax.tree.flatten(args)
        told: list[Any] = []

        def written(*arrays: Any) -> list[Any]:
            out, out_batched = rule(axis_size, in_batched, *jax.tree.unflatten(tree, arrays))
            leaves, out_tree = jax.tree.flatten(out)
            told[:] = [out_tree, out_batched]
            return leaves

        specs = [_spec(aval.update(shape=np.shape(x))) for x, aval in zip(flat, avals, strict=True)]
        closed = jax.make_jaxpr(written)(*specs)
        types = [InType(rewriter.castable_dtype(jax.typeof(x))) for x in flat]
        ruled = coerced(rewriter.jaxpr(closed.jaxpr, types, layer, f"{path}/vmap/"), done.out)
        outs = jax.extend.core.jaxpr_as_fun(ClosedJaxpr(ruled, closed.consts))(*flat)
        out_tree, out_batched = told
        return jax.tree.unflatten(out_tree, outs), out_batched

    batched.__name__ = getattr(rule, "__name__", "rule")
    new = {**params, "call": done.closed(params["call"].consts), "rule": batched}
    body.emit(eqn, [value.atom for value in values], done.out, new)


def _run_backward(
    rewriter: Rewriter,
    rule: Any,
    args: Sequence[Any],
    avals: Sequence[Any],
    known: set[int],
    primals: Sequence[InType],
    layer: str,
    path: str,
) -> list[Any]:
    """Trace a backward rule as written, rewrite it for ``args`` and run it; gradients have their primals' dtypes.

    Residuals that are ``known`` are not traced: a rule may ask Python whether one is true.
    """
    given = [at for at, arg in enumerate(args) if not _symbolic(arg) and at not in known]
    zeros: list[Any] = []

    def written(*arrays: Any) -> list[Any]:
        full = list(args)
        for at, array in zip(given, arrays, strict=True):
            full[at] = array
        for at, arg in enumerate(full):
            if _symbolic(arg):
                full[at] = type(arg)(avals[at])
            elif at in known and float_dtype(avals[at]) is not None:
                full[at] = float(arg) if avals[at].weak_type else np.asarray(arg, avals[at].dtype)
        out = rule.call_wrapped(*full)
        zeros[:] = [one if isinstance(one, ad.Zero) else None for one in out]
        return [one for one in out if not isinstance(one, ad.Zero)]

    closed = jax.make_jaxpr(written)(*(_spec(avals[at]) for at in given))
    types = [InType(rewriter.castable_dtype(jax.typeof(args[at]))) for at in given]
    ruled = rewriter.jaxpr(closed.jaxpr, types, layer, f"{path}/bwd/")
    wanted = [type_.dtype for type_, zero in zip(primals, zeros, strict=True) if zero is None]
    jaxpr = coerced(ruled, wanted)
    results = iter(jax.extend.core.jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*(args[at] for at in given)))
    return [
        next(results) if zero is None else _zero_like(zero, type_.dtype)
        for zero, type_ in zip(zeros, primals, strict=True)
    ]


def _symbolic(arg: Any) -> bool:
    return isinstance(arg, SymbolicZero | ad.Zero)


def _known(residual: Any, aval: Any) -> bool:
    """Whether a residual is a number, or no floating-point array, that the program knows before it runs."""
    if _symbolic(residual) or isinstance(residual, jax.core.Tracer):
        return False
    return not np.shape(residual) or float_dtype(aval) is None


def _spec(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)  # type: ignore[no-untyped-call]


def _zero_like(zero: Any, dtype: DType | None) -> Any:
    if dtype is None or float_dtype(zero.aval) is None:
        return zero
    return ad.Zero(zero.aval.update(dtype=dtype, weak_type=False))


def _wrapped(function: Thunk, like: Any) -> Any:
    return linear_util.wrap_init(function, debug_info=like.debug_info)
