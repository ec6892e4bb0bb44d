"""One pool of ranks for all tests of this room."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Call it as `ranks(2, "job", ...)`: see `ranks.py`."""
    path = Path(__file__).with_name("ranks.py")
    spec = importlib.util.spec_from_file_location("castwise_test_ranks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pool = module.Ranks(4)
    yield pool
    pool.stop()
