"""A step in few passes over memory: unscaling and clipping are one division inside the update, casts follow it.

An optimizer of torch's reads and writes gradients, weights and state in passes of their own, as do unscaling, clipping
and the casts of the next forward. Here the update divides gradients as it reads them, and what has to be rounded is
rounded piece by piece: float32 values of 16-bit weights, gradients and states exist for one piece at a time.

Pieces are not small: on CPUs each operation ends in a barrier of all threads, and on a busy machine that costs more
than what the cache saves (measured by benchmarks/optimizers.py). Weights that need no working memory are not cut.

What this steps must be an exact type of `_updates.UPDATES`, without step hooks, of dense real gradients; everything
else is stepped by the optimizer itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
from torch.optim import Optimizer

from ._casts import CastCache
from ._eight_bit import BLOCK, EightBit, fits, is_eight_bit, zeros
from ._noise import round_into
from ._refresh import refreshed, to_refresh
from ._remainders import KEPT_BESIDE, narrow, widen
from ._steppable import has_step_hooks, is_dense_and_real
from ._updates import UPDATES, Piece, State, Update, nothing
from .weights import WideWeights

_CPU_PIECE = 1 << 20  # weights: 4 MiB of working memory for each of gradient, weight and moments
_DEVICE_PIECE = 1 << 26  # weights; enough that launching kernels takes no time
_WORTH = 1 << 16  # values per weight; below, what a weight costs in Python is more than a pass over it saves


def refreshes(device_type: str, weights: Sequence[torch.Tensor]) -> bool:
    """Whether a step of these float32 weights writes their kept casts too, so that the next step need not cast them."""
    return device_type == "cpu" and sum(p.numel() for p in weights) >= _WORTH * len(weights)


@dataclass(slots=True)
class _Weight:
    """A parameter with a gradient, or a part of one.

    Attributes:
        weight: the float32 values, or the 16-bit ones that stand for them together with `rest`.
        low: the 16-bit weight to round to; None for a float32 parameter.
        casts: copies in other formats that the next forward will read.
        first: the optimizer has no state of it yet.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, torch.Tensor | EightBit]
    state: State
    low: torch.Tensor | None
    rest: torch.Tensor | None
    casts: list[torch.Tensor]
    first: bool

    @property
    def state_dtype(self) -> torch.dtype:
        """What its state of the weight's shape is kept in; float32 where there is none."""
        return next((s.dtype for s in self.states.values()), torch.float32)

    def part(self, start: int, stop: int) -> _Weight:
        """The same for some values of a flat one."""
        return _Weight(
            self.weight[start:stop],
            self.gradient[start:stop],
            {name: s[start:stop] for name, s in self.states.items()},
            self.state,
            None if self.low is None else self.low[start:stop],
            None if self.rest is None else self.rest[start:stop],
            [c[start:stop] for c in self.casts],
            self.first,
        )

    def flat(self) -> _Weight:
        """The same as vectors over the same memory."""
        return _Weight(
            _flat(self.weight),
            _flat(self.gradient),
            {name: _flat(s) if isinstance(s, torch.Tensor) else s for name, s in self.states.items()},
            self.state,
            None if self.low is None else _flat(self.low),
            None if self.rest is None else _flat(self.rest),
            [_flat(c) for c in self.casts],
            self.first,
        )


class FusedStep:
    """Steps an optimizer of a known kind, weights of any mode, and refreshes kept casts.

    Args:
        optimizer: its state stays where it is, under torch's names.
        wide: the 16-bit parameters among the optimizer's.
        cache: kept casts of float32 parameters, refreshed while their weights are in the processor's cache.
        state_dtype: what state of the weights' shape is stored in; uint8 stands for `_eight_bit`. State in 16 and 8
            bits is rounded at random, with the right mean, so that a second moment does not stall.
    """

    def __init__(
        self, optimizer: Optimizer, wide: WideWeights, cache: CastCache, state_dtype: torch.dtype = torch.float32
    ) -> None:
        self.optimizer = optimizer
        self.wide = wide
        self.cache = cache
        self.state_dtype = state_dtype
        self._scratch: dict[tuple[torch.device, str], torch.Tensor] = {}
        self.pieces_at_most: int | None = None  # to count memory: all pieces take the same

    def why_not(self) -> str:
        """Why the optimizer has to step itself now; empty if it need not."""
        update = UPDATES.get(type(self.optimizer))
        if update is None:
            known = ", ".join(kind.__name__ for kind in UPDATES)
            return f"{type(self.optimizer).__name__} is not one of {known}"
        if has_step_hooks(self.optimizer):
            return "it has step hooks, or a step of its own"
        if not all(update.supports(group) for group in self.optimizer.param_groups):
            return "a group asks for another implementation (foreach, capturable, differentiable, fused=False)"
        for p in self.wide.parameters():
            if p.grad is not None and not is_dense_and_real(p, p.grad):
                return f"a parameter of shape {tuple(p.shape)} or its gradient is sparse, complex, float64 or not dense"
        return ""

    def saves_nothing(self, casts: str = "") -> str:
        """Why the optimizer's own step is as good now; empty if it is not. ``casts``: who writes kept casts anew."""
        if self.state_dtype is not torch.float32 or self.wide.kept:
            return ""
        if casts or not len(self.cache):
            return f"weights and state are float32, and {casts or 'no casts of weights are kept'}"
        parameters = [p for p in self.wide.parameters() if p.grad is not None]
        if any(p.device.type != "cpu" for p in parameters):
            return "the device's own fused kernels leave nothing to save"
        return "" if refreshes("cpu", parameters) else f"weights are small, under {_WORTH} values on average"

    @torch.no_grad()
    def step(self, divisor: float | torch.Tensor = 1.0, found_inf: torch.Tensor | None = None) -> None:
        """Update all parameters that have a gradient, by gradients divided by `divisor`.

        Gradients may be written. A true `found_inf` on the device makes the step do nothing.
        """
        update = UPDATES[type(self.optimizer)]
        stepped: list[torch.Tensor] = []
        for group in self.optimizer.param_groups:
            weights = [w for p in group["params"] if (w := self._weight(p, group, update, stepped)) is not None]
            for w in weights:
                update.count(w.state, found_inf)
            for _, alike in groupby(weights, key=lambda w: (w.weight.device, w.first, w.state_dtype)):
                for parts in islice(self._pieces(list(alike), update, divisor), self.pieces_at_most):
                    self._step_piece(update, parts, group, divisor, found_inf)
        # torch's fused updates write behind the version counter, by which kept casts know their age.
        torch.autograd.graph.increment_version(stepped)
        for p in stepped:
            refreshed(self.cache, p)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether step came first
        self._let_go()

    # ---- one parameter ----

    def _weight(
        self, p: torch.Tensor, group: dict[str, Any], update: Update, stepped: list[torch.Tensor]
    ) -> _Weight | None:
        kept = self.wide.kept_for(p)
        own = p if kept is None else kept.low
        gradient = own.grad
        if gradient is None or not own.numel():
            return None
        stepped.append(own)
        names = update.names(group)
        state = self.optimizer.state[p] if names or update.begin is not nothing else {}
        first = any(state.get(name) is None for name in names)
        update.begin(own, state, group)
        for name in names:
            state[name] = self._stored(state.get(name), own, name not in update.positive)
        if gradient.stride() != own.stride():
            gradient = torch.empty_like(own, dtype=gradient.dtype).copy_(gradient)
        values = own.detach()
        weight = values
        if kept is not None and self.wide.mode == "master":
            weight = kept.wide.detach()
        casts = to_refresh(self.cache, own)
        low, rest = (None, None) if kept is None else (values, kept.rest)
        states = {n: EightBit.of(state[n]) if is_eight_bit(state[n]) else state[n] for n in names}
        found = _Weight(weight, gradient, states, state, low, rest, casts, first)
        return found.flat() if update.elementwise else found

    def _stored(self, state: torch.Tensor | None, like: torch.Tensor, signed: bool) -> torch.Tensor:
        """State of a weight's shape, in the dtype and the order in memory that pieces need."""
        dtype = self.state_dtype
        if dtype is torch.uint8:
            if fits(like):
                return _in_eight_bits(state, like, signed)
            dtype = torch.float32
        if state is None:
            return torch.zeros_like(like, dtype=dtype, requires_grad=False)
        if state.dtype is not dtype or state.stride() != like.stride() or is_eight_bit(state):
            return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(state)
        return state

    # ---- pieces ----

    def _pieces(self, weights: list[_Weight], update: Update, divisor: float | torch.Tensor) -> Iterator[list[_Weight]]:
        """Groups of weights, or of parts of them where working memory has to be bounded."""
        if not update.elementwise:
            yield from ([w] for w in weights)
        elif not self._needs_room(weights, update, divisor):
            # Casts are written from the cache; what has none need not be cut.
            yield from (_cut(weights, _limit(weights[0].weight.device)) if any(w.casts for w in weights) else [weights])
        else:
            limit = _limit(weights[0].weight.device)
            if weights[0].state_dtype is torch.uint8:  # whole blocks, and less, as rounding takes more working memory
                limit = max(BLOCK, limit // 4 // BLOCK * BLOCK)
            yield from _cut(weights, limit)

    def _needs_room(self, weights: list[_Weight], update: Update, divisor: float | torch.Tensor) -> bool:
        scaled = isinstance(divisor, torch.Tensor) or divisor != 1.0
        if weights[0].state_dtype is not torch.float32 or (scaled and not update.divides):
            return True
        return any(w.weight.dtype is not torch.float32 or w.gradient.dtype is not torch.float32 for w in weights)

    def _step_piece(
        self,
        update: Update,
        parts: Sequence[_Weight],
        group: dict[str, Any],
        divisor: float | torch.Tensor,
        found_inf: torch.Tensor | None,
    ) -> None:
        gradients, inside = self._gradients(parts, divisor, update.divides)
        wide, weights = self._weights(parts)
        stored: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        if parts[0].state_dtype is not torch.float32:
            stored = {name: self._read(name, parts) for name in parts[0].states}
            used = {name: values for name, (_, values) in stored.items()}
        else:
            used = {name: [_tensor(w.states[name]) for w in parts] for name in parts[0].states}
        whole = [w.state for w in parts]
        update.run(Piece(weights, gradients, used, whole, group, inside, found_inf, parts[0].first))
        self._write(parts, wide, weights)
        for name, (memory, _) in stored.items():
            self._write_state(memory, [w.states[name] for w in parts], name in update.nearest)

    def _gradients(
        self, parts: Sequence[_Weight], divisor: float | torch.Tensor, divides: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Gradients in float32, copies where needed; and what the update still has to divide them by."""
        given = [w.gradient for w in parts]
        scaled = isinstance(divisor, torch.Tensor) or divisor != 1.0
        wide = all(g.dtype is torch.float32 for g in given)
        if wide and not scaled:
            return given, None
        if wide and divides:
            device = given[0].device
            return given, torch.as_tensor(divisor, dtype=torch.float32, device=device)
        memory, gradients = self._copies("gradient", given)
        if isinstance(divisor, torch.Tensor):
            memory.div_(divisor)
        elif scaled:
            memory.mul_(1.0 / divisor)
        return gradients, None

    def _weights(self, parts: Sequence[_Weight]) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The float32 values that the update is to write; first, the working memory that holds those of 16-bit ones."""
        low = [w for w in parts if w.weight.dtype is not torch.float32]
        if not low:
            return None, [w.weight for w in parts]
        memory, room = self._room("weight", [w.weight for w in low])
        for w, out in zip(low, room, strict=True):
            widen(self.wide.mode, w.weight, w.rest, out, self._spare(out))
        wide = iter(room)
        return memory, [w.weight if w.weight.dtype is torch.float32 else next(wide) for w in parts]

    def _write(self, parts: Sequence[_Weight], wide: torch.Tensor | None, weights: list[torch.Tensor]) -> None:
        """Round stepped weights to where they are kept, and write the casts that the next forward reads."""
        if self.wide.mode == "stochastic" and wide is not None:
            self._write_low(wide, [w.low for w in parts if w.low is not None], weights=True)
        for w, stepped in zip(parts, weights, strict=True):
            if w.low is not None and self.wide.mode != "stochastic":
                narrow(self.wide.mode, stepped, w.low, w.rest, room=self._spare(stepped))
            for cast in w.casts:
                cast.copy_(stepped if w.low is None else w.low)

    def _write_low(
        self, memory: torch.Tensor, targets: list[torch.Tensor], exact: bool = False, weights: bool = False
    ) -> None:
        """Round working memory into the 16-bit tensors that it stands for; to nearest if `exact`, else at random.

        It holds other numbers afterwards. NaN is looked for in weights alone: where state is NaN, they are too.
        """
        if not exact:
            round_into(targets, memory, self.wide.noise, keep_nan=weights)
            return
        parts = torch.split(memory, [t.numel() for t in targets])
        torch._foreach_copy_(targets, [p.view(t.shape) for t, p in zip(targets, parts, strict=True)])

    def _read(self, name: str, parts: Sequence[_Weight]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """State in float32, with the shapes of the weights."""
        memory, room = self._room(name, [w.weight for w in parts])
        for w, out in zip(parts, room, strict=True):
            kept = w.states[name]
            kept.read(out.view(-1)) if isinstance(kept, EightBit) else out.copy_(kept)
        return memory, room

    def _write_state(self, memory: torch.Tensor, targets: list[torch.Tensor | EightBit], exact: bool) -> None:
        if not isinstance(targets[0], EightBit):
            self._write_low(memory, [_tensor(t) for t in targets], exact)
            return
        for target, values in zip(targets, torch.split(memory, [t.numel() for t in targets]), strict=True):
            assert isinstance(target, EightBit)
            target.write(values, None if exact else self.wide.noise)

    def _copies(self, role: str, like: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        memory, room = self._room(role, like)
        torch._foreach_copy_(room, like)
        return memory, room

    def _spare(self, like: torch.Tensor) -> torch.Tensor | None:
        """Working memory for one conversion; None where it needs none."""
        return self._room("spare", [like])[1][0] if self.wide.mode in KEPT_BESIDE else None

    def _room(self, role: str, like: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """float32 working memory, and its parts of these shapes: the same for every piece, so that it stays in the
        cache.
        """
        device = like[0].device
        size = sum(t.numel() for t in like)
        memory = self._scratch.get((device, role))
        if memory is None or memory.numel() < size:
            memory = torch.empty(size, dtype=torch.float32, device=device)
            if size <= _limit(device):
                self._scratch[(device, role)] = memory
        memory = memory[:size]
        return memory, [
            m.view(t.shape) for m, t in zip(torch.split(memory, [t.numel() for t in like]), like, strict=True)
        ]

    def _let_go(self) -> None:
        """Give the working memory back: forward and backward need theirs."""
        self._scratch.clear()
        self.wide.noise.let_go()


def _limit(device: torch.device) -> int:
    return _CPU_PIECE if device.type == "cpu" else _DEVICE_PIECE


def _cut(weights: list[_Weight], limit: int) -> Iterator[list[_Weight]]:
    """Groups of flat weights of `limit` values in all, those that do not fit in parts."""
    piece: list[_Weight] = []
    room = limit
    for w in weights:
        size, start = w.weight.numel(), 0
        while start < size:
            stop = min(size, start + room)
            piece.append(w if stop - start == size else w.part(start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield piece
                piece, room = [], limit
    if piece:
        yield piece


def _in_eight_bits(state: torch.Tensor | None, like: torch.Tensor, signed: bool) -> torch.Tensor:
    if state is not None and is_eight_bit(state):
        return state
    made: torch.Tensor = zeros(like, signed)
    if state is not None:
        EightBit.of(made).write(state.to(torch.float32, copy=True).reshape(-1), None)
    return made


def _tensor(state: torch.Tensor | EightBit) -> torch.Tensor:
    assert isinstance(state, torch.Tensor)
    return state


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor in its order, as a vector."""
    x = x.detach()
    return x.view(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,))
