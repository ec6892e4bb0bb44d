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

from ._stateless import TracedBackend
from .record import OpRecord

__all__ = ["Backend"]


class Backend(TracedBackend):
    """Runs the calls of one prepared model."""

    def program(self, pure: Callable[..., Any]) -> Callable[..., Any]:
        """The function, rewritten."""
        found = autocast(pure, self.root.policy)
        # `apply` has matched the rules with the model's layers; a call may run few of them.
        found._castwise_region._check = _unchecked  # type: ignore[attr-defined]
        log, paths = self.root.log, self.root.paths
        if log is None:
            return found

        def noted(*arrays: Any) -> Any:
            log.extend(_record(op, paths) for op in report(found, *arrays).ops)
            return found(*arrays)

        return noted

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
