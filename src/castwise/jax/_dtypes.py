"""The floating dtypes that casting is about, and how they compare.

JAX's own promotion would do for most of this, but it makes float16 and bfloat16 meet in float32 only by a table made
for arrays, and it knows nothing of constants. Here a dtype has a width, and a constant either fits a dtype or does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from castwise.errors import PolicyError
from castwise.formats import NumberFormat, parse_format

__all__ = ["CASTABLE", "dtype_of", "fits", "float_dtype", "format_name", "left_alone", "saturated", "widest"]

DType = np.dtype[Any]

BF16: DType = np.dtype(jnp.bfloat16)
FP16: DType = np.dtype(np.float16)
FP32: DType = np.dtype(np.float32)
FP64: DType = np.dtype(np.float64)

#: What a policy may round or widen. float64, complex and 8-bit arrays are there because the user wants them.
CASTABLE: frozenset[DType] = frozenset({BF16, FP16, FP32})

_BY_FORMAT = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "fp64": FP64}
_WIDTH = {BF16: 1, FP16: 1, FP32: 2, FP64: 3}


def dtype_of(fmt: NumberFormat) -> DType:
    """The dtype that JAX computes ``fmt`` in.

    Raises:
        PolicyError: JAX has no arithmetic in this format.
    """
    try:
        return _BY_FORMAT[fmt.name]
    except KeyError:
        raise PolicyError(
            f"format: castwise.jax does not compute in {fmt.long_name}. Choose one of "
            f"{', '.join(parse_format(name).long_name for name in _BY_FORMAT)}."
        ) from None


def format_name(dtype: DType) -> str:
    """Castwise's short name of a dtype ("bf16"), or the dtype's own name where it is no number format."""
    return next((name for name, known in _BY_FORMAT.items() if known == dtype), dtype.name)


def float_dtype(aval: Any) -> DType | None:
    """The dtype of an abstract value of real floating-point numbers; None for keys, integers, tokens and the like."""
    dtype = getattr(aval, "dtype", None)
    return dtype if isinstance(dtype, np.dtype) and dtype in _WIDTH else None


def left_alone(eqn: Any, castable: frozenset[DType]) -> str:
    """Why a product keeps the dtypes of its operands: with one of them, or its result, nobody may meddle; "" if not."""
    most = max(dtype.itemsize for dtype in castable)
    results = [np.dtype(var.aval.dtype) for var in eqn.outvars]
    for dtype in (*(np.dtype(var.aval.dtype) for var in eqn.invars), *results):
        wider = dtype.kind == "c" or (dtype.kind == "f" and dtype.itemsize > most)
        if wider or (dtype in results and dtype not in castable):
            return f"an operand or its result is {dtype.name}, which is left alone"
    return ""


def widest(dtypes: Iterable[DType]) -> DType:
    """The dtype that holds the values of all: float16 and bfloat16 meet in float32, as neither holds the other."""
    kinds = set(dtypes)
    if len(kinds) == 1:
        return next(iter(kinds))
    top = max(kinds, key=_WIDTH.__getitem__)
    return FP32 if _WIDTH[top] == 1 else top


@functools.cache
def _range(dtype: DType) -> tuple[float, float]:
    info: Any = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(info.smallest_normal), float(info.max)


def fits(value: float, dtype: DType) -> bool:
    """Whether a constant keeps its size in ``dtype``: no overflow, and not below the smallest normal number."""
    smallest, largest = _range(dtype)
    return not math.isfinite(value) or value == 0 or smallest <= abs(value) <= largest


def saturated(value: float, dtype: DType) -> float:
    """A finite constant within the range of ``dtype``: -1e9 in a float16 mask is -65504, not -inf."""
    largest = _range(dtype)[1]
    return min(max(value, -largest), largest) if math.isfinite(value) else value
