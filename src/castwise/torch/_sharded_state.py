"""States of sharded models: whole ones from shards, and shards from whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ._gradients import parameters_of

if TYPE_CHECKING:
    from .amp import Amp

__all__ = ["as_sharded", "names_of", "optimizer_names", "whole"]


def whole(state: Any) -> Any:
    """A state with every DTensor as one plain tensor on the CPU. All ranks have to call it together."""
    if isinstance(state, torch.Tensor):
        return _gathered(state) if hasattr(state, "full_tensor") else state
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([whole(value) for value in state])
    return state


def _gathered(x: Any) -> torch.Tensor:
    """A DTensor whole. The 16-bit integers beside split weights travel as 32-bit ones: gloo has no others."""
    if x.dtype is torch.int16:
        return _gathered(x.to(torch.int32)).to(torch.int16)
    found: torch.Tensor = x.full_tensor().cpu()
    return found


def as_sharded(data: dict[str, Any], amp: Amp) -> dict[str, Any]:
    """The parts of a file of `Amp.save` as this rank's shards. Needs no communication."""
    places = {**dict(amp.model.named_buffers()), **dict(amp.model.named_parameters(remove_duplicate=False))}
    model = {name: _sharded(value, places.get(name)) for name, value in data["model"].items()}
    optimizer = dict(data["optimizer"])
    stepped = parameters_of([amp.optimizer])
    optimizer["state"] = {
        place: {key: _sharded(value, stepped[place]) for key, value in state.items()}
        for place, state in data["optimizer"]["state"].items()
    }
    weights = dict(data["amp"]["weights"])
    weights["kept"] = [_sharded(v, k.low) for v, k in zip(weights["kept"], amp._wide.kept, strict=False)]
    return {**data, "model": model, "optimizer": optimizer, "amp": {**data["amp"], "weights": weights}}


def _sharded(value: Any, like: Any) -> Any:
    """A whole tensor as a DTensor where what it belongs to is one of its shape."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None or not isinstance(value, torch.Tensor) or value.shape != like.shape or hasattr(value, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), mesh, like.placements, src_data_rank=None)


def names_of(amp: Amp) -> dict[int, str]:
    """The names of a model's parameters, by their ids."""
    return {id(p): name for name, p in amp.model.named_parameters()}


def optimizer_names(amp: Amp) -> list[str]:
    """A name for each parameter that the optimizer steps, in its order: the model's, where it is one of the model's."""
    known = names_of(amp)
    names: list[str] = []
    for place, p in enumerate(parameters_of([amp.optimizer])):
        kept = amp._wide.kept_for(p)
        names.append(known.get(id(p if kept is None else kept.low), f"optimizer.{place}"))
    return names
