"""Bytes that operations move, counted."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WORKING_MEMORY = 5 << 20  # bytes: a little more than what a step keeps in the cache for each tensor of a piece
_WRITES_ALONE = frozenset({"copy_", "fill_", "zero_", "_foreach_copy_", "random_", "uniform_"})


class Traffic(TorchDispatchMode):  # type: ignore[misc]
    """Counts what operations read and write of tensors whose memory is larger than any piece's working memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        name = func._schema.name.partition("::")[2]
        seen: list[int] = []
        read: set[tuple[int, int, int]] = set()
        given = dict(kwargs or {})
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else given.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            times = 1 if not written or argument.is_out or name in _WRITES_ALONE else 2
            for x in tree_leaves(value):
                if isinstance(x, torch.Tensor):
                    part = (x.untyped_storage()._cdata, x.storage_offset(), x.numel())
                    seen.append(part[0])
                    if part not in read or times > 1:  # what is given twice is read once
                        self._note(x, times)
                    read.add(part)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in seen:
                self._note(x, 1)
        return out

    def _note(self, x: torch.Tensor, times: int) -> None:
        if x.untyped_storage().nbytes() > _WORKING_MEMORY:
            self.bytes += times * x.numel() * x.element_size()
