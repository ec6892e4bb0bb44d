"""Hooks on a model's forward, on modules of every kind."""

from __future__ import annotations

from torch import nn

__all__ = ["after_forward", "before_forward"]

# Through the class: compiled TorchScript refuses hooks by its own methods, and calls them all the same.
before_forward = nn.Module.register_forward_pre_hook
after_forward = nn.Module.register_forward_hook
