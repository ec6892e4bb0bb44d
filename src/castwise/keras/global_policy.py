"""One line for every model that is made after it: ``castwise.keras.set_global_policy("mixed_bfloat16")``."""

from __future__ import annotations

import sys
from typing import Any

from castwise.policy import Policy

from ._device import resolve
from ._dtypes import keras_name
from ._internals import in_symbolic_scope, keras
from ._state import active
from .apply import apply, coerce

__all__ = ["set_global_policy"]


def set_global_policy(policy: Policy | str | Any) -> None:
    """Prepare every model that is made from here on, as ``apply`` would, when it is compiled or first called.

    Keras' own global dtype policy is set with it, so layers that are called outside of a model compute as Keras does
    under that name. ``set_global_policy("float32")`` ends it for models that are made later.

    Args:
        policy: as for ``apply``: ``"mixed_bfloat16"``, ``"mixed_float16"``, ``"float32"``, ``"auto"``, a ``Policy``, …

    Raises:
        PolicyError: the policy makes no sense.
    """
    asked = coerce(policy)
    resolved = resolve(asked)
    name = keras_name(resolved.low_format)
    narrow = name != "float32" or bool(resolved.layers) or bool(resolved.ops)
    keras.config.set_dtype_policy(_GlobalPolicy(name, asked) if narrow else name)


class _SavedAsKerasPolicy:
    __class__ = property(lambda self: keras.DTypePolicy)


class _GlobalPolicy(_SavedAsKerasPolicy, keras.DTypePolicy):  # type: ignore[misc]
    """What layers are made with. The first that Keras asks it for a model that runs, the model is prepared.

    Keras tells a dtype policy nothing about the layer that asks, so the asking frame is looked at. ``apply`` gives the
    model's layers policies of their own, so this happens once for each model.
    """

    def __init__(self, name: str, asked: Policy) -> None:
        super().__init__(name)
        self._asked = asked

    @property
    def name(self) -> str:
        """Keras' name. ``Model.compile`` reads it, once it has the optimizer."""
        frame = sys._getframe(1)
        if frame.f_code.co_name == "compile":
            self._prepare(frame.f_locals.get("self"))
        return str(self._name)

    @property
    def compute_dtype(self) -> str:
        """The dtype outside of regions. ``Layer.__call__`` reads it before anything else."""
        frame = sys._getframe(1)
        owner = frame.f_locals.get("self")
        while frame is not None and frame.f_code.co_name in ("compute_dtype", "input_dtype"):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None and frame.f_code.co_name == "__call__" and getattr(owner, "built", False):
            self._prepare(owner)
        return str(self._compute_dtype)

    def _prepare(self, model: Any) -> None:
        if isinstance(model, keras.Model) and active() is None and not in_symbolic_scope():
            apply(model, self._asked)

    def get_config(self) -> dict[str, Any]:
        """As Keras writes it."""
        return {"name": self._name}

    def __reduce__(self) -> tuple[Any, ...]:
        return keras.DTypePolicy, (self._name,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, keras.DTypePolicy) and other.name == self._name

    def __hash__(self) -> int:
        return hash(self._name)
