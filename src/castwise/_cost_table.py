"""Measured times of ops and casts, kept on disk so that each is measured once per machine.

A time is looked up by everything it depends on: the op and its attributes, the shapes it reads and writes, the format,
whether a backward pass is included, the device, and the versions of the libraries whose kernels run. After an update
the old times are simply no longer found.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from castwise import _files
from castwise.errors import PlanError

if TYPE_CHECKING:
    from castwise.graph import Graph

__all__ = ["MeasuredCosts", "cast_key", "op_key"]

log = logging.getLogger("castwise.cost")

_SCHEMA_VERSION = 1


def op_key(graph: Graph, position: int, fmt: str, device: str, versions: Mapping[str, str]) -> str:
    """The name under which the time of op number ``position`` of ``graph``, computed in ``fmt``, is kept."""
    op = graph.ops[position]
    described = [f"{op.name}[{op.attributes}]" if op.attributes else op.name]
    for tensors in (op.inputs, op.outputs):
        shown = (graph.tensors[tensor] for tensor in tensors)
        described.append(",".join(f"{_shape(t.shape)}{'' if t.floating else ':' + t.format}" for t in shown))
    gradients = "".join("g" if graph.tensors[tensor].requires_grad else "-" for tensor in op.inputs)
    return _key(" ".join(described), fmt, f"train {gradients}" if graph.training else "forward", device, versions)


def cast_key(shape: tuple[int, ...], source: str, target: str, device: str, versions: Mapping[str, str]) -> str:
    """The name under which the time of one cast of a tensor of ``shape`` is kept. Its forward only."""
    return _key(f"cast {_shape(shape)}", f"{source}->{target}", "forward", device, versions)


def _key(what: str, fmt: str, phase: str, device: str, versions: Mapping[str, str]) -> str:
    libraries = " ".join(f"{name}={version}" for name, version in sorted(versions.items()))
    return " | ".join([what, fmt, phase, device, libraries])


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


class MeasuredCosts:
    """Seconds by key (see :func:`op_key`, :func:`cast_key`), in memory and, where a path is given, on disk.

    >>> table = MeasuredCosts()
    >>> table.put("cast 8x8 | fp32->bf16 | forward | cpu | torch=2.13", 1.5e-6)
    >>> len(table)
    1
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Start from the times in the file at ``path``, where there is one. One that cannot be read is reported."""
        self._path = Path(path) if path is not None else None
        self._seconds: dict[str, float] = _read(self._path) if self._path is not None else {}
        self._unsaved = False

    def __len__(self) -> int:
        return len(self._seconds)

    def __iter__(self) -> Iterator[str]:
        return iter(self._seconds)

    def get(self, key: str) -> float | None:
        """The time kept under ``key`` in seconds, or None."""
        return self._seconds.get(key)

    def put(self, key: str, seconds: float) -> None:
        """Keep a time. Raises PlanError where it is not a positive, finite number of seconds."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise PlanError(f"A measured time of {seconds!r} s for {key!r} makes no sense. Measure it again.")
        self._seconds[key] = float(seconds)
        self._unsaved = True

    def save(self) -> Path:
        """Write all times to the table's file, atomically, and return its path.

        Times that another process has written there in the meantime are kept.
        """
        if self._path is None:
            raise PlanError("This table of measured costs has no file. Make it with MeasuredCosts(path).")
        merged = {**_read(self._path), **self._seconds}
        text = json.dumps({"schema_version": _SCHEMA_VERSION, "seconds": merged}, indent=1, sort_keys=True)
        _files.write_text(self._path, text + "\n")
        self._unsaved = False
        return self._path

    def keep(self) -> None:
        """Save what is new, where the table has a file; one that cannot be written is reported, and no error."""
        if self._path is None or not self._unsaved:
            return
        try:
            self.save()
        except OSError as error:
            log.info("measured times are not kept: %s", error)


def _read(path: Path) -> dict[str, float]:
    """The times in a file. No file, none; an unreadable one is reported and its times are measured afresh."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema_version"] != _SCHEMA_VERSION:
            log.warning("%s was written by another version of Castwise: costs are measured again.", path)
            return {}
        return {str(key): float(seconds) for key, seconds in data["seconds"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is no table of measured costs (%s): costs are measured again.", path, error)
        return {}
