"""Objects that carry tensors from one call of a model to the next, as lists of tensors: Transformers' key-value caches.

torch.export follows tensors in lists, tuples and dictionaries, and refuses what else it meets. A cache of Transformers
is an object with layers, which are objects with tensors, and `forward` changes it. So a captured graph takes the
tensors of a cache and returns those it would have held afterwards, and the caller's cache is given these. Caches are
known by the module that defines their class; Transformers itself is not imported, and nothing is registered with torch.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from castwise.errors import PlanError

__all__ = ["Returned", "caches_of", "carried", "is_cache", "needs_packing", "packed_call", "packed_forward"]

_HOME = "transformers.cache_utils"


class _Slot:
    """Stands for a tensor in the skeleton of a cache."""


_SLOT = _Slot()


def needs_packing(forward: Callable[..., Any]) -> bool:
    """Whether a forward can only be captured packed: there can be caches, or it takes whatever it is given."""
    kinds = (parameter.kind for parameter in inspect.signature(forward).parameters.values())
    return _HOME in sys.modules or inspect.Parameter.VAR_KEYWORD in kinds


def is_cache(x: Any) -> bool:
    """Whether an object is a key-value cache, or a part of one."""
    return _HOME in sys.modules and any(base.__module__ == _HOME for base in type(x).__mro__)


def caches_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The caches among a call's arguments, in order."""
    return [leaf for leaf in pytree.tree_flatten((tuple(args), dict(kwargs)))[0] if is_cache(leaf)]


def _rebuilt(x: Any, leaf: Callable[[Any], Any]) -> Any:
    """A copy of a cache, or of a part of one, with `leaf` of everything in it that holds nothing else."""
    if isinstance(x, list | tuple):
        return type(x)([_rebuilt(part, leaf) for part in x])
    if isinstance(x, dict):
        return {key: _rebuilt(part, leaf) for key, part in x.items()}
    if is_cache(x):
        made = copy.copy(x)
        made.__dict__ = {name: _rebuilt(part, leaf) for name, part in vars(x).items()}
        return made
    return leaf(x)


def _taken_apart(x: Any, tensors: list[torch.Tensor]) -> Any:
    """A skeleton of a cache with its tensors moved to a list."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return _SLOT

    return _rebuilt(x, leaf)


def _put_together(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """The reverse."""
    rest = iter(tensors)
    return _rebuilt(skeleton, lambda value: next(rest) if value is _SLOT else value)


def _described(x: Any) -> Any:
    """What a skeleton is, in values that can be compared: another one needs another graph."""
    if isinstance(x, list | tuple):
        return (type(x), *map(_described, x))
    if isinstance(x, dict):
        return (dict, *((key, _described(part)) for key, part in x.items()))
    if is_cache(x):
        return (type(x), _described(vars(x)))
    return x if isinstance(x, int | float | str | bool | type | torch.device | torch.dtype | None) else id(x)


def carried(leaves: Sequence[Any]) -> tuple[list[Any], Any]:
    """Leaves of a call with each cache replaced by its tensors, and a description of the caches among them."""
    flat: list[Any] = []
    found = []
    for position, leaf in enumerate(leaves):
        if is_cache(leaf):
            tensors: list[torch.Tensor] = []
            skeleton = _taken_apart(leaf, tensors)
            found.append((position, len(tensors), _described(skeleton)))
            flat += tensors
        else:
            flat.append(leaf)
    return flat, tuple(found)


@dataclass
class Returned:
    """What the caller gets: the structure of a captured forward's results, and the caches among them."""

    tree: Any = None
    caches: dict[int, tuple[Any, int, int | None]] = field(default_factory=dict)
    """By position among the results: the skeleton, how many tensors it holds, and which of the call's caches it is."""

    def restored(self, flat: Sequence[Any], given: Sequence[Any]) -> Any:
        """A call's results from their flat values. ``given`` are the call's caches, changed as `forward` would have."""
        rest, leaves = list(flat), []
        for position in range(self.tree.num_leaves):
            if position not in self.caches:
                leaves.append(rest.pop(0))
                continue
            skeleton, count, same = self.caches[position]
            made = _put_together(skeleton, rest[:count])
            del rest[:count]
            if same is not None:
                given[same].__dict__.update(vars(made))
                made = given[same]
            leaves.append(made)
        return pytree.tree_unflatten(leaves, self.tree)


def packed_forward(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], returned: Returned
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A forward that takes and returns tuples of tensors in place of caches, and the arguments packed for it.

    When it has run, ``returned`` says how to unpack what it gives.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    skeletons: list[tuple[Any, int] | None] = []
    for leaf in leaves:
        tensors: list[torch.Tensor] = []
        skeletons.append((_taken_apart(leaf, tensors), len(tensors)) if is_cache(leaf) else None)
    packed_args, packed_kwargs = packed_call(args, kwargs)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: kwargs[name] for name in packed_kwargs}  # in the order in which they were flattened
        flat, original, caches = pytree.tree_flatten((args, kwargs))[0], [], []
        for skeleton in skeletons:
            if skeleton is None:
                original.append(flat.pop(0))
            else:
                caches.append(_put_together(skeleton[0], flat[: skeleton[1]]))
                original.append(caches[-1])
                del flat[: skeleton[1]]
        entered = [_tensors(cache) for cache in caches]
        given_args, given_kwargs = pytree.tree_unflatten(original, tree)
        outputs = forward(*given_args, **given_kwargs)
        return _packed_outputs(outputs, caches, entered, returned)

    signature = _exact_signature(forward, args, kwargs)
    if signature is not None:
        run.__signature__ = signature  # type: ignore[attr-defined]
    return run, packed_args, packed_kwargs


def _exact_signature(forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> inspect.Signature | None:
    """The arguments of this one call as a signature: sizes that vary cannot be told torch.export through `**kwargs`."""
    parameters = list(inspect.signature(forward).parameters.values())
    positional = parameters[: len(args)]
    one_by_one = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(positional) < len(args) or any(parameter.kind not in one_by_one for parameter in positional):
        return None
    names = [*(parameter.name for parameter in positional), *kwargs]
    return inspect.Signature([inspect.Parameter(name, one_by_one[1]) for name in names])


def packed_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with a tuple of its tensors in place of each cache."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    packed = [tuple(_tensors(leaf)) if is_cache(leaf) else leaf for leaf in leaves]
    packed_args, packed_kwargs = pytree.tree_unflatten(packed, tree)
    return packed_args, packed_kwargs


def _tensors(cache: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    _taken_apart(cache, tensors)
    return tensors


def _packed_outputs(outputs: Any, caches: list[Any], entered: list[list[torch.Tensor]], returned: Returned) -> Any:
    leaves, returned.tree = pytree.tree_flatten(outputs)
    returned.caches = {}
    packed = []
    for position, leaf in enumerate(leaves):
        if not is_cache(leaf):
            packed.append(leaf)
            continue
        tensors: list[torch.Tensor] = []
        skeleton = _taken_apart(leaf, tensors)
        same = next((number for number, cache in enumerate(caches) if cache is leaf), None)
        returned.caches[position] = (skeleton, len(tensors), same)
        packed.append(tuple(tensors))
    returned_ones = {same for _, _, same in returned.caches.values()}
    for number, (cache, before) in enumerate(zip(caches, entered, strict=True)):
        after = _tensors(cache)
        changed = len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True))
        if changed and number not in returned_ones:
            raise PlanError("The model changes a cache that it does not return. Let it return the cache.")
    return pytree.tree_unflatten(packed, returned.tree) if returned.caches else outputs
