"""What the arguments of a call say: which are tensors, in which formats, and which format they are to share."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ._casts import fits, to_saturated

# float8 tensors and float64 ones are left to the user; complex ones count as wider than every real format.
WIDTH = {
    torch.float16: 1,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.complex64: 4,
    torch.complex128: 5,
}
CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
LOW = frozenset({torch.float16, torch.bfloat16})
TENSORS = frozenset({Tensor, Parameter})
# Arguments that hold no tensor. Lists and tuples count when they begin with a number: sizes, strides, dimensions.
_NUMBERS = frozenset({int, float, bool})
PLAIN = frozenset({*_NUMBERS, type(None), str, torch.Size, torch.dtype, torch.device, torch.memory_format})
_ASKING = frozenset({"dtype", "out", "attn_mask"})  # named arguments that say something about formats themselves
_SMALLEST_LIMIT = torch.finfo(torch.float16).max


def is_shape(x: Any, kind: type) -> bool:
    """Whether it is a list or tuple that holds no tensor: sizes, strides, dimensions."""
    return (kind is tuple or kind is list) and (not x or type(x[0]) in _NUMBERS)


def says_formats(kwargs: dict[str, Any]) -> bool:
    """Whether named arguments say something about formats themselves."""
    return not _ASKING.isdisjoint(kwargs) and any(kwargs.get(name) is not None for name in _ASKING)


def leads_low(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [x for x in (*args, *kwargs.values()) if type(x) in TENSORS and x.dtype in CASTABLE]
    return low_beside_wide(tensors)


def widened(x: Any) -> Any:
    return x.float() if getattr(x, "dtype", None) in LOW else x


def sums_nothing(x: torch.Tensor, dim: int = -1) -> bool:
    """Whether a dimension has length 1. `torch.jit.trace` would warn of a decision by shape: this is one."""
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    if state is None:
        return x.dim() > 0 and x.size(dim) == 1
    tracer._set_tracing_state(None)
    try:
        return x.dim() > 0 and x.size(dim) == 1
    finally:
        tracer._set_tracing_state(state)


_SUMMED_OVER = ("input", "mat1", "batch1")  # names of the arguments whose last dimension products sum over


def is_outer_product(place: int, args: tuple[Any, ...], kwargs: dict[str, Any], floats: list[torch.Tensor]) -> bool:
    """Whether a product sums nothing. `place` is that of the argument whose last dimension it would sum over."""
    if args and (type(args[0]) is str or (len(args) > 1 and type(args[1]) is list and place == 0)):
        return _einsum_sums_nothing(args)
    names = _SUMMED_OVER[:1] if place == 0 else _SUMMED_OVER[1:]
    first: Any = args[place] if len(args) > place else next((kwargs[n] for n in names if n in kwargs), None)
    return any(first is x for x in floats) and sums_nothing(first)


def _einsum_sums_nothing(args: tuple[Any, ...]) -> bool:
    """Whether an einsum is no sum of products: of one operand, or with no index of several values to sum over."""
    terms, operands, result = _einsum_terms(args)
    if len(terms) < 2:
        return True
    if result is None:  # those that appear once
        indices = [i for term in terms for i in term]
        result = [i for i in indices if i is Ellipsis or indices.count(i) == 1]
    for term, x in zip(terms, operands, strict=False):
        for place, index in enumerate(term):
            if index in result:
                continue
            if index is Ellipsis or len(term) > x.dim() + (Ellipsis in term):
                return False
            if not sums_nothing(x, place - len(term) if Ellipsis in term[:place] else place):
                return False
    return True


def _einsum_terms(args: tuple[Any, ...]) -> tuple[list[list[Any]], Sequence[torch.Tensor], list[Any] | None]:
    """The indices of each operand, the operands, and the indices of the result where they are given."""
    if not isinstance(args[0], str):  # operands and lists of indices, in turn
        given = list(args[-1]) if len(args) % 2 else None
        return [list(a) for a in args[1::2]], args[0 : 2 * (len(args) // 2) : 2], given
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    terms = [[Ellipsis if i == "." else i for i in t.replace("...", ".")] for t in (*inputs.split(","), output)]
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    return terms[:-1], operands, terms[-1] if arrow else None


def low_beside_wide(floats: list[torch.Tensor]) -> bool:
    """Whether a 16-bit tensor leads float32 ones: a norm's input, and its parameters and statistics."""
    return bool(floats) and floats[0].dtype in LOW and all(x.dtype is torch.float32 for x in floats[1:])


def updates_statistics(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a norm writes its running mean and variance, which no schema tells. All spellings say so sixth."""
    if name == "batch_norm":
        return bool(args[5] if len(args) > 5 else kwargs.get("training", False))
    return name == "instance_norm" and bool(args[5] if len(args) > 5 else kwargs.get("use_input_stats", True))


def shared_format(
    args: tuple[Any, ...], kwargs: dict[str, Any], floats: list[torch.Tensor], *, writes_first: bool, constant: bool
) -> torch.dtype | None:
    """The dtype that the arguments are to share. 0-d tensors follow the others, as in torch's own promotion."""
    if writes_first and args:  # a list of destinations has several formats: torch's own kernels see to that
        return args[0].dtype if isinstance(args[0], torch.Tensor) and args[0].dtype in CASTABLE else None
    for x in destinations(kwargs):
        if x.dtype in WIDTH:
            return x.dtype if x.dtype in CASTABLE else None
    asked = kwargs.get("dtype")
    if constant and isinstance(asked, torch.dtype) and asked in LOW:
        return asked  # torch.full(size, -1e9, dtype=scores.dtype)
    if not floats:
        return None
    dtypes = {x.dtype for x in floats if x.dim()} or {x.dtype for x in floats}
    widest = max(dtypes, key=WIDTH.__getitem__)
    if len(dtypes) > 1 and WIDTH[widest] == 1:
        return torch.float32  # float16 and bfloat16 meet: neither holds the other
    return torch.float32 if widest is torch.complex64 else torch.float64 if widest is torch.complex128 else widest


def is_mask(added: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what is added is a float32 tensor other than a weight: it may hold a mask's constants."""
    place, name = added
    x = args[place] if len(args) > place else kwargs.get(name)
    return isinstance(x, Tensor) and x.dtype in CASTABLE and not isinstance(x, Parameter)


def with_mask_in(
    dtype: torch.dtype, added: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with what is added as `dtype` can hold it."""
    place, name = added
    if len(args) <= place:
        return args, {**kwargs, name: _in_format(kwargs[name], dtype)}
    return (*args[:place], _in_format(args[place], dtype), *args[place + 1 :]), kwargs


def _in_format(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is dtype else to_saturated(x, dtype, -1)


def destinations(kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call is to write its results to."""
    out = kwargs.get("out")
    return [x for x in (out if isinstance(out, list | tuple) else [out]) if isinstance(x, torch.Tensor)]


def has_large_constant(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a number among the arguments may be beyond a 16-bit format. What a 0-d tensor holds is not looked at."""
    several = len(args) + len(kwargs) > 1
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = type(a)
        if kind is Tensor or isinstance(a, Tensor):
            if not a.dim() and several and (not args or a is not args[0] or a.dtype in WIDTH):
                return True  # a constant in a 0-d tensor, and not a counter of steps
        elif is_number(a, kind) and not -_SMALLEST_LIMIT <= a <= _SMALLEST_LIMIT:
            return True
    return False


def is_number(value: object, kind: type) -> bool:
    """Python's numbers and NumPy's scalars; True and False are neither."""
    return kind is float or kind is int or (kind not in PLAIN and isinstance(value, numbers.Real))


def fitted(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, keep: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op that stores constants, with those as `dtype` can hold them: numbers, and 0-d tensors.

    Where an op takes indices too, an integer tensor is a constant in the last place only. `keep` is the destination.
    """
    indexed = len(args) - 1 if "index" in name or "scatter" in name else 0
    positional = [a if a is keep else _fit(a, dtype, place >= indexed) for place, a in enumerate(args)]
    return tuple(positional), {k: v if v is keep else _fit(v, dtype, k != "index") for k, v in kwargs.items()}


def _fit(value: Any, dtype: torch.dtype, constant: bool) -> Any:
    if isinstance(value, Tensor):
        if value.dim() or value.dtype is torch.bool or value.is_complex() or value.dtype in CASTABLE:
            return value
        return to_saturated(value, dtype) if constant or value.is_floating_point() else value
    return fits(value, dtype) if is_number(value, type(value)) else value
