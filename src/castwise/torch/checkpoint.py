"""Checkpoints of an `Amp`: everything that decides how training goes on, as a state and as a file.

    amp.save("run.pt")      # model, optimizer, scheduler, loss scale, guard, random states: atomically
    amp.load("run.pt")      # and the run goes on as if it had never stopped

A file that is being written when the machine dies is not there; the one before it is whole.

A model on several ranks is written whole by the first of them, and read by each as it is sharded there. Models too
large for that have sharded checkpoints: see `castwise.torch.distributed`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from castwise._files import write_bytes
from castwise.errors import PolicyError
from castwise.scaling import ScaleState, initial_state

from ._sharded_state import as_sharded, whole
from .attribution_capture import generators, restore_generators

if TYPE_CHECKING:
    from .amp import Amp

__all__ = ["load", "load_state", "save", "state_of"]

_VERSION = 2
_KNOWN = (1, _VERSION)  # 1 had no guard and no random states
_MEANT = "Give a state of Amp.state_dict() or torch.amp.GradScaler.state_dict()"


def state_of(amp: Amp) -> dict[str, Any]:
    """See `Amp.state_dict`."""
    gradients = [p.grad for p in amp._wide.parameters()] if amp._begun else []
    return {
        "version": _VERSION,
        "policy": amp._asked.to_toml(),
        "scaling": amp.scale_state.to_dict(),
        "micro_step": amp._micro,
        "gradients": [None if g is None else g.detach().clone() for g in gradients],
        "weights": amp._wide.state_dict(),
        "guard": amp._guard.state_dict() if amp._guard is not None else None,
        "random": generators(),
    }


def load_state(amp: Amp, state: dict[str, Any]) -> None:
    """See `Amp.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise PolicyError(f"Amp.load_state_dict: this is a {type(state).__name__}, not a state. {_MEANT}.")
    if "scale" in state and "_growth_tracker" in state:
        scaling = _from_grad_scaler(amp, state)
        micro, gradients = 0, []
        amp._wide.reload()
    else:
        if state.get("version") not in _KNOWN:
            raise PolicyError(
                f"Amp.load_state_dict: version {state.get('version')!r} is not known. {_MEANT}, or update Castwise if "
                "a newer one saved it."
            )
        missing = [key for key in ("scaling", "micro_step", "gradients", "weights") if key not in state]
        if missing:
            raise PolicyError(f"Amp.load_state_dict: the state lacks {', '.join(missing)}. {_MEANT}.")
        scaling = ScaleState.from_dict(state["scaling"])
        micro, gradients = int(state["micro_step"]), state["gradients"]
        _check_gradients(amp, micro, gradients)
        amp._wide.load_state_dict(state["weights"])
    amp._forget_gradients()
    for p, gradient in zip(amp._wide.parameters(), gradients, strict=False):
        p.grad = None if gradient is None else gradient.to(p.device, copy=True)
    amp._state, amp._micro, amp._begun = scaling, micro, bool(gradients)
    if amp._on_device is not None:
        amp._on_device.set(scaling)
    amp._cache.refresh()
    if amp._guard is not None and state.get("guard") is not None:
        amp._guard.load_state_dict(state["guard"])
    if state.get("random") is not None:
        restore_generators(state["random"])


def _from_grad_scaler(amp: Amp, state: dict[str, Any]) -> ScaleState:
    config, scale, good = amp._config, state["scale"], state["_growth_tracker"]
    if not isinstance(scale, int | float) or not scale > 0 or not isinstance(good, int) or good < 0:
        raise PolicyError(
            f"Amp.load_state_dict: no GradScaler has a scale of {scale!r} and a growth tracker of {good!r}. {_MEANT}."
        )
    bounded = min(max(float(scale), config.min_scale), config.max_scale)
    return replace(initial_state(config), scale=bounded if config.enabled else 1.0, good_steps=good)


def _check_gradients(amp: Amp, micro: int, gradients: list[torch.Tensor | None]) -> None:
    if micro and micro >= amp.accumulate:
        raise PolicyError(
            f"Amp.load_state_dict: {micro} micro-batches were accumulated when it was saved, and accumulate is "
            f"{amp.accumulate} here. Give Amp the same accumulate."
        )
    shapes = [p.shape for p in amp._wide.parameters()]
    if gradients and (
        len(shapes) != len(gradients)
        or any(g is not None and g.shape != shape for g, shape in zip(gradients, shapes, strict=True))
    ):
        raise PolicyError("Amp.load_state_dict: the saved gradients belong to a model with other parameters.")


def save(amp: Amp, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> Path:
    """See `Amp.save`."""
    if amp._ranks is not None:
        refuse_begun(amp)
    scheduler = amp.scheduler.state_dict() if amp.scheduler is not None else None
    state = {
        "model": amp.model.state_dict(),
        "buffers": dict(amp.model.named_buffers()),  # those that state_dict leaves out, too
        "optimizer": amp.optimizer.state_dict(),
        "scheduler": scheduler,
        "amp": state_of(amp),
        "extra": extra or {},
    }
    if amp._ranks is None:
        return _write(state, path)
    state = whole(state)
    if amp._ranks.rank == 0:
        _write(state, path)
    amp._ranks.barrier()
    return Path(path)


def _write(state: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return write_bytes(path, buffer.getvalue())


def refuse_begun(amp: Amp) -> None:
    """Raise where micro-batches have accumulated: their gradients are on their ranks, and no two are alike."""
    if amp._begun:
        raise PolicyError(
            "Amp.save: micro-batches have accumulated, and each rank holds gradients of its own. Save after a step."
        )


def load(amp: Amp, path: str | os.PathLike[str]) -> dict[str, Any]:
    """See `Amp.load`."""
    # weights_only: a checkpoint must not be able to run code.
    data = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(data, dict) or "amp" not in data:
        raise PolicyError(f"{path}: this is no file of Amp.save. Load other checkpoints' parts by load_state_dict.")
    if amp._ranks is not None:
        data = as_sharded(data, amp)
    amp.model.load_state_dict(data["model"])
    with torch.no_grad():
        for name, buffer in amp.model.named_buffers():
            buffer.copy_(data["buffers"][name])
    amp.optimizer.load_state_dict(data["optimizer"])
    if amp.scheduler is not None and data["scheduler"] is not None:
        amp.scheduler.load_state_dict(data["scheduler"])
    load_state(amp, data["amp"])
    extra: dict[str, Any] = data["extra"]
    return extra
