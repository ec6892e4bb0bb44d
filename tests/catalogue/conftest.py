"""Torch's own op database, which several of these tests read. Importing it takes seconds: once per session."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def one_thread():
    """Samples are tiny: more threads only cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates some of the ops that are called here like all others
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernels_tool() -> ModuleType:
    """tools/generate_no_kernel.py as a module."""
    spec = importlib.util.spec_from_file_location("generate_no_kernel", ROOT / "tools" / "generate_no_kernel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def op_db(kernels_tool: ModuleType) -> list[Any]:
    """Every op of torch's op database that calls torch's own kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kernels_tool.database()
