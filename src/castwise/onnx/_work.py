"""The steps of one conversion: read it, open it, find what its types allow, look at its constants, run it on the
samples, plan, try, write, check.

A step that cannot be taken (nothing runs a custom operator here) is left out and said so; a result that is not valid is
never returned.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx

from castwise.onnx import _assemble, _targets
from castwise.onnx._apply import Applied, apply
from castwise.onnx._capture import Captured, capture
from castwise.onnx._constants import bring_masks_within_range, examine
from castwise.onnx._emulate import emulated
from castwise.onnx._errors import ConversionError
from castwise.onnx._evaluate import Evaluator, infer, uncompared
from castwise.onnx._explain import copied, is_product, named_in, reason
from castwise.onnx._normalise import check, normalise, raise_opset
from castwise.onnx._report import NodeRow, Report
from castwise.onnx._run import Runner, load_failure
from castwise.onnx._samples import Feed, Samples, made_up
from castwise.onnx._scopes import Tree, build_tree
from castwise.onnx._search import Search, fewest_wide
from castwise.onnx._source import Source
from castwise.onnx._stamp import digest, stamp, versions
from castwise.plan import Plan
from castwise.policy import Policy

__all__ = ["TOLERANCES", "Conversion", "Work"]

log = logging.getLogger("castwise.onnx")

TOLERANCES = {"fp16": 1e-2, "bf16": 8e-2}
"""Default tolerance: about ten times the error of one rounding of every output, in either format."""

_OF_THE_TOLERANCE = 0.1
"""How much of it a change of masks may use up."""
_MOST_LOADS = 12
_LOADABLE = 1_500_000_000


@dataclass(frozen=True)
class Conversion:
    """A converted model, what was done to it, and the plan behind it."""

    report: Report
    plan: Plan | None
    """None where the model had been converted before and was returned as it was."""
    source: Source = field(repr=False)
    applied: Applied = field(repr=False)
    fmt: str = "fp16"

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The whole model. Raises ConversionError where it is larger than a ModelProto can be: ``save`` it."""
        return _assemble.assemble(self.source, self.applied, self.fmt)

    def save(self, path: str | os.PathLike[str], *, external: bool | None = None) -> Path:
        """Write the model, atomically. ``external`` puts the weights beside it; by default where it is too large."""
        large = _assemble.total_bytes(self.source, self.applied, self.fmt) > _assemble.LIMIT
        return _assemble.save(self.source, self.applied, self.fmt, path, large if external is None else external)


@dataclass
class Work:
    """One conversion into one format, and what is known on the way."""

    source: Source
    fmt: str
    keep_io: bool
    policy: Policy
    target: _targets.Target | None
    tolerance: float | None
    auto: bool
    settings: Mapping[str, object]
    notes: list[str] = field(default_factory=list)
    pins: dict[str, str] = field(default_factory=dict)
    evaluator: Evaluator | None = None
    samples: list[Feed] | Samples = field(default_factory=list)
    failed: str = ""
    """Why the model did not run on inputs that were made up."""

    def run(self, calibration: object, started: float) -> Conversion:
        name = self.source.name
        self.notes += self.source.notes
        self.origin = digest(self.source.skeleton)
        self.size = self.source.size + _assemble.small_bytes(self.source.skeleton)
        reference = normalise(self.source.skeleton, name, self.notes)
        reference = infer(reference)
        self.skeleton = onnx.ModelProto()
        raised = raise_opset(reference, "tensor(bfloat16)" if self.fmt == "bf16" else "tensor(float16)", self.notes)
        self.skeleton.CopyFrom(reference if raised is reference else infer(raised))
        self.original = self.source.weights
        self.weights = copied(self.source.weights)
        self.overridable = frozenset(self._listed(reference)) if self.source.overridable else frozenset[str]()
        untouched = onnx.ModelProto()
        untouched.CopyFrom(self.skeleton)
        masks = self._examined(change_masks=True)
        if not any(True for _ in self.tree.nodes()):
            self.notes.append("the model has no nodes")
        self._check_rules(self._captured())
        self._prepare(reference, calibration)
        if masks and not self._masks_hold():
            self.skeleton.CopyFrom(untouched)
            self.weights = copied(self.original)
            self._examined(change_masks=False)
            masks = ["mask constants were left as they are: values come so close that smaller ones would not mask them"]
            if self.evaluator is not None:
                self.evaluator.weights = self.weights
        self.notes += masks
        self.calibrated = calibration is not None
        captured, search, plan, applied = self._loadable()
        self._verify(search)
        result = self._finished(applied, plan)
        report = self._report(captured, search, plan, result, time.perf_counter() - started)
        log.info("%s", report.summary())
        return Conversion(report, plan, self.source, result, self.fmt)

    # ---- preparing ----

    def _examined(self, *, change_masks: bool) -> list[str]:
        """Look at all constants, and bring masks within the range where asked to. Returns what was changed."""
        self.tree = self._tree()
        masks = bring_masks_within_range(self.tree, self.weights, self.fmt) if change_masks else []
        self.source = replace(self.source, weights=self.weights)
        self.pins = {}
        found = examine(self._captured(), self.weights)
        self.notes += [note for note in found.notes if note not in self.notes]
        self.pins.update(found.pins)
        return masks

    def _masks_hold(self) -> bool:
        """Whether the model with smaller masks is the same in fp32: values that come near a mask show through one."""
        if self.evaluator is None:
            return True
        tolerance = self.tolerance if self.tolerance is not None else TOLERANCES[self.fmt]
        try:
            return self.evaluator.try_plan(self._captured(), {}).error <= tolerance * _OF_THE_TOLERANCE
        except RuntimeError:
            return True

    def _listed(self, model: onnx.ModelProto) -> set[str]:
        inputs = {info.name for info in model.graph.input}
        return (inputs & {tensor.name for tensor in model.graph.initializer}) | set(self.source.listed)

    def _tree(self) -> Tree:
        tree = build_tree(self.skeleton, self.weights.types, self.overridable)
        for node in tree.nodes():
            node.proto.name = node.id
        return tree

    def _captured(self) -> Captured:
        return capture(self.tree, self.fmt, keep_io=self.keep_io, pins=self.pins, name=self.source.name)

    def _check_rules(self, captured: Captured) -> None:
        self.policy.match_layers([op.layer for op in captured.graph.ops if op.layer])

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        held = set(self.weights) | {tensor.name for tensor in self.skeleton.graph.initializer}
        return [info for info in self.skeleton.graph.input if info.name not in held or info.name in self.overridable]

    def _prepare(self, reference: onnx.ModelProto, calibration: object) -> None:
        """Samples, and the evaluator with its reference outputs; None where nothing runs the model."""
        inputs = self._inputs()
        if calibration is not None:
            self.samples = Samples(calibration, inputs, self.overridable)
            for _ in self.samples:  # refuse a wrong sample before any work is done
                pass
        else:
            feed = self._made_up(reference, [info for info in inputs if info.name not in self.overridable])
            if feed is None:
                why = f": {self.failed}" if self.failed else ""
                self.notes.append(
                    f"not run: no inputs were given, and none could be made up that the model runs on{why}"
                )
                return
            self.notes.append(
                "inputs were made up from types and shapes: that the model runs and stays finite on them says nothing "
                "about the range of real values; give calibration data for that"
            )
            log.warning(
                "No calibration data: inputs are made up, which cannot show whether real values leave the range."
            )
            self.samples = [feed]
        evaluator = Evaluator(reference, self.skeleton, self.weights, self.original, self.samples)
        try:
            evaluator.prepare(self.tree)
            self.evaluator = evaluator
        except RuntimeError as error:
            reason = _short(error)
            self.notes.append(f"not run, so neither ranges nor errors are known: {reason}")
            log.warning("%s cannot be run here, so the result is not verified: %s", self.source.name, reason)
        if evaluator.random:
            self.notes.append(
                f"outputs that differ from run to run are not compared: {', '.join(sorted(evaluator.random))}"
            )

    def _made_up(self, reference: onnx.ModelProto, inputs: list[onnx.ValueInfoProto]) -> Feed | None:
        weights = {name: np.asarray(array) for name, array in self.original.items()}
        try:
            runner = Runner(emulated(reference), weights)
        except RuntimeError as error:
            self.failed = _short(error)
            return None

        def runs(feed: Feed) -> bool:
            try:
                runner.run(feed)
            except RuntimeError as error:
                self.failed = _short(error)
                return False
            return True

        return made_up(inputs, runs)

    # ---- planning and writing ----

    def _search(self, captured: Captured) -> Search:
        missing = _targets.lacking(self.target, captured, self.auto)
        costs = _targets.costs(self.target, captured, missing) if self.auto else fewest_wide(captured, missing)
        tolerance = self.tolerance if self.tolerance is not None else TOLERANCES[self.fmt]
        search = Search(captured, costs, self.policy, self.evaluator, tolerance, self.calibrated)
        if self.evaluator is not None:
            try:
                search.usual = self.evaluator.ranges(self.tree)
            except RuntimeError as error:
                self.notes.append(f"ranges could not be measured: {_short(error)}")
        return search

    def _loadable(self) -> tuple[Captured, Search, Plan, Applied]:
        """Plan, write and check; nodes that ONNX Runtime has no kernel for, though it loads the original, go back."""
        loads: bool | None = None
        for _ in range(_MOST_LOADS):
            captured = self._captured()
            search = self._search(captured)
            try:
                plan = search.run()
            except RuntimeError as error:  # the model ran and its plan does not: a fault of the evaluator's engine
                self.notes.append(f"a plan could not be tried, so the result is not verified: {_short(error)}")
                log.warning("%s: %s", self.source.name, self.notes[-1])
                self.evaluator = None
                search = self._search(captured)
                plan = search.run()
            applied = apply(captured, self.skeleton, search.labels(plan))
            try:
                check(applied.model, f"{self.source.name} (converted)")
            except ConversionError as error:
                node = named_in(str(error), plan)
                if node is None:
                    raise
                self.pins[node] = f"ONNX's checker does not accept it in {self.fmt}"
                continue
            if self.fmt != "fp16" or self.source.size > min(_LOADABLE, _assemble.LIMIT):
                break
            failure = self._failure(applied)
            if failure is None:
                break
            loads = self._original_loads() if loads is None else loads
            node = named_in(failure, plan) if loads else None
            if node is None:
                self.notes.append(
                    f"ONNX Runtime does not load {'the result' if loads else 'the model'}: {failure[:300]}"
                )
                break
            self.pins[node] = "ONNX Runtime has no 16-bit kernel for it on the CPU, and none in fp32 to fall back on"
        else:
            raise ConversionError(
                f"{self.source.name}: after {_MOST_LOADS} attempts the result is still refused: "
                f"{self.pins}. Keep these in fp32 with rules of the policy."
            )
        return captured, search, plan, applied

    def _failure(self, applied: Applied) -> str | None:
        return load_failure(_assemble.assemble(self.source, applied, self.fmt).SerializeToString())

    def _original_loads(self) -> bool:
        untouched = Applied(self.skeleton, {}, frozenset(self.weights), 0)
        return load_failure(_assemble.assemble(self.source, untouched, self.fmt).SerializeToString()) is None

    def _verify(self, search: Search) -> None:
        outcome = search.outcome
        if outcome is None or outcome.error <= search.tolerance:
            return
        message = (
            f"{self.source.name}: the error is {outcome.error:.3g} with everything that may be raised in fp32; the "
            f"tolerance is {search.tolerance:g}."
        )
        if self.tolerance is not None and self.calibrated:
            raise ConversionError(f"{message} Drop rules that keep ops in 16 bits, or allow more.")
        self.notes.append(message)

    def _finished(self, applied: Applied, plan: Plan) -> Applied:
        """The result with the record of how it was made, by which converting it again is seen to change nothing."""
        model = onnx.ModelProto()
        model.CopyFrom(applied.model)
        stamp(model, self.settings, self._fingerprint(plan))
        return replace(applied, model=model)

    def _fingerprint(self, plan: Plan) -> dict[str, str]:
        """What the plan was made for and with."""
        return {
            **versions(),
            "plan": plan.problem.graph.digest,
            "source": self.origin,
            "target": self.target.name if self.target else "",
        }

    def unchanged(self, started: float) -> Conversion:
        check(self.source.skeleton, self.source.name)
        applied = Applied(self.source.skeleton, {}, frozenset(self.source.weights), 0)
        self.notes.append("the model was converted with these settings before: it is returned as it is")
        report = Report(
            self.source.name,
            self.fmt,
            self.target.name if self.target else "",
            self.tolerance,
            (),
            0,
            0,
            0,
            self.source.size,
            self.source.size,
            (),
            (),
            tuple(self.notes),
            (),
            "",
            False,
            0,
            time.perf_counter() - started,
            {},
        )
        return Conversion(report, None, self.source, applied, self.fmt)

    def _report(self, captured: Captured, search: Search, plan: Plan, applied: Applied, seconds: float) -> Report:
        labels = search.labels(plan)
        rows = []
        for op, node in captured.nodes.items():
            low = labels[op]
            rows.append(NodeRow(op, node.op_type, self.fmt if low else "fp32", "" if low else reason(plan, op)))
        known = {row.node for row in rows}
        by_id = {node.id: node for node in self.tree.nodes()}
        rows += [
            NodeRow(op, by_id[op].op_type, "fp32", why)
            for op, why in captured.stays.items()
            if op not in known and op in by_id
        ]
        products = captured.products()
        closed = [row.node for row in rows if row.node in captured.stays and is_product(row.op)]
        biggest = sorted(search.usual.items(), key=lambda item: -item[1])[:20]
        self.notes += uncompared(search.outcome.outputs if search.outcome is not None else ())
        self.notes += _targets.advice(self.target, captured, sum(labels[op] for op in products))
        return Report(
            model=self.source.name,
            format=self.fmt,
            target=self.target.name if self.target else "",
            tolerance=self.tolerance,
            nodes=tuple(rows),
            products=len(products) + len(closed),
            products_low=sum(labels[op] for op in products),
            casts=applied.casts,
            bytes_before=self.size,
            bytes_after=_assemble.total_bytes(self.source, applied, self.fmt),
            outputs=search.outcome.outputs if search.outcome is not None else (),
            largest=tuple(biggest),
            notes=tuple(dict.fromkeys(self.notes)),
            steps=tuple(search.steps),
            engine=self.evaluator.engine if self.evaluator is not None else "",
            calibrated=self.calibrated,
            samples=len(self.samples),
            seconds=seconds,
            fingerprint=self._fingerprint(plan),
        )


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
