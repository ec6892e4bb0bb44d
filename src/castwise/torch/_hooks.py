"""Hooks on a model's forward, on modules of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Pair", "after_forward", "before_forward"]

# Through the class: compiled TorchScript refuses hooks by its own methods, and calls them all the same.
before_forward = nn.Module.register_forward_pre_hook
after_forward = nn.Module.register_forward_hook


class Pair:
    """Two hooks of one module, around its forward, that can be taken off and put back as they were.

    Compiled code that was traced with the hooks on asks for the very keys that they have in the module's dictionaries:
    registered anew each time, they would have it compiled anew each time.

    Args:
        module: what is hooked, until `off`.
        before: a pre-hook that is given the keyword arguments too.
        after: called when the forward raised, too.
    """

    def __init__(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self.module = module
        self._handles = [
            before_forward(module, before, with_kwargs=True),
            after_forward(module, after, always_call=True),
        ]
        entered = self._handles[0].id, self._handles[1].id
        tables = (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_always_called),
        )
        self._entries: list[tuple[Any, int, Any]] = [
            (table, key, table[key]) for key, pair in zip(entered, tables, strict=True) for table in pair
        ]

    def on(self) -> None:
        """Put the hooks back, behind those that the module has got meanwhile."""
        for table, key, value in self._entries:
            table[key] = value

    def off(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
