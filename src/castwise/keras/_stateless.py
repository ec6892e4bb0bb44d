"""A model's call without side effects: state goes in and comes out, as a program that is traced needs it.

Inside, the call reads its variables from the arguments and leaves updates (batch statistics, seeds) and losses in a
scope; outside, what came back is put where a call would have put it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ._internals import get_keras_mask, get_stateless_scope, in_stateless_scope, keras, own_losses, set_keras_mask

__all__ = ["Call", "TracedBackend"]


class Call:
    """One call of a prepared model.

    Attributes:
        arrays: what is traced: values of variables, tensors among the arguments, and their masks.
        pure: the function of those; calls with an equal ``key`` may share one.
        key: everything else that decides what the call does; None where that cannot be compared.
    """

    def __init__(self, root: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.root = root
        self.layers = tuple(root.paths.values())
        listed = list(root.model.variables)
        unlisted = unlisted_variables(self.layers, listed)
        self.variables = listed + unlisted
        args, kwargs = keras.tree.map_structure(_as_tensor, (args, kwargs))
        leaves, self._tree = keras.tree.flatten((args, kwargs)), (args, kwargs)
        tensors = [leaf for leaf in leaves if keras.ops.is_tensor(leaf)]
        masks = [get_keras_mask(leaf) for leaf in tensors]
        # Read here: a variable of TensorFlow's that is spread over replicas is no argument for a tf.function.
        values = [keras.ops.convert_to_tensor(variable.value) for variable in self.variables]
        self.arrays = (values, tensors, [mask for mask in masks if mask is not None])
        static = tuple(_TENSOR if keras.ops.is_tensor(leaf) else leaf for leaf in leaves)
        masked = tuple(mask is not None for mask in masks)
        trainable = tuple(layer.trainable for layer in self.layers)
        structure = str(keras.tree.map_structure(lambda _: 0, self._tree))
        self.key: Any = (original, structure, static, masked, trainable, tuple(map(id, unlisted)))
        try:
            hash(self.key)
        except TypeError:  # an argument without a hash: traced anew at each call
            self.key = None
        self.pure = self._pure(original, static, masked)

    def _pure(self, original: Callable[..., Any], static: Any, masked: Any) -> Callable[..., Any]:
        variables, layers, tree, backend = self.variables, self.layers, self._tree, self.root.backend

        def pure(values: Any, tensors: Any, masks: Any) -> Any:
            given, hidden = iter(tensors), iter(masks)
            mine = []
            for has_mask in masked:
                tensor = next(given)
                if has_mask:
                    set_keras_mask(tensor, next(hidden))
                mine.append(tensor)
            rest = iter(mine)
            flat = [next(rest) if leaf is _TENSOR else leaf for leaf in static]
            args, kwargs = keras.tree.pack_sequence_as(tree, flat)
            mapping = list(zip(variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
                before = dict(scope.state_mapping)
                with backend.layer(""):
                    result = original(*args, **kwargs)
            outs = keras.tree.flatten(result)
            updates = {
                str(position): scope.state_mapping[id(variable)]
                for position, variable in enumerate(variables)
                if scope.state_mapping[id(variable)] is not before[id(variable)]
            }
            losses = {
                f"{owner}.{position}": loss
                for position, loss in enumerate(scope.losses)
                for owner, layer in enumerate(layers)
                if id(loss) in layer._loss_ids
            }
            masks_out = {str(i): mask for i, out in enumerate(outs) if (mask := get_keras_mask(out)) is not None}
            return result, masks_out, updates, losses

        return pure

    def finish(self, results: Any) -> Any:
        """Put updates, losses and masks where the call would have put them; returns what it would have returned."""
        result, masks, updates, losses = results
        for position, value in updates.items():
            self.variables[int(position)].assign(value)
        for place, loss in losses.items():
            self._add_loss(self.layers[int(place.partition(".")[0])], loss)
        outs = keras.tree.flatten(result)
        for position, mask in masks.items():
            set_keras_mask(outs[int(position)], mask)
        return result

    def _add_loss(self, layer: Any, loss: Any) -> None:
        if not in_stateless_scope():
            own_losses(layer).append(loss)
            return
        scope = get_stateless_scope()
        if scope.collect_losses:
            scope.add_loss(loss)
            layer._loss_ids.add(id(loss))


class TracedBackend(ABC):
    """Runs the calls of one prepared model as programs that are traced once for each kind of call."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._programs: dict[Any, Callable[..., Any]] = {}

    def run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The model's call. Results have the dtypes that the model was written with."""
        call = Call(self.root, original, args, kwargs)
        kept = self._programs if call.key is not None and self.root.log is None else {}
        program = kept.get(call.key)
        if program is None:
            program = kept[call.key] = self.program(call.pure)
        return call.finish(program(*call.arrays))

    @abstractmethod
    def program(self, pure: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with each of its operations in the format that the policy decides; noted in the root's log."""

    @abstractmethod
    def layer(self, path: str) -> AbstractContextManager[None]:
        """Around the call of one layer: what is traced in it is this layer's."""


class _Tensor:
    """Stands for a tensor among static arguments."""


_TENSOR = _Tensor()


def unlisted_variables(layers: Iterable[Any], listed: Iterable[Any]) -> list[Any]:
    """Variables that layers hold and Keras does not list, such as the states of a stateful recurrent layer."""
    seen = {id(variable) for variable in listed}
    found = []
    for layer in layers:
        for value in vars(layer).values():
            for variable in _variables_in(value):
                if id(variable) not in seen:
                    seen.add(id(variable))
                    found.append(variable)
    return found


def _variables_in(value: Any, depth: int = 3) -> Iterator[Any]:
    """Variables in an attribute of a layer. Attributes may hold anything, so it is not followed far."""
    if isinstance(value, keras.Variable):
        yield value
    elif depth and isinstance(value, (tuple, list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _variables_in(inner, depth - 1)


def _as_tensor(leaf: Any) -> Any:
    return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
