"""One line for every model that is made after it: ``castwise.keras.set_global_policy("mixed_bfloat16")``.

Layers take the global dtype policy when they are made, so a model that was made under Castwise's carries it. Keras
tells a dtype policy nothing about the layer that asks it. So for as long as anything carries one, ``keras.Model`` says
when a model is compiled or called: a model that carries the policy is prepared then, any other goes on as if nothing
were there. Prepared layers have policies of their own, and when nothing carries the global one any more, Keras' class
is as it was.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from castwise.policy import LayerRule, Policy

from . import _optimizer
from ._device import resolve
from ._dtypes import KerasNamed, keras_name
from ._internals import in_symbolic_scope, keras
from ._paths import escaped, layer_paths
from ._region import root_of
from ._state import active
from .apply import apply, coerce

__all__ = ["set_global_policy"]


def set_global_policy(policy: Policy | str | Any) -> None:
    """Prepare every model that is made from here on, as ``apply`` would, when it is compiled or first called.

    Keras' own global dtype policy is set with it, so layers that are called outside of a model compute as Keras does
    under that name. A layer that is made with a ``dtype`` of its own keeps it. ``set_global_policy("float32")`` ends it
    for models that are made later.

    Args:
        policy: as for ``apply``: ``"mixed_bfloat16"``, ``"mixed_float16"``, ``"float32"``, ``"auto"``, a ``Policy``, …

    Raises:
        PolicyError: the policy makes no sense.
    """
    asked = coerce(policy)
    resolved = resolve(asked)
    name = keras_name(resolved.low_format)
    narrow = name != "float32" or bool(resolved.layers) or bool(resolved.ops)
    keras.config.set_dtype_policy(GlobalPolicy(name, asked) if narrow else name)


class GlobalPolicy(KerasNamed):
    """What layers are made with.

    Attributes:
        asked: the policy that a model which carries this one is prepared with.
    """

    def __init__(self, name: str, asked: Policy) -> None:
        super().__init__(name)
        self.asked = asked
        _listen()
        weakref.finalize(self, _unlisten).atexit = False


# What runs a model that was never compiled. All lead to a call, but some from within a program that is being traced.
_RUNS = ("__call__", "stateless_call", "predict", "predict_on_batch")
_HOOKS: dict[str, Callable[..., Any]] = {}
_carried = 0


def _listen() -> None:
    """Let ``keras.Model`` tell of compilations and calls."""
    global _carried
    _carried += 1
    if _HOOKS:
        return
    _HOOKS["compile"] = _compiling(keras.Model.compile)
    for name in _RUNS:
        _HOOKS[name] = _running(getattr(keras.Model, name))
    for name, hook in _HOOKS.items():
        setattr(keras.Model, name, hook)


def _unlisten() -> None:
    """Nothing carries one policy any more; after the last, what ``keras.Model`` inherits is there again."""
    global _carried
    _carried -= 1
    if _carried:
        return
    for name, hook in _HOOKS.items():
        if vars(keras.Model).get(name) is hook:
            delattr(keras.Model, name)
    _HOOKS.clear()


def _compiling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = _prepare(self)
        result = original(self, *args, **kwargs)
        root = root_of(self) if prepared else None
        if root is not None:  # this compilation began before the model had a say in it
            _optimizer.settle(self, root.policy, kwargs)
        return result

    return compile


def _running(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self.dtype_policy) is GlobalPolicy and _to_run(args, kwargs):
            _prepare(self)
        return original(self, *args, **kwargs)

    return run


def _to_run(args: Any, kwargs: Any) -> bool:
    """Whether a call is one of a whole model that computes, and no part of another's nor a working out of shapes."""
    if active() is not None or in_symbolic_scope():
        return False
    return not any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((args, kwargs)))


def _prepare(model: Any) -> bool:
    """Prepare a model that carries a global policy; says whether it did."""
    carried = model.dtype_policy
    if type(carried) is not GlobalPolicy:
        return False
    rules = tuple(_own_dtypes(model, carried))
    apply(model, replace(carried.asked, layers=(*rules, *carried.asked.layers)))
    return True


def _own_dtypes(model: Any, carried: GlobalPolicy) -> Iterator[LayerRule]:
    """Layers that were made with a dtype of their own."""
    for path, layer in layer_paths(model).items():
        name = layer.dtype_policy.name
        if path and name != carried.name and name in _OWN:
            yield LayerRule(escaped(path), format=_OWN[name])


_OWN = {
    "float32": "float32",
    "mixed_float16": "float16",
    "float16": "float16",
    "mixed_bfloat16": "bfloat16",
    "bfloat16": "bfloat16",
}
