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
from ._stateless import TracedBackend
from ._tf_rewrite import Rewriter

__all__ = ["Backend"]


class Backend(TracedBackend):
    """Runs the calls of one prepared model."""

    def program(self, pure: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a graph with casts."""

        def castwise(values: Any, tensors: Any, masks: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            # A tape outside sees one call, whose gradient TensorFlow makes from the finished graph.
            with tape.stop_recording(), Rewriter(self.root.policy, graph, _layer, self.root.log):
                return pure(values, tensors, masks)

        traced: Callable[..., Any] = tf.function(castwise, autograph=False)
        return traced

    @contextlib.contextmanager
    def layer(self, path: str) -> Iterator[None]:
        """The call of one layer: the rewriter asks where it is."""
        yield


def _layer() -> str:
    now = active()
    return now.layer if now is not None else ""
