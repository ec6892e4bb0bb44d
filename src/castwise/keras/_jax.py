"""The JAX backend: the model's call as a pure function, rewritten by ``castwise.jax``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import jax

from castwise.formats import parse_format
from castwise.jax import autocast, report
from castwise.jax._layers import ABSOLUTE

from ._stateless import Call
from .record import OpRecord

__all__ = ["Backend"]


class Backend:
    """Runs the calls of one prepared model."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._calls: dict[Any, Any] = {}

    def run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The model's call, rewritten. Results have the dtypes that the model was written with."""
        call = Call(self.root, original, args, kwargs)
        found = self._calls.get(call.key) if call.key is not None else None
        if found is None:
            found = autocast(call.pure, self.root.policy)
            # `apply` has matched the rules with the model's layers; a call may run few of them.
            found._castwise_region._check = _unchecked  # type: ignore[attr-defined]
            if call.key is not None:
                self._calls[call.key] = found
        if self.root.log is not None:
            self.root.log += [_record(op, self.root.paths) for op in report(found, *call.arrays).ops]
        return call.finish(found(*call.arrays))

    def layer(self, path: str) -> AbstractContextManager[None]:
        """The call of one layer: JAX remembers its path with each operation, in place of Keras' own scopes."""
        scope: AbstractContextManager[None] = jax.named_scope(f"{ABSOLUTE}{path}")
        return scope


def _unchecked(jaxpr: Any) -> None:
    return None


def _record(op: Any, paths: Collection[str]) -> OpRecord:
    layer = op.layer
    while layer not in paths:  # JAX opens scopes of its own, such as that of an einsum
        layer = layer.rpartition(".")[0]
    names = tuple(parse_format(name).long_name for name in op.inputs)
    results = tuple(parse_format(name).long_name for name in op.outputs)
    widest = max(names, key=_width) if names else (results[0] if results else "")
    rule = "low" if re.search(r"\blow\b", op.reason) else "high" if widest in ("float32", "float64") else "widest"
    return OpRecord(layer, op.op, rule, widest, names, results, op.reason)


def _width(name: str) -> int:
    return parse_format(name).bits
