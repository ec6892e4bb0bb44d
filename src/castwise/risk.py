"""What rounding would do to a model's outputs, and which values leave a format's range.

Rounding a tensor y to a format adds δ = round(y) − y. To first order a scalar F of the outputs moves by ⟨∂F/∂y, δ⟩, so
one fp32 forward and backward prices every rounding at once: its *sensitivity* is Σ (∂F/∂y ⊙ δ)². Independent roundings
add in variance, which is what makes the total a sum that a minimum cut can minimise. F is a random projection of the
outputs, not the loss: near a minimum the loss barely depends on them to first order.

A front end feeds a :class:`RiskMeter` with a sensitivity and a range per tensor, batch by batch, and gets
:class:`Risks`. The same values are rounded where the op that writes a tensor is LOW and where the tensor stays fp32 and
is cast down for LOW readers, but not for the same readers: in the first case all of them see the rounding, in the
second only the LOW ones. A residual stream that is read by a LOW product and added up in fp32 passes hardly any of the
cast's noise on. So a tensor with several readers is priced once with its whole gradient, and once per reader with the
part of the gradient that comes through that reader. Ops that only select or copy values round nothing.

Where a framework has no autodiff, :func:`measure_groups` finds the sensitive ops by running the model instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike

from castwise._graph_index import Bools, Floats
from castwise._ranges import RangeRecord, suggest_loss_scale
from castwise._risk_groups import Group, GroupReport, measure_groups
from castwise.errors import PlanError
from castwise.formats import parse_format, round_to_nearest

if TYPE_CHECKING:
    from castwise.graph import Graph

__all__ = [
    "Breakdown",
    "Group",
    "GroupReport",
    "RangeRecord",
    "RiskMeter",
    "Risks",
    "Sensitivity",
    "measure_groups",
    "sensitivity",
    "suggest_loss_scale",
]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What rounding one tensor adds to the variance of the output."""

    total: float
    range_part: float = 0.0
    """The part of ``total`` from values below the format's smallest normal, where its precision runs out."""


def sensitivity(values: ArrayLike, gradient: ArrayLike, fmt: str) -> Sensitivity:
    """Σ (gradient ⊙ (round(values) − values))², for arrays of one shape.

    Values beyond the format's range are left out: rounding them is no small error but an overflow, which
    :class:`RangeRecord` counts and which pins the op.
    """
    number_format = parse_format(fmt)
    exact = np.asarray(values, np.float64)
    error = round_to_nearest(exact, number_format, saturate=True) - exact
    error[~(np.abs(exact) <= number_format.max)] = 0.0
    contributions = (np.asarray(gradient, np.float64) * error) ** 2
    small = np.abs(exact) < number_format.smallest_normal
    return Sensitivity(float(contributions.sum()), float(contributions[small].sum()))


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where a plan's noise comes from. The parts add up to the plan's noise."""

    values: float
    """Outputs of LOW arithmetic, rounded as they are written."""
    accumulation: float
    """Sums that LOW ops keep in 16 bits inside."""
    casts: float
    """Activations and inputs that stay fp32 and are rounded for LOW readers."""
    weights: float
    """Weights and constants rounded for LOW readers."""
    range: float
    """The part of all these from values below the format's smallest normal; not counted in the others."""

    @property
    def total(self) -> float:
        return self.values + self.accumulation + self.casts + self.weights + self.range


@dataclass(frozen=True, eq=False)
class Risks:
    """The variance that each rounding to ``fmt`` adds to the output. Arrays follow the graph's order."""

    fmt: str
    op_values: Floats
    """[ops] rounding what the op writes, where it is LOW."""
    op_accumulation: Floats
    """[ops] rounding inside the op, where it is LOW and does not accumulate in fp32."""
    cast_noise: Floats
    """[tensors] rounding the tensor for LOW readers, where it is produced in fp32: paid once, whoever reads it."""
    range_share: Floats
    """[tensors] which share of the tensor's noise comes from values below the format's smallest normal."""
    reference: float = 1.0
    """Mean square of what the noise is the variance of: sqrt(noise / reference) is a relative error."""
    ranges: Mapping[int, RangeRecord] = field(default_factory=dict)
    """By tensor, as seen on the calibration batches."""
    gradient_ranges: Mapping[int, RangeRecord] = field(default_factory=dict)
    """By tensor, of its gradient."""
    measured: bool = True
    """False where nothing was calibrated: noise is then 0 and the catalogue's hazards decide instead."""
    read_noise: Floats = field(default_factory=lambda: np.zeros(0))
    """[pairs of ``graph.index.reads``] the same, paid by each LOW reader for itself; empty where no reader has any."""

    @classmethod
    def unmeasured(cls, graph: Graph, fmt: str) -> Self:
        """Risks of a model that was never run: no noise is known, and the catalogue's hazards pin ops to fp32."""
        ops, tensors = np.zeros(len(graph.ops)), np.zeros(len(graph.tensors))
        return cls(fmt, ops, ops, tensors, tensors, measured=False)

    @classmethod
    def from_sensitivities(
        cls,
        graph: Graph,
        fmt: str,
        total: Floats,
        range_part: Floats | None = None,
        per_read: Floats | None = None,
    ) -> Self:
        """Risks from one sensitivity per tensor, in the graph's order; 0 for tensors that have none.

        ``per_read`` are sensitivities of single readers, one per pair of ``graph.index.reads``, NaN where there is
        none. A tensor for which there are some is priced by them wherever it is cast for LOW readers.
        """
        index = graph.index
        total = np.where(index.floating, np.asarray(total, float), 0.0)
        part = np.zeros(index.tensors) if range_part is None else np.asarray(range_part, float)
        written: Floats = np.bincount(index.writes.op, total[index.writes.tensor], index.ops)  # type: ignore[assignment]
        reads = np.full(len(index.reads.op), np.nan) if per_read is None else np.asarray(per_read, float)
        known = ~np.isnan(reads)
        by_reader = index.reads.keep(known).any(index.tensors)
        # The caller of the model is one more reader, which reads all of what it gets.
        by_reader &= ~(index.keeps_format & np.array([tensor.format == fmt for tensor in graph.tensors], bool))
        return cls(
            fmt,
            op_values=np.where(index.selects, 0.0, written),
            op_accumulation=np.where(index.selects, 0.0, accumulation_noise(written, index.accumulates)),
            cast_noise=np.where(by_reader, 0.0, total),
            range_share=np.divide(part, total, out=np.zeros(index.tensors), where=total > 0),
            read_noise=np.where(known & by_reader[index.reads.tensor], reads, 0.0) if known.any() else np.zeros(0),
        )

    @property
    def op_noise(self) -> Floats:
        """[ops] all the noise that an op adds by being LOW."""
        return self.op_values + self.op_accumulation

    def rounding(self, graph: Graph, low_ops: Bools, rounded: Bools) -> Floats:
        """[tensors] the noise of rounding fp32 tensors for LOW readers: ``rounded`` are those that have any."""
        noise = np.where(rounded, self.cast_noise, 0.0)
        if len(self.read_noise):
            reads = graph.index.reads
            paid = np.where(low_ops[reads.op] & rounded[reads.tensor], self.read_noise, 0.0)
            noise += np.bincount(reads.tensor, paid, len(noise))
        return noise

    def relative(self, noise: float) -> float:
        """A noise as a relative root-mean-square error of the output; of an output of zeros, any is infinite."""
        if not self.reference:
            return math.inf if noise else 0.0
        return math.sqrt(noise / self.reference)

    def allowed(self, error: float) -> float:
        """The noise that such a relative root-mean-square error of the output is.

        Raises PlanError where ``error`` is none: negative, or not a number.
        """
        if not error >= 0:
            raise PlanError(
                f"A budget of {error!r} makes no sense. Give the relative error of the outputs that the plan may "
                "cause, such as 0.01; 0 allows none."
            )
        return error**2 * self.reference

    def check(self, graph: Graph) -> None:
        """Raise PlanError unless these risks are finite, not negative, and fit the graph."""
        ops, tensors = len(graph.ops), len(graph.tensors)
        sizes = {"op_values": ops, "op_accumulation": ops, "cast_noise": tensors}
        if len(self.read_noise):
            sizes["read_noise"] = len(graph.index.reads.op)
        for name, size in sizes.items():
            values: Floats = getattr(self, name)
            if len(values) != size:
                raise PlanError(f"Risks: `{name}` has {len(values)} entries for {size}. Make risks from this graph.")
            healthy = np.isfinite(values) & (values >= 0)
            if not healthy.all():
                raise PlanError(
                    f"Risks: `{name}` is negative or not finite at position {int(np.argmin(healthy))}. Calibrate on "
                    "batches on which the fp32 model is finite, or leave the tensor out and record its range."
                )

    def breakdown(self, graph: Graph, low_ops: Bools, rounded: Bools) -> Breakdown:
        """Where the noise comes from, given which ops are LOW and which fp32 tensors are rounded for LOW readers."""
        index = graph.index
        # Of what an op writes, mostly one tensor has all the noise: the op's share is that of its noisiest.
        share = np.zeros(index.ops)
        np.maximum.at(share, index.writes.op, self.range_share[index.writes.tensor])
        op_range = self.op_values * share
        casts = self.rounding(graph, low_ops, rounded)
        cast_range = casts * self.range_share
        casts = casts - cast_range
        return Breakdown(
            values=float((self.op_values - op_range)[low_ops].sum()),
            accumulation=float(self.op_accumulation[low_ops].sum()),
            casts=float(casts[~index.stored].sum()),
            weights=float(casts[index.stored].sum()),
            range=float(op_range[low_ops].sum() + cast_range.sum()),
        )


def accumulation_noise(output_noise: Floats, terms: Floats) -> Floats:
    """Variance added by summing ``terms`` values in 16 bits, when rounding the sum once adds ``output_noise``.

    Each of the n−1 partial sums is rounded. Partial sums of terms of random sign grow with the square root of how many
    were added, so their squares, and with them the rounding variances, average to half of the last one's. That is the
    familiar error of eps·√n; terms of one sign give n/3 in place of n/2.
    """
    result: Floats = output_noise * np.maximum(terms - 1, 0) / 2
    return result


class RiskMeter:
    """Collects sensitivities and ranges over batches and projections, and averages them into :class:`Risks`.

    Per batch and projection: :meth:`add` for each tensor, then :meth:`end_pass`. Ranges are recorded once per batch.
    """

    def __init__(self, graph: Graph, fmt: str) -> None:
        self._graph, self.fmt = graph, parse_format(fmt).name
        self._total = np.zeros(len(graph.tensors))
        self._range_part = np.zeros(len(graph.tensors))
        self._per_read = np.full(len(graph.index.reads.op), np.nan)
        self._ranges: dict[int, RangeRecord] = {}
        self._gradients: dict[int, RangeRecord] = {}
        self._reference = 0.0
        self._passes = 0

    def add(self, tensor: int, measured: Sensitivity) -> None:
        """Add the sensitivity of a tensor in the current pass. Weights: of the gradient summed over the batch."""
        self._check(tensor, measured.total)
        self._total[tensor] += measured.total
        self._range_part[tensor] += measured.range_part

    def add_read(self, tensor: int, op: int, total: float) -> None:
        """Add the sensitivity of a tensor to rounding it for one of its readers, op ``op``, in the current pass.

        It is priced with the part of the gradient that comes through that reader. Add it for all readers or for none.
        """
        self._check(tensor, total)
        pair = self._graph.index.read(tensor, op)
        self._per_read[pair] = total if np.isnan(self._per_read[pair]) else self._per_read[pair] + total

    def _check(self, tensor: int, total: float) -> None:
        if not (math.isfinite(total) and total >= 0):
            name = self._graph.tensors[tensor].name
            raise PlanError(
                f"Tensor {name!r} has a sensitivity of {total!r}: its fp32 gradient is not finite. Calibrate "
                "on a batch on which the model is healthy."
            )

    def add_all(self, total: Floats, range_part: Floats | None = None) -> None:
        """Add one sensitivity per tensor of the graph at once."""
        for tensor in np.flatnonzero(total):
            part = 0.0 if range_part is None else float(range_part[tensor])
            self.add(int(tensor), Sensitivity(float(total[tensor]), part))

    def record(self, tensor: int, seen: RangeRecord) -> None:
        """Record the range of a tensor's values in one batch."""
        self._ranges[tensor] = self._ranges.get(tensor, RangeRecord()).merge(seen)

    def record_gradient(self, tensor: int, seen: RangeRecord) -> None:
        """Record the range of a tensor's gradient in one batch."""
        self._gradients[tensor] = self._gradients.get(tensor, RangeRecord()).merge(seen)

    def end_pass(self, reference: float = 1.0) -> None:
        """End one projection of one batch, whose fp32 outputs have the sum of squares ``reference``."""
        self._reference += reference
        self._passes += 1

    def risks(self) -> Risks:
        """The averages over all passes. Raises PlanError where there was none."""
        if not self._passes:
            raise PlanError("No calibration pass was measured. Call end_pass() after each batch and projection.")
        totals = (total / self._passes for total in (self._total, self._range_part, self._per_read))
        averaged = Risks.from_sensitivities(self._graph, self.fmt, *totals)
        return replace(
            averaged,
            reference=self._reference / self._passes,
            ranges=dict(self._ranges),
            gradient_ranges=dict(self._gradients),
        )
