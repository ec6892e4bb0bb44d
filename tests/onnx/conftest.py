"""Shared helpers: run a model in ONNX Runtime, and say how far two results are apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

sys.path.insert(0, str(Path(__file__).parent))  # for judging and random_models, which are no tests

import judging


@pytest.fixture
def run() -> Callable[..., tuple[list[Any], list[str]]]:
    return judging.run


@pytest.fixture
def distance() -> Callable[..., float]:
    return judging.distance
