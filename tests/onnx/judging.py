"""Running models in ONNX Runtime, and how far two results are apart: for tests and benchmarks alike.

It shares no code with what it judges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort


def run(model: onnx.ModelProto, feed: dict[str, Any], *, optimize: bool = False) -> tuple[list[Any], list[str]]:
    """Outputs and their types. ONNX Runtime 1.32 aborts the process on some valid fp32 models when it may optimize."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feed), [output.type for output in session.get_outputs()]


def distance(wanted: list[Any], got: list[Any]) -> float:
    """The largest max |difference| / max(1, max |wanted|); infinite where shapes or finite positions differ."""
    worst = 0.0
    for a, b in zip(wanted, got, strict=True):
        if isinstance(a, list):
            worst = max(worst, distance(a, b) if len(a) == len(b) else np.inf)
        elif a is None or b is None or np.asarray(a).dtype.kind in "OUS":
            worst = max(worst, 0.0 if a is b or np.array_equal(a, b) else np.inf)
        else:
            x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
            finite = np.isfinite(x)
            if x.shape != y.shape or not np.array_equal(finite, np.isfinite(y)):
                return float("inf")
            if finite.any():
                worst = max(worst, float(np.abs(x - y)[finite].max() / max(1.0, np.abs(x[finite]).max())))
    return worst
