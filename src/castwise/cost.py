"""What each op and each cast costs, in seconds: predicted from the hardware table, or measured.

The prediction is a roofline: an op takes as long as its arithmetic at the device's peak rate or its bytes at the
device's bandwidth, whichever is longer, plus the time to launch it. It knows nothing of caches and kernel quality, so a
front end that sits on the device measures instead (:class:`castwise.cost.MeasuredCosts`); for a device that is not
here the roofline is what there is. In training every cost covers forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from castwise._cost_table import MeasuredCosts, cast_key, op_key
from castwise._graph_index import Bools, Floats
from castwise._terms import HIGH_BYTES, LOW_BYTES, Roles
from castwise.catalogue import OpClass, load_catalogue
from castwise.errors import HardwareError, PlanError
from castwise.hardware import Device, Support

if TYPE_CHECKING:
    from castwise.graph import Graph

__all__ = ["Costs", "MeasuredCosts", "cast_key", "op_key", "roofline"]

# Classes whose arithmetic runs on matrix units, at the peak rate of its format. All else runs on vector units, at the
# rate of fp32.
_PRODUCTS = frozenset({OpClass.MATMUL, OpClass.CONV, OpClass.ATTENTION, OpClass.RNN})
# A product of two matrices has one product per gradient; fused attention has 5 products backward for 2 forward
# (Dao, FlashAttention-2, 2023, arXiv:2307.08691, section 3.1).
_ATTENTION_BACKWARD = 2.5
_MOST_GRADIENTS = 2

# Seconds to launch one op. The order of magnitude of an eager framework's dispatch, not a measurement of any device;
# what matters is that a cast of a small tensor is not free. Measured costs include the real figure.
_LAUNCH_ON_CPU = 2e-6
_LAUNCH_ON_ACCELERATOR = 5e-6


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds per step for each op in either format, and for each tensor's casts. Arrays follow the graph's order."""

    fmt: str
    """The 16-bit format that "low" means, by Castwise's short name."""
    high: Floats
    """[ops] where the op computes in fp32."""
    low: Floats
    """[ops] where it computes in ``fmt``; infinite where it cannot, see ``unavailable``."""
    down: Floats
    """[tensors] to cast fp32 to ``fmt``, and its gradient back; 0 where a low copy is kept."""
    up: Floats
    """[tensors] to cast ``fmt`` to fp32, and its gradient back."""
    kept: Bools
    """[tensors] a low copy is kept between steps (weights in inference, or refreshed by the optimizer)."""
    device: str = ""
    unavailable: Mapping[int, str] = field(default_factory=dict)
    """Ops that the device cannot compute in ``fmt``, and why."""
    measured: Bools = field(default_factory=lambda: np.zeros(0, bool))
    """[ops] whether ``high`` and ``low`` were timed rather than predicted."""

    def __post_init__(self) -> None:
        if not len(self.measured):
            object.__setattr__(self, "measured", np.zeros(len(self.high), bool))
        for name in ("high", "low", "down", "up"):
            values = getattr(self, name)
            finite = np.isfinite(values) | (np.isin(np.arange(len(values)), list(self.unavailable)) & (name == "low"))
            if not (finite & (values >= 0)).all():
                raise PlanError(
                    f"Costs: `{name}` has a time that is negative or not finite at position "
                    f"{int(np.argmin(finite & (values >= 0)))}. List ops that cannot run low in `unavailable`."
                )

    def check(self, graph: Graph) -> None:
        """Raise PlanError unless these costs have the graph's number of ops and tensors."""
        sizes = [len(self.high), len(self.low), len(self.measured), len(self.down), len(self.up), len(self.kept)]
        if sizes != 3 * [len(graph.ops)] + 3 * [len(graph.tensors)]:
            raise PlanError(
                f"Costs for {sizes[0]} ops and {sizes[3]} tensors do not fit a graph of {len(graph.ops)} ops and "
                f"{len(graph.tensors)} tensors. Make costs from the graph that is planned."
            )

    def with_measured(self, graph: Graph, table: MeasuredCosts, versions: Mapping[str, str]) -> Self:
        """These costs with measured times wherever ``table`` has them, of ops in both formats and of casts.

        An op measured in one format only keeps its prediction: a measured and a predicted time do not compare.
        """
        high, low, measured = self.high.copy(), self.low.copy(), self.measured.copy()
        down, up = self.down.copy(), self.up.copy()
        for position in range(len(graph.ops)):
            times = [table.get(op_key(graph, position, fmt, self.device, versions)) for fmt in ("fp32", self.fmt)]
            if times[0] is not None and times[1] is not None and position not in self.unavailable:
                high[position], low[position], measured[position] = *times, True
        for position, tensor in enumerate(graph.tensors):
            for seconds, formats in ((down, ("fp32", self.fmt)), (up, (self.fmt, "fp32"))):
                time = table.get(cast_key(tensor.shape, *formats, self.device, versions))
                if time is not None and seconds[position] > 0:
                    # The gradient's cast goes the other way and moves the same bytes.
                    seconds[position] = time * (1 + (graph.training and tensor.requires_grad))
        return replace(self, high=high, low=low, down=down, up=up, measured=measured)


def roofline(
    graph: Graph,
    device: Device,
    fmt: str,
    *,
    keep_low_weights: bool | None = None,
    tf32: bool = False,
    launch: float | None = None,
) -> Costs:
    """Costs of ``graph`` on ``device`` as its data sheet predicts them, in seconds per step.

    ``fmt`` is the 16-bit format. ``keep_low_weights`` says whether a weight's low copy lives between steps, as it does
    in inference (the default there) and where the optimizer refreshes it; otherwise each step casts it. ``tf32``
    computes fp32 products at the device's TF32 rate. ``launch`` is the time to start an op or cast. A format that
    the device emulates is computed at fp32's rate with conversions around it. One that it does not support at all makes
    every op unavailable in it.

    Raises HardwareError where the device table lacks a figure that this needs.
    """
    index, roles = graph.index, Roles.of(graph, fmt)
    if launch is None:
        launch = _LAUNCH_ON_CPU if device.kind == "cpu" else _LAUNCH_ON_ACCELERATOR
    bandwidth, passes = _bandwidth(device, fmt), _passes(graph)
    launches = np.where(index.fused, 0.0, launch * (1 + (passes > 1)))
    high_bytes, low_bytes = _traffic(graph, roles)
    rate_high, rate_low = _rates(graph, device, fmt, tf32)

    def seconds(rate: Floats, size: Floats) -> Floats:
        return passes * np.maximum(index.flops / rate, size / bandwidth) + launches

    high, low = seconds(rate_high, high_bytes), seconds(rate_low, low_bytes)
    if device.supports(fmt) is Support.emulated:  # widen, compute in fp32, round
        low = seconds(rate_high, high_bytes) + passes * (high_bytes + low_bytes) / bandwidth
    unavailable = _unavailable(graph, device, fmt)
    low[list(unavailable)] = np.inf
    kept = _kept_low(graph, not graph.training if keep_low_weights is None else keep_low_weights)
    casts = 1 + (index.requires_grad & graph.training)  # the gradient is cast as well, the other way
    cast = casts * (index.elements * (HIGH_BYTES + LOW_BYTES) / bandwidth + launch)
    return Costs(fmt, high, low, np.where(kept, 0.0, cast), cast, kept, device.name, unavailable)


def _kept_low(graph: Graph, keep: bool) -> Bools:
    """[tensors] which stored tensors keep a low copy between steps. One that is written in place would outdate it.

    Nor is there one of a table of which a training step reads some rows: each step would write all of it anew.
    """
    index = graph.index
    mutated = np.isin(np.arange(index.tensors), list(graph.mutated))
    by_rows = np.fromiter((op.bytes is not None for op in graph.ops), bool, index.ops)
    table = index.reads.any(index.tensors) & ~index.reads.keep(~by_rows[index.reads.op]).any(index.tensors)
    return index.stored & ~mutated & ~(table & graph.training) & keep


def _passes(graph: Graph) -> Floats:
    """[ops] how many times an op's forward work a step does: once, plus the backward of a training step."""
    index = graph.index
    if not graph.training:
        return np.ones(index.ops)
    wanted = index.requires_grad & index.floating
    gradients = np.bincount(index.reads.op[wanted[index.reads.tensor]], minlength=index.ops)
    product, attention = _classes(graph, _PRODUCTS), _classes(graph, frozenset({OpClass.ATTENTION}))
    backward = np.where(product, np.minimum(gradients, _MOST_GRADIENTS), np.minimum(gradients, 1)).astype(float)
    backward[attention & (gradients > 0)] = _ATTENTION_BACKWARD
    return 1 + backward


def _traffic(graph: Graph, roles: Roles) -> tuple[Floats, Floats]:
    """[ops] bytes that each op's forward moves to and from memory where it is HIGH, and where it is LOW.

    Inside a fused kernel only what enters or leaves the kernel moves.
    """
    index = graph.index
    given = np.fromiter((np.nan if op.bytes is None else op.bytes for op in graph.ops), float, index.ops)
    outside_reader = index.reads.keep(~index.fused[index.reads.op]).any(index.tensors)
    unread = ~index.reads.any(index.tensors)
    saved = index.saves.any(index.tensors) & graph.training
    enters = ~index.of_producer(index.fused, missing=False)
    leaves = outside_reader | unread | saved | index.keeps_format
    other = index.elements * index.itemsize
    sizes = []
    for width in (HIGH_BYTES, LOW_BYTES):
        size = np.where(roles.movable, index.elements * width, other)
        total = np.zeros(index.ops)
        for pairs, moves in ((index.reads, enters), (index.writes, leaves)):
            counted = ~index.fused[pairs.op] | moves[pairs.tensor]
            total += np.bincount(pairs.op[counted], size[pairs.tensor[counted]], index.ops)
        sizes.append(total)
    share = np.divide(sizes[1], sizes[0], out=np.ones(index.ops), where=sizes[0] > 0)
    return np.where(np.isnan(given), sizes[0], given), np.where(np.isnan(given), sizes[1], given * share)


def _rates(graph: Graph, device: Device, fmt: str, tf32: bool) -> tuple[Floats, Floats]:
    """[ops] FLOP/s of each op where it is HIGH, and where it is LOW."""
    product = _classes(graph, _PRODUCTS)
    wide = device.peak["fp32"]
    high = max(device.peak.get("tf32", wide), wide) if tf32 else wide
    return np.where(product, high, wide), np.where(product, device.peak.get(fmt, wide), wide)


def _bandwidth(device: Device, fmt: str) -> float:
    """Bytes/s, once it is sure that the device table has all that a roofline needs."""
    needed = ["fp32", fmt] if device.native(fmt) else ["fp32"]
    missing = [f"peak.{name}" for name in needed if name not in device.peak]
    if device.bandwidth is None:
        missing.append("bandwidth")
    if device.bandwidth is None or missing:
        raise HardwareError(
            f"The device table has no {' and no '.join(missing)} for {device.name}, so times on it cannot be "
            "predicted. Measure them there (castwise.cost.MeasuredCosts), or choose another device."
        )
    return device.bandwidth


def _classes(graph: Graph, classes: frozenset[OpClass]) -> Bools:
    """[ops] whether the catalogue puts each op in one of ``classes``."""
    entries = load_catalogue().entries
    names = {name for name, entry in entries.items() if entry.op_class in classes}
    return np.fromiter((op.name in names for op in graph.ops), bool, len(graph.ops))


def _unavailable(graph: Graph, device: Device, fmt: str) -> dict[int, str]:
    """Ops that ``device`` cannot compute in ``fmt``, and why."""
    if device.supports(fmt) is Support.none:
        return dict.fromkeys(range(len(graph.ops)), f"{device.name} has no {fmt}")
    entries = load_catalogue().entries
    lacking = {name for name, entry in entries.items() if entry.lacks_kernel(fmt, device.kind)}
    return {
        position: f"no {fmt} kernel of {op.name} on {device.kind}"
        for position, op in enumerate(graph.ops)
        if op.name in lacking
    }
