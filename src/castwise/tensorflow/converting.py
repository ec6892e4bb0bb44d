"""``convert``: a SavedModel to mixed precision, verified on samples it was not planned on, and written in one step.

    done = convert("model", "model.bf16", format="bfloat16", calibration="samples.npz", tolerance=5e-2)

Each signature is planned with as few wide operations as its tolerance allows: one trial with everything low that the
policy lowers, and where that is too far off, the noise of each rounding is priced and the planner buys digits back
until a trial keeps the tolerance. What was written is loaded again and run before it takes its name. It needs
TensorFlow to run, and nothing of Castwise.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from castwise._decide import is_wide
from castwise.catalogue import load_catalogue
from castwise.cost import Costs
from castwise.errors import PlanError
from castwise.formats import parse_format
from castwise.graph import Graph
from castwise.plan import solve
from castwise.policy import Policy
from castwise.risk import Risks

from ._conversion import Conversion, SignatureReport
from ._errors import ConversionError
from ._measure import kept_constants, unavailable, versions
from ._plan import Plan
from ._risk import measured_risks
from ._rules import device_here, resolve
from ._samples import Feed, made_up, read, split
from ._types import dtype_of
from .autocast import autocast, is_polymorphic, results_of
from .capture import Captured, capture

__all__ = ["Conversion", "SignatureReport", "convert", "verify"]

log = logging.getLogger("castwise.tensorflow.convert")

_TOLERANCES = {"fp16": 1e-2, "bf16": 8e-2}  # about ten times the error of one rounding of every output
_RECORD = ("assets.extra", "castwise.json")
# What one wide product, another wide op and one cast count for: few wide products first, then few casts.
_WIDE_PRODUCT, _WIDE_OP, _CAST = 100.0, 1.0, 0.6
_SAFETY, _MOST_TRIALS = 0.7, 8


def convert(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    format: str | None = None,
    calibration: object = None,
    tolerance: float | None = None,
    policy: Policy | None = None,
) -> Conversion:
    """Convert a SavedModel to mixed precision.

    Args:
        model: its folder.
        output: the folder to write, which must not exist. It appears when all is done and verified, or not at all.
        format: "float16", "bfloat16", or "auto": what this device computes natively. By default what the policy says
            for this device, and float16 where it says nothing.
        calibration: inputs (name -> array): one set, several, an ``.npz`` file or a folder of such files. Some are held
            out to verify on. Without, inputs are made up, which shows that the result runs, but not what real values
            do.
        tolerance: the largest error allowed of any output, max |difference| / max(1, max |fp32 value|); by default 1e-2
            in float16 and 8e-2 in bfloat16.
        policy: rules for ops and layers, as everywhere in Castwise.

    Raises:
        ConversionError: the model cannot be read, the tolerance cannot be kept, or the arguments make no sense.
    """
    source, target = Path(model), Path(output)
    if target.exists():
        raise ConversionError(f"{target} exists already. Give the result another name, or remove it.")
    base = policy or Policy()
    if format is None:
        asked = base.format_on(device_here())
        format = "float16" if asked == "auto" else asked
    rules = resolve(base.in_format(format if format == "auto" else parse_format(format).long_name))
    if is_wide(rules.low_format):
        raise ConversionError(
            f"format {format!r} lowers nothing on this device. Name the format of the device the model is for: "
            "float16 or bfloat16."
        )
    dtype_of(rules.low_format)  # one that TensorFlow lacks is an error here
    fmt = rules.low_format.name
    allowed = _TOLERANCES[fmt] if tolerance is None else tolerance
    if not 0 < allowed < float("inf"):
        raise ConversionError(f"tolerance: {tolerance!r} is no error to keep. Give a positive number such as 1e-2.")
    loaded = _loaded(source)
    every = _all_inputs(loaded)
    works = [
        _Work(name, signature, fmt, rules, allowed, calibration, every)
        for name, signature in dict(loaded.signatures).items()
    ]
    plans = {work.name: work.run() for work in works}
    module, left_out = _module(loaded, works, plans)
    converted = {work.name: autocast(work.signature, plan=plans[work.name]) for work in works}
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".castwise-{secrets.token_hex(8)}.tmp")
    try:
        tf.saved_model.save(module, os.fspath(temporary), signatures=converted)
        again = tf.saved_model.load(os.fspath(temporary))
        reports = tuple(work.report(plans[work.name], again.signatures[work.name]) for work in works)
        done = Conversion(target, rules.format, allowed, calibration is not None, reports, left_out)
        for one in reports:
            if not one.error <= allowed:
                raise ConversionError(
                    f"signature {one.name!r}: on samples held out the error is {one.error:.3g} where {allowed:g} is "
                    "allowed. Give more calibration samples, a larger tolerance, or format bfloat16."
                )
        record = temporary.joinpath(*_RECORD)
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps(done.to_dict(), indent=1) + "\n", encoding="utf-8")
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return done


def verify(
    model: str | os.PathLike[str],
    against: str | os.PathLike[str],
    *,
    calibration: object = None,
    tolerance: float | None = None,
) -> tuple[dict[str, float], float | None]:
    """The error of each signature of a converted SavedModel, and the tolerance: what is given, else its own record's.

    Raises:
        ConversionError: one of the models cannot be read, or they have different signatures.
    """
    models = _loaded(Path(model)), _loaded(Path(against))  # a signature does not keep its variables alive
    ours, theirs = (one.signatures for one in models)
    if set(ours) != set(theirs):
        raise ConversionError(f"The models have different signatures: {sorted(ours)} and {sorted(theirs)}.")
    record = Path(model).joinpath(*_RECORD)
    if tolerance is None and record.exists():
        tolerance = float(json.loads(record.read_text(encoding="utf-8"))["tolerance"])
    errors, every = {}, _all_inputs(models[1])
    for name in theirs:
        inputs = _inputs(theirs[name])
        feeds = read(calibration, inputs, every) if calibration is not None else [made_up(inputs)]
        errors[name] = max(_error(ours[name], theirs[name], feed) for feed in feeds)
    return errors, tolerance


def _loaded(path: Path) -> Any:
    if not (path / "saved_model.pb").exists():
        raise ConversionError(f"{path} is no SavedModel: it has no saved_model.pb. Write one with tf.saved_model.save.")
    try:
        loaded = tf.saved_model.load(os.fspath(path))
    except (OSError, ValueError, tf.errors.OpError, KeyError) as error:
        raise ConversionError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error
    if not getattr(loaded, "signatures", None):
        raise ConversionError(
            f"{path} has no signature to convert. Save it with tf.saved_model.save(model, path, signatures=...)."
        )
    return loaded


def _inputs(signature: Any) -> dict[str, Any]:
    return dict(signature.structured_input_signature[1])


def _module(loaded: Any, works: Sequence[_Work], plans: Mapping[str, Plan]) -> tuple[Any, tuple[str, ...]]:
    """What is saved: the variables and tables of the model, and those of its functions that a signature calls."""
    module = tf.__internal__.tracking.AutoTrackable()
    left_out = []
    by_structure = {work.captured.structure: plans[work.name] for work in works}
    for name, child in loaded._trackable_children().items():
        if name == "signatures":
            continue
        if is_polymorphic(child):
            kept = _function(child, by_structure)
            if kept is None:
                left_out.append(name)
            else:
                setattr(module, name, kept)
        elif not _holds_functions(child):
            setattr(module, name, child)
    module.castwise_variables = list(loaded.variables) if hasattr(loaded, "variables") else []
    module.castwise_captured = [one for work in works for one in _trackables(loaded, work.signature)]
    return module, tuple(left_out)


def _function(function: Any, plans: Mapping[str, Plan]) -> Any:
    """A function as one of the signatures was planned, for all arguments that it was saved for; None where none is."""
    chosen = None
    for concrete in function.concrete_functions:
        found = plans.get(capture(concrete.graph, results_of(concrete)).structure)
        if found is None:
            return None
        chosen = found
    if chosen is None:
        return None
    made = autocast(function, plan=chosen)
    for concrete in function.concrete_functions:
        args, kwargs = concrete.structured_input_signature
        made.get_concrete_function(*args, **kwargs)
    return made


def _holds_functions(trackable: Any, seen: set[int] | None = None) -> bool:
    seen = set() if seen is None else seen
    if is_polymorphic(trackable) or hasattr(trackable, "function_type"):
        return True
    if id(trackable) in seen or not hasattr(trackable, "_trackable_children"):
        return False
    seen.add(id(trackable))
    if isinstance(trackable, (tf.Variable, tf.saved_model.experimental.TrackableResource)):
        return False
    return any(_holds_functions(child, seen) for child in trackable._trackable_children().values())


def _trackables(loaded: Any, signature: Any) -> list[Any]:
    """Variables and tables anywhere in the model whose handles a signature reads."""
    handles = {id(tensor) for tensor in signature.captured_inputs}
    found: list[Any] = []
    stack, seen = [loaded], set()
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name in ("handle", "resource_handle"):
            if id(getattr(one, name, None)) in handles:
                found.append(one)
        if hasattr(one, "_trackable_children") and not is_polymorphic(one):
            stack += list(one._trackable_children().values())
    return found


class _Work:
    """The conversion of one signature."""

    def __init__(
        self,
        name: str,
        signature: Any,
        fmt: str,
        policy: Policy,
        tolerance: float,
        calibration: object,
        every: Sequence[Collection[str]],
    ) -> None:
        self.name, self.signature, self.fmt, self.policy, self.tolerance = name, signature, fmt, policy, tolerance
        inputs = _inputs(signature)
        given = calibration is not None
        feeds = read(calibration, inputs, every) if given else [made_up(inputs, seed) for seed in (1, 2)]
        self.feeds, self.held_out = split(feeds)
        self.captured: Captured = capture(signature.graph, results_of(signature), name=name)
        self.trials = 0

    def run(self) -> Plan:
        """The plan with the fewest wide ops that keeps the tolerance."""
        found = self._solve(Risks.unmeasured(self.captured.graph, self.fmt), None)
        error = self._try(found)
        if error <= self.tolerance:
            return found
        order = [one.name for one in self.signature.function_type.flat_inputs]
        flat = [[tf.constant(feed[name]) for name in order] for feed in self.feeds]
        risks = measured_risks(self.captured, self.signature, self.fmt, flat)
        found = self._solve(risks, None)
        error, budget = self._try(found), found.score.noise
        while error > self.tolerance and found.labels.any() and self.trials < _MOST_TRIALS:
            share = self.tolerance / error if np.isfinite(error) else 0.1
            budget *= min(0.5, (_SAFETY * share) ** 2)
            try:
                found = self._solve(risks, budget)
            except PlanError:
                break
            error = self._try(found)
        if error > self.tolerance:
            raise ConversionError(
                f"signature {self.name!r}: after {self.trials} trials the error is {error:.3g} where "
                f"{self.tolerance:g} is allowed. Give a larger tolerance, or another format."
            )
        return found

    def _solve(self, risks: Risks, budget: float | None) -> Plan:
        graph, entries = self.captured.graph, load_catalogue().entries
        wide = np.array([_WIDE_PRODUCT if (e := entries.get(op.name)) and e.product else _WIDE_OP for op in graph.ops])
        kept = kept_constants(self.captured)
        cast = np.where(kept, 0.0, _CAST)
        lacking = unavailable(self.captured, dtype_of(parse_format(self.fmt)))
        low = np.zeros(len(graph.ops))
        low[list(lacking)] = np.inf
        costs = Costs(self.fmt, wide, low, cast, cast, kept, "", lacking)
        lam = 0.0 if budget is None else None
        made = solve(graph, costs, risks, self.policy, lam=lam, budget=budget, versions=versions())
        return Plan.of(made, structure=self.captured.structure)

    def _try(self, found: Plan) -> float:
        self.trials += 1
        planned = autocast(self.signature, plan=found)
        error = max(_error(planned, self.signature, feed) for feed in self.feeds)
        log.info(
            "%s: trial %d, %d of %d ops low: error %.3g",
            self.name,
            self.trials,
            found.labels.sum(),
            len(found.labels),
            error,
        )
        return error

    def report(self, found: Plan, written: Any) -> SignatureReport:
        """What was done, and how far off the written signature is on the samples held out."""
        graph, entries, pins = found.problem.graph, load_catalogue().entries, found.problem.pins
        products = [at for at, op in enumerate(graph.ops) if (e := entries.get(op.name)) and e.product]
        causes = found.causes
        wide = {
            op.id: pins[at].reason if at in pins else causes[at].value
            for at, op in enumerate(graph.ops)
            if not found.labels[at] and op.id in self.captured.ops and (not op.pin or op.id in self.captured.wide)
        }
        error = max(_error(written, self.signature, feed) for feed in self.held_out)
        low = sum(bool(found.labels[at]) or _is_low(graph, at) for at in products)
        return SignatureReport(self.name, len(products), low, wide, error, self.trials)


def _all_inputs(loaded: Any) -> list[set[str]]:
    """Names of the inputs of each signature."""
    return [set(_inputs(signature)) for signature in dict(loaded.signatures).values()]


def _is_low(graph: Graph, at: int) -> bool:
    """Whether an operation was written in 16 bits."""
    return any(graph.tensors[tensor].format in _TOLERANCES for tensor in graph.ops[at].outputs)


def _error(ours: Any, theirs: Any, feed: Feed) -> float:
    """The largest error of any output, max |difference| / max(1, max |fp32 value|), where fp32 is finite."""
    given = {name: tf.constant(array) for name, array in feed.items()}
    found, wanted = ours(**given), theirs(**given)
    worst = 0.0
    for name in wanted:
        exact = wanted[name].numpy()
        if not (wanted[name].dtype.is_floating and exact.size):
            continue
        exact = exact.astype(np.float64)
        finite = np.isfinite(exact)
        if finite.any():
            off = np.abs(found[name].numpy().astype(np.float64) - exact)[finite].max()
            error = float(off / max(1.0, np.abs(exact[finite]).max()))
            worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst
