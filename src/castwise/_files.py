"""Writing files so that a reader, or a run killed half way, never meets half a file.

The text goes to a temporary file in the same folder, is flushed to the disk, and replaces the target in one step:
``os.replace`` is atomic within a file system on POSIX and Windows. The old file stays until the new one is whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

__all__ = ["write_bytes", "write_text"]


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write ``text`` to ``path`` as UTF-8, atomically, with line ends as given; missing parent folders are made.

    Returns:
        The path written, as a ``Path``.

    Raises:
        OSError: the folder cannot be made or written; the old file, if any, is untouched.
    """
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write ``data`` to ``path`` atomically; missing parent folders are made.

    A symbolic link is followed: the file it points to is replaced, the link stays. A file that was there keeps its
    permissions.

    Returns:
        The path written, as a ``Path``.

    Raises:
        OSError: the folder cannot be made or written; the old file, if any, is untouched.
    """
    path = Path(path)
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile.mkstemp: its files are private (0600), and the umask that others get cannot be read without setting
    # it for the whole process.
    temporary = target.with_name(f".castwise-{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, target.stat().st_mode & 0o7777)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return path
