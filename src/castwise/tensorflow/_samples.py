"""Inputs of a SavedModel's signature: read from files, checked, or made up."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from castwise._npz import read_npz
from castwise.errors import did_you_mean

from ._errors import ConversionError

__all__ = ["Feed", "made_up", "read", "split"]

Feed = dict[str, Any]
_SEED, _OPEN = 20, 4
_HELD_OUT = 4  # every fourth sample is kept for the verification


def read(given: object, inputs: Mapping[str, Any], others: Iterable[Collection[str]] = ()) -> list[Feed]:
    """The feeds of a mapping, a list of them, an ``.npz`` file or a folder of such files.

    Args:
        given: what the user gave.
        inputs: specifications by name.
        others: inputs of each of the model's signatures. Samples may hold those of others too, or those alone.

    Raises:
        ConversionError: it is none of these, or does not fit the inputs.
    """
    feeds = _feeds(given)
    if not feeds:
        raise ConversionError("calibration: there is no sample in it. Give at least one, or leave it out.")
    every = [set(names) for names in others]
    foreign = set().union(*every) - set(inputs)
    numbered = [
        (number, feed)
        for number, feed in enumerate(feeds)
        if set(inputs) <= set(feed) or not any(names <= set(feed) for names in every)
    ] or list(enumerate(feeds))
    return [
        _checked({name: array for name, array in feed.items() if name not in foreign}, inputs, number)
        for number, feed in numbered
    ]


def _feeds(given: object) -> list[Mapping[str, Any]]:
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        found = []
        for file in files:
            try:
                found.append(read_npz(file))
            except ValueError as error:
                raise ConversionError(
                    f"calibration: {file} cannot be read ({error}). Write it with numpy.savez."
                ) from error
        return list(found)
    if isinstance(given, Mapping):
        return [given]
    if isinstance(given, Iterable):
        every = list(given)
        if all(isinstance(one, Mapping) for one in every):
            return every
    raise ConversionError(
        f"calibration: {type(given).__name__} is not understood. Give a mapping of input names to arrays, a list of "
        "those, an .npz file or a folder of such files."
    )


def _checked(feed: Mapping[str, Any], inputs: Mapping[str, Any], number: int) -> Feed:
    where = f"calibration sample {number}"
    for name in feed:
        if name not in inputs:
            hint = did_you_mean(str(name), inputs)
            raise ConversionError(f"{where}: the model has no input {name!r}.{hint} Inputs: {', '.join(inputs)}.")
    found: Feed = {}
    for name, spec in inputs.items():
        if name not in feed:
            raise ConversionError(f"{where}: input {name!r} is missing. Give every input of the model.")
        array = np.asarray(feed[name])
        if not np.can_cast(array.dtype, spec.dtype.as_numpy_dtype, "same_kind"):
            raise ConversionError(f"{where}: input {name!r} is {array.dtype}, the model takes {spec.dtype.name}.")
        if not spec.shape.is_compatible_with(array.shape):
            raise ConversionError(
                f"{where}: input {name!r} has shape {list(array.shape)}, the model takes {spec.shape}. Reshape it."
            )
        found[name] = array.astype(spec.dtype.as_numpy_dtype)
    return found


def split(feeds: Sequence[Feed]) -> tuple[list[Feed], list[Feed]]:
    """Samples to plan on, and samples to verify on: every fourth, or of a single sample the second half of its rows.

    Where neither can be divided, both are the same.
    """
    if len(feeds) > 1:
        held = [feed for number, feed in enumerate(feeds) if number % _HELD_OUT == min(_HELD_OUT, len(feeds)) - 1]
        kept = [feed for number, feed in enumerate(feeds) if number % _HELD_OUT != min(_HELD_OUT, len(feeds)) - 1]
        return kept, held
    [feed] = feeds
    rows = {array.shape[0] if array.ndim else 0 for array in feed.values()}
    if len(rows) != 1 or (count := rows.pop()) < 2:
        return [feed], [feed]
    half = count - max(1, count // _HELD_OUT)
    return [{n: a[:half] for n, a in feed.items()}], [{n: a[half:] for n, a in feed.items()}]


def made_up(inputs: Mapping[str, Any], seed: int = _SEED) -> Feed:
    """Numbers of the right types and shapes."""
    random = np.random.default_rng(seed)
    found: Feed = {}
    for name, spec in inputs.items():
        shape = [_OPEN if size is None else int(size) for size in (spec.shape if spec.shape.rank is not None else [])]
        dtype = np.dtype(spec.dtype.as_numpy_dtype)
        if dtype.kind == "f" or spec.dtype.is_floating:
            found[name] = random.standard_normal(shape).astype(dtype)
        elif dtype.kind == "b":
            found[name] = np.ones(shape, bool)
        elif dtype.kind in "iu":
            found[name] = random.integers(0, 2, shape).astype(dtype)
        else:
            raise ConversionError(f"Input {name!r} is {spec.dtype.name}, which cannot be made up. Give calibration.")
    return found
