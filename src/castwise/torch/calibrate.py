"""What rounding each tensor of a captured graph would do to its outputs: one fp32 forward and backward per projection.

`castwise.risk` explains the method. Here a hook on each op's result sees ∂F/∂y the moment backward has it, for a random
projection F of the outputs, and prices rounding y there and then; nothing is kept but a number per tensor. Weights are
priced by their own gradients, which sum over the batch as the weight's one rounding does.

A tensor with several readers is read through one alias per reader. The gradient of an alias is the part of ∂F/∂y that
comes through that reader, and the same backward prices what that reader would see of a cast of y, see `castwise.risk`.

Infinities of the fp32 model are masks, put there on purpose: every format has them, so they count in no range.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx

from castwise._joined import join_risks
from castwise.errors import PlanError
from castwise.formats import BF16, NumberFormat, parse_format
from castwise.graph import Kind
from castwise.risk import RangeRecord, RiskMeter, Risks, Sensitivity

from . import _aten
from ._run import StudyRun, floating, random_state_kept
from .capture import Captured
from .emulation import dtype_of
from .parts import CapturedParts

__all__ = ["calibrate"]

log = logging.getLogger("castwise.torch.calibrate")

_SEED = 20
_PROJECTIONS = 2
_MOST_PROJECTIONS_WITH_BATCHES = 1  # where several batches are averaged anyway

Loss = Callable[[Any], torch.Tensor]


def calibrate(captured: Captured | CapturedParts, fmt: str, batches: Sequence[Any], loss: Loss | None = None) -> Risks:
    """Sensitivities and ranges of every tensor of a captured model, averaged over batches.

    Args:
        captured: a captured model. Neither it nor the model's gradients and buffers are changed.
        fmt: the 16-bit format to round to.
        batches: example inputs, as `capture` takes them.
        loss: of the model's outputs, a scalar; where given, ranges of its gradients are recorded too.

    Raises:
        PlanError: no output is a floating tensor that depends on floating values.
    """
    meters = [RiskMeter(part.graph, fmt) for part in captured.parts]
    projections = _PROJECTIONS if len(batches) == 1 else _MOST_PROJECTIONS_WITH_BATCHES
    references = []
    for number, batch in enumerate(batches):
        passes = [_Pass(part, meter, parse_format(fmt)) for part, meter in zip(captured.parts, meters, strict=True)]
        with captured.kept(), random_state_kept(_SEED + number):
            references.append(_priced(captured, passes, batch, projections, loss))
    found = [meter.risks() for meter in meters]
    if isinstance(captured, Captured):
        return found[0]
    return join_risks([part.graph for part in captured.parts], found, sum(references) / len(references))


def _priced(
    captured: Captured | CapturedParts, passes: list[_Pass], batch: Any, projections: int, loss: Loss | None
) -> float:
    """One batch: a forward that notes ranges, and a backward per projection that prices roundings.

    Returns the outputs' sum of squares.
    """
    started = time.perf_counter()
    with torch.enable_grad():
        outputs = captured.run(batch, lambda number, flat: passes[number].forward(flat))
        results = [y for y in floating(outputs) if y.requires_grad]
        if not results:
            raise PlanError("No output depends on a floating-point value. Give example inputs of a model's forward.")
        reference = sum(float(y.detach().double().square().sum()) for y in results)
        if not math.isfinite(reference):
            raise PlanError("The fp32 model's outputs are not finite on a calibration batch. Give other inputs.")
        ran = [one for one in passes if one.ran]  # a batch may take another path through the model
        for number in range(projections):
            last = number == projections - 1 and loss is None
            torch.autograd.backward(results, [torch.randn_like(y) for y in results], retain_graph=not last)
            for one in ran:
                one.collect(reference)
        if loss is not None:
            for one in ran:
                one.records_gradients = True
            loss(outputs).backward()  # type: ignore[no-untyped-call]
            for one in ran:
                one.collect_gradients()
    log.debug("calibrated a batch in %.2f s", time.perf_counter() - started)
    return reference


class _Pass:
    """One graph on one batch: what was seen of its tensors and of their gradients."""

    def __init__(self, captured: Captured, meter: RiskMeter, fmt: NumberFormat) -> None:
        self.captured, self.meter, self.fmt = captured, meter, fmt
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.read: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.records_gradients = False
        self.ran = False

    def forward(self, flat: list[Any]) -> Any:
        """Run the graph, watched."""
        self.ran = True
        return _Hooked(self).run(*flat)

    def seen(self, node: fx.Node, y: torch.Tensor) -> None:
        """A tensor of the graph as the forward made it."""
        name = self.captured.tensors.get(node.name)
        if name is not node or y.dtype is not torch.float32 or not y.numel():
            return
        position = self.position(node)
        if position is None:
            return
        values = y.detach()
        if any(_aten.mutated(user) for user in node.users):
            values = values.clone()  # before it is changed in place
        record, small = _range(values, self.fmt)
        self.meter.record(position, record)
        if y.requires_grad:
            rounding = _Rounding(values, self.fmt, small)
            y.register_hook(lambda gradient: self._price(position, rounding, gradient))  # type: ignore[no-untyped-call]

    def read_by(self, position: int, op: int, alias: torch.Tensor) -> None:
        """What one op will read of a tensor, or of a view of it, that others read as well."""
        rounding, found = _Rounding(alias.detach(), self.fmt), self.read.setdefault((position, op), [])

        def price(gradient: torch.Tensor) -> None:
            if not self.records_gradients:
                found.append(rounding.noise(gradient)[0])

        alias.register_hook(price)  # type: ignore[no-untyped-call]

    @cached_property
    def shared(self) -> frozenset[int]:
        """Tensors that several take: ops, and the caller. One that is changed in place has one price for all."""
        graph = self.captured.graph
        readers = np.bincount(graph.index.reads.tensor, minlength=len(graph.tensors))
        leaves = np.array([tensor.kind is Kind.OUTPUT for tensor in graph.tensors], bool)
        return frozenset(np.flatnonzero(readers + leaves > 1).tolist()) - graph.mutated.keys()

    def position(self, node: fx.Node) -> int | None:
        if _aten.viewed(node, self.captured.values) is not None:
            return None
        graph = self.captured.graph
        if node.name in self.captured.ops:
            op = graph.ops[graph.positions[node.name]]
            return op.outputs[0] if op.outputs else None
        # An input or a parameter: the first version of that name.
        return self._given.get(node.name)

    @cached_property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """Which tensor is read by which op."""
        reads = self.captured.graph.index.reads
        return frozenset(zip(reads.tensor.tolist(), reads.op.tolist(), strict=True))

    @cached_property
    def _given(self) -> dict[str, int]:
        producer = self.captured.graph.index.producer
        return {t.name: at for at, t in enumerate(self.captured.graph.tensors) if producer[at] < 0}

    def _price(self, position: int, rounding: _Rounding, gradient: torch.Tensor) -> None:
        if self.records_gradients:
            self.gradients[position] = gradient.detach()
            return
        noise = rounding.noise(gradient)
        if position in self.found:  # a graph that runs several times in a step adds up
            before = self.found[position]
            noise = (before[0] + noise[0], before[1] + noise[1])
        self.found[position] = noise

    def collect(self, reference: float) -> None:
        for position, (total, part) in self.found.items():
            self.meter.add(position, Sensitivity(float(total), min(float(part), float(total))))
        for (position, op), parts in self.read.items():
            self.meter.add_read(position, op, sum(map(float, parts)))
            parts.clear()
        self.found.clear()
        self.meter.end_pass(reference)

    def collect_gradients(self) -> None:
        for position, gradient in self.gradients.items():
            self.meter.record_gradient(position, _range(gradient, self.fmt)[0])
        self.gradients.clear()


class _Hooked(StudyRun):
    def __init__(self, work: _Pass) -> None:
        super().__init__(work.captured.module, input_gradients=True)
        self.work = work
        self.values = work.captured.values
        self.garbage_collect_values = False  # backward needs most of it, and aliases are made of it
        self._aliases: dict[fx.Node, torch.Tensor] = {}
        self._given: set[int] = set()

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        # Of a parameter that has two names (tied weights), each name is a tensor of the graph with its own readers.
        again = id(value) in self._given and value.requires_grad
        self._given.add(id(value))
        return value.view_as(value) if again else value

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        return fx.node.map_arg(args, lambda read: self._aliases.get(read, self.env[read]))

    def run_node(self, n: fx.Node) -> Any:
        self._aliases = self._aliases_for(n)
        y = super().run_node(n)
        self._aliases = {}
        first = y if isinstance(y, torch.Tensor) else next(iter(floating(y)), None) if n.op != "output" else None
        if first is not None:
            self.work.seen(n, first)
        return y

    def _aliases_for(self, n: fx.Node) -> dict[fx.Node, torch.Tensor]:
        """What op `n` reads in place of tensors that it shares with other readers."""
        work = self.work
        op = work.captured.graph.positions.get(n.name)
        if op is None:
            return {}
        aliases = {}
        for read in _aten.planned_inputs(n):
            value = self.env[read]
            position = work.position(_aten.root(read, self.values))
            if position not in work.shared or not isinstance(value, torch.Tensor) or not value.requires_grad:
                continue
            if value.dtype is torch.float32 and (position, op) in work.pairs:
                aliases[read] = self._alias(read, position, op)
        return aliases

    def _alias(self, read: fx.Node, position: int, op: int) -> torch.Tensor:
        value: torch.Tensor = self.env[read]
        root = _aten.root(read, self.values)
        origin = self.env[root]
        if not isinstance(origin, torch.Tensor) or value.numel() <= origin.numel():
            alias = value.view_as(value)
            self.work.read_by(position, op, alias)
            return alias
        # The view repeats values, whose roundings are then the same: only the gradient of the whole sums them first.
        alias = origin.view_as(origin)
        self.work.read_by(position, op, alias)
        repeated: torch.Tensor = self._view_again(read, root, alias)
        return repeated

    def _view_again(self, read: fx.Node, root: fx.Node, alias: Any) -> Any:
        if read is root:
            return alias
        before = _aten.viewed(read, self.values)
        assert before is not None and callable(read.target)
        source = self._view_again(before, root, alias)
        args, kwargs = fx.node.map_arg((read.args, read.kwargs), lambda m: source if m is before else self.env[m])
        return read.target(*args, **kwargs)


class _Rounding:
    """What rounding a tensor changes: found once, for all projections."""

    def __init__(self, values: torch.Tensor, fmt: NumberFormat, small: torch.Tensor | None = None) -> None:
        self.values, self.fmt, self.small = values, fmt, small

    @cached_property
    def error(self) -> torch.Tensor:
        # Through the rounded dtype: fewer passes over memory than `castwise.risk.sensitivity`, and no copy to NumPy.
        error = self.values.to(dtype_of(self.fmt)).to(torch.float32).sub_(self.values)
        return error.nan_to_num_(0.0, 0.0, 0.0)  # overflow is for ranges to tell, and infinities are masks

    def noise(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The variance that rounding adds to F, and the part of it from values below the smallest normal."""
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        moved = self.error * gradient
        total = torch.linalg.vector_norm(moved).square()
        if self.small is None or not len(self.small):
            return total, torch.zeros_like(total)
        return total, moved.reshape(-1)[self.small].square().sum()


def _range(values: torch.Tensor, fmt: NumberFormat) -> tuple[RangeRecord, torch.Tensor | None]:
    """The range of a tensor's values, and where those below the smallest normal are; None where that was not looked at.

    Infinities do not count, see the module's docstring.
    """
    values = values.to_dense() if values.is_sparse else values
    size = values.abs()
    count = size.numel()
    largest = float(size.amax())
    if math.isnan(largest):
        return RangeRecord(math.inf, count, overflow=1.0), None
    if math.isinf(largest):
        size = size.masked_fill(size.isinf(), 0.0)
        largest = float(size.amax())
    overflow = float((size > fmt.max).sum()) / count if largest > fmt.max else 0.0
    if fmt is BF16:  # what is too small for it is too small for fp32
        return RangeRecord(largest, count, overflow), None
    small = ((size < fmt.smallest_normal) & (size > 0)).reshape(-1).nonzero()[:, 0]
    underflow = int((size.reshape(-1)[small] <= fmt.smallest_subnormal / 2).sum()) if len(small) else 0
    return RangeRecord(largest, count, overflow, underflow / count, (len(small) - underflow) / count), small
