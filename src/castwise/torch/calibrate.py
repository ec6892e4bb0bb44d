"""What rounding each tensor of a captured graph would do to its outputs: one fp32 forward and backward per projection.

`castwise.risk` explains the method. Here a hook on each op's result sees ∂F/∂y the moment backward has it, for a random
projection F of the outputs, and prices rounding y there and then; nothing is kept but a number per tensor. Weights are
priced by their own gradients, which sum over the batch as the weight's one rounding does.

Infinities of the fp32 model are masks, put there on purpose: every format has them, so they count in no range.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from castwise.errors import PlanError
from castwise.formats import BF16, NumberFormat, parse_format
from castwise.risk import RangeRecord, RiskMeter, Risks, Sensitivity

from . import _aten
from ._run import StudyRun, floating, random_state_kept
from .capture import Captured, as_call, flat_inputs
from .emulation import dtype_of

__all__ = ["calibrate"]

log = logging.getLogger("castwise.torch.calibrate")

_SEED = 20
_PROJECTIONS = 2
_MOST_PROJECTIONS_WITH_BATCHES = 1  # where several batches are averaged anyway

Loss = Callable[[Any], torch.Tensor]


def calibrate(captured: Captured, fmt: str, batches: Sequence[Any], loss: Loss | None = None) -> Risks:
    """Sensitivities and ranges of every tensor of a captured graph, averaged over batches.

    Args:
        captured: a captured model. Neither it nor the model's gradients and buffers are changed.
        fmt: the 16-bit format to round to.
        batches: example inputs, as `capture` takes them.
        loss: of the model's outputs, a scalar; where given, ranges of its gradients are recorded too.

    Raises:
        PlanError: no output is a floating tensor that depends on floating values.
    """
    meter = RiskMeter(captured.graph, fmt)
    projections = _PROJECTIONS if len(batches) == 1 else _MOST_PROJECTIONS_WITH_BATCHES
    for number, batch in enumerate(batches):
        with random_state_kept(_SEED + number):
            _Pass(captured, meter, parse_format(fmt), projections, loss).run(batch)
    return meter.risks()


class _Pass:
    """One batch: a forward that notes ranges, and a backward per projection that prices roundings."""

    def __init__(
        self, captured: Captured, meter: RiskMeter, fmt: NumberFormat, projections: int, loss: Loss | None
    ) -> None:
        self.captured, self.meter, self.fmt = captured, meter, fmt
        self.low = dtype_of(fmt)
        self.projections, self.loss = projections, loss
        self.found: dict[int, list[torch.Tensor]] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.records_gradients = False

    def run(self, batch: Any) -> None:
        started = time.perf_counter()
        run = _Hooked(self)
        with torch.enable_grad():
            outputs = run.run(*flat_inputs(*as_call(batch)))
            results = [y for y in floating(outputs) if y.requires_grad]
            if not results:
                raise PlanError(
                    "No output depends on a floating-point value. Give example inputs of a model's forward."
                )
            reference = sum(float(y.detach().double().square().sum()) for y in results)
            if not math.isfinite(reference):
                raise PlanError("The fp32 model's outputs are not finite on a calibration batch. Give other inputs.")
            for number in range(self.projections):
                last = number == self.projections - 1 and self.loss is None
                torch.autograd.backward(results, [torch.randn_like(y) for y in results], retain_graph=not last)
                self._collect(reference)
            if self.loss is not None:
                self.records_gradients = True
                self.loss(outputs).backward()  # type: ignore[no-untyped-call]
                self._collect_gradients()
        log.debug("calibrated a batch in %.2f s", time.perf_counter() - started)

    def seen(self, node: fx.Node, y: torch.Tensor) -> None:
        """A tensor of the graph as the forward made it."""
        name = self.captured.tensors.get(node.name)
        if name is not node or y.dtype is not torch.float32 or not y.numel():
            return
        position = self._position(node)
        if position is None:
            return
        values = y.detach()
        if any(_aten.mutated(user) for user in node.users):
            values = values.clone()  # before it is changed in place
        self.meter.record(position, _record(values, self.fmt))
        if y.requires_grad:
            y.register_hook(lambda gradient: self._price(position, values, gradient))  # type: ignore[no-untyped-call]

    def _position(self, node: fx.Node) -> int | None:
        if _aten.viewed(node, self.captured.values) is not None:
            return None
        graph = self.captured.graph
        if node.name in self.captured.ops:
            op = graph.ops[graph.positions[node.name]]
            return op.outputs[0] if op.outputs else None
        # An input or a parameter: the first version of that name.
        return self._given.get(node.name)

    @cached_property
    def _given(self) -> dict[str, int]:
        producer = self.captured.graph.index.producer
        return {t.name: at for at, t in enumerate(self.captured.graph.tensors) if producer[at] < 0}

    def _price(self, position: int, values: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.records_gradients:
            self.gradients[position] = gradient.detach()
            return
        # In the rounded dtype first: two passes over memory fewer than through `sensitivity`, and no copy to NumPy.
        error = values.to(self.low).to(torch.float32).sub_(values)
        small = None
        if self.fmt is not BF16:
            size = values.abs()
            error.masked_fill_(size > self.fmt.max, 0.0)
            small = size < self.fmt.smallest_normal
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        error.nan_to_num_(0.0, 0.0, 0.0).mul_(gradient)
        total = torch.linalg.vector_norm(error).square()
        part = torch.linalg.vector_norm(error * small).square() if small is not None else torch.zeros_like(total)
        self.found[position] = [total, part]

    def _collect(self, reference: float) -> None:
        for position, (total, part) in self.found.items():
            self.meter.add(position, Sensitivity(float(total), min(float(part), float(total))))
        self.found.clear()
        self.meter.end_pass(reference)

    def _collect_gradients(self) -> None:
        for position, gradient in self.gradients.items():
            self.meter.record_gradient(position, _record(gradient, self.fmt))
        self.gradients.clear()


class _Hooked(StudyRun):
    def __init__(self, work: _Pass) -> None:
        super().__init__(work.captured.module, input_gradients=True)
        self.work = work

    def run_node(self, n: fx.Node) -> Any:
        y = super().run_node(n)
        first = y if isinstance(y, torch.Tensor) else next(iter(floating(y)), None) if n.op != "output" else None
        if first is not None:
            self.work.seen(n, first)
        return y


def _record(values: torch.Tensor, fmt: NumberFormat) -> RangeRecord:
    """The range of a tensor's values; infinities aside, see the module's docstring."""
    size = values.abs()
    largest = float(size.amax())
    if math.isinf(largest):
        size = size.masked_fill(size.isinf(), 0.0)
        largest = float(size.amax())
    count = size.numel()
    if math.isnan(largest):
        return RangeRecord(math.inf, count, overflow=1.0)
    if fmt is BF16:
        return RangeRecord(largest, count)
    overflow = float((size > fmt.max).sum()) / count if largest > fmt.max else 0.0
    low = (size < fmt.smallest_normal) & (size > 0)
    gone = size <= fmt.smallest_subnormal / 2
    underflow = int((low & gone).sum())
    return RangeRecord(largest, count, overflow, underflow / count, (int(low.sum()) - underflow) / count)
