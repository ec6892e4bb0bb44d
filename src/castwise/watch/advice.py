"""Advice tied to causes: what a finding or a loss curve usually comes from, and what to do about it.

A cause is named only where what was seen points to it: the operation that broke, what it read, how the loss moved.
Each cause has a test that provokes it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castwise.guard import Finding, Kind

__all__ = ["advice_for", "trend_advice"]

Advice = tuple[str, str]

_EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "sinh", "cosh", "pow", "softplus", "square"})
_LOGARITHMS = frozenset({"log", "log2", "log10", "log1p", "xlogy"})
_DIVISIONS = frozenset({"div", "reciprocal", "rsqrt", "sqrt", "true_divide"})
_PRODUCTS = frozenset({"bmm", "baddbmm"})
_NORMS = ("batch_norm", "layer_norm", "group_norm", "var")

_TREND_STEPS = 40  # of loss values that a trend is judged on
_GROWTH = 2.0  # times the best level, from which on a loss counts as growing
_STILL = 0.002  # relative change of the level under which a loss counts as standing still
_SWING = 0.5  # standard deviation over level from which on a loss counts as swinging


@dataclass(frozen=True, slots=True)
class _Cause:
    name: str
    shows: Callable[[Finding, str], bool]  # the finding, and its operation without what marks it as in place
    words: str


def _weight_cast(finding: Finding, op: str) -> bool:
    return op == "_to_copy" and finding.kind is Kind.RANGE and "parameter" in finding.reads


_CAUSES = (
    _Cause(
        "inputs",
        lambda f, op: f.kind is Kind.DATA,
        "The input holds infinite or NaN values: clean the data, or drop such samples, before the model.",
    ),
    _Cause(
        "inputs out of range",
        lambda f, op: op == "_to_copy" and f.kind is Kind.RANGE and "input" in f.reads,
        "The input is beyond the format's range: normalise it before the model.",
    ),
    _Cause(
        "weights",
        lambda f, op: f.source.startswith("parameter"),
        "The weights are not finite any more: go back to the last good checkpoint, and lower the learning rate.",
    ),
    _Cause(
        "weights beyond the format",
        _weight_cast,
        "A weight does not fit the format. Was this checkpoint trained in bfloat16? Then train it in bfloat16, or keep "
        "this layer in float32.",
    ),
    _Cause(
        "mask",
        lambda f, op: "softmax" in op and f.kind is Kind.BROKEN,
        "A softmax had nothing but -inf to choose from: a row of the mask hides everything. Let each row see one.",
    ),
    _Cause(
        "attention scores",
        lambda f, op: op in _PRODUCTS and f.kind is Kind.RANGE and f.phase == "forward",
        "A batched product overflows, as attention scores do that are scaled too late: scale the queries before the "
        "product, normalise queries and keys, or use scaled_dot_product_attention.",
    ),
    _Cause(
        "exponentials",
        lambda f, op: op in _EXPONENTIALS and f.phase == "forward",
        "An exponential or a power overflows: subtract the maximum before it, clamp its input, or keep it in float32.",
    ),
    _Cause(
        "logarithm",
        lambda f, op: op in _LOGARITHMS and f.kind is not Kind.RANGE,
        "A logarithm was taken of zero or less: clamp what goes in, or use a loss that takes logits.",
    ),
    _Cause(
        "epsilon",
        lambda f, op: f.underflow or (op in _DIVISIONS and f.kind is not Kind.SCALE),
        "Something was divided by zero, or the root of zero was differentiated: add an epsilon that the format can "
        "hold (float16's smallest number is 6e-8), inside the root.",
    ),
    _Cause(
        "statistics",
        lambda f, op: any(norm in op for norm in _NORMS),
        "A normalisation layer's statistics overflow or have nothing to vary: look at batches of one value and at "
        "inputs of large scale, and keep the layer in float32.",
    ),
)


def advice_for(finding: Finding) -> list[Advice]:
    """The causes that a finding points to, each with what to do; empty where it points to none.

    Returns:
        Pairs of a cause's name and a sentence or two.
    """
    op = finding.op.rstrip("_") if not finding.op.startswith("_") else finding.op
    return [(cause.name, cause.words) for cause in _CAUSES if cause.shows(finding, op)]


def trend_advice(losses: Sequence[float]) -> list[Advice]:
    """What the last steps of a loss curve point to; empty where it falls as it should, or is too short to tell.

    Args:
        losses: of consecutive steps, the newest last.
    """
    if len(losses) < _TREND_STEPS:
        return []
    recent = list(losses[-_TREND_STEPS:])
    finite = [x for x in recent if math.isfinite(x)]
    if len(finite) < _TREND_STEPS // 2:
        return [("not finite", "Most of the last losses are not finite: see the events for what broke.")]
    parts = [statistics.median(finite[i * len(finite) // 4 : (i + 1) * len(finite) // 4]) for i in range(4)]
    level = statistics.median(finite)
    earlier = [x for x in losses[:-_TREND_STEPS] if math.isfinite(x)]
    best = min([*parts, *(statistics.median(earlier[i : i + 10]) for i in range(0, max(len(earlier) - 9, 0), 10))])
    found: list[Advice] = []
    if parts[3] > _GROWTH * abs(best) and parts[3] >= parts[0]:
        words = "The loss grows: lower the learning rate, warm it up, or clip gradients. No number format mends that."
        found.append(("learning rate", words))
    elif abs(level) > 0 and statistics.pstdev(finite) > _SWING * abs(level) and parts[3] > 0.8 * parts[0]:
        found.append(
            ("oscillation", "The loss swings without falling: lower the learning rate, or use larger batches.")
        )
    elif abs(parts[3] - parts[0]) <= _STILL * abs(level) and statistics.pstdev(finite) <= _STILL * abs(level):
        words = "The loss stands still: look at the learning rate, at vanishing gradients, and at the initialisation."
        found.append(("stagnation", words))
    return found
