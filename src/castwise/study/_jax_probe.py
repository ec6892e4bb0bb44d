"""Looking at a JAX task: its parameters apart from the rest, programs, gradients compared, bytes counted."""

from __future__ import annotations

import hashlib
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from castwise.errors import StudyError

__all__ = [
    "Parts",
    "Programs",
    "batch_size",
    "packed",
    "saved_bytes",
    "split",
    "takes_key",
    "tree_bytes",
    "unpacked",
]


@dataclass(frozen=True)
class Parts:
    """A model, a pytree, as what is trained and what is not.

    Attributes:
        structure: of the whole.
        fixed: its leaves, with ``None`` for those that are trained.
    """

    structure: Any
    fixed: tuple[Any, ...]

    def whole(self, trained: Any) -> Any:
        """The model with these values of what is trained."""
        given = iter(jax.tree.leaves(trained))
        return jax.tree.unflatten(self.structure, [next(given) if leaf is None else leaf for leaf in self.fixed])


def split(model: Any, task: str) -> tuple[Any, Parts]:
    """What is trained of a model, its real floating-point arrays, as a pytree with ``None`` elsewhere; and the parts.

    Raises:
        StudyError: there is nothing to train, or it is kept in 16 bits.
    """
    leaves, structure = jax.tree.flatten(model)
    trained = [jnp.array(leaf) if _is_parameter(leaf) else None for leaf in leaves]
    kept = [leaf for leaf in trained if leaf is not None]
    if not kept:
        raise StudyError(
            f"Task {task!r}: model gives a {type(model).__name__} without a floating-point array. Return the "
            f"parameters, a pytree of arrays."
        )
    narrow = next((leaf.dtype for leaf in kept if leaf.dtype.itemsize < 4), None)
    if narrow is not None:
        raise StudyError(
            f"Task {task!r}: model gives parameters in {narrow}. Return them in float32: each arm lowers "
            f"them by itself."
        )
    fixed = tuple(leaf if one is None else None for leaf, one in zip(leaves, trained, strict=True))
    return jax.tree.unflatten(structure, trained), Parts(structure, fixed)


def _is_parameter(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


class Programs:
    """Compiled functions, each compiled once however many runs trace it: seeds of an arm share one program.

    Args:
        options: of XLA's compiler.
    """

    def __init__(self, options: Mapping[str, bool]) -> None:
        self._options = dict(options)
        self._compiled: dict[Any, Any] = {}

    def made(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, traced anew for arguments of other shapes, and compiled unless the same program was before."""
        known: dict[Any, Any] = {}

        def run(*args: Any) -> Any:
            leaves, structure = jax.tree.flatten(args)
            shapes = (structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves))
            if shapes not in known:
                known[shapes] = self._program(jax.jit(function).lower(*args))
            return known[shapes](*args)

        return run

    def _program(self, lowered: Any) -> Any:
        # The program's text holds its constants too: the same text computes the same.
        key = (hashlib.sha256(lowered.as_text().encode()).digest(), lowered.in_tree, lowered.out_tree)
        if key not in self._compiled:
            self._compiled[key] = lowered.compile(compiler_options=self._options)
        return self._compiled[key]


def takes_key(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter called ``key``."""
    try:
        return "key" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def batch_size(batch: Any) -> int:
    """The first dimension of the first array in ``batch``; 0 where there is none."""
    arrays = (leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.Array | np.ndarray))
    return next((int(leaf.shape[0]) if leaf.ndim else 0 for leaf in arrays), 0)


def tree_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def saved_bytes(loss: Callable[[Any], Any], trained: Any) -> int:
    """Bytes that ``loss`` keeps for the backward pass as JAX differentiates it, parameters not counted.

    A compiler may keep less: it computes again what is cheap.
    """
    sizes: list[int] = []

    def kept(trained: Any) -> None:
        own = {id(leaf) for leaf in jax.tree.leaves(trained)}
        found = {id(leaf): leaf for leaf in jax.tree.leaves(jax.vjp(loss, trained)[1])}
        sizes.extend(leaf.size * leaf.dtype.itemsize for key, leaf in found.items() if key not in own)

    jax.eval_shape(kept, trained)
    return sum(sizes)


def packed(leaves: Sequence[Any], told: str) -> bytes:
    """Arrays of any dtype, and a text, as bytes that hold no code."""
    arrays = [np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for leaf in leaves]
    buffer = io.BytesIO()
    # NumPy's files do not know JAX's 16-bit formats: plain bytes do for all.
    raw = {f"{at}": np.frombuffer(array.tobytes(), np.uint8) for at, array in enumerate(arrays)}
    np.savez(buffer, told=np.frombuffer(told.encode(), np.uint8), **raw)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpacked(state: bytes, like: Sequence[Any]) -> tuple[list[Any], str]:
    """What ``packed`` was given, as arrays of the shapes and dtypes of ``like``."""
    with np.load(io.BytesIO(state), allow_pickle=False) as data:
        raw = [data[f"{at}"].tobytes() for at in range(len(data.files) - 1)]
        told = data["told"].tobytes().decode()
    return [_as(one, leaf) for one, leaf in zip(raw, like, strict=True)], told


def _as(raw: bytes, like: Any) -> Any:
    data = np.asarray(jax.random.key_data(like) if _is_key(like) else like)
    array = jnp.asarray(np.frombuffer(raw, data.dtype).reshape(data.shape))
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like)) if _is_key(like) else array


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
