"""Recurrent layers in an emulated format: the state is rounded at every time step.

`torch.lstm`, `gru`, `rnn_tanh` and `rnn_relu` are one call for all steps. Run as one float32 call they would carry a
float32 state from step to step, which no 16-bit kernel does: those store the state in 16 bits between steps, and over
a long sequence that rounding is most of the difference. So where a format is emulated the steps are run here, with
what a kernel keeps between steps (hidden and cell state) rounded to the format, and everything inside one step
(products, gates) in float32.

Dropout between layers draws its own random numbers, as any other kernel would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from .emulation import Arithmetic

State = tuple[torch.Tensor, ...]
# What a step makes of the product with the input, the state and the product with the hidden state.
Cell = Callable[[torch.Tensor, State, torch.Tensor], State]


def stepwise(name: str, arithmetic: Arithmetic) -> Callable[..., Any] | None:
    """What to run instead of a recurrent op of torch, with its arguments; None for an op that has no time steps."""
    return functools.partial(_run, _CELLS[name], arithmetic) if name in _CELLS else None


def _run(cell: Cell, arithmetic: Arithmetic, *args: Any) -> Any:
    """torch's two forms: (input, hx, params, ..., batch_first), or (data, batch_sizes, hx, params, ...) if packed."""
    packed = not isinstance(args[3], bool)
    if packed:
        data, batch_sizes, hx, params, biases, layers, dropout, train, bidirectional = args
        sizes = [int(n) for n in batch_sizes]
    else:
        data, hx, params, biases, layers, dropout, train, bidirectional, batch_first = args
        data = data.transpose(0, 1) if batch_first else data
        sizes = [data.shape[1]] * data.shape[0]
        data = data.reshape(-1, data.shape[-1])
    states: State = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
    directions = 2 if bidirectional else 1
    per_direction = len(params) // (layers * directions)
    finals: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = params[number * per_direction : (number + 1) * per_direction]
            start = tuple(s[number] for s in states)
            output, final = _direction(cell, arithmetic, data, sizes, start, weights, biases, bool(direction))
            outputs.append(output)
            finals.append(final)
        data = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if train and dropout and layer < layers - 1:
            data = F.dropout(data, dropout)
    ends = tuple(torch.stack(s) for s in zip(*finals, strict=True))
    if not packed:
        data = data.reshape(len(sizes), -1, data.shape[-1]) if sizes else data
        data = data.transpose(0, 1) if batch_first else data
    return (data, *ends)


def _direction(
    cell: Cell,
    arithmetic: Arithmetic,
    data: torch.Tensor,
    sizes: list[int],
    start: State,
    weights: Sequence[torch.Tensor],
    biases: bool,
    reverse: bool,
) -> tuple[torch.Tensor, State]:
    """One layer in one direction. Sequences are sorted by length: step t has the first `sizes[t]` of them."""
    from_input = weights[0], (weights[2] if biases else None)
    products = torch.split(arithmetic.received(F.linear(arithmetic.read(data), *from_input)), sizes)
    outputs: list[torch.Tensor] = [data] * len(sizes)
    steps = range(len(sizes))[::-1] if reverse else range(len(sizes))
    live = tuple(s[: sizes[steps[0]]] for s in start)
    ended: list[State] = []
    inner = [weights[1], *(weights[3:4] if biases else ())]
    projection = weights[-1:] if len(weights) in (3, 5) else ()
    for t in steps:
        have, want = live[0].shape[0], sizes[t]
        if want < have:
            ended.append(tuple(s[want:] for s in live))
            live = tuple(s[:want] for s in live)
        elif want > have:
            live = tuple(torch.cat([s, s0[have:want]]) for s, s0 in zip(live, start, strict=True))
        from_state = arithmetic.received(F.linear(arithmetic.read(live[0]), inner[0], *inner[1:]))
        hidden, *others = cell(products[t], live, from_state)
        if projection:
            hidden = arithmetic.received(F.linear(arithmetic.read(hidden), projection[0]))
        live = tuple(arithmetic.kept(s) for s in (hidden, *others))
        outputs[t] = live[0]
    final = tuple(torch.cat(parts) for parts in zip(live, *ended[::-1], strict=True)) if ended else live
    return torch.cat(outputs), final


def _lstm(x: torch.Tensor, state: State, h: torch.Tensor) -> State:
    gates = x + h
    size = gates.shape[-1] // 4
    entry, forget, _, exit_ = gates.sigmoid().chunk(4, -1)
    cell = torch.addcmul(forget * state[1], entry, gates[..., 2 * size : 3 * size].tanh())
    return exit_ * cell.tanh(), cell


def _gru(x: torch.Tensor, state: State, h: torch.Tensor) -> State:
    size = h.shape[-1] // 3
    reset, update = (x[..., : 2 * size] + h[..., : 2 * size]).sigmoid().chunk(2, -1)
    new = torch.addcmul(x[..., 2 * size :], reset, h[..., 2 * size :]).tanh()
    return (torch.lerp(new, state[0], update),)


def _tanh(x: torch.Tensor, state: State, h: torch.Tensor) -> State:
    return ((x + h).tanh(),)


def _relu(x: torch.Tensor, state: State, h: torch.Tensor) -> State:
    return ((x + h).relu(),)


_CELLS: dict[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}
