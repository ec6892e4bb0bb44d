"""Running fp32 models: ONNX Runtime where it can, ONNX's own evaluator where not.

Weights are fed as inputs, so that a model that is tried in many ways is many small graphs and one set of arrays.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import onnx

from castwise.onnx._samples import Array, Feed

__all__ = ["Runner", "load_failure", "onnxruntime"]

log = logging.getLogger("castwise.onnx")


def onnxruntime() -> ModuleType | None:
    """ONNX Runtime, where it is installed."""
    try:
        import onnxruntime as runtime
    except ImportError:
        return None
    runtime.set_default_logger_severity(4)  # its errors come as exceptions
    return runtime  # type: ignore[no-any-return]


class Runner:
    """An fp32 model, ready to run. Raises RuntimeError where no evaluator takes it."""

    def __init__(self, model: onnx.ModelProto, weights: Mapping[str, Array]) -> None:
        self._weights = weights
        self.outputs = [info.name for info in model.graph.output]
        self.engine = ""
        self._session: Any = None
        self._model = model
        runtime, reason = onnxruntime(), "ONNX Runtime is not installed"
        if runtime is not None:
            options = runtime.SessionOptions()
            # Fusions would keep in fp32 what the model rounds in between.
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.log_severity_level = 4
            options.enable_mem_pattern = False
            # Its threads wait by spinning otherwise, which takes a core from whatever else runs.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            try:
                self._session = runtime.InferenceSession(
                    model.SerializeToString(), options, providers=["CPUExecutionProvider"]
                )
                self.engine = "onnxruntime"
                return
            except Exception as error:  # it raises classes of its own
                reason = str(error)
        self._reference(reason)

    def _reference(self, reason: str) -> None:
        try:
            from onnx.reference import ReferenceEvaluator

            self._session = ReferenceEvaluator(self._model)
            self.engine = "onnx.reference"
        except Exception as error:
            raise RuntimeError(f"{reason}; {error}") from error

    def run(self, feed: Feed) -> list[Any]:
        """The outputs for one feed. Raises RuntimeError where the model does not run on it."""
        given: dict[str, Any] = {**self._weights, **feed}
        given = {name: _as_fed(value) for name, value in given.items()}
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                results = self._session.run(None, given)
        except Exception as error:
            if self.engine == "onnxruntime":
                self._reference(str(error))
                return self.run(feed)
            raise RuntimeError(str(error)) from error
        return [_as_wide(result) for result in results]


def _as_fed(value: Any) -> Any:
    """16-bit inputs are fed in fp32, as the emulated model takes them."""
    if isinstance(value, np.ndarray) and value.dtype.name in ("float16", "bfloat16"):
        return value.astype(np.float32)
    return np.asarray(value) if isinstance(value, np.memmap) else value


def _as_wide(result: Any) -> Any:
    if isinstance(result, list):
        return [_as_wide(item) for item in result]
    return result


def load_failure(data: bytes | str) -> str | None:
    """Why ONNX Runtime does not load a model on the CPU; None where it does, or where it is not installed."""
    runtime = onnxruntime()
    if runtime is None:
        return None
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    # Kernels are looked up at any level; optimizing would only cost time here.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with contextlib.suppress(AttributeError):
        options.use_deterministic_compute = True
    try:
        runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error)
    return None
