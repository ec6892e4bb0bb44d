"""Trying plans: a planned function run beside the one that was given, for its error and for its time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ._measure import alternating
from ._plan import Plan

__all__ = ["Trial"]

_SECONDS = 1.0  # for all that are compared
_MOST_SECONDS = 60.0

Run = Callable[[list[Any]], Any]


class Trial:
    """Runs a function as it was written and as planned, on the same arguments.

    Args:
        closed: the function.
        arrays: its arguments.
        loss: where it will be differentiated, of its results; gradients are compared and timed then.
    """

    def __init__(self, closed: ClosedJaxpr, arrays: Sequence[Any], loss: Callable[..., Any] | None) -> None:
        self.closed, self.arrays, self.loss = closed, list(arrays), loss
        self._written: list[Any] | None = None

    def error(self, plan: Plan) -> float:
        """The error of the planned function's results, relative to those of the function as written."""
        if self._written is None:
            self._written = jax.device_get(jax.jit(_function(self.closed))(self.arrays))
        planned = jax.device_get(jax.jit(_function(self._planned(plan)))(self.arrays))
        off = total = 0.0
        for ours, theirs in zip(planned, self._written, strict=True):
            if jnp.issubdtype(np.asarray(theirs).dtype, jnp.floating):
                theirs = np.asarray(theirs, np.float64)
                finite = np.isfinite(theirs)
                off += float(
                    np.square(np.asarray(ours, np.float64) - theirs, where=finite, out=np.zeros_like(theirs)).sum()
                )
                total += float(np.square(theirs, where=finite, out=np.zeros_like(theirs)).sum())
        error = (off / total) ** 0.5 if total else off**0.5
        return error if np.isfinite(error) else float("inf")

    def with_error(self, plan: Plan, error: float) -> Plan:
        """The plan, with the error that was measured."""
        return replace(plan, error=error)

    def seconds(self, plans: Iterable[Plan]) -> list[float]:
        """Seconds of a call as written, then as planned by each: the fastest of several runs, which take turns."""
        functions = [self._whole(self.closed), *(self._whole(self._planned(plan)) for plan in plans)]
        wait: Any = jax.block_until_ready
        runs = [functools.partial(lambda run: wait(run(self.arrays)), jax.jit(function)) for function in functions]
        return alternating(runs, time.perf_counter() + _MOST_SECONDS, _SECONDS)

    def _planned(self, plan: Plan) -> ClosedJaxpr:
        return ClosedJaxpr(plan.rewriter().whole(self.closed.jaxpr), self.closed.consts)

    def _whole(self, closed: ClosedJaxpr) -> Run:
        run, loss = _function(closed), self.loss
        if loss is None:
            return run
        floats = [at for at, x in enumerate(self.arrays) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]

        def differentiated(arrays: list[Any]) -> Any:
            def of(values: list[Any]) -> Any:
                full = dict(enumerate(arrays)) | dict(zip(floats, values, strict=True))
                return loss(run([full[at] for at in range(len(arrays))]))

            return jax.value_and_grad(of)([arrays[at] for at in floats])

        return differentiated


def _function(closed: ClosedJaxpr) -> Run:
    run = jax.extend.core.jaxpr_as_fun(closed)
    return lambda arrays: run(*arrays)
