"""``plan``: the format of every operation of a function decided together, by what it costs here and what it risks.

    decided = plan(train_step, images, labels, policy="bfloat16")
    print(decided.summary())
    fast_step = autocast(train_step, plan=decided)

    trace, capture, measure (or predict) costs, price roundings, solve, try

Everything between tracing a function and rewriting it is the neutral planner. What operations cost alone is not what
they cost together, so the end is measured as well: where the planned function is not faster than the one that was
given, nothing is lowered.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from castwise._decide import is_wide
from castwise.cost import Costs, roofline
from castwise.errors import PlanError
from castwise.formats import BF16, parse_format
from castwise.hardware import Device, get_device
from castwise.plan import solve
from castwise.policy import Policy
from castwise.risk import Risks

from ._internals import not_recorded
from ._measure import alternating, kept_constants, measured_costs, unavailable, versions
from ._plan import Plan
from ._replay import Rewriter
from ._risk import LEAST_UPDATE, measured_risks
from ._rules import Choice, device_here, resolve
from ._types import dtype_of
from .autocast import autocast, check_function, is_compiled, is_polymorphic, results_of, traced, with_signature
from .capture import Captured, capture

__all__ = ["plan"]

log = logging.getLogger("castwise.tensorflow.plan")

_WORTHWHILE = 1.05
"""How much faster than the function as written a plan must be: two runs of one function differ by a few percent."""
_TOLERATED = 1.25
"""How far the measured error may exceed the one that was budgeted for before the plan is solved again."""
_MOST_TIGHTENINGS = 3
_REPEATABLE = 0.1
"""Of the error allowed: how far two calls of the function as written may differ for the error to be tried."""
_SECONDS = 1.0


def plan(
    fn: Any,
    *args: Any,
    policy: Policy | str = "auto",
    device: Device | str | None = None,
    budget: float | None = None,
    batches: Sequence[tuple[Any, ...]] = (),
    training: bool = False,
    trips: int | None = None,
    seconds: float = 20.0,
    **kwargs: Any,
) -> Plan:
    """Decide the format of every operation of ``fn`` together, for arguments like these.

    Args:
        fn: a ``tf.function`` or ``ConcreteFunction``.
        args: example arguments, with real values: what rounding does is measured on them.
        policy: rules that the plan keeps, and its format. "auto" plans the format that the device computes natively;
            where it has none, nothing is lowered.
        device: a device to plan for by its data sheet, instead of measuring this one.
        budget: the largest relative error of the results; where not given, what the policy's own op-by-op rules make.
        batches: more arguments, each a tuple as ``args``, to average roundings over.
        training: whether ``fn`` will be differentiated; not where it trains by itself.
        trips: how often each loop repeats; where not given, the example's repetitions are counted, loop by loop.
        seconds: how long measuring operations may take.
        kwargs: further arguments of ``fn``.

    Returns:
        The plan, for ``autocast(fn, plan=...)``.

    Raises:
        PlanError: no plan meets the budget, or the function's results are not finite.
        PolicyError: the policy asks for what TensorFlow cannot compute in.
    """
    check_function(fn)
    fn = with_signature(fn)
    asked = Policy.coerce(policy)
    wanted = get_device(device) if isinstance(device, str) else device
    resolved = asked.resolve(wanted) if wanted is not None else resolve(asked)
    function = fn if hasattr(fn, "function_type") or is_polymorphic(fn) else tf.function(fn)
    concrete = traced(function, args, kwargs) if is_polymorphic(function) else function
    name = wanted.name if wanted is not None else _name_here()
    captures = functools.partial(
        capture, concrete.graph, results_of(concrete), training=training, fused=is_compiled(concrete)
    )
    captured = captures(trips=trips or 1)
    if is_wide(resolved.low_format):
        return _nothing(captured, resolved, name)
    fmt = resolved.low_format.name
    flat = [_flat(concrete, given, kwargs) for given in (args, *batches)]
    before = [(variable, variable.read_value()) for variable in concrete.graph.variables]
    try:
        if trips is None and captured.loops:
            captured = captures(trips=_counted(captured, concrete, flat[0]))
        risks = measured_risks(captured, concrete, fmt, flat)
        costs = (
            _predicted(captured, wanted, fmt)
            if wanted is not None
            else measured_costs(captured, fmt, name, seconds=seconds)
        )
        allowed = None if budget is None else risks.allowed(budget)
        if budget is not None and not risks.measured:
            raise PlanError("A budget was given, but no rounding could be priced here. Leave it out.")
        made = solve(captured.graph, costs, risks, resolved, budget=allowed, versions=versions())
        found = Plan.of(made, structure=captured.structure)
        return _tried(_Trial(concrete, args, kwargs, before), found, resolved, timed=wanted is None)
    finally:
        for variable, value in before:  # a function that trains was run to be measured
            variable.assign(value)


def _counted(captured: Captured, concrete: Any, args: Sequence[Any]) -> dict[str, int]:
    """How often the body of each loop runs in one call, by the loop's path."""
    counters = {path: tf.Variable(0, dtype=tf.int64, trainable=False) for path in captured.loops}

    def counted(args: list[Any]) -> list[Any]:
        rewriter = Rewriter(lambda *_: Choice("", None), in_place=False, counters=counters)
        with not_recorded():
            return rewriter.run(concrete.graph, [*args, *concrete.captured_inputs], results_of(concrete))

    tf.function(counted, autograph=False)(list(args))
    return {path: int(counter.numpy()) for path, counter in counters.items()}


def _name_here() -> str:
    device = device_here()
    return device.name if device is not None else "this device"


def _flat(concrete: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    bound = concrete.function_type.bind(*args, **kwargs)
    return [tf.convert_to_tensor(one) for one in concrete.function_type.unpack_inputs(bound)]


def _nothing(captured: Captured, policy: Policy, device: str) -> Plan:
    """The plan that lowers nothing."""
    tensors, ops = np.zeros(len(captured.graph.tensors)), np.zeros(len(captured.graph.ops))
    costs = Costs(BF16.name, ops, ops, tensors, tensors, tensors > 0, device)
    wide = replace(policy, format="float32")
    made = solve(captured.graph, costs, Risks.unmeasured(captured.graph, BF16.name), wide, versions=versions())
    return replace(Plan.of(made, structure=captured.structure), error=0.0)


def _predicted(captured: Captured, device: Device, fmt: str) -> Costs:
    """Costs from the data sheet. Constants are cast when the function is traced, and weights in each call."""
    costs = roofline(captured.graph, device, fmt, keep_low_weights=False)
    kept = kept_constants(captured)
    lacking = {**unavailable(captured, dtype_of(parse_format(fmt))), **costs.unavailable}
    low = costs.low.copy()
    low[list(lacking)] = np.inf
    return replace(
        costs,
        low=low,
        down=np.where(kept, 0.0, costs.down),
        up=np.where(kept, 0.0, costs.up),
        kept=costs.kept | kept,
        unavailable=lacking,
    )


def _tried(trial: _Trial, found: Plan, policy: Policy, *, timed: bool) -> Plan:
    """The plan once it was run: within its error, and faster than the function as it was written."""
    if not found.labels.any():
        return replace(found, error=0.0)
    wanted = trial.run(trial.fn)
    drawn = _error(trial.run(trial.fn), wanted)
    allowed = found.problem.risks.relative(found.budget or 0.0) if found.problem.risks.measured else None
    if drawn > _REPEATABLE * (allowed or 1.0):
        log.info("two calls give results that differ by %.3g, as with random numbers: the error is not tried", drawn)
        planned = autocast(trial.fn, plan=found)
        return _timed(trial, planned, found) if timed else found
    for _ in range(_MOST_TIGHTENINGS):
        planned = autocast(trial.fn, plan=found)
        error = _error(trial.run(planned), wanted)
        found = replace(found, error=error)
        if not allowed or error <= allowed * _TOLERATED:
            break
        log.info("the error is %.3g where %.3g is allowed: solving again", error, allowed)
        problem, scale = found.problem, min(0.9, allowed / error) if np.isfinite(error) else 0.1
        made = solve(
            problem.graph,
            problem.costs,
            problem.risks,
            policy,
            budget=found.score.noise * scale**2,
            versions=versions(),
        )
        found = Plan.of(made, structure=found.structure)
        if not found.labels.any():
            return replace(found, error=0.0)
    else:
        return _as_written(found, f"tried as a whole, the results were off by more than {allowed:.3g}")
    return _timed(trial, planned, found) if timed else found


def _timed(trial: _Trial, planned: Any, found: Plan) -> Plan:
    wide = autocast(trial.fn, plan=_labelled_wide(found, ""))  # what it adds in place is no merit of the formats
    runs = [functools.partial(fn, *trial.args, **trial.kwargs) for fn in (trial.fn, wide, planned)]
    times = alternating(runs, time.perf_counter() + 10 * _SECONDS, _SECONDS)
    seconds, best = {"as written": times[0], "planned": times[2]}, min(times[:2])
    if times[2] * _WORTHWHILE > best:
        reason = f"measured as a whole, the planned function took {times[2]:.3g} s, in float32 it took {best:.3g} s"
        return replace(_as_written(found, reason), seconds=seconds)
    return replace(found, seconds=seconds)


def _as_written(found: Plan, reason: str) -> Plan:
    log.info("%s: nothing is lowered", reason)
    return _labelled_wide(found, reason)


def _labelled_wide(found: Plan, reason: str) -> Plan:
    return replace(found.relabelled(np.zeros_like(found.labels), reason), error=0.0)


@dataclass(frozen=True)
class _Trial:
    """A function, what it is run on, and the variables that it may change with their values before."""

    fn: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    before: Sequence[tuple[Any, Any]]

    def run(self, fn: Any) -> tuple[list[Any], list[Any]]:
        """The results of ``fn`` in place of the function, and by how much each variable changed."""
        for variable, value in self.before:
            variable.assign(value)
        flat = tf.nest.flatten(fn(*self.args, **self.kwargs), expand_composites=True)
        results = [_wide(one) for one in flat if tf.is_tensor(one) and one.dtype.is_floating]
        pairs = [(variable.read_value(), value) for variable, value in self.before if variable.dtype == tf.float32]
        # One that grows, as a log does, has no difference: it counts as it is.
        return results, [_wide(now) - (_wide(value) if now.shape == value.shape else 0.0) for now, value in pairs]


def _wide(tensor: Any) -> Any:
    return tensor.numpy().astype(np.float64)


def _error(ours: tuple[list[Any], list[Any]], theirs: tuple[list[Any], list[Any]]) -> float:
    """The relative error of the results, and that of the updates of variables as ``_risk`` weighs them, in one."""
    off, total = _squares(ours[0], theirs[0])
    found = [off / total if total else off] if theirs[0] else []
    updates = [_squares([one], [other]) for one, other in zip(ours[1], theirs[1], strict=True)]
    least = LEAST_UPDATE * max((size for _, size in updates), default=0.0)
    updates = [(off, max(size, least)) for off, size in updates if size]
    if updates:
        found.append(sum(off / size for off, size in updates) / len(updates))
    error = float(np.sqrt(sum(found) / len(found))) if found else 0.0
    return error if np.isfinite(error) else float("inf")


def _squares(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[float, float]:
    off = total = 0.0
    for one, other in zip(ours, theirs, strict=True):
        finite = np.isfinite(other)
        off += float(np.square(one - other)[finite].sum())
        total += float(np.square(other)[finite].sum())
    return off, total
