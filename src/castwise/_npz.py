"""Calibration data in ``.npz`` files, for the front ends that take such files."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["read_npz"]


def read_npz(path: Path) -> dict[str, Any]:
    """The arrays of an ``.npz`` file, by name. Raises ValueError, saying why, where it is none or damaged."""
    if path.is_file() and not zipfile.is_zipfile(path):
        raise ValueError("it is no .npz file")
    try:
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(str(error).partition(" when allow_pickle")[0]) from error
