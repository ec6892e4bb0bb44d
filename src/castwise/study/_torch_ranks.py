"""The ranks of a study of a PyTorch task: one leads, the others do the same in the same order.

Every rank holds the whole model in DistributedDataParallel and trains on its part of each batch, so that a study on
several ranks is the study of the same training, with its gradients sent between processes.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from castwise.errors import StudyError
from castwise.study import _torch_probe
from castwise.study.arms import Arm
from castwise.study.backend import Backend, Blame, Layer, Run, backend_for
from castwise.study.protocol import load_task
from castwise.study.records import Ending, Evaluation, Interval
from castwise.torch.distributed import start

__all__ = ["SharedBackend", "Wrapped", "follow", "meeting", "part_of"]


@contextlib.contextmanager
def meeting() -> Iterator[int]:
    """A process group of all ranks; this process's number in it. The first lets the others go at the end."""
    start()
    rank = dist.get_rank()
    try:
        yield rank
        if rank == 0:
            with contextlib.suppress(RuntimeError):  # the others may have ended with the error that has ended this one
                _tell("end")
    finally:
        dist.destroy_process_group()


def follow(words: Sequence[str]) -> None:
    """Do what the first rank does, until it ends."""
    from castwise.study.cli import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_known_args(words)[0]
    backend: Backend | None = None
    run: Any = None
    with contextlib.ExitStack() as session:
        while True:
            what, given = _heard()
            if what == "end":
                return
            if backend is None:
                spec = load_task(args.task)
                backend = backend_for(spec, threads=args.threads if args.threads is not None else spec.threads)
                session.enter_context(backend.session())
            if what == "start":
                run = backend.start(*given)
            elif what == "blame":
                backend.blame(*given)
            else:
                getattr(run, what)(*given)


def _tell(what: str, *given: Any) -> None:
    dist.broadcast_object_list([(what, given)], src=0, device=torch.device("cpu"))


def _heard() -> tuple[str, tuple[Any, ...]]:
    held: list[Any] = [None]
    dist.broadcast_object_list(held, src=0, device=torch.device("cpu"))
    found: tuple[str, tuple[Any, ...]] = held[0]
    return found


class SharedBackend:
    """The first rank's backend: what the study asks of it, the other ranks do too."""

    def __init__(self, own: Backend) -> None:
        self.own = own

    def settings(self) -> Mapping[str, object]:
        return {**self.own.settings(), "ranks": dist.get_world_size()}

    def session(self) -> AbstractContextManager[None]:
        return self.own.session()

    def start(self, arm: Arm, seed: int, steps: int) -> Run:
        _tell("start", arm, seed, steps)
        return SharedRun(self.own.start(arm, seed, steps))

    def layers(self) -> Sequence[Layer]:
        return self.own.layers()

    def blame(self, arm: Arm, seed: int, state: bytes | None) -> Sequence[Blame]:
        _tell("blame", arm, seed, state)
        return self.own.blame(arm, seed, state)


class SharedRun:
    """The first rank's part of one run."""

    def __init__(self, own: Run) -> None:
        self.own = own
        self.emulated = own.emulated
        self.memory = own.memory

    def evaluate(self) -> Evaluation:
        return self.own.evaluate()

    def advance(self, steps: int) -> tuple[Interval, Ending | None]:
        _tell("advance", steps)
        found = self.own.advance(steps)
        self.memory = self.own.memory
        return found

    def save(self) -> bytes:
        _tell("save")
        return self.own.save()

    def load(self, state: bytes) -> None:
        _tell("load", state)
        self.own.load(state)
        self.memory = self.own.memory


# ---- what a run does on several ranks --------------------------------------------------------------------------------


class Wrapped(nn.parallel.DistributedDataParallel):
    """A wrapper that lets a task's loss use the model's own attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def part_of(batch: Any, rank: int, ranks: int, task: str) -> tuple[Any, float]:
    """This rank's part of a batch, and what its mean loss counts in the mean of the ranks' losses.

    Tensors as long as the batch are divided; what else is in it goes to every rank.

    Raises:
        StudyError: there are fewer samples than ranks.
    """
    size = _torch_probe.batch_size(batch)
    if size < ranks:
        raise StudyError(f"Task {task!r}: a batch of {size} cannot be divided among {ranks} ranks. Make it larger.")
    start, stop = rank * size // ranks, (rank + 1) * size // ranks

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[start:stop] if value.dim() and value.shape[0] == size else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(cut, value))
        if isinstance(value, list | tuple):
            return type(value)(map(cut, value))
        if isinstance(value, Mapping):
            return {key: cut(item) for key, item in value.items()}
        return value

    return cut(batch), (stop - start) * ranks / size


def mean_of(losses: Tensor) -> Tensor:
    """The mean over the ranks, of a vector of losses."""
    losses = losses.double()
    dist.all_reduce(losses)
    return losses / dist.get_world_size()


def all_of(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
