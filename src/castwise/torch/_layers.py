"""Layer rules: parts of a model that run under decisions of their own.

A module under a rule enters a region of its own in a forward pre-hook and leaves it in a forward hook, which torch
calls after exceptions too. Only modules where the decisions change get hooks. The hooks travel with copies of the
model (averages of weights) and with pickles of it; outside of regions of their policy they do nothing.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from castwise.policy import Policy

from ._hooks import after_forward, before_forward
from ._paths import paths_of
from ._region import Region, current_region
from ._rules import rules_for
from ._traced import as_is, traced_by_dynamo


class LayerHooks:
    """The hooks of one policy on one model, as long as the policy is in force."""

    def __init__(self, model: nn.Module, policy: Policy, device_type: str) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        written = paths_of(model)
        matching = [frozenset(covered) for covered in policy.match_layers(dict.fromkeys(written.values()))]
        rules_at = {path: {n for n, covered in enumerate(matching) if written[path] in covered} for path in modules}
        # A module that is used in several places has several paths; that with the most rules speaks for it.
        path_of: dict[nn.Module, str] = {}
        for path, module in modules.items():
            if module not in path_of or len(rules_at[path]) > len(rules_at[path_of[module]]):
                path_of[module] = path
        self._handles: list[Any] = []
        representative: dict[frozenset[int], str] = {}
        hooked: set[nn.Module] = set()
        for path, module in modules.items():
            covering = frozenset(rules_at[path_of[module]])
            parent = rules_at[path_of[modules[path.rpartition(".")[0]]]] if path else set()
            if covering == parent or not covering or module in hooked:
                continue
            hooked.add(module)
            layer = representative.setdefault(covering, written[path_of[module]])
            hook = _LayerHook(policy, device_type, layer)
            self._handles.append(before_forward(module, hook.enter, prepend=True))
            self._handles.append(after_forward(module, hook.leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _LayerHook:
    def __init__(self, policy: Policy, device_type: str, layer: str) -> None:
        self.policy = policy
        self.device_type = device_type
        self.layer = layer
        self.rules = rules_for(policy, device_type, layer)
        self._local = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> _LayerHook:
        return self  # a copied model (an average of weights, say) follows the same rules

    def __reduce__(self) -> tuple[Any, ...]:
        return _LayerHook, (self.policy, self.device_type, self.layer)

    @as_is
    def enter(self, module: nn.Module, args: Any) -> None:
        outer = current_region(self.device_type)
        region = None
        if outer is not None and outer.enabled and outer.rules.policy == self.policy:
            region = Region(self.rules, outer.cache, log=outer.log)
            region.owner = self
            region.enter()
        if not traced_by_dynamo():
            self._stack().append(region)

    @as_is
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if traced_by_dynamo():  # which is well nested, and may run in the body of an op, where no list is written
            inner = current_region(self.device_type)
            if inner is not None and inner.owner is self:
                inner.leave()
            return
        stack = self._stack()
        region = stack.pop() if stack else None
        if region is not None:
            region.leave()

    def _stack(self) -> list[Region | None]:
        stack = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack
