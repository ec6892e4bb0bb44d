"""In which format each op of a graph was computed, as seen where kernels are dispatched."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.catalogue import OpClass

from . import _aten

__all__ = ["Recorder"]


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Formats of the tensors that kernels wrote, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.written.append(x.dtype)
                break
        return result


class Recorder(fx.Interpreter):
    """Runs a graph and notes in which format kernels computed each op of the plan."""

    def __init__(self, module: fx.GraphModule, fmt: str) -> None:
        super().__init__(module)
        self.fmt = fmt
        self.formats: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        op = n.meta.get("castwise_op")
        entry = _aten.entry_of(n)
        if op is None or (entry is not None and entry.op_class is OpClass.CAST):  # nothing is computed
            return super().run_node(n)
        with _Dispatched() as seen:
            result = super().run_node(n)
        if seen.written:  # a composite may sum or normalise in fp32 inside: what counts is the format it ends in
            self.formats[op] = "fp32" if seen.written[-1].itemsize > 2 else self.fmt
        return result
