"""Buffers as they were when they were well: a broken forward leaves NaN in running statistics, where it would stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._ranks import Ranks

__all__ = ["GoodBuffers", "Healed", "as_it_was"]

_EVERY = 1000  # steps between copies


@dataclass(frozen=True, slots=True, eq=False)
class Healed:
    """A buffer that was mended, and what it held before."""

    name: str
    buffer: torch.Tensor
    bad: torch.Tensor


class GoodBuffers:
    """Copies of a model's floating buffers, made every 1,000 steps while they are finite."""

    def __init__(self, model: nn.Module, ranks: Ranks | None) -> None:
        self.model = model
        self._ranks = ranks
        self._kept: dict[str, torch.Tensor] = {}
        self._of = -1  # the step at whose beginning they were like this

    def keep(self, step: int) -> None:
        """A step begins: copy the buffers where it is time to."""
        if step % _EVERY or self._of == step:
            return
        self._of = step
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                if b.is_floating_point() and b.layout is torch.strided and bool(b.isfinite().all()):
                    self._kept[name] = b.detach().clone()

    def heal(self) -> list[Healed]:
        """Put back the last good copies of buffers that are infinite or NaN, on any rank."""
        healed = []
        bad = [n for n, b in self.model.named_buffers() if n in self._kept and not bool(b.isfinite().all())]
        if self._ranks is not None:
            bad = [name for names in self._ranks.gather(bad) for name in names]
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                kept = self._kept.get(name)
                if name in bad and kept is not None and kept.shape == b.shape:
                    healed.append(Healed(name, b, b.clone()))
                    b.copy_(kept)
        return healed

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"buffers": {name: b.clone() for name, b in self._kept.items()}, "buffers_of": self._of}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """What `state_dict` gave, at a step."""
        places = dict(self.model.named_buffers())
        self._kept = {n: b.to(places[n].device, copy=True) for n, b in state["buffers"].items() if n in places}
        self._of = int(state.get("buffers_of", step))


@contextlib.contextmanager
def as_it_was(healed: Sequence[Healed]) -> Iterator[None]:
    """Inside, buffers that were mended are as bad as they were."""
    mended = [(one, one.buffer.detach().clone()) for one in healed]
    with torch.no_grad():
        for one in healed:
            one.buffer.copy_(one.bad)
    try:
        yield
    finally:
        with torch.no_grad():
            for one, good in mended:
                one.buffer.copy_(good)
