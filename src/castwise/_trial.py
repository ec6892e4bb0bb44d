"""One operation in one format: is the result right, was it computed in that format, and how long does it take?

The part of ``castwise doctor`` that knows no framework: a framework brings functions that multiply (``_probe.py``),
this module gives them values that are on the format's grid, compares what comes back with float64, and times them
beside float32.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from castwise.formats import FORMATS, FP32, TF32, NumberFormat, parse_format, round_to_nearest

_SIDE = 48  # of the small matrices; a multiple of 16, which fp8 kernels ask for
_TIMED_SIDE_CPU = 256  # large enough to see 100x, small enough that 100x is 50 ms
_TIMED_SIDE_ACCELERATOR = 2048
_TIME_BUDGET = 0.3  # seconds a format and float32 are timed for in turns, after a call each to warm up
_WIDE_ENOUGH = 1.0  # eps of a 16-bit format; one rounding of the result gives at most a half
_NOT_ROUNDED = 0.005  # eps; results nearer to float64 than this never went through the format

Array = np.ndarray[Any, Any]
# What a framework does with two matrices (or an image and a filter): returns the result and the dtype it came in.
Product = Callable[[Array, Array, NumberFormat], tuple[Array, str]]
# For a format and a side, a function that multiplies two square matrices once and waits for the result.
Timed = Callable[[NumberFormat, int], Callable[[], None]]


def trials(framework: str, device: str, products: Mapping[str, Product], timed: Timed) -> list[dict[str, Any]]:
    """Try each operation in every format on a device, and time the products beside float32's.

    Args:
        framework: its name, copied into the results.
        device: its name in the framework, copied into the results.
        products: the operations by name; ``"matmul"`` is the one that is timed.
        timed: see ``Timed``.

    Returns:
        One dict per operation and format: ``outcome`` (``right``, ``narrow`` sums, ``wrong``, ``falls back``,
        ``fails``), ``message``, ``error`` (in eps of the format); of products also ``seconds`` and ``relative_time``
        (to float32's).
    """
    side = _TIMED_SIDE_CPU if device == "cpu" else _TIMED_SIDE_ACCELERATOR
    results = []
    for operation, product in products.items():
        for fmt in FORMATS.values():
            result: dict[str, Any] = {"framework": framework, "device": device, "operation": operation}
            result |= {"format": fmt.name, **try_product(operation, product, fmt)}
            if operation == "matmul" and result["outcome"] in ("right", "narrow"):
                result["seconds"], result["relative_time"] = _times(timed, fmt, side)
            results.append(result)
    return results


def try_product(operation: str, product: Product, fmt: NumberFormat) -> dict[str, Any]:
    """Multiply (or convolve) small values of the format and judge the result: outcome, message and error."""
    random = np.random.default_rng(0)
    shapes = ((2, 8, 9, 9), (8, 8, 3, 3)) if operation == "conv2d" else ((_SIDE, _SIDE), (_SIDE, _SIDE))
    # TF32 rounds float32 inputs by itself; given values on its own grid, it could not be told from float32.
    grid = FP32 if fmt is TF32 else fmt
    left, right = (round_to_nearest(random.uniform(-1, 1, shape), grid) for shape in shapes)
    wanted = _conv2d(left, right) if operation == "conv2d" else left @ right
    try:
        got, dtype = product(left, right, fmt)
    except Exception as error:
        return {"outcome": "fails", "message": _in_short(error)}
    return judge_values(got, wanted, dtype, fmt)


def judge_values(got: Array, wanted: Array, dtype: str, fmt: NumberFormat) -> dict[str, Any]:
    """Right, summed in the format itself, wrong, or quietly computed in another dtype."""
    error = float(np.max(np.abs(got.astype(np.float64) - wanted)) / np.max(np.abs(wanted))) / fmt.eps
    in_place = fmt.bits >= 16 and fmt is not TF32  # fp8 and TF32 are formats of inputs: results come wider
    if in_place and parse_format(dtype) != fmt:
        return {"outcome": "falls back", "message": f"computed in {dtype}", "error": error}
    if (fmt.bits == 16 or fmt is TF32) and error < _NOT_ROUNDED:
        return {"outcome": "falls back", "message": "computed in float32 (nothing was rounded)", "error": error}
    if not np.isfinite(error) or error > _SIDE:
        return {"outcome": "wrong", "message": f"off by {error:.3g} eps", "error": error}
    if fmt.bits == 16 and error > _WIDE_ENOUGH:
        return {"outcome": "narrow", "message": "sums in the format itself, not in float32", "error": error}
    return {"outcome": "right", "message": "", "error": error}


def _in_short(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    line = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)
    return f"{type(error).__name__}: {line if len(line) <= 90 else line[:89] + '…'}"


def _conv2d(image: Array, filters: Array) -> Array:
    """Valid 2-d convolution (as deep learning means it) in float64, channels first."""
    windows = np.lib.stride_tricks.sliding_window_view(image, (filters.shape[2], filters.shape[3]), axis=(2, 3))
    out: Array = np.einsum("bchwij,ocij->bohw", windows, filters)
    return out


def _times(timed: Timed, fmt: NumberFormat, side: int) -> tuple[float | None, float | None]:
    """Seconds of one product in the format and the same over float32's; ``None`` if the timed size fails.

    The two run in turns and the fastest of each counts, so that what else the machine does falls on both.
    """
    try:
        runs = (timed(fmt, side), timed(FP32, side))
        fastest = [float("inf"), float("inf")]
        for run in runs:
            run()
        stop = time.perf_counter() + _TIME_BUDGET
        while time.perf_counter() < stop:
            for index, run in enumerate(runs):
                start = time.perf_counter()
                run()
                fastest[index] = min(fastest[index], time.perf_counter() - start)
        return fastest[0], fastest[0] / fastest[1]
    except Exception:  # the small product ran: that the large one does not is no reason to say nothing of the format
        return None, None
