"""``plan``: the format of every operation of a function decided together, by what it costs here and what it risks.

    step = jax.value_and_grad(loss)                        # plan what will run, backward pass included
    decided = plan(step, params, batch, policy="bfloat16")
    print(decided.summary())
    fast_step = jax.jit(autocast(step, plan=decided))

    capture the jaxpr, measure (or predict) costs, price roundings, solve, try

Everything between capturing a function and rewriting it is the neutral planner. What operations cost alone is not what
they cost fused together, so the end is measured as well: the plan, plans of a plainer kind within the same error (all
products low, the policy's own rules), and the function as it was written run against each other. The fastest is taken,
and where none is faster nothing is lowered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from castwise._decide import is_wide
from castwise._pins import preset_labels
from castwise._terms import wide_of
from castwise.catalogue import PRODUCTS, load_catalogue
from castwise.cost import Costs, roofline
from castwise.errors import PlanError
from castwise.formats import BF16, FP32
from castwise.hardware import Device, get_device
from castwise.plan import pareto, solve
from castwise.policy import Policy
from castwise.risk import Risks

from ._dtypes import FP64, float_dtype
from ._evaluate import count_trips
from ._layers import layers_of
from ._measure import measured_costs, versions
from ._plan import Plan, structure_of
from ._risk import measured_risks
from ._rules import device_here, resolve
from ._try import Trial
from .autocast import _Region, region_call
from .capture import OUT, Captured, capture

__all__ = ["Prepared", "plan", "prepare"]

log = logging.getLogger("castwise.jax.plan")

Loss = Callable[[Any], Any]

# How much faster than the function as it was written a plan must have been measured to be worth its rounding: two runs
# of one function differ by a few percent.
_WORTHWHILE = 1.05
_MOST_TIGHTENINGS = 4
_TOLERATED = 1.25
"""How far the measured error may exceed the one that was budgeted for before the plan is solved again."""


@dataclass(frozen=True)
class Prepared:
    """All that a plan is solved from. Solve it again at other prices without capturing and measuring anew."""

    captured: Captured
    costs: Costs
    rounded: frozenset[str]
    risks: Risks
    policy: Policy
    arguments: tuple[list[Any], ...]
    loss: Callable[..., Any] | None

    def solve(self, budget: float | None = None) -> Plan:
        """The best plan, as it was solved: not tried. ``budget`` is a relative error of the results."""
        if budget is not None and not self.risks.measured:
            raise PlanError(
                "A budget was given, but no rounding was priced here. Leave it out, or name a low format narrower "
                "than what the function computes in: policy='bfloat16', or policy='float32' for float64."
            )
        allowed = None if budget is None else self.risks.allowed(budget)
        made = solve(self.captured.graph, self.costs, self.risks, self.policy, budget=allowed, versions=versions())
        return Plan.of(made, structure=structure_of(self.captured.closed.jaxpr), rounded=self.rounded)

    def front(self, points: int = 16) -> list[Plan]:
        """Plans from the fastest to the most exact; see ``castwise.plan.pareto``."""
        structure = structure_of(self.captured.closed.jaxpr)
        plans = pareto(self.captured.graph, self.costs, self.risks, self.policy, points=points, versions=versions())
        return [Plan.of(one, structure=structure, rounded=self.rounded) for one in plans]


def plan(
    fn: Callable[..., Any],
    *args: Any,
    loss: Loss | None = None,
    policy: Policy | str = "auto",
    device: Device | str | None = None,
    budget: float | None = None,
    batches: Sequence[tuple[Any, ...]] = (),
    seconds: float = 20.0,
    **kwargs: Any,
) -> Plan:
    """Decide the format of every operation of ``fn`` together, for arguments like these.

    Args:
        fn: any function that ``jax.jit`` could trace; it is run many times, callbacks included. To plan a training step
            with its backward pass, give the function that returns the gradients; it need not be a network: solvers and
            simulations are functions too.
        args: example arguments, with real values: what rounding does is measured on them. Later calls may have other
            sizes, as long as JAX traces the same operations for them.
        loss: of ``fn``'s result, a scalar: ``fn`` will be differentiated. Costs then count its backward pass.
        policy: names the low format, and rules that become fixed decisions. "auto" is the 16-bit format that the device
            computes natively, if any. "float32" plans float64 and float32, where ``fn`` computes in float64.
        device: the name of a device of Castwise's table, for a plan for another machine. Default: JAX's default
            backend, with times measured on it.
        budget: the relative root-mean-square error of the results that the plan may cause. Default: as much as the
            policy's own op-by-op rules would.
        batches: more tuples of positional arguments, of the same shapes, to price rounding on.
        seconds: how long measuring may take; and, beside the plan itself, compiling others to try.
        kwargs: as ``args``.

    Raises:
        PlanError, PolicyError: there is no such plan, or the policy's rules cannot hold.
    """
    ready = prepare(fn, *args, loss=loss, policy=policy, device=device, batches=batches, seconds=seconds, **kwargs)
    found = ready.solve(budget)
    return _tried(ready, found, timed=device is None, seconds=seconds)


def prepare(
    fn: Callable[..., Any],
    *args: Any,
    loss: Loss | None = None,
    policy: Policy | str = "auto",
    device: Device | str | None = None,
    batches: Sequence[tuple[Any, ...]] = (),
    seconds: float = 20.0,
    **kwargs: Any,
) -> Prepared:
    """Capture, measure and price: everything that ``plan`` does before it solves. Arguments as there."""
    region = _Region(fn, policy)
    arrays, traceable = region.prepared(args, kwargs)
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in arrays):
        raise PlanError("A plan is made on real values, not on shapes: give arrays in place of jax.ShapeDtypeStruct.")
    outer, tree = traceable.traced(arrays)
    call = region_call(outer.jaxpr)
    traced = any(isinstance(value, jax.core.Tracer) for value in (*arrays, *outer.consts))
    if traced or call is None or len(call.invars) != len(arrays):
        raise PlanError(
            "Plan a function outside of jit and other transformations, with jit enabled: its operations are timed and "
            "its values are looked at."
        )
    closed: ClosedJaxpr = call.params["jaxpr"]
    if closed.effects:
        log.warning(
            "The function has side effects (%s), and planning runs it many times: they happen each time",
            ", ".join(sorted(map(str, closed.effects))),
        )
    wanted = get_device(device) if isinstance(device, str) else device
    resolved = region.policy.resolve(wanted) if wanted is not None else resolve(region.policy)
    if resolved.layers:
        resolved.match_layers(layers_of(closed.jaxpr))
    name = wanted.name if wanted is not None else _name_here()
    whole = None if loss is None else lambda out: loss(jax.tree.unflatten(tree, out)[0])
    low = _low_format(resolved, closed, region.policy)
    if low is None:
        captured = capture(closed, BF16.name)
        nothing = np.zeros(len(captured.graph.tensors))
        zero = np.zeros(len(captured.graph.ops))
        costs = Costs(BF16.name, zero, zero, nothing, nothing, nothing > 0, name)
        risks = Risks.unmeasured(captured.graph, BF16.name)
        wide = Policy(format="float32") if not is_wide(resolved.low_format) else resolved
        return Prepared(captured, costs, frozenset(), risks, wide, (arrays,), whole)
    trips = count_trips(closed.jaxpr, closed.consts, arrays)
    captured = capture(closed, low, trips, training=loss is not None, name=getattr(fn, "__name__", "function"))
    if wanted is None:
        measured = measured_costs(captured, name, seconds=seconds)
        costs, rounded = measured.costs, measured.rounded
    else:
        costs, rounded = _predicted(captured, wanted), frozenset()
    every = (arrays, *_batches(region, arrays, batches, kwargs))
    risks = measured_risks(captured, every, trips)
    return Prepared(captured, costs, rounded, risks, resolved, every, whole)


def _batches(
    region: _Region, arrays: list[Any], batches: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
) -> Iterator[list[Any]]:
    """The arrays of more batches of positional arguments, beside the same keyword arguments."""
    wanted = [(np.shape(x), jnp.result_type(x)) for x in arrays]
    for number, batch in enumerate(batches):
        found = region.prepared(batch, kwargs)[0]
        given = [(np.shape(x), jnp.result_type(x)) for x in found]
        if given != wanted:
            first = next((a, b) for a, b in zip_longest(wanted, given) if a != b)
            shown = [f"{one[1]}{list(one[0])}" if one is not None else "nothing" for one in first]
            raise PlanError(
                f"batches[{number}]: has {shown[1]} where the example arguments have {shown[0]}. Give tuples of "
                f"arguments of the same shapes and dtypes."
            )
        yield found


def _low_format(resolved: Policy, closed: ClosedJaxpr, asked: Policy) -> str | None:
    """The low format of the plan; None where everything is to stay as it is."""
    fmt = resolved.low_format
    if not is_wide(fmt):
        return fmt.name
    double = any(float_dtype(var.aval) == FP64 for var in (*closed.jaxpr.invars, *closed.jaxpr.outvars))
    return FP32.name if fmt == FP32 and double and asked.format != "auto" else None


def _name_here() -> str:
    device = device_here()
    return device.name if device is not None else jax.devices()[0].device_kind


def _predicted(captured: Captured, device: Device) -> Costs:
    """Costs from the data sheet. A product's kernel writes either width in the time that it takes."""
    if wide_of(captured.low) != FP32.name:
        raise PlanError("Plans for float64 and float32 are measured, not predicted. Leave out `device`.")
    costs = roofline(captured.graph, device, captured.low)
    high, low, up, down = costs.high.copy(), costs.low.copy(), costs.up.copy(), costs.down.copy()
    for op in captured.graph.ops:
        if op.id.endswith(OUT):
            position = captured.graph.positions[op.id]
            high[position] = low[position] = 0.0
            [tensor] = op.inputs
            up[tensor] = 0.0
    return Costs(costs.fmt, high, low, down, up, costs.kept, costs.device, costs.unavailable)


# ---- trying a plan ----


def _tried(ready: Prepared, found: Plan, *, timed: bool, seconds: float) -> Plan:
    """The plan once it was run: within its error, and faster than the function as it was written."""
    if not ready.risks.measured:
        return found if found.labels.any() else replace(found, error=0.0)
    trial = Trial(ready.captured.closed, ready.arguments[-1], ready.loss)
    allowed = None if found.budget is None else ready.risks.relative(found.budget)
    error = trial.error(found) if found.labels.any() else 0.0
    for _ in range(_MOST_TIGHTENINGS):
        if not allowed or error <= allowed * _TOLERATED or not found.labels.any():
            break
        budget = found.relative_error * min(0.9, allowed / error) if np.isfinite(error) else found.relative_error / 8
        log.info("the error is %.3g where %.3g is allowed: solving again", error, allowed)
        found = ready.solve(budget)
        error = trial.error(found)
    solved = found
    if allowed and error > allowed * _TOLERATED:
        reason = f"tried as a whole, the results were off by {error:.3g} where {allowed:.3g} is allowed"
        found, error = _as_written(found, reason), 0.0
    found = trial.with_error(found, error)
    if not timed:
        return found
    plans = [found] if found.labels.any() else []
    deadline = time.perf_counter() + seconds
    for one in _others(ready, solved):
        if time.perf_counter() > deadline:
            log.info("no time was left to try more plans")
            break
        error = trial.error(one)
        if error <= (allowed or found.error or 0.0) * _TOLERATED:
            plans.append(trial.with_error(one, error))
    return _fastest(trial, found, plans) if plans else found


def _others(ready: Prepared, found: Plan) -> Iterator[Plan]:
    """Plans of a plainer kind. Costs are those of operations alone: as a whole, one of these may be faster."""
    entries = load_catalogue().entries
    graph, pins = found.problem.graph, found.problem.pins
    names = {name for name, entry in entries.items() if entry.op_class in PRODUCTS}
    products = np.array([op.name in names for op in graph.ops], bool)
    results = np.array([op.id.endswith(OUT) for op in graph.ops], bool)
    kinds = {
        "its products are low and nothing else": found.labels & products,
        "all products are low, with their results": products | results,
        "all products are low, with wide results": products,
        "the policy's own rules decide each operation": preset_labels(graph, found.fmt, ready.policy, pins),
    }
    pinned = np.zeros(len(graph.ops), bool)
    pinned[list(pins)] = True
    seen = {found.labels.tobytes()}
    for kind, wanted in kinds.items():
        labels = np.where(pinned, found.labels, wanted)
        if labels.any() and labels.tobytes() not in seen:
            seen.add(labels.tobytes())
            yield found.relabelled(labels, f"measured as a whole, the function is fastest where {kind}")


def _fastest(trial: Trial, found: Plan, plans: Sequence[Plan]) -> Plan:
    """The plan that ran fastest, or the function as it was written."""
    seconds, shares = trial.seconds(plans)
    log.info("measured as a whole, as written and by each plan: %s s", ", ".join(f"{one:.3g}" for one in seconds))
    best = min(range(len(plans)), key=lambda at: max(seconds[at + 1] / seconds[0], shares[at + 1]))
    shown = {"as written": seconds[0], "planned": seconds[best + 1]}
    if max(seconds[best + 1] / seconds[0], shares[best + 1]) * _WORTHWHILE > 1.0:
        reason = (
            f"measured as a whole, the planned function took {shown['planned']:.3g} s and the one that was given "
            f"{shown['as written']:.3g} s"
        )
        return _as_written(found, reason, shown)
    return plans[best].timed(shown)


def _as_written(found: Plan, reason: str, seconds: dict[str, float] | None = None) -> Plan:
    log.info("%s: nothing is lowered", reason)
    nothing = replace(found.relabelled(np.zeros_like(found.labels), reason), error=0.0)
    return nothing.timed(seconds) if seconds is not None else nothing
