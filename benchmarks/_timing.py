"""Timing that a busy machine cannot easily fool: alternating runs of all candidates, medians, a fixed allocator."""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# glibc gives large blocks back to the system and maps them anew; how often depends on what ran before. Held fixed.
_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "2000000000"}


def fix_allocator() -> None:
    """Start this script again with the allocator's settings fixed, unless they are."""
    if any(os.environ.get(key) != value for key, value in _ALLOCATOR.items()):
        os.environ.update(_ALLOCATOR)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def alternate(
    candidates: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    synchronize: Callable[[], None] = lambda: None,
    warm_up: int = 2,
    most: int = 2000,
) -> dict[str, float]:
    """Median seconds of each candidate, run in turn for about `seconds` in all, at least 3 times each."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(warm_up):
        for run in candidates.values():
            run()
    synchronize()
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or (time.perf_counter() < end and rounds < most):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            synchronize()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


@dataclass(frozen=True)
class Timing:
    """A candidate's medians over all rounds."""

    seconds: float
    faults: float
    """Page faults of this process in one run: where they differ, the allocator and not the kernels are compared."""


def rounds_of(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    seconds: float = 600.0,
    synchronize: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Timing], int]:
    """Run all candidates in turn, ``rounds`` times after two to warm up, and say how often it was.

    It ends early after ``seconds``, but not before 3 rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    faults: dict[str, list[int]] = {name: [] for name in candidates}
    for run in candidates.values():
        run(), run()
    synchronize()
    end = time.perf_counter() + seconds
    done = 0
    while done < rounds and (done < 3 or time.perf_counter() < end):
        for name, run in candidates.items():
            before = resource.getrusage(resource.RUSAGE_SELF)
            start = time.perf_counter()
            run()
            synchronize()
            times[name].append(time.perf_counter() - start)
            after = resource.getrusage(resource.RUSAGE_SELF)
            faults[name].append(after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt)
        done += 1
    found = {name: Timing(statistics.median(times[name]), statistics.median(faults[name])) for name in candidates}
    return found, done


def per_call(candidates: Mapping[str, Callable[[], object]], *, calls: int = 300, rounds: int = 9) -> dict[str, float]:
    """Median seconds per call of things too short to time one by one."""

    def repeated(run: Callable[[], object]) -> Callable[[], None]:
        def many() -> None:
            for _ in range(calls):
                run()

        return many

    loops = {name: repeated(run) for name, run in candidates.items()}
    medians = alternate(loops, seconds=0.0, warm_up=1)
    medians = alternate(loops, seconds=1e9, warm_up=0, most=rounds) if rounds > 3 else medians
    return {name: value / calls for name, value in medians.items()}


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1 + (i == 0)) + (":" if i else "") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])
