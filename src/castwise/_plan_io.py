"""Plans as files, and the fingerprint that says whether a plan fits where it is used.

A plan file holds the whole problem, in columns: the graph, costs, risks and pins. A loaded plan can thus be explained,
checked and solved again without the model. Numbers survive exactly: JSON text is read back to the same float.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from castwise import _files
from castwise._graph_index import Floats
from castwise._pins import Cause, Pin
from castwise._problem import Problem
from castwise._ranges import RangeRecord
from castwise.cost import Costs
from castwise.errors import CastwiseError, PlanError
from castwise.graph import Graph, Kind, Op, Tensor
from castwise.risk import Risks

if TYPE_CHECKING:
    from castwise.plan import Plan

__all__ = ["Fingerprint", "fields", "load", "save", "to_dict"]

_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a plan was made for: if any of it differs, the plan may not fit, or not be the best."""

    structure: str
    """SHA-256 of the graph's ops, shapes and wiring."""
    ops: int
    tensors: int
    device: str
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Castwise, and of the libraries whose kernels run."""

    @classmethod
    def of(cls, graph: Graph, costs: Costs, versions: Mapping[str, str]) -> Self:
        """The fingerprint of a graph on the device that ``costs`` are for."""
        return cls(graph.digest, len(graph.ops), len(graph.tensors), costs.device, dict(versions))

    def differences(self, here: Fingerprint) -> list[str]:
        """What is different ``here``, one sentence each."""
        found = []
        if (self.ops, self.tensors) != (here.ops, here.tensors):
            found.append(
                f"The model has {here.ops} ops and {here.tensors} tensors; the plan was made for {self.ops} and "
                f"{self.tensors}."
            )
        elif self.structure != here.structure:
            found.append("The model has as many ops and tensors as the plan, but other shapes, names or connections.")
        if self.device != here.device:
            found.append(f"The device is {here.device!r}; the plan was made for {self.device!r}.")
        for name in sorted({*self.versions, *here.versions}):
            mine, theirs = self.versions.get(name, "none"), here.versions.get(name, "none")
            if mine != theirs:
                found.append(f"The version of {name} is {theirs}; the plan was made with {mine}.")
        return found


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    text = json.dumps(to_dict(plan), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    _files.write_text(path, text + "\n")


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of the plan in a file. Raises PlanError that names the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"The plan {os.fspath(path)!r} cannot be read: {error.strerror}. Check the path.") from error
    except ValueError as error:
        raise PlanError(f"{os.fspath(path)!r} is not JSON ({error}). Make the plan again.") from error
    try:
        return fields(data)
    except CastwiseError as error:
        raise PlanError(f"{os.fspath(path)!r}: {error}") from error


def to_dict(plan: Plan) -> dict[str, object]:
    problem = plan.problem
    return {
        "schema_version": _SCHEMA_VERSION,
        "structure": plan.fingerprint.structure,
        "versions": dict(plan.versions),
        "lam": plan.lam,
        "mu": plan.mu,
        "gap": plan.gap,
        "budget": plan.budget,
        "labels": plan.labels.astype(int).tolist(),
        "pins": {str(op): [int(pin.low), pin.cause.value, pin.reason] for op, pin in problem.pins.items()},
        "graph": _graph_to_dict(problem.graph),
        "costs": _costs_to_dict(problem.costs),
        "risks": _risks_to_dict(problem.risks),
    }


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the plan that ``to_dict`` described. Raises PlanError."""
    if not isinstance(data, Mapping) or data.get("schema_version") != _SCHEMA_VERSION:
        raise PlanError(f"This is no plan of schema version {_SCHEMA_VERSION}. Make it again with this Castwise.")
    try:
        pins = {int(op): Pin(bool(low), Cause(cause), why) for op, (low, cause, why) in data["pins"].items()}
        problem = Problem(
            _graph_from_dict(data["graph"]), _costs_from_dict(data["costs"]), _risks_from_dict(data["risks"]), pins
        )
        labels = np.array(data["labels"], bool)
        fits = len(labels) == len(problem.graph) and all(op in range(len(labels)) for op in pins)
        if not fits or data["structure"] != problem.graph.digest:
            raise PlanError("The plan's parts do not fit together: its file was edited. Make the plan again.")
        return {
            "problem": problem,
            "labels": labels,
            "versions": data["versions"],
            **{name: data[name] for name in ("lam", "mu", "gap", "budget")},
        }
    except CastwiseError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"The plan is damaged ({type(error).__name__}: {error}). Make it again.") from error


# ---- its parts ----


def _record(value: Any) -> dict[str, Any]:
    """A dataclass as a flat dict, by field name."""
    return {part.name: getattr(value, part.name) for part in dataclass_fields(value)}


def _columns(kind: type, values: tuple[Any, ...]) -> dict[str, list[Any]]:
    """Dataclasses of one kind as a list per field."""
    return {part.name: [getattr(value, part.name) for value in values] for part in dataclass_fields(kind)}


def _rows(columns: Mapping[str, list[Any]], tuples: tuple[str, ...]) -> list[dict[str, Any]]:
    """The reverse of ``_columns``: the fields of each value; those in ``tuples`` are tuples, not lists."""
    named = {name: map(tuple, column) if name in tuples else column for name, column in columns.items()}
    return [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]


def _graph_to_dict(graph: Graph) -> dict[str, Any]:
    return {
        "name": graph.name,
        "training": graph.training,
        "tensors": _columns(Tensor, graph.tensors),
        "ops": _columns(Op, graph.ops),
        "views": dict(graph.views),
        "mutated": {str(tensor): op for tensor, op in graph.mutated.items()},
        "parts": list(graph.parts),
        "eager": list(graph.eager),
    }


def _graph_from_dict(data: Mapping[str, Any]) -> Graph:
    tensors = (Tensor(**{**row, "kind": Kind(row["kind"])}) for row in _rows(data["tensors"], ("shape",)))
    ops = (Op(**row) for row in _rows(data["ops"], ("inputs", "outputs", "saves", "promotes")))
    mutated = {int(tensor): op for tensor, op in data["mutated"].items()}
    broken = {name: tuple(data.get(name, ())) for name in ("parts", "eager")}
    return Graph(tuple(ops), tuple(tensors), data["training"], data["name"], data["views"], mutated, **broken)


def _costs_to_dict(costs: Costs) -> dict[str, Any]:
    record = _record(costs)
    record["unavailable"] = {str(op): reason for op, reason in costs.unavailable.items()}
    return {name: _plain(value) for name, value in record.items()}


def _costs_from_dict(data: Mapping[str, Any]) -> Costs:
    return Costs(
        fmt=data["fmt"],
        high=_floats(data["high"]),
        low=_floats(data["low"]),
        down=_floats(data["down"]),
        up=_floats(data["up"]),
        kept=np.array(data["kept"], bool),
        device=data["device"],
        unavailable={int(op): reason for op, reason in data["unavailable"].items()},
        measured=np.array(data["measured"], bool),
    )


def _risks_to_dict(risks: Risks) -> dict[str, Any]:
    record = _record(risks)
    for name in ("ranges", "gradient_ranges"):
        record[name] = {str(tensor): _plain(_record(seen)) for tensor, seen in record[name].items()}
    return {name: _plain(value) for name, value in record.items()}


def _risks_from_dict(data: Mapping[str, Any]) -> Risks:
    return Risks(
        fmt=data["fmt"],
        op_values=_floats(data["op_values"]),
        op_accumulation=_floats(data["op_accumulation"]),
        cast_noise=_floats(data["cast_noise"]),
        range_share=_floats(data["range_share"]),
        reference=data["reference"],
        ranges={int(tensor): _range(seen) for tensor, seen in data["ranges"].items()},
        gradient_ranges={int(tensor): _range(seen) for tensor, seen in data["gradient_ranges"].items()},
        measured=data["measured"],
        read_noise=_floats(data["read_noise"]),
    )


def _plain(value: Any) -> Any:
    """Arrays as lists; infinity, which JSON lacks, as null."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isinf(value) else value


def _floats(values: list[float | None]) -> Floats:
    return np.array([math.inf if value is None else value for value in values], float)


def _range(record: Mapping[str, Any]) -> RangeRecord:
    largest = record["largest"]
    return RangeRecord(**{**record, "largest": math.inf if largest is None else largest})
