"""Layer rules: parts of a model that run under decisions of their own.

A module under a rule enters a region of its own in a forward pre-hook and leaves it in a forward hook, which torch
calls after exceptions too. Only modules where the decisions change get hooks.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from castwise.policy import Policy

from ._region import Region, current_region
from ._rules import Rules, rules_for


class LayerHooks:
    """The hooks of one policy on one model, as long as the policy is in force."""

    def __init__(self, model: nn.Module, policy: Policy, device_type: str) -> None:
        paths = dict(model.named_modules())
        covered = policy.match_layers(paths)
        covering = {path: tuple(i for i, found in enumerate(covered) if path in set(found)) for path in paths}
        self._handles: list[Any] = []
        representative: dict[tuple[int, ...], str] = {}
        for path, module in paths.items():
            parent = covering[path.rpartition(".")[0]] if path else ()
            if covering[path] == parent and path:
                continue
            if not covering[path]:
                continue
            layer = representative.setdefault(covering[path], path)
            hook = _LayerHook(rules_for(policy, device_type, layer), policy)
            self._handles.append(module.register_forward_pre_hook(hook.enter, prepend=True))
            self._handles.append(module.register_forward_hook(hook.leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _LayerHook:
    def __init__(self, rules: Rules, policy: Policy) -> None:
        self.rules = rules
        self.policy = policy
        self._local = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> _LayerHook:
        return self  # a copied model (an average of weights, say) follows the same rules

    def enter(self, module: nn.Module, args: Any) -> None:
        outer = current_region(self.rules.device_type)
        region = None
        if outer is not None and outer.enabled and outer.rules.policy == self.policy:
            region = Region(self.rules, outer.cache, log=outer.log)
            region.enter()
        self._stack().append(region)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._stack()
        region = stack.pop() if stack else None
        if region is not None:
            region.leave()

    def _stack(self) -> list[Region | None]:
        stack = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack
