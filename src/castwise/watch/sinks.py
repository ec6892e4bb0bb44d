"""Where records of a run go: a JSONL file, TensorBoard, or any function.

A record is a flat mapping: ``{"step": 12, "train/loss": 1.3, …}`` for metrics, ``{"step": 12, "event": "raise", …}``
for events. A sink is anything with ``write(record)``; a plain function will do. W&B and MLflow are one line each:

    castwise.torch.watch(amp, lambda r: wandb.log(r, step=r["step"]))
    castwise.torch.watch(amp, lambda r: mlflow.log_metrics(numbers(r), step=r["step"]))
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from castwise.errors import CastwiseError

__all__ = ["JsonlSink", "Record", "Sink", "TensorBoardSink", "numbers", "read_jsonl", "sink_for"]

Record = Mapping[str, Any]


@runtime_checkable
class Sink(Protocol):
    """What takes records."""

    def write(self, record: Record) -> None:
        """Take one record."""


class JsonlSink:
    """One JSON object a line. Each line is handed to the system whole, so a killed run leaves whole lines."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        self.close = weakref.finalize(self, os.close, self._file)  # callable; at the latest when the sink goes

    def write(self, record: Record) -> None:
        """Append a record. Infinities and NaN, which JSON lacks, are written as strings."""
        os.write(self._file, (json.dumps(_plain(record)) + "\n").encode())


class TensorBoardSink:
    """A TensorBoard writer: torch's ``SummaryWriter``, or anything with its ``add_scalar`` and ``add_text``."""

    def __init__(self, writer: Any) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise CastwiseError(f"TensorBoardSink: {writer!r} has no add_scalar. Give it a SummaryWriter.")
        self.writer = writer

    def write(self, record: Record) -> None:
        """Scalars for metrics, a text for an event."""
        step = int(record.get("step", 0))
        if "event" in record:
            self.writer.add_text(f"castwise/{record['event']}", str(record.get("message", "")), step)
            return
        for name, value in numbers(record).items():
            self.writer.add_scalar(name, value, step)


class _FunctionSink:
    def __init__(self, function: Callable[[Record], Any]) -> None:
        self.function = function

    def write(self, record: Record) -> None:
        self.function(record)


def sink_for(target: object) -> Sink:
    """The sink that a path, a TensorBoard writer, a function or a sink means.

    Raises:
        CastwiseError: it means none.
    """
    if isinstance(target, str | os.PathLike):
        return JsonlSink(target)
    if isinstance(target, Sink):
        return target
    if callable(getattr(target, "add_scalar", None)):
        return TensorBoardSink(target)
    if callable(target):
        return _FunctionSink(target)
    raise CastwiseError(
        f"watch: {target!r} takes no records. Give a path, a function, or an object with write(record)."
    )


def numbers(record: Record) -> dict[str, float]:
    """The numbers of a record, but for its step and time."""
    return {
        key: float(value)
        for key, value in record.items()
        if key not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
    }


def read_jsonl(path: str | os.PathLike[str], offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The records of a file from a byte on, and where the next begin. A line that is still being written waits.

    Raises:
        CastwiseError: the file cannot be read, or a line is no record.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError as error:
        raise CastwiseError(f"{path}: {error.strerror or error}. Give the file that a run writes.") from error
    whole = data[: data.rfind(b"\n") + 1]
    return list(_records(whole, path)), offset + len(whole)


def _records(data: bytes, path: object) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise CastwiseError(f"{path}: line {number} is not JSON. Is it a file of castwise.torch.watch?") from error
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int | float) or not math.isfinite(step):
            told = "it has no step" if step is None else f"its step is {step!r}"
            raise CastwiseError(f"{path}: line {number} is no record: {told}. Each record is an object with a step.")
        yield {key: _UNPLAIN.get(value, value) if isinstance(value, str) else value for key, value in record.items()}


_UNPLAIN = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
