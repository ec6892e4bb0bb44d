"""Rules for ops that the catalogue does not know: custom ops and custom autograd Functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from castwise.errors import CatalogueError, FormatError, did_you_mean
from castwise.formats import parse_format

from ._functions import written_arguments
from ._traced import as_is_inside

Function = Callable[..., Any]

_RULES: dict[Any, str] = {}
_SETTINGS = ("low", "high", "widest", "keep")


def registered_rule(function: Function) -> str | None:
    """The rule given to `register_op` for this callable (or for the packet it is an overload of)."""
    try:
        found = _RULES.get(function)
        if found is None and isinstance(function, torch._ops.OpOverload):
            found = _RULES.get(function.overloadpacket)
    except TypeError:
        return None
    return found


def register_op(op: Any, rule: str = "low", *, cast_inputs: torch.dtype | str | None = None) -> Any:
    """Say how a custom op or a custom autograd Function is cast inside regions.

    Args:
        op: an op of a library (`torch.ops.mylib.my_op`, one overload of it, or what torch's `custom_op`
            returned), any callable that torch functions can override, or a subclass of `torch.autograd.Function`.
        rule: "low" (the region's 16-bit format), "high" (fp32), "widest" (what unregistered ops get: mixed floating
            inputs are brought to the widest among them) or "keep" (inputs are left as they are).
        cast_inputs: a fixed dtype instead of a rule, as in torch's `register_autocast`.

    An op that writes into its first argument is computed in that argument's format, whatever the rule.
    Positional and keyword arguments, also keyword-only ones, and tensors in lists, tuples and dicts are cast.
    Inside the forward of a registered autograd Function no further casting happens. Returns `op`.

    Raises:
        CatalogueError: the rule is none of the four, or `op` is not something that torch can hand to a region.
    """
    if not isinstance(rule, str):
        raise CatalogueError(f"register_op: rule {rule!r} is no name. Use one of {', '.join(_SETTINGS)}.")
    try:
        setting = rule if cast_inputs is None else parse_format(cast_inputs).name
    except FormatError as error:
        raise CatalogueError(f"register_op: cast_inputs: {error} Use torch.float32, float16 or bfloat16.") from None
    if cast_inputs is None and setting not in _SETTINGS:
        raise CatalogueError(
            f"register_op: {rule!r} is not a rule.{did_you_mean(rule, _SETTINGS)} Use one of {', '.join(_SETTINGS)}."
        )
    from ._rules import rules_for

    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        _register_function(op, setting)
        return op
    target = getattr(op, "_opoverload", op)  # what torch's custom_op returns wraps the overload that is called
    if not callable(target):
        raise CatalogueError(
            f"register_op: {op!r} is not callable; give an op, a function or an autograd Function class."
        )
    written = [w for w in written_arguments(target) if w != 0]
    if written and setting != "keep":
        raise CatalogueError(
            f"register_op: {target} writes into its argument {written[0]!r}, so what a cast made of it would be "
            'written instead. Use "keep", or an op that returns its result or writes into its first argument alone.'
        )
    _RULES[target] = setting
    if isinstance(target, torch._ops.OpOverload):
        _RULES[target.overloadpacket] = setting
    rules_for.cache_clear()
    return op


def _register_function(cls: type[torch.autograd.Function], setting: str) -> None:
    """Regions cannot see `Function.apply`, so the class itself is given an `apply` that casts first."""
    plain = getattr(cls, "_castwise_plain_apply", None) or getattr(cls.apply, "__func__", None)
    if plain is None:
        raise CatalogueError(
            f"register_op: {cls.__qualname__}.apply is not a class method, as torch's is. Make it one."
        )

    @functools.wraps(plain)
    @as_is_inside
    def apply(own: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:  # `own`: a subclass inherits this
        from ._region import current_region
        from .autocast import autocast

        region = current_region()
        if region is None or not region.enabled or setting == "keep":
            return plain(own, *args, **kwargs)
        call = region.rules.registered_call(own.__name__, setting)
        assert call is not None  # only "keep" has none

        def run(*a: Any, **k: Any) -> Any:
            with autocast(region.rules.device_type, enabled=False):
                return plain(own, *a, **k)

        return region.casting.run(call, run, args, kwargs)

    cls._castwise_plain_apply = staticmethod(plain)  # type: ignore[attr-defined]
    cls.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
