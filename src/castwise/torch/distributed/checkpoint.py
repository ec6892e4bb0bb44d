"""Sharded checkpoints of an `Amp`, written by all ranks at once and read by any number of them.

    distributed.save(amp, "checkpoints", extra={"epoch": 3})    # on every rank
    extra = distributed.load(amp, "checkpoints")                # None: there is none yet

Each checkpoint is a folder of its own, named after the step, in the format of `torch.distributed.checkpoint`. It
becomes visible under its name when all of it is there: whichever rank dies at whichever moment, the newest one is
whole, and a run that `torchrun` starts again goes on from it. Optimizer state is found by names of parameters, not by
places.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from castwise.errors import PolicyError

from .. import checkpoint as files
from .._sharded_state import optimizer_names
from ..attribution_capture import generators, restore_generators

if TYPE_CHECKING:
    from ..amp import Amp

__all__ = ["load", "save"]

_PREFIX = "step-"
_UNFINISHED = "unfinished-"
_PLAIN = "plain"
_METADATA = ".metadata"  # torch.distributed.checkpoint writes it last


def save(amp: Amp, folder: str | os.PathLike[str], extra: dict[str, Any] | None = None, *, keep: int = 2) -> Path:
    """Write a checkpoint into `folder`. Every rank calls it, with the same folder, which all of them see.

    Args:
        amp: at the end of a step.
        folder: of all checkpoints of a run. It is made where it is missing.
        extra: what else the program needs to go on: tensors and plain values. The first rank's is kept.
        keep: how many checkpoints stay; older ones are removed.

    Returns:
        The checkpoint's own folder.

    Raises:
        PolicyError: micro-batches have accumulated.
    """
    from torch.distributed.checkpoint.state_dict_saver import save as write

    if keep < 1:
        raise PolicyError(f"keep: {keep!r} must be 1 or more")
    files.refuse_begun(amp)
    ranks, root = amp._ranks, Path(folder)
    path = root / f"{_PREFIX}{amp.scale_state.steps:09d}"
    partial = root / f"{_UNFINISHED}{path.name}"
    if ranks is None or ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was cut off here
        partial.mkdir(parents=True)
    if ranks is not None:
        ranks.barrier()
    state = {key: _to_write(value) for key, value in _tensors(amp).items()}
    rank, size = (ranks.rank, ranks.size) if ranks is not None else (0, 1)
    state[_PLAIN] = _packed(_plain(amp, extra or {}, size))
    state[f"random/{rank}"] = _packed(generators())
    with _alone_is_fine():
        write(state, checkpoint_id=partial, process_group=_group(amp), no_dist=ranks is None)
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        for old in _complete(root)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    if ranks is not None:
        ranks.barrier()
    return path


def load(amp: Amp, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Go on from the newest whole checkpoint in `folder` (or from one checkpoint's own folder). Every rank calls it.

    The model may be sharded in another way, and among another number of ranks, than when it was saved. On the same
    number, random numbers go on where they were.

    Returns:
        The `extra` of `save`; None, and nothing is changed, where there is no checkpoint yet.

    Raises:
        PolicyError: the checkpoint belongs to another model, optimizer or mode of weights.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as read

    path = _chosen(amp, Path(folder))
    if path is None:
        return None
    known = FileSystemReader(path).read_metadata().state_dict_metadata
    plain = cast(dict[str, Any], _read_plain(path, known, _PLAIN))
    _check(amp, plain, known, path)
    target = _tensors(amp, known)
    missing = sorted(set(target) - set(known))
    if missing:
        raise PolicyError(f"{path} has no {missing[0]}: it belongs to another model or optimizer.")
    with _alone_is_fine():
        read(target, checkpoint_id=path, process_group=_group(amp), no_dist=amp._ranks is None)
    _take(amp, target, plain, known)
    rank = amp._ranks.rank if amp._ranks is not None else 0
    _restore_random(_read_plain(path, known, f"random/{rank % plain['ranks']}"), rank, plain["ranks"])
    extra: dict[str, Any] = plain["extra"]
    return extra


# ---- what is saved ---------------------------------------------------------------------------------------------------


def _tensors(amp: Amp, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """All tensors, by key. With what a checkpoint is `known` to hold: room for those of the optimizer's state."""
    found: dict[str, Any] = {f"model/{name}": x for name, x in amp.model.state_dict().items() if _is_tensor(x)}
    found |= {f"buffers/{name}": b for name, b in amp.model.named_buffers() if f"model/{name}" not in found}
    kept = amp._wide.state_dict()["kept"]
    names = optimizer_names(amp)
    lows = [name for name, p in zip(names, _stepped(amp), strict=True) if amp._wide.kept_for(p) is not None]
    found |= {f"weights/{name}": x for name, x in zip(lows, kept, strict=False)}
    for name, p in zip(names, _stepped(amp), strict=True):
        if known is None:
            state = amp.optimizer.state.get(p, {})
            found |= {f"optimizer/{name}/{key}": x for key, x in state.items() if _is_tensor(x)}
        else:
            start = f"optimizer/{name}/"
            found |= {key: _room(known[key], p) for key in known if key.startswith(start)}
    return found


def _plain(amp: Amp, extra: dict[str, Any], ranks: int) -> dict[str, Any]:
    """All that is no tensor of the model, its weights or the optimizer. It is the same on every rank."""
    whole = files.state_of(amp)
    weights = {key: value for key, value in whole.pop("weights").items() if key != "kept"}
    del whole["random"]
    names = optimizer_names(amp)
    others = {
        name: {key: x for key, x in amp.optimizer.state.get(p, {}).items() if not _is_tensor(x)}
        for name, p in zip(names, _stepped(amp), strict=True)
    }
    groups = [{key: x for key, x in g.items() if key != "params"} for g in amp.optimizer.state_dict()["param_groups"]]
    scheduler = amp.scheduler.state_dict() if amp.scheduler is not None else None
    return {
        "amp": whole,
        "weights": weights,
        "names": names,
        "state": others,
        "groups": groups,
        "scheduler": scheduler,
        "extra": extra,
        "ranks": ranks,
    }


def _take(amp: Amp, target: dict[str, Any], plain: dict[str, Any], known: dict[str, Any]) -> None:
    """Put what was read in force. The model's own tensors were written as they were read."""
    amp.model.load_state_dict({k.removeprefix("model/"): x for k, x in target.items() if k.startswith("model/")}, False)
    names = optimizer_names(amp)
    state: dict[int, dict[str, Any]] = {}
    for place, name in enumerate(names):
        start = f"optimizer/{name}/"
        one = {k.removeprefix(start): x for k, x in target.items() if k.startswith(start)} | plain["state"][name]
        if one:
            state[place] = one
    current = amp.optimizer.state_dict()["param_groups"]
    groups = [{**old, "params": new["params"]} for old, new in zip(plain["groups"], current, strict=True)]
    amp.optimizer.load_state_dict({"state": state, "param_groups": groups})
    if amp.scheduler is not None and plain["scheduler"] is not None:
        amp.scheduler.load_state_dict(plain["scheduler"])
    kept = [x for k, x in target.items() if k.startswith("weights/")]
    files.load_state(amp, {**plain["amp"], "weights": {**plain["weights"], "kept": kept}, "random": None})


def _check(amp: Amp, plain: dict[str, Any], known: dict[str, Any], path: Path) -> None:
    names = optimizer_names(amp)
    if sorted(names) != sorted(plain["names"]) or len(plain["groups"]) != len(amp.optimizer.param_groups):
        other = sorted(set(names) ^ set(plain["names"]))
        raise PolicyError(
            f"{path}: the optimizer that was saved steps other parameters than this one"
            + (f", {other[0]} for example." if other else ", or has them in other groups.")
        )
    if plain["weights"]["mode"] != amp._wide.mode:
        raise PolicyError(
            f'{path}: saved with weights="{plain["weights"]["mode"]}", not "{amp._wide.mode}"; use the same.'
        )
    for name, x in amp.model.state_dict().items():
        size = getattr(known.get(f"model/{name}"), "size", None)
        if _is_tensor(x) and size is not None and size != x.shape:
            raise PolicyError(f"{path}: {name} has the shape {tuple(size)} there, and {tuple(x.shape)} here.")


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _stepped(amp: Amp) -> list[torch.Tensor]:
    from .._gradients import parameters_of

    return parameters_of([amp.optimizer])


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def _to_write(x: torch.Tensor) -> torch.Tensor:
    return x.detach()


def _room(metadata: Any, p: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor of a parameter's state: sharded as the parameter is, where it has its shape."""
    dtype = metadata.properties.dtype
    if metadata.size == p.shape and p.dim():
        return torch.zeros_like(p.detach(), dtype=dtype)
    device = p.device if metadata.size.numel() > 1 else torch.device("cpu")
    return torch.zeros(metadata.size, dtype=dtype, device=device)


def _packed(value: Any) -> torch.Tensor:
    """A plain value as bytes: tensors are all that a checkpoint can hold without being able to run code."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _read_plain(path: Path, known: dict[str, Any], key: str) -> Any:
    from torch.distributed.checkpoint.state_dict_loader import load as read

    if key not in known:
        raise PolicyError(f"{path}: this is no checkpoint of castwise.torch.distributed.save; it has no {key!r}.")
    target = {key: torch.empty(known[key].size, dtype=torch.uint8)}
    with _alone_is_fine():
        read(target, checkpoint_id=path, no_dist=True)
    return torch.load(io.BytesIO(target[key].numpy().tobytes()), map_location="cpu", weights_only=True)


def _restore_random(state: Any, rank: int, saved: int) -> None:
    """Random numbers as they were; on a rank that was not there, a stream of its own that follows from them."""
    restore_generators(state)
    if rank >= saved:
        torch.manual_seed(int(torch.randint(2**62, ())) + rank)


@contextlib.contextmanager
def _alone_is_fine() -> Iterator[None]:
    """torch warns where a single process saves or loads, which is what this one means to do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


# ---- folders ---------------------------------------------------------------------------------------------------------


def _complete(root: Path) -> list[Path]:
    """The whole checkpoints in a folder, the newest last."""
    return sorted(p for p in root.glob(f"{_PREFIX}*") if (p / _METADATA).is_file())


def _chosen(amp: Amp, folder: Path) -> Path | None:
    """What to load, as the first rank sees it."""
    if (folder / _METADATA).is_file():
        found: Path | None = folder
    else:
        complete = _complete(folder)
        found = complete[-1] if complete else None
    return found if amp._ranks is None else amp._ranks.from_rank(0, found)


def _group(amp: Amp) -> dist.ProcessGroup | None:
    return amp._ranks.group if amp._ranks is not None else None
