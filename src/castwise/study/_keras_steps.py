"""Losses and gradients of a Keras task, in the way of each backend. Keras has no gradient of its own to ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from castwise._extras import require

keras: Any = require("keras", extra="keras")

__all__ = ["Gradients", "gradients_for"]

#: (batch, scale) -> loss as a number, gradients of the scaled loss as arrays of the backend, one for each variable.
Gradients = Callable[[Any, float], tuple[float, list[Any]]]


def gradients_for(model: Any, loss: Callable[[Any], Any]) -> Gradients:
    """The function that gives losses and gradients of ``loss(batch)`` for a model's trainable variables.

    What the loss changes besides (batch statistics, seeds) is changed in the model, as in any training step.
    """
    return _BY_BACKEND[keras.backend.backend()](model, loss)


def _torch(model: Any, loss: Callable[[Any], Any]) -> Gradients:
    import torch

    def gradients(batch: Any, scale: float) -> tuple[float, list[Any]]:
        variables = [variable.value for variable in model.trainable_variables]
        value = loss(batch)
        found = torch.autograd.grad(value * scale, variables, allow_unused=True)
        dense = [torch.zeros_like(v) if g is None else g for g, v in zip(found, variables, strict=True)]
        return float(value.detach()), dense

    return gradients


def _tensorflow(model: Any, loss: Callable[[Any], Any]) -> Gradients:
    import tensorflow as tf

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def traced(batch: Any, scale: Any) -> Any:
        variables = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape:
            value = loss(batch)
            scaled = value * scale
        found = tape.gradient(scaled, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return value, [tf.convert_to_tensor(gradient) for gradient in found]

    def gradients(batch: Any, scale: float) -> tuple[float, list[Any]]:
        value, found = traced(keras.tree.map_structure(tf.convert_to_tensor, batch), tf.constant(scale, tf.float32))
        return float(value), list(found)

    return gradients


def _jax(model: Any, loss: Callable[[Any], Any]) -> Gradients:
    import jax

    def pure(trainable: Any, fixed: Any, batch: Any, scale: Any) -> Any:
        variables = model.non_trainable_variables
        mapping = [*zip(model.trainable_variables, trainable, strict=True), *zip(variables, fixed, strict=True)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            value = loss(batch)
        return value * scale, (value, [scope.get_current_value(variable) for variable in variables])

    compiled = jax.jit(jax.value_and_grad(pure, has_aux=True))

    def gradients(batch: Any, scale: float) -> tuple[float, list[Any]]:
        fixed = model.non_trainable_variables
        trainable = [variable.value for variable in model.trainable_variables]
        (_, (value, after)), found = compiled(trainable, [variable.value for variable in fixed], batch, scale)
        for variable, new in zip(fixed, after, strict=True):
            variable.assign(new)
        return float(value), list(found)

    return gradients


_BY_BACKEND: dict[str, Callable[[Any, Callable[[Any], Any]], Gradients]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "jax": _jax,
}
