"""How far a plan's outputs are from fp32's, computed with the plan's own roundings.

The evaluator knows two models: the one to be right about (the user's, unchanged) and the one that plans are written
into. A plan is tried by writing it, emulating the result in fp32 and running it on every sample; reference outputs are
kept, which are small beside a model's activations.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx

from castwise._graph_index import Floats
from castwise._ranges import RangeRecord
from castwise.formats import FORMATS
from castwise.onnx._apply import Applied, apply, narrow
from castwise.onnx._capture import Captured
from castwise.onnx._disturb import can_disturb, disturb
from castwise.onnx._emulate import emulated, round_inputs
from castwise.onnx._explain import is_random
from castwise.onnx._measure import instrument
from castwise.onnx._run import Runner
from castwise.onnx._samples import Array, Feed
from castwise.onnx._scopes import Tree, Value, build_tree
from castwise.onnx._slots import ELEMENT
from castwise.onnx._source import Weights
from castwise.onnx._unmix import beside_twin, can_twin

__all__ = ["Evaluator", "Outcome", "OutputError", "compare", "infer", "uncompared", "worst"]

log = logging.getLogger("castwise.onnx")

_FLOAT = onnx.TensorProto.FLOAT
_MOST_KEPT = 1 << 30
"""Bytes of weights of which rounded copies are kept."""


@dataclass(frozen=True, slots=True)
class OutputError:
    """The largest difference of one output over all samples."""

    name: str
    error: float
    """max |difference| / max(1, max |fp32 value|); infinite where one is finite and the other is not."""
    absolute: float
    largest: float
    """max |fp32 value|."""
    compared: bool = True
    """Whether fp32 had a finite value there in any sample: without one, an error of 0 says nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan does to the outputs."""

    outputs: tuple[OutputError, ...]
    noise: float
    """Mean square of difference / max(1, max |fp32 value|), summed over outputs; infinite where not finite."""

    @property
    def error(self) -> float:
        return max((output.error for output in self.outputs), default=0.0)


def worst(left: Outcome, right: Outcome) -> Outcome:
    """Two samples together."""
    outputs = tuple(
        OutputError(
            a.name,
            max(a.error, b.error),
            max(a.absolute, b.absolute),
            max(a.largest, b.largest),
            a.compared or b.compared,
        )
        for a, b in zip(left.outputs, right.outputs, strict=True)
    )
    return Outcome(outputs, left.noise + right.noise)


def uncompared(outputs: Iterable[OutputError]) -> list[str]:
    """What is to be said of outputs in which there was nothing to compare."""
    return [
        f"output {output.name!r} is empty or not finite in fp32 in every sample: nothing was compared there"
        for output in outputs
        if not output.compared
    ]


def compare(names: Iterable[str], wanted: list[Any], got: list[Any], ignored: frozenset[str] = frozenset()) -> Outcome:
    """One sample's outputs against fp32's."""
    outputs, noise = [], 0.0
    for name, want, have in zip(names, wanted, got, strict=True):
        if name in ignored:
            continue
        error, part = _difference(name, want, have)
        outputs.append(error)
        noise += part
    return Outcome(tuple(outputs), noise)


def _difference(name: str, want: Any, have: Any) -> tuple[OutputError, float]:
    if want is None or have is None:
        same = want is None and have is None
        return OutputError(name, 0.0 if same else math.inf, 0.0, 0.0), 0.0
    if isinstance(want, (list, tuple)):
        if len(want) != len(have):
            return OutputError(name, math.inf, math.inf, 0.0), math.inf
        parts = [_difference(name, a, b) for a, b in zip(want, have, strict=True)]
        found = [part[0] for part in parts] or [OutputError(name, 0.0, 0.0, 0.0)]
        biggest = max(found, key=lambda item: item.error)
        return replace(biggest, compared=any(item.compared for item in found)), sum(part[1] for part in parts)
    a, b = np.asarray(want), np.asarray(have)
    if a.dtype.kind in "OUS":
        same = np.array_equal(a, b)
        return OutputError(name, 0.0 if same else math.inf, 0.0, 0.0), 0.0
    if a.shape != b.shape:
        return OutputError(name, math.inf, math.inf, 0.0), math.inf
    exact = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(exact), b.astype(exact)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return OutputError(name, math.inf, math.inf, 0.0), math.inf
    if not finite.any():
        return OutputError(name, 0.0, 0.0, 0.0, compared=False), 0.0
    difference, largest = np.abs(a[finite] - b[finite]), float(np.abs(a[finite]).max())
    scale = max(1.0, largest)
    return (
        OutputError(name, float(difference.max()) / scale, float(difference.max()), largest),
        float(np.mean((difference / scale) ** 2)),
    )


def infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the types that ONNX infers. What it cannot infer stays open."""
    try:
        return onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True)
    except Exception as error:
        log.debug("shape inference without data: %s", error)
    try:
        return onnx.shape_inference.infer_shapes(model)
    except Exception as error:
        log.warning("types could not be inferred: %s", error)
        return model


@dataclass
class Evaluator:
    """Runs plans on samples. ``reference`` is the model as it came, plans are written into ``skeleton``."""

    reference: onnx.ModelProto
    skeleton: onnx.ModelProto
    weights: Weights
    original: Mapping[str, Array]
    """The weights of the reference, where some were changed for the plans."""
    samples: list[Feed] | Any
    runs: int = 0
    worst: int = 0
    """The sample with the largest error in the last trial."""
    engine: str = ""
    random: frozenset[str] = frozenset()
    """Outputs that two runs of the reference do not agree on."""
    wanted: list[list[Any]] = field(default_factory=list)
    _fed: dict[tuple[str, str], Array] = field(default_factory=dict)

    def prepare(self, tree: Tree) -> None:
        """Run the reference. Raises RuntimeError where it does not run."""
        runner = Runner(emulated(self.reference), {name: self._wide(self.original, name) for name in self.original})
        self.names = runner.outputs
        for feed in self.samples:
            self.wanted.append(runner.run(feed))
        self.engine = runner.engine
        if any(is_random(node.op_type) for node in tree.nodes()):
            again = next(iter(self.samples))
            once = compare(self.names, self.wanted[0], runner.run(again))
            self.random = frozenset(output.name for output in once.outputs if output.error > 0)

    def ranges(self, tree: Tree) -> dict[str, float]:
        """The largest finite |value| of every fp32 tensor over all samples, by path."""
        return self._largest(self.skeleton, tree, {name: self._wide(self.weights, name) for name in self.weights})

    def _largest(self, model: onnx.ModelProto, tree: Tree, weights: Mapping[str, Array]) -> dict[str, float]:
        values = {value for value in tree.values() if value.floating and not value.constant}
        found = self._maxima(emulated(model), tree, values, weights, finite_only=False)
        odd = {value for value in values if not math.isfinite(found.get(value.path, 0.0))}
        if odd:
            found |= self._maxima(emulated(model), tree, odd, weights, finite_only=True)
        return found

    def _maxima(
        self, model: onnx.ModelProto, tree: Tree, values: set[Value], weights: Mapping[str, Array], *, finite_only: bool
    ) -> dict[str, float]:
        extended = instrument(model, tree, values, finite_only=finite_only)
        runner = Runner(extended.model, weights)
        found: dict[str, float] = {}
        for feed in self.samples:
            results = runner.run(feed)[-len(extended.paths) :] if extended.paths else []
            for path, result in zip(extended.paths, results, strict=True):
                number = float(np.asarray(result).reshape(-1)[0])
                old = found.get(path, 0.0)
                found[path] = number if math.isnan(number) else max(old, number)
            self.runs += 1
        return found

    def try_plan(self, captured: Captured, labels: Mapping[str, bool]) -> Outcome:
        """What a plan does to the outputs, over all samples. Raises RuntimeError where its model does not run."""
        return self.try_model(apply(captured, self.skeleton, labels), captured.fmt)

    def try_model(self, applied: Applied, fmt: str) -> Outcome:
        runner = Runner(*self._emulation(applied, fmt))
        total: Outcome | None = None
        for number, feed in enumerate(self.samples):
            outcome = compare(self.names, self.wanted[number], runner.run(feed), self.random)
            if total is None or outcome.error > total.error:
                self.worst = number
            total = outcome if total is None else worst(total, outcome)
            self.runs += 1
        assert total is not None
        return total

    def first_not_finite(self, captured: Captured, labels: Mapping[str, bool], usual: Mapping[str, float]) -> list[str]:
        """Nodes whose results are not finite under a plan though all they read is, and though they are in fp32."""
        applied = apply(captured, self.skeleton, labels)
        model, weights = self._emulation(applied, captured.fmt)
        model = infer(model)
        tree = build_tree(model, dict.fromkeys(weights, (int(_FLOAT), ())))
        for node in tree.nodes():
            node.proto.name = node.id
        values = {value for value in tree.values() if value.floating and not value.constant}
        seen = self._maxima(model, tree, values, weights, finite_only=False)
        guilty = []
        for node in tree.nodes():
            if node.op_type == "Cast" and node.id.endswith(("_down", "_up")):
                continue
            made = [value.path for value in node.outputs if value is not None and value.floating]
            made += [path.removesuffix("_unrounded") for path in made]
            read = [value.path for value in node.inputs if value is not None and value.floating]
            broken = any(
                not math.isfinite(seen.get(path, 0.0)) and math.isfinite(usual.get(path, 0.0)) for path in made
            )
            if broken and all(math.isfinite(seen.get(path, 0.0)) for path in read):
                guilty.append(node.id)
        return guilty

    def disturbed(self, paths: Collection[str], elem: int) -> tuple[list[str], Callable[[Floats], Floats]] | None:
        """The model with the rounding error of each of these tensors added by a dial.

        Returns the tensors that rounding changes, and a function from dials in their order to the outputs' difference,
        on the sample that was worst in the last trial. None for a model of which that cannot be had. Raises
        RuntimeError where it does not run. ``elem`` is the ONNX type that tensors are rounded to.
        """
        model = infer(emulated(self.skeleton))
        tree = build_tree(model, {name: (int(_FLOAT), ()) for name in self.weights})
        for node in tree.nodes():
            node.proto.name = node.id
        wanted = [value for value in tree.values() if value.path in paths and value.floating]
        if not wanted or not can_twin(tree, wanted):
            return None
        weights = {name: self._wide(self.weights, name) for name in self.weights}
        feed = next(itertools.islice(self.samples, self.worst, None))
        if can_disturb(tree, wanted, self.weights):
            changed, moved = disturb(model, wanted, elem, weights, feed)
        else:
            changed, moved = wanted, beside_twin(model, tree, wanted, elem, weights, feed)

        def run(dials: Floats) -> Floats:
            self.runs += 1
            return moved(dials)

        return [value.path for value in changed], run

    def _emulation(self, applied: Applied, fmt: str) -> tuple[onnx.ModelProto, dict[str, Array]]:
        """A written model as one that runs in fp32, and its weights.

        Rounded weights are kept for the next trial; where they are many, the model rounds each when it needs it.
        """
        model = emulated(infer(applied.model))
        fed = {name: self._wide(self.weights, name) for name in self.weights if name in applied.kept}
        if sum(self.weights.size(name) for name in applied.narrowed.values()) <= _MOST_KEPT:
            return model, fed | {name: self._rounded(old, fmt) for name, old in applied.narrowed.items()}
        renamed = round_inputs(model, applied.narrowed, int(ELEMENT[fmt]))
        return model, fed | {renamed[name]: self._wide(self.weights, old) for name, old in applied.narrowed.items()}

    def _rounded(self, name: str, fmt: str) -> Array:
        key = (name, fmt)
        if key not in self._fed:
            self._fed[key] = narrow(self.weights[name], fmt).astype(np.float32)
        return self._fed[key]

    @staticmethod
    def _wide(weights: Mapping[str, Array], name: str) -> Array:
        array = weights[name]
        return array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else np.asarray(array)


def records(largest: Mapping[str, float], fmt: str) -> dict[str, RangeRecord]:
    """Ranges as the planner takes them."""
    limit = FORMATS[fmt].max
    return {path: RangeRecord(value, 1, float(not value <= limit)) for path, value in largest.items()}
