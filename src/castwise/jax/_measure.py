"""What operations cost on this backend: timed one by one, in the wide format and in the low one, once, and kept.

Each distinct operation is compiled by itself and runs on ordinary numbers; formats take turns, and the fastest run
counts, less what calling an empty function takes. A product is also timed with a wide result, and with one that is
rounded afterwards: the first kernel may be much faster than the one that writes 16 bits, which some backends compute by
converting its operands.

Times are kept in the user's cache directory by operation, shapes, format, device and versions. Compiling is what takes
long, so casts, and operations that a compiler joins with their neighbours anyway, are timed in a few sizes only: others
cost, for their size, what the nearest of their kind does. Measuring begins with what computes most and stops when its
time is used up; what was not reached is taken from its kind in the same way.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from castwise._gemm import cache_file
from castwise._terms import wide_of
from castwise.cost import Costs, MeasuredCosts
from castwise.formats import parse_format

from ._dtypes import DType, dtype_of, float_dtype
from .capture import OUT, Captured, castable_for

__all__ = ["Measured", "alternating", "cost_table", "measured_costs", "versions"]

log = logging.getLogger("castwise.jax.measure")

_ROUNDS = 4
_PER_OP = 0.03  # seconds for all formats, beyond the first rounds
_SHORTEST = 1e-7  # seconds; below this a clock tells nothing
_ALIKE, _ALIKE_FUSED, _ALIKE_SECONDS = 0.1, 0.3, 2e-6
_NEAR = 8.0  # times as large or as small: near enough to be told from
_LONG_RUN = 0.5  # seconds after which a run is not repeated more than it must


@dataclass(frozen=True)
class Measured:
    """Costs, and which products are fastest in 16 bits with a wide result that is rounded afterwards."""

    costs: Costs
    rounded: frozenset[str]


def versions() -> dict[str, str]:
    """What measured times depend on besides the device."""
    return {"jax": jax.__version__, "cpus": str(len(jax.devices()))}


def cost_table() -> MeasuredCosts:
    """The times measured on this machine so far."""
    return MeasuredCosts(cache_file().with_name("jax_ops.json"))


def measured_costs(
    captured: Captured, device: str, *, seconds: float = 20.0, table: MeasuredCosts | None = None
) -> Measured:
    """Seconds of every operation and cast of a graph, in one call of the function.

    Args:
        captured: the graph.
        device: its name.
        seconds: how long measuring may take.
        table: where times are looked up and kept; by default ``cost_table``.
    """
    timer = _Timer(captured, device, cost_table() if table is None else table, time.perf_counter() + seconds)
    graph, count = captured.graph, len(captured.graph.ops)
    high, low, measured = np.zeros(count), np.zeros(count), np.zeros(count, bool)
    every = timer.operations()
    down, up = timer.casts()
    rounded: set[str] = set()
    for position, times in every.items():
        op = graph.ops[position]
        repeats = captured.times[op.id]
        measured[position] = position in timer.timed
        high[position] = repeats * times[0]
        low[position] = high[position] if _alike(times[0], times[1], op.fused) else repeats * times[1]
        result = graph.positions.get(op.id + OUT)
        if result is None:
            continue
        times = [times[0] if _alike(times[0], one, op.fused) else one for one in times]
        narrow, wide, wide_rounded = (repeats * value for value in times[1:])
        best = min(narrow, wide_rounded)
        if wide_rounded < narrow:
            rounded.add(op.id)
        # Together: the wide kernel where the result is wide, the better of the other two where it is not.
        low[position], low[result] = min(wide, best), max(best - wide, 0.0)
        [tensor] = op.outputs
        up[tensor] = max(wide - best, 0.0)
        measured[result] = measured[position]
    timer.finish()
    kept = np.zeros(len(graph.tensors), bool)
    costs = Costs(captured.low, high, low, down, up, kept, device, measured=measured)
    return Measured(costs, frozenset(rounded))


def _alike(seconds: float, other: float, fused: bool) -> bool:
    """Whether two times differ by no more than two runs of one operation do, or than fusing it with others changes."""
    share = _ALIKE_FUSED if fused else _ALIKE
    return abs(seconds - other) < max(_ALIKE_SECONDS, share * max(seconds, other))


class _Timer:
    """Times operations and casts that the table does not have yet."""

    def __init__(self, captured: Captured, device: str, table: MeasuredCosts, deadline: float) -> None:
        self.captured, self.device, self.table, self.deadline = captured, device, table, deadline
        self.low, self.wide = dtype_of(parse_format(captured.low)), dtype_of(parse_format(wide_of(captured.low)))
        self.castable, self.training = castable_for(captured.low), captured.graph.training
        self.missed, self.unknown = 0, 0
        self.timed: set[int] = set()
        self._overhead: float | None = None

    @property
    def overhead(self) -> float:
        """Seconds that a call takes which computes nothing."""
        if self._overhead is None:
            empty = jax.jit(lambda x: x)
            [self._overhead] = alternating([_call(empty, [jnp.zeros(())])], self.deadline + 1)
        return self._overhead

    def operations(self) -> dict[int, list[float]]:
        """Seconds of one run of each operation that may be LOW, by its position, in the forms of ``operation``."""
        ops, eqns = self.captured.graph.ops, self.captured.eqns
        chosen = [at for at, op in enumerate(ops) if op.id in eqns and not op.pin]
        found, self.timed = self._sampled(
            chosen,
            {at: ops[at].flops / self.captured.times[ops[at].id] for at in chosen},
            {at: str(eqns[ops[at].id].primitive) for at in chosen},
            {at for at in chosen if ops[at].fused},
            lambda at: self.operation(eqns[ops[at].id]),
        )
        return found

    def _sampled(
        self,
        chosen: Sequence[int],
        work: dict[int, float],
        kinds: dict[int, str],
        alike: set[int],
        timed: Callable[[int], list[float] | None],
    ) -> tuple[dict[int, list[float]], set[int]]:
        """Times of all, the largest first, and of which they are their own. Those of ``alike`` may be told from others
        of their kind; so must be those for which no time is left.
        """
        found: dict[int, list[float]] = {}
        by_kind: dict[str, list[int]] = {}
        late: list[int] = []
        for at in sorted(chosen, key=lambda at: -work[at]):
            like = by_kind.setdefault(kinds[at], [])
            if at in alike and like and work[like[-1]] <= _NEAR * work[at]:
                late.append(at)
                continue
            missed, times = self.missed, timed(at)
            if times is not None:
                found[at] = times
                like.append(at)
            elif self.missed > missed:
                late.append(at)
        own = set(found)
        for at in late:
            if not by_kind[kinds[at]]:
                self.unknown += 1
                continue
            nearest = min(by_kind[kinds[at]], key=lambda other: abs(np.log((work[other] + 1.0) / (work[at] + 1.0))))
            factor = (work[at] + 1.0) / (work[nearest] + 1.0)
            found[at] = [max(_SHORTEST, factor * one) for one in found[nearest]]
        return found, own

    def operation(self, eqn: JaxprEqn) -> list[float] | None:
        """Seconds in the wide format and the low one; of a product, then of those with a wide and a rounded result."""
        forms = ["wide", "low"]
        if "preferred_element_type" in eqn.params and self.low.itemsize == 2:
            forms += ["wide result", "rounded result"]
        named = self._key(eqn)
        return self._times([f"{named} | {form}" for form in forms], lambda: [self._standalone(eqn, f) for f in forms])

    def casts(self) -> tuple[Any, Any]:
        """Seconds of casting each tensor down and up."""
        graph = self.captured.graph
        down, up = np.zeros(len(graph.tensors)), np.zeros(len(graph.tensors))
        cast = [
            at
            for at, tensor in enumerate(graph.tensors)
            if tensor.floating and tensor.elements >= 2 and not tensor.kind.stored
        ]
        found, _ = self._sampled(
            cast,
            {at: float(graph.tensors[at].elements) for at in cast},
            dict.fromkeys(cast, "cast"),
            set(cast),
            lambda at: self._cast(graph.tensors[at].shape),
        )
        for at, times in found.items():
            factor = 1 + (self.training and graph.tensors[at].requires_grad)
            down[at], up[at] = times[0] * factor, times[1] * factor
        return down, up

    def _cast(self, shape: tuple[int, ...]) -> list[float] | None:
        name = "x".join(map(str, shape))
        keys = [f"cast {name} | {way} {self.wide}:{self.low} | {self._where()}" for way in ("down", "up")]
        return self._times(keys, lambda: self._cast_runs(shape))

    def finish(self) -> None:
        """Keep what was measured, and say what was not."""
        self.table.keep()
        if self.missed:
            log.warning(
                "The time given was over before %d operations or casts were timed: they count as what others of their "
                "kind cost, %d of which there is no other as equally fast in all formats. Plan again to go on from "
                "here, or give seconds=...",
                self.missed,
                self.unknown,
            )

    def _times(self, keys: list[str], make: Callable[[], list[Callable[[], Any]]]) -> list[float] | None:
        known = [self.table.get(key) for key in keys]
        if None not in known:
            return [float(value) for value in known if value is not None]
        if time.perf_counter() > self.deadline:
            self.missed += 1
            return None
        try:
            found = alternating(make(), self.deadline)
        except Exception as error:  # what a backend refuses to compile in a format, it says in many ways
            log.info("%s cannot be timed by itself: %s", keys[0], str(error).splitlines()[:1])
            return None
        found = [max(_SHORTEST, one - self.overhead) for one in found]
        for key, one in zip(keys, found, strict=True):
            self.table.put(key, one)
        return found

    def _key(self, eqn: JaxprEqn) -> str:
        params = hashlib.sha256(str(sorted(eqn.params.items(), key=lambda item: item[0])).encode()).hexdigest()[:12]
        shapes = ",".join(f"{v.aval}" for v in eqn.invars)
        phase = "train" if self.training else "forward"
        return f"{eqn.primitive.name}[{params}] {shapes} | {self.wide}:{self.low} {phase} | {self._where()}"

    def _where(self) -> str:
        return " ".join([self.device, *(f"{name}={version}" for name, version in sorted(versions().items()))])

    def _cast_runs(self, shape: tuple[int, ...]) -> list[Callable[[], Any]]:
        wide = jnp.ones(shape, self.wide)
        casts = [(wide, self.low), (wide.astype(self.low), self.wide)]
        return [_call(jax.jit(lambda x, dtype=dtype: x.astype(dtype)), [x]) for x, dtype in casts]

    def _standalone(self, eqn: JaxprEqn, form: str) -> Callable[[], Any]:
        """A call that computes an equation alone."""
        dtype = self.wide if form == "wide" else self.low
        params = dict(eqn.params)
        if "preferred_element_type" in params:
            params["preferred_element_type"] = self.wide if "result" in form else dtype
        if eqn.primitive.name == "convert_element_type":
            dtype = self.wide
        primitive: Any = eqn.primitive
        bound = primitive.get_bind_params(params)
        operands = [self._operand(atom, dtype) for atom in eqn.invars]
        varying = [at for at, atom in enumerate(eqn.invars) if not isinstance(atom, Literal)]
        floats = [at for at in varying if jnp.issubdtype(operands[at].dtype, jnp.floating)]

        def function(*given: Any) -> Any:
            full = list(operands)
            for at, value in zip(varying, given, strict=True):
                full[at] = value
            out = primitive.bind(*full, **bound)
            return jax.tree.map(lambda x: x.astype(dtype), out) if form == "rounded result" else out

        def differentiated(*given: Any) -> Any:
            def of(*values: Any) -> Any:
                full = dict(zip(varying, given, strict=True)) | dict(zip(floats, values, strict=True))
                return function(*full.values())

            out, back = jax.vjp(of, *(operands[at] for at in floats))
            return out, back(jax.tree.map(jnp.ones_like, out))

        timed = differentiated if self.training and floats and _differentiable(eqn) else function
        return _call(jax.jit(timed), [operands[at] for at in varying])

    def _operand(self, atom: Any, dtype: DType) -> Any:
        castable = float_dtype(atom.aval) in self.castable
        if isinstance(atom, Literal):
            return jnp.asarray(atom.val, dtype if castable else None)
        if castable:
            # Around 1: an operation on zeros or on subnormals can take a time of its own.
            size = int(np.prod(atom.aval.shape))
            return jnp.asarray(np.linspace(0.5, 1.5, size).reshape(atom.aval.shape), dtype)
        return jnp.zeros(atom.aval.shape, atom.aval.dtype)


def _differentiable(eqn: JaxprEqn) -> bool:
    return all(float_dtype(var.aval) is not None for var in eqn.outvars)


def _call(compiled: Any, arguments: Sequence[Any]) -> Callable[[], Any]:
    wait: Any = jax.block_until_ready
    return lambda: wait(compiled(*arguments))


def alternating(runs: Sequence[Callable[[], Any]], deadline: float, per_run: float = _PER_OP) -> list[float]:
    """The fastest time of each, in seconds; they take turns, a few rounds or as many as fit a short while."""
    best = [float("inf")] * len(runs)
    for run in runs:  # compiles
        run()
    start = time.perf_counter()
    for number in range(400):
        for position, run in enumerate(runs):
            begun = time.perf_counter()
            run()
            best[position] = min(best[position], time.perf_counter() - begun)
        now = time.perf_counter()
        enough = number + 1 >= _ROUNDS and now - start > per_run
        if enough or now > deadline or (number and now - start > max(_LONG_RUN, per_run)):
            break
    return best
