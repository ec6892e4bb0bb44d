"""Trying plans: a planned function run beside the one that was given, for its error and for its time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ._plan import Plan

__all__ = ["Trial"]

log = logging.getLogger("castwise.jax.plan")

_SECONDS = 2.0  # for all that are compared
_MOST_SECONDS = 60.0
_ROUNDS = 12  # at least, unless they take longer than that

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
        self._kept: dict[tuple[bytes, bool], Run] = {}

    def error(self, plan: Plan) -> float:
        """The error of the planned function's results, relative to those of the function as written.

        Infinite where the backend lacks a kernel for what is planned, as some products with a wide result.
        """
        if self._written is None:
            self._written = jax.device_get(self._compiled(None, with_loss=False)(self.arrays))
        try:
            planned = jax.device_get(self._compiled(plan, with_loss=False)(self.arrays))
        except jax.errors.JaxRuntimeError as error:
            log.info("a plan does not run here: %s", str(error).splitlines()[0])
            return float("inf")
        off = total = 0.0
        for ours, theirs in zip(planned, self._written, strict=True):
            if jnp.issubdtype(np.asarray(theirs).dtype, jnp.floating):
                theirs = np.asarray(theirs, np.float64)
                finite = np.isfinite(theirs)
                off += float(
                    np.square(np.asarray(ours, np.float64) - theirs, where=finite, out=np.zeros_like(theirs)).sum()
                )
                total += float(np.square(theirs, where=finite, out=np.zeros_like(theirs)).sum())
        found = (off / total) ** 0.5 if total else off**0.5
        return found if np.isfinite(found) else float("inf")

    def with_error(self, plan: Plan, error: float) -> Plan:
        """The plan, with the error that was measured."""
        return replace(plan, error=error)

    def seconds(self, plans: Iterable[Plan]) -> tuple[list[float], list[float]]:
        """Seconds of a call as written, then as planned by each: the fastest of several runs, which take turns.

        Beside them, how long each takes relative to the one as written: the median over rounds, which a machine that is
        busy now and then does not move.
        """
        wait: Any = jax.block_until_ready
        runs = [self._compiled(plan, with_loss=self.loss is not None) for plan in (None, *plans)]
        for run in runs:  # compiles, where it was not run before
            wait(run(self.arrays))
        rounds: list[list[float]] = []
        start = now = time.perf_counter()
        while len(rounds) < 3 or now - start < (_SECONDS if len(rounds) >= _ROUNDS else _MOST_SECONDS):
            times = []
            for run in runs:
                begun = time.perf_counter()
                wait(run(self.arrays))
                times.append(time.perf_counter() - begun)
            rounds.append(times)
            now = time.perf_counter()
        every = np.asarray(rounds)
        return every.min(0).tolist(), np.median(every / every[:, :1], axis=0).tolist()

    def _compiled(self, plan: Plan | None, *, with_loss: bool) -> Run:
        """The function as written (None) or planned, jitted once for its error and its time."""
        key = (b"" if plan is None else plan.labels.tobytes(), with_loss)
        if key not in self._kept:
            closed = self.closed if plan is None else self._planned(plan)
            self._kept[key] = jax.jit(self._whole(closed) if with_loss else _function(closed))
        return self._kept[key]

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
