"""Where a study keeps what it has done, so that it can be killed at any moment and go on.

    OUT/results.json policy.toml report.html      written when the study is complete
    OUT/state/fp16.seed3.json                     one file per finished run
    OUT/state/running.bin                         the run in progress: its records and the state to continue from
    OUT/state/fp16.last.bin                       the last state of an arm's first seed, to look for guilty layers in
    OUT/state/lock                                held while a study writes here, so that no second one does

Every file replaces its predecessor in one step, so a reader never meets half a file. ``running.bin`` holds the records
and the training state of the same moment in one file: were they two, a kill between them could tear them apart.

A run is known by a fingerprint of everything that decides its numbers. A study that is resumed with more seeds or
another arm keeps what it has; with other steps, another task file or another policy it says what changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from castwise._files import write_bytes, write_text
from castwise.errors import StudyError
from castwise.study.records import RunRecord, from_json, to_json

__all__ = ["RESULTS", "Store"]

_log = logging.getLogger("castwise.study")

RESULTS = "results.json"
_STATE = "state"
_RUNNING = "running.bin"
_SETTINGS = "settings.json"
_LOCK = "lock"
_KEEP = "keep_state"
_HEADER = struct.Struct("<QI")  # bytes of the records that follow; CRC-32 of these and the state


@dataclass(frozen=True, slots=True)
class Store:
    """The folder of one study."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / _STATE

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other studies out of the folder for as long as the body runs. A lock does not outlive its process.

        Raises:
            StudyError: another study is writing here.
        """
        try:
            self.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StudyError(
                f"The folder {self.root} cannot be made ({error.strerror}). Name another with --out."
            ) from error
        with (self.state / _LOCK).open("ab") as file:
            try:
                _lock(file.fileno())
            except BlockingIOError as error:
                raise StudyError(
                    f"Another study is writing to {self.root} now. Wait until it ends, or name another --out."
                ) from error
            except OSError as error:  # some network file systems have no locks
                _log.info("%s cannot be locked (%s): do not run a second study in it", self.root, error)
            yield

    def begin(self, settings: Mapping[str, object], *, resume: bool) -> None:
        """Make the folder ready.

        Args:
            settings: what must stay the same from one part of a study to the next, as JSON values.
            resume: keep what is there. Without it, a complete study is replaced, and an interrupted one refused; one
                that has no interval yet (its task raised) is always replaced.

        Raises:
            StudyError: an interrupted study is there and ``resume`` is off, or its settings differ from ``settings``.
        """
        known = self._known_settings()
        if known is not None and resume:
            self._settle()
        if known is None or self._is_empty() or (not resume and (self.root / RESULTS).exists()):
            self._clear()
            write_text(self.state / _SETTINGS, json.dumps(settings, indent=1) + "\n")
            return
        if not resume:
            raise StudyError(
                f"{self.root} holds a study that was interrupted. Add --resume to go on with it, name another "
                f"--out, or delete the folder."
            )
        changed = [key for key in {**known, **settings} if known.get(key) != settings.get(key)]
        if changed:
            key = changed[0]
            raise StudyError(
                f"{self.root} holds a study with {key} = {known.get(key)!r}, and this one has "
                f"{settings.get(key)!r}, so their "
                f"numbers do not belong together. Use the same {key}, name another --out, or delete the folder."
            )

    def finished(self, arm: str, seed: int) -> RunRecord | None:
        """The record of a finished run, or None."""
        path = self._run_path(arm, seed)
        return self._read_record(path.read_bytes(), path) if path.exists() else None

    def finish(self, record: RunRecord, *, keep_state: bool) -> None:
        """Keep a finished run. Its training state becomes the arm's last state, or is dropped."""
        text = to_json(record) | {_KEEP: keep_state}
        write_text(self._run_path(record.arm, record.seed), json.dumps(text) + "\n")
        self._settle()

    def last_state(self, arm: str) -> bytes | None:
        """The last good training state of the arm's first seed; None where it never reached one."""
        path = self._last_path(arm)
        return _split(path)[1] if path.exists() else None

    def _settle(self) -> None:
        """Move or drop the training state of a run that is finished; also where a kill came between the two steps."""
        running = self.state / _RUNNING
        if not running.exists():
            return
        record = self._read_record(_split(running)[0], running)
        done = self._run_path(record.arm, record.seed)
        if not done.exists():
            return
        if json.loads(done.read_bytes()).get(_KEEP):
            running.replace(self._last_path(record.arm))
        else:
            running.unlink()

    def checkpoint(self, record: RunRecord, state: bytes) -> None:
        """Keep the run in progress, in one step."""
        header = json.dumps(to_json(record)).encode()
        checksum = zlib.crc32(state, zlib.crc32(header))
        write_bytes(self.state / _RUNNING, _HEADER.pack(len(header), checksum) + header + state)

    def running(self, arm: str, seed: int) -> tuple[RunRecord, bytes] | None:
        """The records and the training state of this run, where it was the one in progress."""
        path = self.state / _RUNNING
        if not path.exists():
            return None
        header, state = _split(path)
        record = self._read_record(header, path)
        return (record, state) if (record.arm, record.seed) == (arm, seed) else None

    def _last_path(self, arm: str) -> Path:
        return self.state / f"{quote(arm, safe='+')}.last.bin"

    def _run_path(self, arm: str, seed: int) -> Path:
        return self.state / f"{quote(arm, safe='+')}.seed{seed}.json"

    def _read_record(self, data: bytes, path: Path) -> RunRecord:
        try:
            return from_json(json.loads(data))
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from error

    def _known_settings(self) -> dict[str, object] | None:
        path = self.state / _SETTINGS
        try:
            known: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StudyError(f"{path} is damaged ({error}). Delete the folder {self.state} and start again.") from error
        return known

    def _is_empty(self) -> bool:
        return not any(path.name != _SETTINGS for path in self.state.glob("*.json")) and not any(
            self.state.glob("*.bin")
        )

    def _clear(self) -> None:
        """Remove what an earlier study left, and nothing else: the user may keep other files in the folder."""
        (self.root / RESULTS).unlink(missing_ok=True)
        if self.state.is_dir():
            # The settings last: a kill in between leaves a study that is still seen as one.
            for path in sorted(self.state.iterdir(), key=lambda path: path.name == _SETTINGS):
                if path.suffix in (".json", ".bin"):
                    path.unlink()


def _split(path: Path) -> tuple[bytes, bytes]:
    """The header and the training state of a checkpoint file."""
    data = path.read_bytes()
    try:
        length, checksum = _HEADER.unpack_from(data)
    except struct.error as error:
        raise _damaged(path, error) from error
    header, state = data[_HEADER.size : _HEADER.size + length], data[_HEADER.size + length :]
    if zlib.crc32(state, zlib.crc32(header)) != checksum:
        raise _damaged(path, "its checksum is wrong")
    return header, state


def _damaged(path: Path, why: object) -> StudyError:
    return StudyError(
        f"{path} is not a run that castwise wrote, or it is damaged ({why}). "
        f"Delete it and resume: the run is made again."
    )


def _lock(handle: int) -> None:
    """Take an exclusive lock, or raise ``BlockingIOError`` where another process has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except PermissionError as error:
            raise BlockingIOError(*error.args) from error
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
