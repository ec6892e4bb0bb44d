"""A jaxpr run equation by equation, with something done to what the equations read and write.

Walks a jaxpr as ``capture`` does, so that an equation has the same path in both. Loops and branches stay loops and
branches, whose own equations are reached too: what is observed in them is merged over iterations. A while loop becomes
a scan of as many iterations as it was seen to have, since JAX differentiates scans backwards and while loops not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .capture import CALLS, inside

__all__ = ["Evaluation", "count_trips"]

Seen = dict[str, jax.Array]
"""By path, what was observed of an equation's result."""


class Evaluation:
    """Runs jaxprs.

    Args:
        reads: called with a path, the operand's position and its value; returns what the equation reads in its place.
        writes: called with a path and a result; returns what others read in its place, and what was observed.
        merge: observations of all iterations, along a new first axis, into one.
        trips: how often while loops run, by path.
    """

    def __init__(
        self,
        reads: Callable[[str, int, Any], Any],
        writes: Callable[[str, Any], tuple[Any, jax.Array | None]],
        merge: Callable[[jax.Array], jax.Array],
        trips: Mapping[str, int],
    ) -> None:
        self.reads, self.writes, self.merge, self.trips = reads, writes, merge, trips

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], path: str = "") -> tuple[list[Any], Seen]:
        """The jaxpr's results, and what was observed."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        seen: Seen = {}
        for index, eqn in enumerate(jaxpr.eqns):
            given = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
            outs, inner = self._equation(eqn, given, f"{path}{index}")
            seen |= inner
            env.update(zip(eqn.outvars, outs, strict=True))
        return [atom.val if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars], seen

    def _equation(self, eqn: JaxprEqn, given: list[Any], path: str) -> tuple[list[Any], Seen]:
        name = eqn.primitive.name
        if name in CALLS:
            holder = eqn.params[CALLS[name]]
            return self.run(inside(holder), getattr(holder, "consts", ()), given, f"{path}/")
        if name == "scan":
            return self._scan(eqn, given, path)
        if name == "while":
            return self._while(eqn, given, path)
        if name == "cond":
            return self._branches(eqn, given, path)
        given = [self.reads(path, at, value) for at, value in enumerate(given)]
        primitive: Any = eqn.primitive
        outs = primitive.bind(*given, **primitive.get_bind_params(eqn.params))
        outs = list(outs) if primitive.multiple_results else [outs]
        if not outs:
            return outs, {}
        outs[0], observed = self.writes(path, outs[0])
        return outs, {} if observed is None else {path: observed}

    def _scan(self, eqn: JaxprEqn, given: list[Any], path: str) -> tuple[list[Any], Seen]:
        params, holder = eqn.params, eqn.params["jaxpr"]
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        count = params["num_carry"]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], Seen]]:
            outs, seen = self.run(inside(holder), holder.consts, [*given[:first], *carry, *xs], f"{path}/")
            return outs[:count], (outs[count:], seen)

        carry, (ys, seen) = jax.lax.scan(
            step, given[first:last], given[last:], length=params["length"], reverse=params["reverse"]
        )
        return [*carry, *ys], self._merged(seen, params["length"])

    def _while(self, eqn: JaxprEqn, given: list[Any], path: str) -> tuple[list[Any], Seen]:
        params = eqn.params
        skip, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, body = params["cond_jaxpr"], params["body_jaxpr"]

        def step(carry: list[Any], _: None) -> tuple[list[Any], Seen]:
            outs, seen = self.run(inside(body), body.consts, [*given[skip:last], *carry], f"{path}/")
            [goes_on] = jax.core.eval_jaxpr(inside(test), test.consts, *given[:skip], *carry)
            # In an outer loop it may have run less often this time than at most.
            return [jnp.where(goes_on, new, old) for new, old in zip(outs, carry, strict=True)], seen

        trips = self.trips.get(path, 0)
        if not trips:
            return given[last:], {}
        carry, seen = jax.lax.scan(jax.checkpoint(step), given[last:], None, length=trips)
        return list(carry), self._merged(seen, trips)

    def _branches(self, eqn: JaxprEqn, given: list[Any], path: str) -> tuple[list[Any], Seen]:
        branches, operands = eqn.params["branches"], given[1:]

        def branch(number: int) -> Callable[..., tuple[list[Any], Seen]]:
            holder = branches[number]
            return lambda *values: self.run(inside(holder), holder.consts, values, f"{path}/{number}/")

        every = [branch(number) for number in range(len(branches))]
        shapes = [jax.eval_shape(one, *operands)[1] for one in every]

        def padded(number: int) -> Callable[..., tuple[list[Any], Seen]]:
            def run(*values: Any) -> tuple[list[Any], Seen]:
                outs, seen = every[number](*values)
                nothing = {name: jnp.zeros(s.shape, s.dtype) for shape in shapes for name, s in shape.items()}
                return outs, nothing | seen

            return run

        outs, seen = jax.lax.switch(given[0], [padded(number) for number in range(len(branches))], *operands)
        return list(outs), dict(seen)

    def _merged(self, seen: Seen, length: int) -> Seen:
        return {name: self.merge(values) for name, values in seen.items()} if length else {}


def count_trips(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> dict[str, int]:
    """How often each while loop of a jaxpr runs at most, by path. Runs the function, if it has any."""
    if not _has_while(jaxpr):
        return {}
    counted = jax.jit(lambda consts, args: _Counting().run(jaxpr, consts, args)[1])(list(consts), list(args))
    return {name: int(count) for name, count in counted.items()}


class _Counting(Evaluation):
    def __init__(self) -> None:
        super().__init__(lambda _, __, value: value, lambda _, value: (value, None), lambda all: all.max(0), {})

    def _while(self, eqn: JaxprEqn, given: list[Any], path: str) -> tuple[list[Any], Seen]:
        params = eqn.params
        skip, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, body = params["cond_jaxpr"], params["body_jaxpr"]

        def goes_on(state: tuple[Any, list[Any], Seen]) -> Any:
            return jax.core.eval_jaxpr(inside(test), test.consts, *given[:skip], *state[1])[0]

        def inner(carry: list[Any]) -> tuple[list[Any], Seen]:
            return self.run(inside(body), body.consts, [*given[skip:last], *carry], f"{path}/")

        def step(state: tuple[Any, list[Any], Seen]) -> tuple[Any, list[Any], Seen]:
            outs, seen = inner(state[1])
            return state[0] + 1, outs, {name: jnp.maximum(state[2][name], value) for name, value in seen.items()}

        shapes = jax.eval_shape(inner, given[last:])[1]
        nothing = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
        carry = [jnp.asarray(value) for value in given[last:]]
        count, outs, seen = jax.lax.while_loop(goes_on, step, (jnp.int32(0), carry, nothing))
        return outs, {**seen, path: count}


def _has_while(jaxpr: Jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            return True
        for held in eqn.params.values():
            for one in held if isinstance(held, tuple | list) else (held,):
                if hasattr(inside(one), "eqns") and _has_while(inside(one)):
                    return True
    return False
