"""The TensorFlow backend: the model's call as a ``tf.function`` whose graph gets its casts while it is built.

TensorFlow has no promotion: an op that is handed a bfloat16 and a float32 tensor is an error in the user's own code,
before anything could be cast. So the code sees what it was written for, float32 tensors throughout, and the casts are
beneath it. An op that the policy wants narrow computes on narrow inputs, and its result comes back as the float32
tensor that holds the same values; the next narrow op takes the narrow one instead, and what nobody reads is pruned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record as tape

from ._state import active
from ._stateless import Call
from ._tf_rewrite import Rewriter

__all__ = ["Backend"]


class Backend:
    """Runs the calls of one prepared model."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._calls: dict[Any, Any] = {}

    def run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The model's call. Results have the dtypes that the model was written with."""
        call = Call(self.root, original, args, kwargs)
        found = self._calls.get(call.key) if call.key is not None and self.root.log is None else None
        if found is None:
            found = tf.function(self._body(call.pure), autograph=False)
            if call.key is not None and self.root.log is None:
                self._calls[call.key] = found
        return call.finish(found(*call.arrays))

    @contextlib.contextmanager
    def layer(self, path: str) -> Iterator[None]:
        """The call of one layer: the rewriter asks where it is."""
        yield

    def _body(self, pure: Callable[..., Any]) -> Callable[..., Any]:
        def castwise(values: Any, tensors: Any, masks: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            # A tape outside sees one call, whose gradient TensorFlow makes from the finished graph.
            with tape.stop_recording(), Rewriter(self.root.policy, graph, _layer, self.root.log):
                return pure(values, tensors, masks)

        return castwise


def _layer() -> str:
    now = active()
    return now.layer if now is not None else ""
