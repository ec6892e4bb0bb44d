"""What each op costs on this machine in fp32 and in the 16-bit format: timed on its real inputs, once, and kept.

Formats take turns, so that a slow moment does not fall on one of them alone, and the fastest run counts: everything
that disturbs a timing makes it longer. What is timed is what will run: forward, backward where the model trains, and
the emulation of a product where this machine has no arithmetic for the format. Weights of an inference that do not fit
in the cache are read from memory while an op is timed, as they are in the model.

Times are kept in the user's cache directory by op, shapes, format, device and versions. Measuring stops when its time
is used up; ops that were not reached keep their predicted costs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from castwise._gemm import cache_file
from castwise.catalogue import OpClass
from castwise.cost import Costs, MeasuredCosts, cast_key, op_key, roofline
from castwise.formats import parse_format
from castwise.hardware import Device

from . import _aten
from ._cold import FROM_MEMORY, evict, leave, reads_weights, weights_are_cold
from ._rewrite import emulated_call, emulated_steps
from ._run import StudyRun, floating, random_state_kept
from .capture import Captured, as_call, flat_inputs
from .emulation import arithmetic, dtype_of

__all__ = ["cost_table", "measured_costs", "versions"]

log = logging.getLogger("castwise.torch.measure")

_ROUNDS = 3
_PER_OP = 0.05  # seconds in both formats, beyond the first rounds
_MEASURE_BANDWIDTH = 1 << 26  # bytes: larger than any cache of a core


def versions() -> dict[str, str]:
    """What measured times depend on besides the device."""
    return {"torch": torch.__version__, "threads": str(torch.get_num_threads())}


def cost_table() -> MeasuredCosts:
    """The times measured on this machine so far."""
    return MeasuredCosts(cache_file().with_name("torch_ops.json"))


def measured_costs(
    captured: Captured,
    example_inputs: Any,
    device: Device,
    fmt: str,
    *,
    seconds: float = 20.0,
    table: MeasuredCosts | None = None,
    tf32: bool = False,
    keep_low_weights: bool | None = None,
) -> Costs:
    """Costs of a graph on this machine's `device`.

    Args:
        captured: the graph; it runs once in fp32, on `example_inputs`.
        device: this machine's, as `castwise.hardware.detect` gives it.
        fmt: the 16-bit format.
        seconds: how long measuring may take.
        table: where times are looked up and kept; by default `cost_table`.
        tf32: whether fp32 products may round to TF32.
        keep_low_weights: see `castwise.cost.roofline`.
    """
    table = cost_table() if table is None else table
    base = roofline(captured.graph, _with_bandwidth(device), fmt, tf32=tf32, keep_low_weights=keep_low_weights)
    base = replace(base, device=device.name)
    device_type = "cuda" if device.kind == "rocm" else device.kind
    known = versions() | (FROM_MEMORY if weights_are_cold(captured.graph, device_type) else {})
    timer = _Timer(captured, base, fmt, device_type, table, time.perf_counter() + seconds, known)
    with random_state_kept(0), torch.enable_grad():
        timer.run(*flat_inputs(*as_call(example_inputs)))
    timer.time_casts()
    table.keep()
    if timer.missed:
        log.warning(
            "%d ops were not timed within %g s and keep their predicted costs; plan again to go on from here, or give "
            "seconds=...",
            timer.missed,
            seconds,
        )
    return base.with_measured(captured.graph, table, known)


class _Timer(StudyRun):
    def __init__(
        self,
        captured: Captured,
        costs: Costs,
        fmt: str,
        device_type: str,
        table: MeasuredCosts,
        deadline: float,
        known: Mapping[str, str],
    ) -> None:
        super().__init__(captured.module)
        self.known = known
        """By what times are kept besides the op and the device."""
        self.captured, self.costs, self.fmt, self.device_type = captured, costs, fmt, device_type
        self.table, self.deadline = table, deadline
        self.low = dtype_of(parse_format(fmt))
        self.missed = 0

    def run_node(self, n: fx.Node) -> Any:
        op = self.captured.graph.positions.get(n.name)
        if op is not None and self._wants_time(n, op):
            keys = [op_key(self.captured.graph, op, name, self.costs.device, self.known) for name in ("fp32", self.fmt)]
            if any(self.table.get(key) is None for key in keys):
                self._time(n, keys)
        y = super().run_node(n)
        # Each op is timed by itself: nothing of the graph before it is needed for its backward.
        return torch.utils._pytree.tree_map_only(torch.Tensor, _cut, y)

    def _wants_time(self, n: fx.Node, op: int) -> bool:
        entry = _aten.entry_of(n)
        chosen = not self.captured.graph.ops[op].pin and op not in self.costs.unavailable
        return chosen and not _aten.mutated(n) and (entry is None or entry.op_class is not OpClass.CAST)

    def _time(self, n: fx.Node, keys: list[str]) -> None:
        if time.perf_counter() > self.deadline:
            self.missed += 1
            return
        runs = [self._standalone(n, dtype) for dtype in (torch.float32, self.low)]
        try:
            times = alternating(runs, self.device_type, self.deadline, self._before(n))
            for key, best in zip(keys, times, strict=True):
                self.table.put(key, best)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            log.info("%s cannot be timed by itself: %s", n.name, str(error).splitlines()[0])

    def _before(self, n: fx.Node) -> Callable[[], None]:
        """What makes the cache as it is when the op runs in the model."""
        read = [self.env[source] for source in _aten.planned_inputs(n)[:2]]
        tensors = [x for x in read if isinstance(x, torch.Tensor)]
        cold = self.known.keys() & FROM_MEMORY and len(tensors) == 2 and reads_weights(tensors[1], tensors[0])
        return evict if cold else leave

    def _standalone(self, n: fx.Node, dtype: torch.dtype) -> Callable[[], None]:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        planned = {id(x) for x in (self.env.get(p) for p in _aten.planned_inputs(n)) if x is not None}
        training, leaves = self.captured.training, []

        def operand(x: torch.Tensor) -> torch.Tensor:
            if not x.is_floating_point():
                return x
            y = x.detach().to(dtype) if id(x) in planned and x.dtype in (torch.float32, self.low) else x.detach()
            if x.requires_grad and training:
                leaves.append(y.requires_grad_())
            return y

        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, operand, (args, kwargs))
        floats = (torch.float32, self.low)
        args = tuple(dtype if isinstance(a, torch.dtype) and a in floats else a for a in args)
        target = n.target
        entry = _aten.entry_of(n)
        if dtype is self.low and entry is not None:
            emulates = entry.product and arithmetic(self.device_type, parse_format(self.fmt)).emulated
            if emulates or entry.lacks_kernel(self.fmt, self.device_type):
                args = (target, self.fmt, *args)
                target = emulated_steps if entry.op_class is OpClass.RNN else emulated_call

        def run() -> None:
            out = floating(target(*args, **kwargs))  # type: ignore[operator]
            if leaves and out and out[0].requires_grad:
                torch.autograd.grad(out[0], leaves, torch.ones_like(out[0]), allow_unused=True)

        return run

    def time_casts(self) -> None:
        """Time the two casts of each shape of floating tensor."""
        for tensor in self.captured.graph.tensors:
            if tensor.format not in ("fp32", self.fmt) or time.perf_counter() > self.deadline:
                continue
            pairs = (("fp32", self.fmt), (self.fmt, "fp32"))
            keys = [cast_key(tensor.shape, *pair, self.costs.device, self.known) for pair in pairs]
            if all(self.table.get(key) is not None for key in keys):
                continue
            wide = torch.ones(tensor.shape, device=self.device_type)
            narrow = wide.to(self.low)
            runs: list[Callable[[], None]] = [_cast(wide, self.low), _cast(narrow, torch.float32)]
            for key, best in zip(keys, alternating(runs, self.device_type, self.deadline), strict=True):
                self.table.put(key, best)


def _cut(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def _cast(x: torch.Tensor, dtype: torch.dtype) -> Callable[[], None]:
    def run() -> None:
        x.to(dtype)

    return run


def alternating(
    runs: list[Callable[[], None]], device_type: str, deadline: float, before: Callable[[], None] = leave
) -> list[float]:
    """The fastest time of each, in seconds; they take turns, a few rounds or as many as fit a short while.

    ``before`` is called before each run, and not timed.
    """
    wait = (lambda: None) if device_type == "cpu" else getattr(torch, device_type).synchronize
    best = [float("inf")] * len(runs)
    start = time.perf_counter()
    for number in range(200):
        for position, run in enumerate(runs):
            before()
            wait()
            begun = time.perf_counter()
            run()
            wait()
            if number or len(runs) == 1:  # the first round warms up
                best[position] = min(best[position], time.perf_counter() - begun)
        now = time.perf_counter()
        if number >= 1 and ((number >= _ROUNDS and now - start > _PER_OP) or now > deadline or now - start > 1.0):
            break
    return best


def _with_bandwidth(device: Device) -> Device:
    """The device with the figures that a prediction needs; of a CPU whose memory nobody described, measured."""
    if device.bandwidth is not None:
        return device
    source = torch.empty(_MEASURE_BANDWIDTH // 4)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    [seconds] = alternating([copy], "cpu", time.perf_counter() + 0.2)
    return replace(device, bandwidth=2 * _MEASURE_BANDWIDTH / seconds)
