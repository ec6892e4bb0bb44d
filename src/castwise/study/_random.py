"""Streams of random numbers that do not disturb each other.

Data order, the model's own draws (initialisation, dropout) and evaluation each have a stream. If they shared one, an
arm whose dropout draws in another format would see other samples from there on, and the comparison with fp32 would
be of two different trainings. Python's and NumPy's generators are here; a framework with global generators of its own
adds them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from castwise.errors import StudyError
from castwise.study.calls import calling

__all__ = ["Feed", "capture", "restore", "scattered_seed", "seed_all", "seeded"]


def scattered_seed(*parts: int) -> int:
    """A seed from several small numbers, such that neighbours give unrelated streams."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_all(seed: int) -> None:
    """Seed Python and NumPy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def capture() -> dict[str, Any]:
    """The state of both generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state()}


def restore(state: dict[str, Any]) -> None:
    """Put back what ``capture`` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def seeded_by(
    capture: Callable[[], dict[str, Any]], restore: Callable[[dict[str, Any]], None], seed_all: Callable[[int], None]
) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A context that runs its body from a seed and leaves the generators that these know as they were."""

    @contextlib.contextmanager
    def seeded(seed: int) -> Iterator[None]:
        before = capture()
        seed_all(seed)
        try:
            yield
        finally:
            restore(before)

    return seeded


seeded = seeded_by(capture, restore, seed_all)


class Feed:
    """Training batches in an order that depends on the seed alone.

    Whatever ``batches`` draws, now and while it is iterated, comes from a stream of its own. An iterable that ends is
    iterated again; a generator, which cannot be, is made again.
    """

    # A framework's feed replaces these by those that know its generators too.
    capture: Callable[[], dict[str, Any]] = staticmethod(capture)
    restore: Callable[[dict[str, Any]], None] = staticmethod(restore)
    seed_all: Callable[[int], None] = staticmethod(seed_all)

    def __init__(self, batches: Callable[[int], Iterable[Any]], seed: int, *, task: str) -> None:
        self._batches = batches
        self._seed = seed
        self._task = task
        self.position = 0
        outside = self.capture()
        self.seed_all(scattered_seed(seed, 1))
        try:
            self._iterable = batches(seed)
            with calling(task, "batches"):
                self._iterator = iter(self._iterable)
            self._stream = self.capture()
        finally:
            self.restore(outside)

    def next(self) -> Any:
        """The next batch."""
        outside = self.capture()
        self.restore(self._stream)
        try:
            with calling(self._task, "batches"):
                batch = self._next()
            self._stream = self.capture()
        finally:
            self.restore(outside)
        self.position += 1
        return batch

    def skip_to(self, position: int) -> None:
        """Draw and drop batches up to ``position``.

        Replaying from the start is the one way that is right for every iterable: its shuffling may depend on the epochs
        before, and its state may be out of reach.
        """
        while self.position < position:
            self.next()

    def _next(self) -> Any:
        for fresh in (False, True):
            if fresh:
                if iter(self._iterable) is self._iterator:
                    self._iterable = self._batches(self._seed)
                self._iterator = iter(self._iterable)
            for batch in self._iterator:
                return batch
        raise StudyError(
            f"Task {self._task!r}: batches({self._seed}) gives no batch. Check that the data are not empty."
        )
