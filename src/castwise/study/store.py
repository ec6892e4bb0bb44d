"""Where a study keeps what it has done, so that it can be killed at any moment and go on.

    OUT/results.json policy.toml report.html      written when the study is complete
    OUT/state/fp16.seed3.json                     one file per finished run
    OUT/state/running.bin                         the run in progress: its records and the state to continue from
    OUT/state/fp16.last.bin                       the last state of an arm's first seed, to look for guilty layers in

Every file replaces its predecessor in one step, so a reader never meets half a file. ``running.bin`` holds the records
and the training state of the same moment in one file: were they two, a kill between them could tear them apart.

A run is known by a fingerprint of everything that decides its numbers. A study that is resumed with more seeds or
another arm keeps what it has; with other steps, another task file or another policy it says what changed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from castwise._files import write_bytes, write_text
from castwise.errors import StudyError
from castwise.study.records import RunRecord, from_json, to_json

__all__ = ["RESULTS", "Store"]

RESULTS = "results.json"
_STATE = "state"
_RUNNING = "running.bin"
_SETTINGS = "settings.json"
_KEEP = "keep_state"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Store:
    """The folder of one study."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / _STATE

    def begin(self, settings: Mapping[str, object], *, resume: bool) -> None:
        """Make the folder ready.

        Args:
            settings: what must stay the same from one part of a study to the next, as JSON values.
            resume: keep what is there. Without it, a complete study is replaced, and an interrupted one refused.

        Raises:
            StudyError: an interrupted study is there and ``resume`` is off, or its settings differ from ``settings``.
        """
        known = self._known_settings()
        if known is not None and resume:
            self._settle()
        if known is None or (not resume and (self.root / RESULTS).exists()):
            self._clear()
            write_text(self.state / _SETTINGS, json.dumps(settings, indent=1) + "\n")
            return
        if not resume:
            raise StudyError(
                f"{self.root} holds a study that was interrupted. Add --resume to go on with it, or name another --out."
            )
        changed = [key for key in {**known, **settings} if known.get(key) != settings.get(key)]
        if changed:
            key = changed[0]
            raise StudyError(
                f"{self.root} holds a study with {key} = {known.get(key)!r}, and this one has "
                f"{settings.get(key)!r}, so their "
                f"numbers do not belong together. Use the same {key}, or name another --out."
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
        return _split(path.read_bytes())[1] if path.exists() else None

    def _settle(self) -> None:
        """Move or drop the training state of a run that is finished; also where a kill came between the two steps."""
        running = self.state / _RUNNING
        if not running.exists():
            return
        record = self._read_record(_split(running.read_bytes())[0], running)
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
        write_bytes(self.state / _RUNNING, _LENGTH.pack(len(header)) + header + state)

    def running(self, arm: str, seed: int) -> tuple[RunRecord, bytes] | None:
        """The records and the training state of this run, where it was the one in progress."""
        path = self.state / _RUNNING
        if not path.exists():
            return None
        header, state = _split(path.read_bytes())
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
            raise StudyError(
                f"{path} is not a run that castwise wrote ({error!r}). Delete it and resume: the run is made again."
            ) from error

    def _known_settings(self) -> dict[str, object] | None:
        path = self.state / _SETTINGS
        try:
            known: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StudyError(f"{path} is damaged ({error}). Delete the folder {self.state} and start again.") from error
        return known

    def _clear(self) -> None:
        """Remove what an earlier study left, and nothing else: the user may keep other files in the folder."""
        (self.root / RESULTS).unlink(missing_ok=True)
        if self.state.is_dir():
            # The settings last: a kill in between leaves a study that is still seen as one.
            for path in sorted(self.state.iterdir(), key=lambda path: path.name == _SETTINGS):
                if path.suffix in (".json", ".bin"):
                    path.unlink()


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The header and the training state of a checkpoint file."""
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    return data[_LENGTH.size : end], data[end:]
