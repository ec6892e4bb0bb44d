"""A plan on a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from castwise._energy import Score
from castwise._pins import Cause
from castwise._terms import wide_of, widths_of
from castwise._units import show_bytes, show_seconds
from castwise.risk import Breakdown

if TYPE_CHECKING:
    from castwise.plan import Plan

__all__ = ["Cast", "Kept", "Summary", "casts", "summarise"]

# Groups of ops that stay fp32 which the text names; the rest are counted.
_MOST_REASONS = 12
# A plan that is at most this share of its time from the best one counts as the best.
_NEGLIGIBLE = 1e-6
_IN_WORDS = {
    Cause.TIME: "the 16-bit kernel is slower",
    Cause.CASTS: "casts would cost more than the op gains",
    Cause.NOISE: "rounding would cost more than the op gains",
    Cause.MEMORY: "more would be kept for backward",
    Cause.BUDGET: "no room in the noise budget",
    Cause.NOTHING: "nothing to gain",
}


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor that is converted for those who need it in the other format."""

    tensor: str
    source: str
    target: str
    bytes: float
    """Read and written by one cast; a backward cast of the gradient moves as many again."""
    seconds: float
    """Per step, forward and backward; 0 for a copy that is kept."""
    kept: bool
    """Converted when the tensor changes, not at each step: the low copy of a weight or constant."""
    backward: bool
    """In training: whether its gradient is cast back."""

    @property
    def step_bytes(self) -> float:
        """Read and written per step."""
        return 0.0 if self.kept else self.bytes * (1 + self.backward)


@dataclass(frozen=True, slots=True)
class Kept:
    """Ops that stay fp32 for one reason."""

    count: int
    names: tuple[str, ...]
    """What they are, most frequent first, such as ``softmax ×12``."""
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a plan decided and what it is predicted to bring. Prints as text."""

    name: str
    format: str
    device: str
    training: bool
    ops: dict[str, int]
    """How many ops compute in each format. Ops without floating-point operands are not counted."""
    without_floats: int
    casts_down: int
    casts_up: int
    cast_bytes: float
    """Read and written by casts per step, forward and backward."""
    kept_copies: int
    kept_bytes: float
    """Memory of low copies that are kept between steps."""
    planned: Score
    fp32: Score
    measured: float
    """Share of the ops whose times were measured; the others' are predicted."""
    calibrated: bool
    """Whether noise was measured; if not, the catalogue's hazards decided."""
    relative_error: float
    noise: Breakdown
    stays_fp32: tuple[Kept, ...]
    gap: float
    parts: int = 1
    """Graphs that the model was captured as."""
    eager: tuple[str, ...] = ()
    """What of the model is in none of them, where, and why: it runs as it is written."""

    @property
    def speedup(self) -> float:
        """Predicted time of the fp32 step over that of the planned step."""
        return self.fp32.seconds / self.planned.seconds if self.planned.seconds else 1.0

    def __str__(self) -> str:
        what = "training step" if self.training else "inference"
        wide = wide_of(self.format)
        title = f"{self.name or 'plan'}: {wide} and {self.format}, {what}, {self.device or 'unnamed device'}"
        counts = ", ".join(f"{count} in {fmt}" for fmt, count in self.ops.items())
        timed = "predicted" if not self.measured else f"{self.measured:.0%} of ops measured"
        lines = [
            title,
            f"  ops     {counts}; {self.without_floats} without floating-point operands",
            f"  casts   {self.casts_down} down, {self.casts_up} up a step ({show_bytes(self.cast_bytes)} read and "
            f"written); {self.kept_copies} low copies kept ({show_bytes(self.kept_bytes)})",
            f"  time    {show_seconds(self.planned.seconds)}; {wide} {show_seconds(self.fp32.seconds)} "
            f"({self.speedup:.2f}× as long); {timed}",
            f"  noise   {self._noise()}",
        ]
        if self.training:
            lines.append(
                f"  memory  {show_bytes(self.planned.saved_bytes)} saved for backward; "
                f"{wide} {show_bytes(self.fp32.saved_bytes)}"
            )
        proven = self.gap <= _NEGLIGIBLE * self.planned.seconds
        lines.append(f"  optimum {'proven' if proven else f'at most {show_seconds(self.gap)} away'}")
        return "\n".join([*lines, *self._reasons(), *self._eager()])

    def _noise(self) -> str:
        if not self.calibrated:
            return "not measured: the op catalogue's hazards decided"
        total = self.noise.total
        parts = ("values", "weights", "casts", "accumulation", "range")
        shares = [f"{part} {getattr(self.noise, part) / total:.0%}" for part in parts] if total else []
        return f"output error {self.relative_error:.2e}" + (f" ({', '.join(shares)})" if shares else "")

    def _eager(self) -> list[str]:
        if not self.eager:
            return []
        return [f"  left as written, between {self.parts} graphs:", *(f"    {what}" for what in self.eager)]

    def _reasons(self) -> list[str]:
        if not self.stays_fp32:
            return [f"  stays {wide_of(self.format)}: nothing"]
        shown = [
            f"    {kept.count:>5}  {kept.cause}: {kept.reason} ({', '.join(kept.names)})"
            for kept in self.stays_fp32[:_MOST_REASONS]
        ]
        rest = sum(kept.count for kept in self.stays_fp32[_MOST_REASONS:])
        return [f"  stays {wide_of(self.format)}:", *shown, *([f"    {rest:>5}  for other reasons"] if rest else [])]


def casts(plan: Plan) -> tuple[Cast, ...]:
    """The casts of a plan in the order of its tensors."""
    problem, used = plan.problem, plan.usage
    graph, costs, index = problem.graph, problem.costs, problem.graph.index
    found = []
    for down in (True, False):
        source, target = (plan.wide, problem.fmt) if down else (problem.fmt, plan.wide)
        seconds = costs.down if down else costs.up
        for position in np.flatnonzero(used.cast_down if down else used.cast_up):
            tensor, kept = graph.tensors[position], bool(down and costs.kept[position])
            size = float(index.elements[position]) * sum(widths_of(problem.fmt))
            backward = graph.training and tensor.requires_grad
            cast = Cast(tensor.name, source, target, size, float(seconds[position]), kept, backward)
            found.append((int(position), cast))
    return tuple(cast for _, cast in sorted(found, key=lambda entry: entry[0]))


def summarise(plan: Plan) -> Summary:
    problem = plan.problem
    graph, costs, risks = problem.graph, problem.costs, problem.risks
    index = graph.index
    floats = index.touching(index.floating)
    low = int((plan.labels & floats).sum())
    step = [cast for cast in plan.casts if not cast.kept]
    kept = [cast for cast in plan.casts if cast.kept]
    return Summary(
        name=graph.name,
        format=problem.fmt,
        device=costs.device,
        training=graph.training,
        ops={problem.fmt: low, plan.wide: int(floats.sum()) - low},
        without_floats=int((~floats).sum()),
        casts_down=sum(cast.target == problem.fmt for cast in step),
        casts_up=sum(cast.target == plan.wide for cast in step),
        cast_bytes=sum(cast.step_bytes for cast in step),
        kept_copies=len(kept),
        kept_bytes=sum(cast.bytes for cast in kept) * widths_of(problem.fmt)[1] / sum(widths_of(problem.fmt)),
        planned=plan.score,
        fp32=plan.fp32,
        measured=float(costs.measured.mean()) if index.ops else 0.0,
        calibrated=risks.measured,
        relative_error=plan.relative_error,
        noise=plan.breakdown,
        stays_fp32=tuple(_stays_fp32(plan, np.flatnonzero(floats & ~plan.labels).tolist())),
        gap=plan.gap,
        parts=max(1, len(graph.parts)),
        eager=graph.eager,
    )


def _stays_fp32(plan: Plan, positions: list[int]) -> list[Kept]:
    """Ops that stay fp32, grouped by why, the largest group first."""
    groups: dict[tuple[Cause, str], list[int]] = {}
    for position in positions:
        pin, cause = plan.problem.pins.get(position), plan.causes[position]
        reason = pin.reason if pin is not None else _IN_WORDS[cause]
        groups.setdefault((cause, reason), []).append(position)
    found = []
    for (cause, reason), members in groups.items():
        names = Counter(plan.problem.graph.ops[position].name for position in members)
        shown = tuple(f"{name} ×{count}" for name, count in names.most_common(4))
        more = len(names) - len(shown)
        found.append(Kept(len(members), (*shown, f"{more} more") if more > 0 else shown, cause, reason))
    return sorted(found, key=lambda kept: -kept.count)
