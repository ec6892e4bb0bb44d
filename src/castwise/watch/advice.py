"""Advice tied to causes: what a finding or a loss curve usually comes from, and what to do about it.

A cause is named only where what was seen points to it: the operation that broke, what it read, how the loss moved.
Each cause has a test that provokes it.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castwise.guard import Finding, Kind

__all__ = ["BFLOAT16_CHECKPOINT", "HAZARDS", "advice_for", "growth_advice", "trend_advice"]

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
_LEARNT = 0.9  # of the first level: a loss that stands still below it has learnt, and may have arrived
_FLOOR = 0.01  # of the first level, under which a loss that moves is noise around its end
_JUMP = 10.0  # times the best of the last losses, from which on a step that breaks is put down to growth before it
_LARGEST_FLOAT16 = 65504.0


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
        lambda f, op: f.kind is Kind.DATA and f.phase != "loss",
        "The input holds infinite or NaN values: clean the data, or drop such samples, before the model.",
    ),
    _Cause(
        "targets",
        lambda f, op: f.kind is Kind.DATA and f.phase == "loss",
        "The loss reads a tensor with infinite or NaN values that is not of the model, such as targets or weights of "
        "samples: clean the data, or leave such entries out of the loss.",
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
        "mask constant",
        lambda f, op: f.kind is Kind.RANGE and f.constant < -_LARGEST_FLOAT16,
        "A constant that hides what is masked does not fit the format and becomes infinite: use "
        "torch.finfo(x.dtype).min of the tensor that it is written to, or masked_fill with -inf where each row keeps "
        "one entry.",
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
    quarters = [finite[i * len(finite) // 4 : (i + 1) * len(finite) // 4] for i in range(4)]
    parts = [_median(quarter) for quarter in quarters]
    level = _median(finite)
    earlier = [x for x in losses[:-_TREND_STEPS] if math.isfinite(x)]
    windows = [*quarters, *(earlier[i : i + 10] for i in range(0, max(len(earlier) - 9, 0), 10))]
    first = _median([x for x in losses if math.isfinite(x)][:10])
    spread = _spread(finite)
    if abs(level) < _FLOOR * abs(first):
        return []
    # By the median and by the mean: neither a single spike nor a swing from value to value is growth.
    if parts[3] >= parts[0] and all(f(quarters[3]) > _GROWTH * abs(min(map(f, windows))) for f in (_median, _mean)):
        return [("learning rate", _GROWS)]
    if abs(level) > 0 and spread > _SWING * abs(level) and parts[3] > 0.8 * parts[0]:
        return [("oscillation", "The loss swings without falling: lower the learning rate, or use larger batches.")]
    still = abs(parts[3] - parts[0]) <= _STILL * abs(level) and spread <= _STILL * abs(level)
    if still and level > first - (1.0 - _LEARNT) * abs(first):
        words = "The loss stands still: look at the learning rate, at vanishing gradients, and at the initialisation."
        return [("stagnation", words)]
    return []


def growth_advice(losses: Sequence[float]) -> list[Advice]:
    """Whether the loss had grown out of bounds before a step that broke: then it was no format's fault.

    Args:
        losses: of the steps up to the one that broke, the newest last; that one's own may be infinite or NaN.
    """
    finite = [x for x in losses[-_TREND_STEPS:] if math.isfinite(x)]
    if len(finite) < 2:
        return []
    return [("learning rate", _GROWS)] if finite[-1] > _JUMP * max(abs(min(finite)), sys.float_info.min) else []


def _median(values: Sequence[float]) -> float:
    return statistics.median(x / 2 for x in values) * 2  # halved: the sum of the largest floats is infinite


def _mean(values: Sequence[float]) -> float:
    return sum(x / len(values) for x in values)


def _spread(values: Sequence[float]) -> float:
    """The standard deviation, also of values whose squares are no floats."""
    largest = max(abs(x) for x in values)
    return statistics.pstdev([x / largest for x in values]) * largest if largest > 0 else 0.0


_GROWS = "The loss grows: lower the learning rate, warm it up, or clip gradients. No number format mends that."

#: What makes nothing infinite and still spoils a run: causes that a front end sees by looking, with what to do.
HAZARDS = {
    "initialisation": "The first step shows a poor initialisation: initialise weights by their fan-in (Xavier for "
    "tanh, Kaiming for ReLU), at random, and put normalisation between layers.",
    "statistics": "Running statistics of a normalisation layer are spoilt: keep them in float32 (leave the layer's "
    "buffers alone when the model is cast to 16 bits), and normalise inputs of large scale.",
    "positions": "Positions, or what is multiplied by them, are beyond the whole numbers that the format tells apart "
    "(bfloat16 ends at 256, float16 at 2048): compute positions, angles and their sine and cosine in float32, and "
    "cast the result.",
    "reductions": "A sum of many values is carried in 16 bits, where small terms are lost: accumulate in float32, or "
    "with one call of sum or mean, and cast the result.",
    "attention scores": "Scores this far apart make the softmax pick one and pass no gradient: scale queries by the "
    "root of their width, normalise queries and keys, or cap the scores.",
    "labels out of range": "The labels are outside of what the loss and the format expect: class numbers run from 0 to "
    "the number of classes less one, probabilities from 0 to 1, and targets of a regression should be normalised.",
    "inputs out of range": "The inputs are far from unit scale, or outside of an embedding: normalise them before the "
    "model.",
    "optimizer epsilon": "The optimizer's eps is zero in the format of its state, so it divides by zero wherever a "
    "second moment is zero: keep the optimizer's state in float32 (castwise.torch.Amp does), or raise eps to 1e-4 in "
    "float16.",
    "clip before unscale": "Gradients were clipped while they were still multiplied by the loss scale, so that all of "
    "them are cut to next to nothing: give amp.step(loss, clip_norm=...) the norm, or unscale before you clip.",
    "half-precision parameters": "Parameters are stepped in 16 bits without float32 values beside them, and updates "
    "that are smaller than half the distance to the next number are lost: keep parameters in float32, or let "
    "castwise.torch.Amp keep master weights for them.",
}

#: For an overflow in float16 of a model whose weights have no more digits than bfloat16 has.
BFLOAT16_CHECKPOINT: Advice = (
    "checkpoint of bfloat16",
    "The weights have no more digits than bfloat16 has: this looks like a checkpoint that was trained in bfloat16, "
    "whose values may be beyond float16's range. Train it in bfloat16, or keep the layers that overflow in float32.",
)
