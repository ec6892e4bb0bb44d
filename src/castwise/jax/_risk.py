"""What rounding each tensor of a function would do to its results: one differentiation of a random projection of them.

``castwise.risk`` explains the method. Here every value passes through a function that does nothing on the way forward;
on the way back it sees ∂F/∂y, prices rounding y there and then, and hands the price on as the gradient of a number that
is zero. So nothing is kept but a number per tensor, in loops as well, whose iterations' prices are thus summed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from castwise._terms import wide_of
from castwise.errors import PlanError
from castwise.formats import BF16, NumberFormat, parse_format
from castwise.risk import RangeRecord, RiskMeter, Risks, Sensitivity

from ._dtypes import DType, dtype_of
from ._evaluate import Evaluation
from .capture import Captured

__all__ = ["measured_risks"]

log = logging.getLogger("castwise.jax.risk")

_SEED = 20
_PROJECTIONS = 2
_QUICK = {"cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}}
_MOST_PROJECTIONS_WITH_BATCHES = 1


def measured_risks(captured: Captured, batches: Sequence[Sequence[Any]], trips: Mapping[str, int]) -> Risks:
    """What rounding each tensor to the plan's low format adds to the variance of the results, averaged over batches.

    Args:
        captured: the graph.
        batches: arguments of the function; the more, the better the average.
        trips: how often while loops run.

    Returns:
        The risks. Where JAX cannot differentiate the function they are unmeasured, which is logged: the catalogue's
        hazards decide then.

    Raises:
        PlanError: the wide function's results are not finite, or none is a floating-point number.
    """
    meter = RiskMeter(captured.graph, captured.low)
    work = _Pricing(captured, trips)
    projections = _PROJECTIONS if len(batches) == 1 else _MOST_PROJECTIONS_WITH_BATCHES
    try:
        # It runs once or twice: compiling it well would take longer than that saves.
        price = jax.jit(jax.grad(work.projected, has_aux=True), compiler_options=_QUICK.get(jax.default_backend()))
        for number, args in enumerate(batches):
            for projection in range(projections):
                key = jax.random.fold_in(jax.random.key(_SEED), number * projections + projection)
                prices, (reference, seen) = price(work.nothing(), list(args), key)
                _add(meter, captured, jax.device_get(prices), float(reference))
            _record(meter, captured, jax.device_get(seen))
    except PlanError:
        raise
    except (NotImplementedError, TypeError, ValueError, AssertionError) as error:  # JAX's rules raise all of them
        log.warning(
            "JAX cannot differentiate this function (%s): no rounding is priced, and operations with a hazard "
            "in the op catalogue stay wide",
            (str(error) or type(error).__name__).splitlines()[0],
        )
        return Risks.unmeasured(captured.graph, captured.low)
    return meter.risks()


def _add(meter: RiskMeter, captured: Captured, prices: dict[str, Any], reference: float) -> None:
    if not np.isfinite(reference):
        raise PlanError("The function's results are not finite on the example arguments. Give other arguments.")
    reads: dict[tuple[int, str], float] = {}
    for name, (total, part) in prices.items():
        kind, _, rest = name.partition(" ")
        if kind == "input":
            meter.add(captured.inputs[int(rest)], Sensitivity(float(total), float(min(part, total))))
        elif kind == "write":
            meter.add(captured.written[rest], Sensitivity(float(total), float(min(part, total))))
        else:
            path, _, at = rest.partition(" ")
            tensor = dict(captured.reads[path])[int(at)]
            reads[tensor, path] = reads.get((tensor, path), 0.0) + float(total)
    for (tensor, path), total in reads.items():
        meter.add_read(tensor, captured.graph.positions[path], total)
    split = {tensor for tensor, _ in reads}
    for position, op in enumerate(captured.graph.ops):
        for tensor in split.intersection(op.inputs):
            if (tensor, op.id) not in reads:  # it is pinned: what it reads is never rounded for it
                meter.add_read(tensor, position, 0.0)
    meter.end_pass(reference)


def _record(meter: RiskMeter, captured: Captured, seen: dict[str, Any]) -> None:
    for path, (largest, count, over, under, subnormal) in seen.items():
        count = max(float(count), 1.0)
        largest = float(largest) if np.isfinite(largest) else float("inf")
        record = RangeRecord(largest, int(count), float(over) / count, float(under) / count, float(subnormal) / count)
        meter.record(captured.written[path], record)


class _Pricing:
    """The function, with every value that a plan may round passed through a pricing identity."""

    def __init__(self, captured: Captured, trips: Mapping[str, int]) -> None:
        self.captured, self.trips = captured, trips
        self.fmt = parse_format(captured.low)
        self.wide = dtype_of(parse_format(wide_of(captured.low)))
        self.priced = _pricing(self.fmt)

    def nothing(self) -> dict[str, Any]:
        """The zeros whose gradients are the prices."""
        captured, graph = self.captured, self.captured.graph
        wide = wide_of(captured.low)
        names = [f"input {at}" for at, tensor in captured.inputs.items() if graph.tensors[tensor].format == wide]
        names += [f"write {path}" for path, tensor in captured.written.items() if graph.tensors[tensor].format == wide]
        names += [
            f"read {path} {at}"
            for path, operands in captured.reads.items()
            for at, tensor in operands
            if graph.tensors[tensor].format == wide
        ]
        return dict.fromkeys(names, jnp.zeros(2, self.wide))

    def projected(self, prices: dict[str, Any], args: list[Any], key: Any) -> tuple[Any, Any]:
        """A random projection of the results; beside it their sum of squares, and the ranges of what was written."""

        def through(name: str, value: Any) -> Any:
            return self.priced(value, prices[name]) if name in prices and self._wide(value) else value

        def write(path: str, value: Any) -> tuple[Any, Any]:
            if path not in self.captured.written or not self._wide(value):
                return value, None
            return through(f"write {path}", value), _ranges(jax.lax.stop_gradient(value), self.fmt)

        evaluation = Evaluation(
            lambda path, at, value: through(f"read {path} {at}", value), write, _merged_ranges, self.trips
        )
        given = [through(f"input {at}", arg) for at, arg in enumerate(args)]
        closed = self.captured.closed
        outs, seen = evaluation.run(closed.jaxpr, closed.consts, given)
        floats = [out for out in outs if jnp.issubdtype(jnp.result_type(out), jnp.floating)]
        if not floats:
            raise PlanError("No result of the function is a floating-point number: there is nothing to plan.")
        keys = jax.random.split(key, len(floats))
        total = jnp.zeros((), self.wide)
        reference = jnp.zeros((), self.wide)
        for one, out in zip(keys, floats, strict=True):
            wide = out.astype(self.wide)
            total += (jax.random.normal(one, out.shape, self.wide) * wide).sum()
            reference += jax.lax.stop_gradient(jnp.square(wide).sum())
        return total, (reference, seen)

    def _wide(self, value: Any) -> bool:
        return bool(jnp.result_type(value) == self.wide)


def _pricing(fmt: NumberFormat) -> Any:
    low: DType = dtype_of(fmt)

    barrier: Any = jax.lax.optimization_barrier

    @jax.custom_vjp
    def priced(value: Any, price: Any) -> Any:
        return value

    def forward(value: Any, price: Any) -> tuple[Any, Any]:
        return value, value

    def backward(value: Any, gradient: Any) -> tuple[Any, Any]:
        # The barrier keeps a compiler from seeing that the value was wider before.
        error = barrier(value.astype(low)).astype(value.dtype) - value
        size = jnp.abs(value)
        noise = jnp.where(size <= fmt.max, jnp.square(error * gradient), 0.0)
        small = jnp.where(size < fmt.smallest_normal, noise, 0.0).sum() if _narrow(fmt) else jnp.zeros((), noise.dtype)
        return gradient, jnp.stack([noise.sum(), small])

    priced.defvjp(forward, backward)
    return priced


def _narrow(fmt: NumberFormat) -> bool:
    """Whether the format's range is one that values leave: only then is it counted what is lost at its ends."""
    return fmt.exponent_bits < BF16.exponent_bits


def _ranges(value: Any, fmt: NumberFormat) -> Any:
    """[5] the largest finite value, how many there are, beyond the format, lost below it, and subnormal in it."""
    size = jnp.abs(value)
    size = jnp.where(jnp.isinf(size), 0.0, size)  # masks, which every format has
    largest = size.max() if size.size else jnp.zeros((), size.dtype)
    if not _narrow(fmt):
        return jnp.zeros(5, size.dtype).at[0].set(largest).at[1].set(size.size)
    gone = size <= fmt.smallest_subnormal / 2
    under = (size > 0) & gone
    subnormal = (size < fmt.smallest_normal) & ~gone
    counts = [jnp.full((), size.size), (size > fmt.max).sum(), under.sum(), subnormal.sum()]
    return jnp.stack([largest.astype(size.dtype), *(count.astype(size.dtype) for count in counts)])


def _merged_ranges(every: Any) -> Any:
    return jnp.concatenate([every[:, :1].max(0), every[:, 1:].sum(0)])
