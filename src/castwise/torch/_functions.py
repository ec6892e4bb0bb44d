"""Which catalogue entry a torch callable stands for.

A torch-function mode is handed the callable the user's code called (`torch.softmax`, `Tensor.softmax`,
`F.softmax`, `torch.ops.aten.softmax.int`, ...): several spellings of one operation. This module maps each of them,
once, to the one catalogue entry, and notes the two things about the *spelling* that matter for casting: whether it
writes into its first argument, and whether it is a Python body that should be entered rather than treated as one op.

There is no list of ops here: what an op is comes from the catalogue alone.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.overrides

from castwise.catalogue import OpEntry, load_catalogue

Function = Callable[..., Any]

_DUNDERS = {
    "setitem": "index_put",
    "getitem": "index",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
}


@dataclass(frozen=True, slots=True)
class FunctionInfo:
    """What is known about one callable: its canonical name, its catalogue entry (if any), and how it is spelt."""

    name: str
    entry: OpEntry | None
    writes_first: bool  # in-place: the first argument is the destination, whose format is not ours to change
    descend: Function | None  # the body of a Python composite, callable without being intercepted as a whole
    writes_others: bool = False  # an op of a user's that writes other arguments too, in which no cast may take part


def base_name(function: Function) -> tuple[str, bool]:
    """The aten-like base name of a callable and whether it works in place: `Tensor.__iadd__` -> ("add", True)."""
    if isinstance(function, torch._ops.OpOverload):
        name = function._schema.name.split("::")[-1]
        in_place = function._schema.is_mutable and name.endswith("_")
        return name.rstrip("_"), in_place
    name = getattr(function, "__name__", "") or ""
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        if inner == "setitem":
            return "index_put", True
        if inner[:1] == "i" and hasattr(torch.Tensor, f"__{inner[1:]}__"):
            return _DUNDERS.get(inner[1:], inner[1:]), True
        if inner[:1] == "r" and hasattr(torch.Tensor, f"__{inner[1:]}__"):
            return _DUNDERS.get(inner[1:], inner[1:]), False
        return _DUNDERS.get(inner, inner), False
    if name.endswith("_"):
        return name[:-1], True
    return name, False


def written_arguments(function: Function) -> list[str | int]:
    """What an op from a library writes, as its schema says: positions, and names of keyword-only arguments."""
    overload = getattr(function, "default", None) if isinstance(function, torch._ops.OpOverloadPacket) else function
    if not isinstance(overload, torch._ops.OpOverload):
        return []
    written = enumerate(overload._schema.arguments)
    return [a.name if a.kwarg_only else i for i, a in written if a.alias_info is not None and a.alias_info.is_write]


def _not_overridden(*_: object, **__: object) -> bool:
    return False


def without_interception(function: types.FunctionType) -> Function:
    """The same Python body, bound to globals in which torch's `has_torch_function*` answer no.

    Calling the original inside a region would intercept the composite again, without end; calling it outside would
    leave its products wide. The copy enters the body, whose own calls are then seen one by one.
    """
    names = {n: _not_overridden for n in function.__globals__ if n.startswith("has_torch_function")}
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def describe(function: Function) -> FunctionInfo:
    """Look a callable up in the catalogue. Unknown callables get an entry-less info: they promote, nothing else."""
    name, in_place = base_name(function)
    catalogue = load_catalogue()
    entry = catalogue.lookup("torch", name) or catalogue.lookup("torch", getattr(function, "__name__", "") or name)
    body = None
    if entry is not None and entry.composite and isinstance(function, types.FunctionType):
        body = without_interception(function)
    written = written_arguments(function) if entry is None else []
    return FunctionInfo(name, entry, in_place or written[:1] == [0], body, any(w != 0 for w in written))


def trace_as(function: Function) -> Function:
    """What a compiler should call instead of `function`: a plain function in place of a Python method of Tensor's that
    ends in `super()`, which a tracer cannot follow from outside the class. (torch has one such method.)
    """
    return torch.unflatten if function.__name__ == "unflatten" else function


def _namespaces() -> Iterator[object]:
    yield from (
        torch,
        torch.Tensor,
        torch._C.TensorBase,
        torch._C._VariableFunctions,
        torch._C._nn,
        torch.nn.functional,
    )
    yield from (getattr(torch._C, name) for name in ("_linalg", "_fft", "_special", "_sparse"))
    yield from (torch.linalg, torch.functional)


@functools.cache
def known_functions() -> dict[Function, FunctionInfo]:
    """Every public callable of torch that has a catalogue entry, described. Built once per process."""
    table: dict[Function, FunctionInfo] = {}
    for namespace in _namespaces():
        for attribute in dir(namespace):
            function = getattr(namespace, attribute, None)
            if not callable(function) or isinstance(function, type | types.ModuleType):
                continue
            try:
                if function in table:
                    continue
            except TypeError:  # an unhashable callable cannot be a key of torch's own overrides either
                continue
            info = describe(function)
            if info.entry is not None:
                table[function] = info
    return table
