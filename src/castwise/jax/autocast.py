"""``autocast``: a function that computes the same in other formats.

The wrapped function is traced as ``jax.jit`` would trace it, its jaxpr is rewritten (``_rewrite.py``), and the result
runs as one jitted call. So it can be differentiated, vmapped, sharded and jitted like any other function, in any order,
and a region inside a region keeps its own policy.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from castwise.errors import PlanError, PolicyError
from castwise.policy import Policy

from ._inline import differentiated_while_traced, inlined
from ._layers import REGION, layers_of
from ._nnx import values_of, variables, write_back, written
from ._plan import Plan
from ._rewrite import Rewriter
from ._rules import resolve, rules_for

__all__ = ["autocast"]

log = logging.getLogger("castwise.jax")

P = ParamSpec("P")
R = TypeVar("R")

# Functions traced for one set of static arguments, the most recent ones.
_KEPT_CALLS = 64


def autocast(fn: Callable[P, R], policy: Policy | str | Any = "auto", *, plan: Plan | None = None) -> Callable[P, R]:
    """``fn`` with every operation computed in the format that the policy, or a plan, decides for it.

    Args:
        fn: any function that ``jax.jit`` could trace once its non-array arguments are fixed.
        policy: a ``castwise.Policy``, a preset's or format's name, or the path of a policy file. "auto" is the preset
            of the 16-bit format that the backend computes natively, if any.
        plan: of ``castwise.jax.plan`` for ``fn``, in place of a policy.

    Returns:
        A function of the same signature, whose results have the same shapes and dtypes. Arrays in its arguments, at
        any depth of any pytree, positional or by keyword, are traced; all else, Python numbers too, is fixed for the
        call. Integers, booleans, complex numbers, float64 and PRNG keys are left alone.

    Raises:
        PolicyError: the policy makes no sense, or asks for a format that JAX cannot compute in.
        PlanError: when called: the plan was made for another function.

    Linear solvers stay in the formats they were written in, since no backend factors in 16 bits; only the map that they
    solve for is computed low where JAX differentiates the solution. Wide as well are products that sum a single term,
    which gain nothing and lose digits (the angles of rotary embeddings), and products that were written with
    ``precision=HIGHEST``, among them those that ``jnp.linalg.solve`` makes for its derivative. ``report`` lists all of
    them with the reason.

    A kernel (Pallas) and a function with its own partitioning keep the formats they were written in, which is logged
    once. What ``fn`` writes into Flax nnx modules among its arguments, such as running statistics, is written into
    them, as ``nnx.jit`` does.

    Like ``jax.jit``, it assumes that what ``fn`` reads besides its arguments does not change between calls.
    """
    region = _Region(fn, policy, plan)

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = region(args, kwargs)
        return result

    wrapped._castwise_region = region  # type: ignore[attr-defined]
    return wrapped


class _Region:
    """What ``autocast`` knows of one function."""

    def __init__(self, fn: Callable[..., Any], policy: Any, plan: Plan | None = None) -> None:
        self.fn, self.plan = fn, plan
        if plan is not None and policy != "auto":
            raise PolicyError(
                "Both policy and plan are given. A plan has its policy's rules in it: give the plan alone."
            )
        if plan is not None and not isinstance(plan, Plan):
            raise PlanError(
                f"plan: {plan!r} is no plan of a JAX function. Make one with castwise.jax.plan(fn, *args), or read one "
                f"with castwise.jax.Plan.load(path)."
            )
        self.policy = Policy.coerce(policy)
        self._calls: OrderedDict[Any, _Traceable] = OrderedDict()
        self._rewriter: Rewriter | None = None
        self._checked: set[int] = set()
        if self.policy.format != "auto":
            rules_for(self.policy)  # an impossible policy is an error here, not at the first call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arrays, traceable = self.prepared(args, kwargs)
        closed, out_tree = traceable.traced(arrays)
        jaxpr = self._rewritten(closed.jaxpr)
        call = region_call(jaxpr)
        if call is not None and differentiated_while_traced(arrays):
            results = inlined(jaxpr, call, closed.consts, arrays)
        elif call is not None and _hunting(arrays):
            results = inlined(jaxpr, call, closed.consts, arrays, as_calls=False)
        else:
            results = jax.extend.core.jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*arrays)
        result, changed = jax.tree.unflatten(out_tree, results)
        if changed:
            write_back((args, kwargs), changed)
        return result

    def prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], _Traceable]:
        """The arrays of a call, and the function of them that is traced."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        static = tuple(_ARRAY if _is_array(leaf) else leaf for leaf in leaves)
        try:
            key = (tree, tuple((type(leaf), leaf) for leaf in static))
            found = self._calls.get(key)
        except TypeError:  # a static argument without a hash: traced anew at each call
            return arrays, _Traceable(self.fn, tree, static)
        if found is None:
            found = self._calls[key] = _Traceable(self.fn, tree, static)
            if len(self._calls) > _KEPT_CALLS:
                self._calls.popitem(last=False)
        else:
            self._calls.move_to_end(key)
        return arrays, found

    @property
    def rewriter(self) -> Rewriter:
        """The rewriter of the policy, resolved when it is first needed: asking for the backend starts it."""
        if self._rewriter is None:
            if self.plan is not None:
                self._rewriter = self.plan.rewriter()
            else:
                rules = rules_for(resolve(self.policy))
                self._rewriter = Rewriter(rules, layered=rules.layered)
        return self._rewriter

    def _rewritten(self, outer: Jaxpr) -> Jaxpr:
        """The traced jaxpr, which is one call of the region, with another region inside the call."""
        call = region_call(outer)
        if call is None:  # jit is disabled: the operations themselves are there
            self._check(outer)
            return self.rewriter.whole(outer)
        inner = call.params["jaxpr"]
        self._check(inner.jaxpr)
        eqns = [call.replace(params={**call.params, "jaxpr": self.rewriter.closed(inner)})]
        return Jaxpr(outer.constvars, outer.invars, outer.outvars, eqns, outer.effects, outer.debug_info, outer.is_high)

    def _check(self, jaxpr: Jaxpr) -> None:
        if id(jaxpr) in self._checked:
            return
        if self.plan is not None:
            self.plan.check_function(jaxpr)
        elif self.policy.layers:
            resolve(self.policy).match_layers(layers_of(jaxpr))
        self._checked.add(id(jaxpr))


class _Array:
    """Stands for an array among static arguments."""

    def __repr__(self) -> str:
        return "array"


_ARRAY = _Array()


class _Traceable:
    """A function of the arrays alone: the structure and all other arguments are fixed."""

    def __init__(self, fn: Callable[..., Any], tree: Any, static: Sequence[Any]) -> None:
        def region(*arrays: Any) -> Any:
            given = iter(arrays)
            all_args = jax.tree.unflatten(tree, [next(given) if leaf is _ARRAY else leaf for leaf in static])
            held = variables(all_args)
            before = values_of(held)
            result = fn(*all_args[0], **all_args[1])
            return result, written(held, before, all_args)

        region.__name__ = region.__qualname__ = REGION
        region.__signature__ = inspect.signature(region)  # type: ignore[attr-defined]
        region.__wrapped__ = fn  # type: ignore[attr-defined]  # JAX's errors name the function that the user wrote
        self._traced = jax.make_jaxpr(jax.jit(region), return_shape=True)

    def traced(self, arrays: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
        """The jaxpr, one call of the function; and the structure of its result and of what it wrote into modules.

        What was traced before is not traced again.
        """
        closed, shapes = self._traced(*arrays)
        return closed, jax.tree.structure(shapes)


def region_call(jaxpr: Jaxpr) -> JaxprEqn | None:
    """The one equation of a traced region: the call of its function."""
    eqns = jaxpr.eqns
    return eqns[0] if len(eqns) == 1 and eqns[0].params.get("name") == REGION else None


def _hunting(arrays: Sequence[Any]) -> bool:
    """Whether JAX is to stop at the operation that makes a NaN or an infinity: then they run one by one."""
    config: Any = jax.config
    return (config.jax_debug_nans or config.jax_debug_infs) and not any(isinstance(x, jax.core.Tracer) for x in arrays)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
