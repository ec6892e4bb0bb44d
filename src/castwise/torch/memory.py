"""How much memory a training step takes, from a run on fake tensors: every op says what it would allocate, nothing is.

Fake tensors have shapes, dtypes and lifetimes, and no values. A step run on them makes and drops the same storages as a
real one, whatever the model does, so that the peak is counted, not estimated: parameters, gradients, optimizer state,
casts of weights, what autograd saves, and what ops need while they run. Of what kernels allocate inside themselves the
copies of oneDNN's convolutions and the workspace of its LSTM are counted. Not counted are the buffers of 16-bit kernels
on processors without 16-bit arithmetic, and what an allocator wastes by rounding and fragments.
"""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from castwise.errors import CastwiseError
from castwise.policy import Policy

from ._eight_bit import is_eight_bit
from ._gradients import norm, parameters_of, values_of
from ._rules import Rules
from ._updates import UPDATES
from .amp import Amp
from .emulation import Arithmetic, dtype_of

__all__ = ["MemoryUse", "StorageCount", "Workload", "largest", "predict"]

_STORED = (torch.float16, torch.bfloat16)
_BEYOND = 1.02  # how far past the expected end to look, so that the next size does not fit
_BLOCK = 8  # channels, the fewest that oneDNN goes through together
_LSTM = (torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default)
_LARGEST = 1 << 24  # nobody trains with more samples in a batch

log = logging.getLogger("castwise.torch.memory")


@dataclass(frozen=True)
class Workload:
    """What is trained, without the precision.

    Attributes:
        build: makes the model.
        batch: makes a batch of so many samples (of so many positions, where there are any; None: as they come).
        loss: of a model on a batch.
        optimizer: makes the optimizer over a model's parameters.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int | None], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Callable[[nn.Module], Optimizer]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one training step.

    Attributes:
        parameters: of the model's parameters and buffers.
        kept: float32 masters or remainders beside 16-bit parameters.
        gradients: of all parameters, after backward.
        optimizer: of the optimizer's state.
        activations: what the forward leaves for the backward: saved tensors, and casts of weights.
        peak: the most that is there at any moment of the step.
        phase: when that is: "forward", "backward" or "step".
    """

    parameters: int
    kept: int
    gradients: int
    optimizer: int
    activations: int
    peak: int
    phase: str


class StorageCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages while they live: of all tensors that ops make while this mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.phase = ""
        self.peak_phase = ""
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _LSTM[0] and not out[3].nbytes:
            out = (*out[:3], torch.empty(_lstm_workspace(args[0], args[2]), dtype=torch.uint8, device=args[0].device))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.note(x)
        self._reach(self.now + _inside(func, args, out))
        return out

    def _reach(self, now: int) -> None:
        if now > self.peak:
            self.peak, self.peak_phase = now, self.phase

    def note(self, x: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        if x.layout is not torch.strided:
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()

        def forget(_: object) -> None:
            if self._seen.pop(key, None) is not None:
                self.now -= size

        self._seen[key] = weakref.ref(storage, forget)
        self.now += size
        self._reach(self.now)


def predict(
    work: Workload,
    policy: Policy | str = "float32",
    *,
    batch: int,
    seq: int | None = None,
    weights: str = "auto",
    native: bool = False,
    **options: Any,
) -> MemoryUse:
    """The memory of a training step of `Amp` with fused AdamW or the workload's own optimizer.

    Args:
        work: what is trained.
        policy: as for `Amp`.
        batch: samples of a step.
        seq: positions of a sample; None: as the workload has them.
        weights: "auto": parameters stay as the model has them; else they are stored in the policy's 16-bit format and
            kept in this way.
        native: count for a device that computes the format natively, where this machine would emulate it. Ops stay
            those of torch's CPU kernels. Layer rules keep this machine's arithmetic.
        options: further arguments of `Amp`.

    Raises:
        CastwiseError: the model or its loss looks at values, which fake tensors do not have.
    """
    policy = Policy.coerce(policy)
    policy = replace(policy, guard=replace(policy.guard, enabled=False))  # it reads values
    count = StorageCount()
    gc.collect()
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), count:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            return _steps(work, policy, count, batch, seq, weights, native, options)
    except (DataDependentOutputException, UnsupportedFakeTensorException, DynamicOutputShapeException) as error:
        raise CastwiseError(
            f"memory: the model or its loss looks at values of tensors ({error}), and this run has shapes alone. "
            "Give a model whose control flow does not depend on values, or measure a real step."
        ) from error


def _steps(
    work: Workload,
    policy: Policy,
    count: StorageCount,
    batch: int,
    seq: int | None,
    weights: str,
    native: bool,
    options: dict[str, Any],
) -> MemoryUse:
    model = _with_own_storages(work.build())
    low = dtype_of(policy.low_format)
    if weights != "auto" and low in _STORED:
        _store_in(model, low)
    gc.collect()
    parameters = count.now
    optimizer = work.optimizer(model)
    amp = Amp(model, optimizer, policy, weights=weights, **options)
    if type(optimizer) in UPDATES and UPDATES[type(optimizer)].elementwise:
        amp._stepper._fused.pieces_at_most = 2
    kept = count.now - parameters
    if native:
        amp._rules = _native(amp._rules)
    given = work.batch(batch, seq)
    gc.collect()
    count.phase = "step"
    _make_state(amp)
    count.phase = "forward"
    before = count.now
    with amp:
        loss = work.loss(model, given)
    gc.collect()
    activations = count.now - before
    count.phase = "backward"
    amp.backward(loss)
    del loss
    gradients = sum(_bytes(p.grad) for p in amp._wide.parameters())
    count.phase = "step"
    _step(amp)
    state = sum(_bytes(x) for p in parameters_of([optimizer]) for x in optimizer.state[p].values())
    return MemoryUse(parameters, kept, gradients, state, activations, count.peak, count.peak_phase)


def _make_state(amp: Amp) -> None:
    """Have the optimizer make its state, as a first step does, so that the step that is counted runs beside it."""
    for p in amp._wide.parameters():
        if p.requires_grad:
            wide = p.grad_dtype is None or p.grad_dtype is p.dtype
            p.grad = torch.empty_like(p, dtype=p.dtype if wide else p.grad_dtype)
    amp._stepper.step(1.0)
    amp._forget_gradients()


def _step(amp: Amp) -> None:
    """What `Amp.step` does when gradients are finite, which is known from values alone."""
    values = values_of(amp._wide.parameters())
    norm(values)
    del values
    amp._stepper.step(2.0 if amp.policy.uses_scaling else 1.0)
    amp._forget_gradients()


def _inside(func: Any, args: Any, out: Any) -> int:
    """Bytes that a kernel takes beside its results, and gives back.

    oneDNN's convolutions work on blocks of channels on CPUs: they copy what comes in plain order, and what goes out.
    """
    if func in _LSTM:
        return _inside_lstm(*args[:6], backward=func is _LSTM[1])
    if func is torch.ops.aten.convolution.default:
        given, made = args[0], out
    elif func is torch.ops.aten.convolution_backward.default:
        made, given = args[0], args[1]
    else:
        return 0
    if given.device.type != "cpu" or not given.is_contiguous() or given.dtype is torch.float64:
        return 0
    return int(made.nbytes + (given.nbytes if given.shape[1] >= _BLOCK else 0))  # pictures are read as they are


def _inside_lstm(x: torch.Tensor, w_in: torch.Tensor, w_state: torch.Tensor, *rest: Any, backward: bool) -> int:
    """oneDNN's LSTM reads weights with padded rows, and keeps the gates' sums of all steps while it runs."""
    hidden, width = w_state.shape[1], w_in.shape[1]
    gates = _padded(4 * hidden)
    floats = (width + hidden + x.numel() // width) * gates + 2 * rest[-1].numel()
    if backward:
        floats += sum(4 * hidden * _padded(row) for row in (width, hidden) if _padded(row) != row)
    return int(floats * torch.float32.itemsize)


def _lstm_workspace(x: torch.Tensor, w_state: torch.Tensor) -> int:
    """Bytes that oneDNN's LSTM keeps for its backward: gates, states and their gradients at every step.

    Fake runs take it for empty. The sum was read off oneDNN's own workspaces (torch 2.13), as a test does again; rows
    are padded to 16 values, and off multiples of 256.
    """
    (steps, samples, width), hidden = x.shape, w_state.shape[1]
    row, layer = _padded(hidden), _padded(max(width, hidden))
    floats = steps * (_padded(4 * hidden) + row) + (steps + 1) * (6 * layer + 4 * hidden)
    return int(samples * floats * torch.float32.itemsize)


def _padded(values: int) -> int:
    rounded = -(-values // 16) * 16
    return rounded + 16 * (rounded % 256 == 0)


def _native(rules: Rules) -> Rules:
    """The same decisions, with every low format computed as hardware does that has it."""
    new = rules.under(rules.policy)
    for function, call in rules.seen.items():
        low = None if call is None else call.arithmetic
        if call is not None and low is not None and low.emulated:
            own = Arithmetic(low.fmt, low.dtype, emulated=False)
            new.seen[function] = replace(call, arithmetic=own, emulate_as=None)
    return new


def _with_own_storages(model: nn.Module) -> nn.Module:
    """The model, its copied tensors made anew: views of a fake tensor from `copy.deepcopy` have a storage of their own.

    So weights of cloned layers (`nn.TransformerEncoder`'s) would count twice. Shared ones stay shared.
    """
    new: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, x in list(table.items()):
                if x is None or x.untyped_storage()._cdata == x.detach().untyped_storage()._cdata:
                    continue
                if id(x) not in new:
                    own = torch.empty_like(x, requires_grad=False)
                    new[id(x)] = nn.Parameter(own, x.requires_grad) if isinstance(x, nn.Parameter) else own
                setattr(module, name, new[id(x)])
    return model


def _store_in(model: nn.Module, dtype: torch.dtype) -> None:
    """`model.to(dtype)`, which fake parameters do not bear; shared ones stay shared."""
    new: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, x in table.items():
                if x is None or not x.is_floating_point():
                    continue
                if id(x) not in new:
                    low = x.detach().to(dtype)
                    new[id(x)] = nn.Parameter(low, x.requires_grad) if isinstance(x, nn.Parameter) else low
                table[name] = new[id(x)]


def _bytes(x: Any) -> int:
    if is_eight_bit(x):
        return sum(_bytes(part) for part in (x.codes, x.scale, x.qmap))
    return x.untyped_storage().nbytes() if isinstance(x, torch.Tensor) and x.layout is torch.strided else 0


def largest(peak_of: Callable[[int], int], memory: int) -> int:
    """The largest size, a whole number, whose peak fits into `memory` bytes, to 3%; 0 if not even 1 fits.

    Peaks grow about linearly (in the batch) or faster (in the sequence), so that few runs are needed.

    Args:
        peak_of: the peak at a size.
        memory: bytes that are there.
    """
    low, low_peak = 1, peak_of(1)
    if low_peak > memory:
        return 0
    high, high_peak = 2, peak_of(2)
    while high_peak <= memory:
        per_one = max(1.0, (high_peak - low_peak) / (high - low))
        low, low_peak = high, high_peak
        high = min(low + max(1, int((memory - low_peak) / per_one * _BEYOND)), _LARGEST)
        if low == high:
            return low
        high_peak = peak_of(high)
    straight = True
    while high - low > max(1, low // 32):
        # In turn along the line between the two, and in the middle, as the peaks may lie on a curve.
        share = (memory - low_peak) / max(1, high_peak - low_peak) if straight else 0.5
        straight = not straight
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        peak = peak_of(guess)
        if peak <= memory:
            low, low_peak = guess, peak
        else:
            high, high_peak = guess, peak
    return low
