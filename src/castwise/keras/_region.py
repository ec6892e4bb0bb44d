"""A prepared model: its calls run as written, and the backend decides each operation by the policy.

Every layer of the model gets a ``call`` of its own (an attribute of that one object; Keras' classes stay as they are).
The model's opens the region, a layer's says where the call is. What an operation is computed in is decided beneath
Keras, where each backend shows its operations: torch functions as they are called, JAX's traced program, the nodes that
TensorFlow adds to a graph. So rules reach into ``MultiHeadAttention`` and custom layers, whatever their code is.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from castwise.policy import Policy

from ._internals import backend_name, in_symbolic_scope, keras, unlocked
from ._state import active, entered

__all__ = ["Root", "root_of"]

_BACKENDS = {
    "torch": "castwise.keras._torch",
    "jax": "castwise.keras._jax",
    "tensorflow": "castwise.keras._tensorflow",
}
_MARK = "_castwise_call"


class Root:
    """What ``apply`` knows of one model.

    Attributes:
        model: the model.
        policy: resolved for the device, with the rules for output layers.
        asked: the policy as the user gave it.
        paths: path -> layer.
        complete: what is left to do once the model has made all its layers, at its first call.
        log: a list that takes one ``OpRecord`` for each operation, while somebody records.
    """

    def __init__(self, model: Any, asked: Policy, policy: Policy, paths: dict[str, Any]) -> None:
        self.model = model
        self.asked = asked
        self.policy = policy
        self.paths = paths
        self.log: list[Any] | None = None
        self.complete: Callable[[], None] | None = None  # called once, where layers were still to be made
        self.backend: Any = importlib.import_module(_BACKENDS[backend_name()]).Backend(self)

    def install(self) -> None:
        """Give every layer its call."""
        for path, layer in self.paths.items():
            uninstall(layer)
            original = layer.call
            wrapped = self._wrapped(layer, path, original)
            setattr(wrapped, _MARK, (self, path, "call" in vars(layer)))
            with unlocked(layer):
                layer.call = wrapped

    def _wrapped(self, layer: Any, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            now = active()
            if in_symbolic_scope() or _symbolic(args, kwargs) or (now is None and layer is not self.model):
                return original(*args, **kwargs)
            if now is not None and now.root is self:
                with self.backend.layer(path), entered(self, path):
                    return original(*args, **kwargs)
            if layer is not self.model:
                return original(*args, **kwargs)
            if self.complete is not None and self.model.built:
                complete, self.complete = self.complete, None
                complete()
                return self.model.call(*args, **kwargs)
            with entered(self, path):
                return self.backend.run(original, args, kwargs)

        return call

    def changed(self, policy: Policy) -> None:
        """Decide by another policy from now on; what was traced under the old one is traced again."""
        self.policy = policy
        self.backend = type(self.backend)(self)


def root_of(layer: Any) -> Root | None:
    """What ``apply`` has made of this model, or of the one that this layer belongs to; None without it."""
    mark = getattr(vars(layer).get("call"), _MARK, None)
    return None if mark is None else mark[0]


def uninstall(layer: Any) -> None:
    """Give a layer back the call that it had."""
    call = vars(layer).get("call")
    mark = getattr(call, _MARK, None)
    if mark is None:
        return
    with unlocked(layer):
        if mark[2]:
            layer.call = call.__wrapped__
        else:
            object.__delattr__(layer, "call")


def _symbolic(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((args, kwargs)))
