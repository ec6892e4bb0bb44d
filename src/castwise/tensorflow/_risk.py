"""What rounding each tensor of a function would do to its results: one differentiation of a random projection of them.

``castwise.risk`` explains the method. Here every value passes through an identity; its gradient sees ∂F/∂y, prices
rounding y there and then, and hands the price on as the gradient of a pair of numbers that are zero. So nothing is kept
but two numbers per tensor, in loops as well, whose iterations' prices are thus summed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from castwise.errors import PlanError
from castwise.formats import parse_format
from castwise.risk import RangeRecord, RiskMeter, Risks, Sensitivity

from ._internals import not_recorded, watch_variables
from ._replay import Rewriter
from ._rules import Choice
from ._types import dtype_of
from ._work import shape_of
from .autocast import results_of
from .capture import Captured

__all__ = ["LEAST_UPDATE", "measured_risks"]

log = logging.getLogger("castwise.tensorflow.risk")

_SEED = 20
_PROJECTIONS = 2
LEAST_UPDATE = 1e-6
"""Of the largest update's sum of squares: smaller updates of variables count by what they are."""


def measured_risks(captured: Captured, concrete: Any, fmt: str, batches: Sequence[Sequence[Any]]) -> Risks:
    """What rounding each tensor to ``fmt`` adds to the variance of the results, averaged over batches.

    Args:
        captured: the graph.
        concrete: the function.
        fmt: the 16-bit format.
        batches: the function's arguments, flat.

    Returns:
        The risks. Where TensorFlow cannot differentiate the function, or it has no floating-point result, they are
        unmeasured, which is logged: the catalogue's hazards decide then.

    Raises:
        PlanError: the results are not finite.
    """
    meter = RiskMeter(captured.graph, fmt)
    work = _Pricing(captured, concrete, fmt)
    try:
        price = tf.function(work.projected, autograph=False)
        for number, args in enumerate(batches):
            for projection in range(_PROJECTIONS if len(batches) == 1 else 1):
                seed = tf.constant([_SEED, number * _PROJECTIONS + projection], tf.int32)
                found = price(work.nothing(), list(args), seed)
                _add(meter, captured, work, [one.numpy() for one in found])
    except PlanError:
        raise
    except (LookupError, ValueError, TypeError, NotImplementedError, tf.errors.OpError) as error:
        log.warning(
            "TensorFlow cannot differentiate this function (%s): no rounding is priced, and operations with a hazard "
            "in the op catalogue stay wide",
            (str(error).splitlines() or [type(error).__name__])[0],
        )
        return Risks.unmeasured(captured.graph, fmt)
    return meter.risks()


def _add(meter: RiskMeter, captured: Captured, work: _Pricing, found: Sequence[Any]) -> None:
    reference, prices = float(found[0]), np.asarray(found[1])
    if not np.isfinite(reference):
        raise PlanError("The function's results are not finite on the example arguments. Give other arguments.")
    for at, path in enumerate(work.paths):
        tensor = work.tensor_of[path]
        total, part, largest, over = (float(one) for one in prices[at])
        meter.add(tensor, Sensitivity(total, min(part, total)))
        size = max(1, captured.graph.tensors[tensor].elements)
        if largest:
            meter.record(tensor, RangeRecord(largest, size, overflow=over / size))
    meter.end_pass(reference)


class _Projection:
    """Of a tensor, its scalar product with random numbers and its sum of squares, as two numbers."""

    def __init__(self, seed: Any) -> None:
        self.seed, self.number = seed, 0

    def __call__(self, value: Any) -> Any:
        random = tf.random.stateless_normal(tf.shape(value), self.seed + tf.constant([0, 7919 * self.number]))
        self.number += 1
        return tf.stack([tf.reduce_sum(random * value), tf.reduce_sum(tf.square(value))])

    def update(self, op: Any, inputs: list[Any]) -> Any:
        """By how much a node changes a variable: what a training step is run for."""
        values = [tensor for tensor in inputs if tensor.dtype == tf.float32]
        if op.type == "AssignVariableOp" and values:
            before = tf.raw_ops.ReadVariableOp(resource=inputs[0], dtype=tf.float32)
            if before.shape.is_fully_defined() and before.shape == values[0].shape:
                values = [values[0] - tf.stop_gradient(before)]
        # Of several, such as a gradient and a learning rate, the largest.
        return self(max(values, key=lambda one: math.prod(shape_of(one)))) if values else None


def _as_large(updates: Any, results: Any) -> Any:
    """[updates, 2] projections of updates, scaled so that the relative error of one counts as that of the results.

    An update of a weight is some thousands of times smaller than a loss, and is what matters. One that is nothing but
    rounding, as that of a bias before a normalisation is, must not count as much as those that are not.
    """
    squares = tf.stop_gradient(updates[:, 1])
    least = LEAST_UPDATE * tf.reduce_max(squares)
    known = tf.where(results > 0, tf.stop_gradient(results), tf.reduce_max(squares))
    scale = tf.math.divide_no_nan(known, tf.maximum(squares, least) * tf.cast(tf.size(squares), tf.float32))
    return tf.stack([tf.sqrt(scale) * updates[:, 0], scale * updates[:, 1]], 1)


def _depends(tensor: Any, on: Sequence[Any]) -> bool:
    wanted, seen, stack = {one.name for one in on}, set(), [tensor]
    while stack:
        one = stack.pop()
        if one.name in wanted:
            return True
        if one.name not in seen:
            seen.add(one.name)
            stack += one.op.inputs
    return False


class _Pricing:
    """The function, with every value that a plan may round passed through a pricing identity."""

    def __init__(self, captured: Captured, concrete: Any, fmt: str) -> None:
        self.concrete, self.fmt = concrete, parse_format(fmt)
        self.low = dtype_of(self.fmt)
        graph = captured.graph
        places = {f"input {at}": tensor for at, tensor in captured.inputs.items()} | dict(captured.written)
        self.tensor_of = {path: at for path, at in places.items() if graph.tensors[at].format == "fp32"}
        self.paths = list(self.tensor_of)
        self.number = {path: at for at, path in enumerate(self.paths)}

    def nothing(self) -> list[Any]:
        """The zeros whose gradients are the prices: noise, its part below the normal range, max |y|, and overflows.

        The last two are no gradients of anything; they take the same way back. A loop adds up what its iterations
        give, so there max |y| is an upper bound.
        """
        return [tf.zeros(4) for _ in self.paths]

    def projected(self, prices: list[Any], args: list[Any], seed: Any) -> list[Any]:
        """The sum of squares of the results, and the prices."""
        watch_variables(self.concrete.graph.variables)
        with not_recorded():
            project = _Projection(seed)
            rewriter = Rewriter(lambda *_: Choice("", None), self._hook(prices), update=project.update)
            count = results_of(self.concrete)
            results = rewriter.run(self.concrete.graph, [*args, *self.concrete.captured_inputs], count)
            floats = [project(tf.cast(one, tf.float32)) for one in results if one.dtype.is_floating]
            updates = [one for one in rewriter.updates if _depends(one, prices)]
            if not floats and not updates:
                raise ValueError("no result is a floating-point number, and no variable changes")
            total = tf.add_n([tf.zeros(2), *floats])
            if updates:
                total += tf.reduce_sum(_as_large(tf.stack(updates), total[1]), 0)
            grads = tf.gradients(total[0], prices)
        return [total[1], tf.stack([tf.zeros(4) if one is None else one for one in grads])]

    def _hook(self, prices: list[Any]) -> Any:
        def hook(path: str, tensor: Any) -> Any:
            at = self.number.get(path)
            return tensor if at is None else self._priced(tensor, prices[at])

        return hook

    def _priced(self, value: Any, price: Any) -> Any:
        def priced(value: Any, price: Any) -> Any:
            def back(gradient: Any) -> Any:
                size = tf.abs(value)
                inside = size <= self.fmt.max
                error = tf.cast(tf.cast(value, self.low), tf.float32) - value
                noise = tf.where(inside, tf.square(error * gradient), 0.0)
                small = tf.where(size < self.fmt.smallest_normal, noise, 0.0)
                finite = tf.where(tf.math.is_finite(size), size, 0.0)  # masks are infinite, which every format can be
                over = tf.reduce_sum(tf.cast(finite > self.fmt.max, tf.float32))
                largest = tf.maximum(tf.reduce_max(finite), 0.0)
                return gradient, tf.stack([tf.reduce_sum(noise), tf.reduce_sum(small), largest, over])

            return tf.identity(value), back

        return tf.custom_gradient(priced)(value, price)
