"""Shared helpers: run a model in ONNX Runtime, and say how far two results are apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

sys.path.insert(0, str(Path(__file__).parent))  # for random_models, which is no test


def _run(model: Any, feed: dict[str, Any]) -> tuple[list[Any], list[str]]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # ONNX Runtime 1.32 aborts the process on some valid fp32 models when it rewrites quantized nodes.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feed), [output.type for output in session.get_outputs()]


def _distance(wanted: list[Any], got: list[Any]) -> float:
    """The largest max |difference| / max(1, max |wanted|); infinite where shapes or finite positions differ."""
    worst = 0.0
    for a, b in zip(wanted, got, strict=True):
        if isinstance(a, list):
            worst = max(worst, _distance(a, b) if len(a) == len(b) else np.inf)
            continue
        if a is None or b is None or np.asarray(a).dtype.kind in "OUS":
            worst = max(worst, 0.0 if (a is b or np.array_equal(a, b)) else np.inf)
            continue
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        finite = np.isfinite(x)
        if x.shape != y.shape or not np.array_equal(finite, np.isfinite(y)):
            return float("inf")
        if finite.any():
            worst = max(worst, float(np.abs(x - y)[finite].max() / max(1.0, np.abs(x[finite]).max())))
    return worst


@pytest.fixture
def run() -> Callable[..., tuple[list[Any], list[str]]]:
    return _run


@pytest.fixture
def distance() -> Callable[..., float]:
    return _distance
