"""What operations cost on this device: timed one by one, in float32 and in the 16-bit format, once, and kept.

Each distinct operation runs by itself in a small function, on ordinary numbers; formats take turns, and the fastest run
counts, less what calling an empty function takes. Times are kept in the user's cache directory by operation, shapes,
format, device and versions. Measuring begins with what computes most and stops when its time is used up; what was not
reached counts as equally fast in both formats, so that nothing is lowered for a gain that nobody measured.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import tensor_util

from castwise._gemm import cache_file
from castwise.cost import Costs, MeasuredCosts
from castwise.formats import parse_format

from ._internals import add_node
from ._rules import lowered_attrs
from ._types import dtype_of, typing_of
from ._work import shape_of
from .capture import Captured

__all__ = ["alternating", "cost_table", "kept_constants", "measured_costs", "unavailable", "versions"]

log = logging.getLogger("castwise.tensorflow.measure")

_ROUNDS, _PER_OP = 5, 0.02  # rounds, and seconds for both formats, at least
_SHORTEST = 1e-7  # seconds; below this a clock tells nothing
_ALIKE, _ALIKE_SECONDS = 0.1, 2e-6  # two runs of one operation differ by that much


def versions() -> dict[str, str]:
    """What measured times depend on besides the device."""
    return {"tensorflow": tf.__version__}


def cost_table() -> MeasuredCosts:
    """The times measured on this machine so far."""
    return MeasuredCosts(cache_file().with_name("tensorflow_ops.json"))


def unavailable(captured: Captured, low: Any) -> dict[int, str]:
    """Ops of which TensorFlow has no kernel in the 16-bit dtype, and why."""
    return {
        position: f"TensorFlow has no {low.name} kernel of {captured.ops[op.id].type}"
        for position, op in enumerate(captured.graph.ops)
        if op.id in captured.ops and not op.pin and not lowered_attrs(captured.ops[op.id], low)
    }


def kept_constants(captured: Captured) -> Any:
    """[tensors] constants, whose low copies are made when the function is traced."""
    return np.array([tensor.kind == "constant" for tensor in captured.graph.tensors], bool)


def measured_costs(
    captured: Captured, fmt: str, device: str, *, seconds: float = 20.0, table: MeasuredCosts | None = None
) -> Costs:
    """Seconds of every operation and cast of a graph, in one call of the function.

    Args:
        captured: the graph.
        fmt: the 16-bit format.
        device: its name.
        seconds: how long measuring may take.
        table: where times are looked up and kept; by default ``cost_table``.
    """
    graph, low = captured.graph, dtype_of(parse_format(fmt))
    timer = _Timer(low, device, cost_table() if table is None else table, time.perf_counter() + seconds)
    lacking = unavailable(captured, low)
    ops, tensors = len(graph.ops), len(graph.tensors)
    high, lows, measured = np.zeros(ops), np.zeros(ops), np.zeros(ops, bool)
    lows[list(lacking)] = np.inf
    free = [at for at, op in enumerate(graph.ops) if op.id in captured.ops and not op.pin and at not in lacking]
    for at in sorted(free, key=lambda at: -graph.ops[at].flops):
        op = graph.ops[at]
        times = timer.operation(captured.ops[op.id])
        if times is not None:
            repeats = captured.times[op.id]
            high[at], lows[at], measured[at] = repeats * times[0], repeats * times[1], True
    kept = kept_constants(captured)
    down, up = np.zeros(tensors), np.zeros(tensors)
    for at in sorted(range(tensors), key=lambda at: -graph.tensors[at].elements):
        tensor = graph.tensors[at]
        if tensor.format == "fp32" and not kept[at]:
            casts = timer.cast(tensor.elements)
            factor = 1 + (graph.training and tensor.requires_grad)
            down[at], up[at] = (factor * one for one in casts)
    timer.finish()
    return Costs(fmt, high, lows, down, up, kept, device, lacking, measured)


class _Timer:
    """Times operations and casts that the table does not have yet."""

    def __init__(self, low: Any, device: str, table: MeasuredCosts, deadline: float) -> None:
        self.low, self.device, self.table, self.deadline = low, device, table, deadline
        self.missed = 0
        self._overhead: float | None = None
        self._casts: dict[int, tuple[float, float]] = {}

    @property
    def overhead(self) -> float:
        """Seconds that a call takes which computes nothing."""
        if self._overhead is None:
            x = tf.zeros(())
            empty = tf.function(lambda: tf.identity(x), autograph=False).get_concrete_function()
            [self._overhead] = alternating([empty], self.deadline + 1)
        return self._overhead

    def operation(self, op: Any) -> list[float] | None:
        """Seconds of a node in float32 and in 16 bits."""
        attrs = hashlib.sha256(str(sorted(op.node_def.attr.items())).encode()).hexdigest()[:12]
        shapes = ",".join("x".join(map(str, shape_of(tensor))) for tensor in op.inputs)
        named = f"{op.type}[{attrs}] {shapes}"
        found = self._times(named, lambda: [_alone(op, None), _alone(op, self.low)])
        if found is None:
            return None
        alike = abs(found[0] - found[1]) < max(_ALIKE_SECONDS, _ALIKE * max(found))
        return [found[0], found[0]] if alike else found

    def cast(self, elements: int) -> tuple[float, float]:
        """Seconds of casting so many numbers down, and up. Powers of four are timed; others cost their share."""
        size = 4 ** max(0, round(np.log(max(1, elements)) / np.log(4)))
        if size not in self._casts:
            found = self._times(f"cast {size}", lambda: [_cast(size, tf.float32, self.low), _cast(size, self.low)])
            nearest = min(self._casts, key=lambda one: abs(one - size), default=None)
            if found is None:
                known = self._casts[nearest] if nearest is not None else (_SHORTEST, _SHORTEST)
                scale = size / nearest if nearest is not None else 1.0
                return known[0] * scale, known[1] * scale
            self._casts[size] = (found[0], found[1])
        share = elements / size
        return self._casts[size][0] * share, self._casts[size][1] * share

    def _times(self, named: str, make: Callable[[], list[Callable[[], Any]]]) -> list[float] | None:
        where = " ".join([self.device, *(f"{name}={version}" for name, version in sorted(versions().items()))])
        keys = [f"{named} | {form} of {self.low.name} | {where}" for form in ("wide", "low")]
        known = [self.table.get(key) for key in keys]
        if None not in known:
            return [float(value) for value in known if value is not None]
        if time.perf_counter() > self.deadline:
            self.missed += 1
            return None
        try:
            found = alternating(make(), self.deadline)
        except (tf.errors.OpError, ValueError, TypeError) as error:
            log.info("%s cannot be timed by itself: %s", named, str(error).splitlines()[:1])
            return None
        found = [max(_SHORTEST, one - self.overhead) for one in found]
        for key, one in zip(keys, found, strict=True):
            self.table.put(key, one)
        return found

    def finish(self) -> None:
        """Keep what was measured, and say what was not."""
        self.table.keep()
        if self.missed:
            log.warning(
                "The time given was over before %d operations or casts were timed: they count as equally fast in both "
                "formats. Plan again to go on from here, or give seconds=...",
                self.missed,
            )


def _alone(op: Any, low: Any) -> Callable[[], Any]:
    """A call that computes a node alone."""
    lowered = lowered_attrs(op, low) if low is not None else ()
    places = typing_of(op).inputs
    operands = []
    for at, tensor in enumerate(op.inputs):
        known = tensor_util.constant_value(tensor)
        if at not in places and known is not None:
            operands.append((tf.constant(known, tensor.dtype), True))
        elif tensor.dtype.is_floating:
            shape = shape_of(tensor)
            # Around 1: an operation on zeros or on subnormals can take a time of its own.
            numbers = np.linspace(0.5, 1.5, int(np.prod(shape))).reshape(shape)
            dtype = low if places.get(at) in lowered else tensor.dtype
            operands.append((tf.cast(tf.constant(numbers, tf.float32), dtype), False))
        else:
            operands.append((tf.zeros(shape_of(tensor), tensor.dtype), False))
    varying = [value for value, fixed in operands if not fixed]

    def compute(*given: Any) -> Any:
        rest = iter(given)
        tensors = [tf.constant(value.numpy()) if fixed else next(rest) for value, fixed in operands]
        return add_node(op, tensors, name="timed", types=dict.fromkeys(lowered, low)).outputs

    made = tf.function(compute, autograph=False).get_concrete_function(*varying)
    return lambda: made(*varying)


def _cast(size: int, source: Any, target: Any = tf.float32) -> Callable[[], Any]:
    x = tf.cast(tf.ones(size), source)
    made = tf.function(lambda x: tf.cast(x, target), autograph=False).get_concrete_function(x)
    return lambda: made(x)


def alternating(runs: Sequence[Callable[[], Any]], deadline: float, per_run: float = _PER_OP) -> list[float]:
    """The fastest time of each, in seconds; they take turns, a few rounds or as many as fit a short while."""
    best = [float("inf")] * len(runs)
    for run in runs:  # what runs once is not what runs again
        run()
    start = time.perf_counter()
    for number in range(400):
        for position, run in enumerate(runs):
            begun = time.perf_counter()
            run()
            best[position] = min(best[position], time.perf_counter() - begun)
        now = time.perf_counter()
        if (number + 1 >= _ROUNDS and now - start > per_run) or (number and now > deadline):
            break
    return best
