"""Layers of a JAX task by the named scopes in its loss, and which of them a narrow format hurts.

A jaxpr has no modules, but every equation knows the scopes that it was written in, and what a layer does tells what it
is: a norm takes a square root and multiplies no matrices, an embedding looks rows up, the head holds the last product.
Guilt is measured on the whole loss at once: each value that the arm rounds, priced by its own gradient.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from castwise.errors import PlanError
from castwise.jax import report
from castwise.jax._evaluate import count_trips
from castwise.jax._layers import layer_path
from castwise.jax._risk import measured_risks
from castwise.jax.autocast import _Region, region_call
from castwise.jax.capture import OUT, capture
from castwise.policy import Policy
from castwise.study.backend import Blame, Layer

__all__ = ["blame", "classify"]

_log = logging.getLogger("castwise.study")

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
_ROOTS = frozenset({"rsqrt", "sqrt"})
_LOOKUPS = frozenset({"gather", "dynamic_slice"})


def classify(loss: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Sequence[str]]) -> list[Layer]:
    """The layers of ``loss(*args)``, in the order in which they run first; none where it opens no named scope.

    Args:
        loss: the function.
        args: its arguments.
        named: the task's own globs by kind; where they match they decide. Else what the layer computes does.
    """
    does: dict[str, set[str]] = {}
    last_product = ""
    for path, primitive in _operations(_traced(loss, args, Policy(format="float32"))[0].jaxpr, ""):
        does.setdefault(path, set()).add(primitive)
        last_product = path if primitive in _PRODUCTS else last_product
    return [Layer(path, _kind(path, done, path == last_product, named)) for path, done in does.items() if path]


def _kind(path: str, done: set[str], last_product: bool, named: Mapping[str, Sequence[str]]) -> str:
    for kind, globs in named.items():
        if any(fnmatch.fnmatchcase(path, glob) for glob in globs):
            return kind
    if not done & _PRODUCTS:
        if done & _ROOTS:
            return "norm"
        return "embedding" if done & _LOOKUPS else "other"
    return "head" if last_product and "head" not in named else "other"


def _operations(jaxpr: Jaxpr, outer: str) -> Iterator[tuple[str, str]]:
    """(layer, primitive) of all equations that hold no others, in order."""
    for eqn in jaxpr.eqns:
        path = layer_path(outer, eqn.source_info.name_stack)
        inner = [
            one.jaxpr if isinstance(one, ClosedJaxpr) else one
            for held in eqn.params.values()
            for one in (held if isinstance(held, tuple | list) else (held,))
            if isinstance(one, ClosedJaxpr | Jaxpr)
        ]
        if not inner:
            yield path, eqn.primitive.name
        for one in inner:
            yield from _operations(one, path)


def _traced(loss: Callable[..., Any], args: Sequence[Any], policy: Policy) -> tuple[ClosedJaxpr, list[Any]]:
    region = _Region(loss, policy)
    arrays, traceable = region.prepared(tuple(args), {})
    outer = traceable.traced(arrays)[0]
    call = region_call(outer.jaxpr)
    if call is None or len(call.invars) != len(arrays):
        raise PlanError("Layers are looked at outside of jit, with jit enabled.")
    return call.params["jaxpr"], arrays


def blame(loss: Callable[..., Any], args: Sequence[Any], policy: Policy) -> list[Blame]:
    """Layers by what they lose in the policy's low format on these arguments, the worst first.

    What the policy computes in fp32 is not blamed. Empty where nothing was written in a named scope, or where JAX
    cannot differentiate the loss.
    """
    low = policy.low_format.name
    lowered = {op.path for op in report(loss, *args, policy=policy).ops if low in (*op.inputs, *op.outputs)}
    closed, arrays = _traced(loss, args, policy)
    trips = count_trips(closed.jaxpr, closed.consts, arrays)
    captured = capture(closed, low, trips)
    risks = measured_risks(captured, [arrays], trips)
    if not risks.measured:
        return []
    graph, noise, overflow = captured.graph, dict[str, float](), dict[str, float]()
    rounded = {tensor for op in graph.ops if op.id.removesuffix(OUT) in lowered for tensor in op.outputs}
    for position, op in enumerate(graph.ops):
        if not op.layer or op.id.removesuffix(OUT) not in lowered:
            continue
        reads = [tensor for tensor in op.inputs if tensor not in rounded]
        own = risks.op_values[position] + risks.op_accumulation[position] + risks.cast_noise[reads].sum()
        noise[op.layer] = noise.get(op.layer, 0.0) + float(np.nan_to_num(own, posinf=0.0))
        ranges = [risks.ranges[tensor] for tensor in (*op.outputs, *reads) if tensor in risks.ranges]
        beyond = max((seen.overflow for seen in ranges), default=0.0)
        overflow[op.layer] = max(overflow.get(op.layer, 0.0), beyond)
    total = math.fsum(noise.values())
    found = [Blame(path, overflow[path], own / total if total > 0 else 0.0) for path, own in noise.items()]
    return sorted(found, key=lambda item: (-item.overflow, -item.noise))
