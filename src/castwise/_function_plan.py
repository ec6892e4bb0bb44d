"""What plans of functions that JAX or TensorFlow has traced have beyond the neutral plan, and their files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from . import _files, plan
from ._graph_index import Bools
from ._pins import Cause, Pin
from .errors import PlanError

__all__ = ["FunctionPlan"]


@dataclass(frozen=True, eq=False)
class FunctionPlan(plan.Plan):
    """A ``castwise.plan.Plan`` of a function that a framework has traced."""

    framework: ClassVar[str]
    """The framework's name: that of its front end, and of the plan's own part in a file."""
    title: ClassVar[str]
    """Of the framework, as people write it."""

    structure: str = ""
    """A digest of the traced function's operations, without sizes."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of a call ("as written", "planned") as measured; empty where nothing was timed."""
    error: float | None = None
    """The relative root-mean-square error of the results as measured; None where the plan was not tried."""

    @classmethod
    def of(cls, made: plan.Plan, **own: Any) -> Self:
        """A neutral plan as that of a function, with what this class has beyond it."""
        return cls(**{one.name: getattr(made, one.name) for one in fields(plan.Plan)}, **own)

    def relabelled(self, labels: Bools, reason: str) -> Self:
        """The plan with other labels; ``reason`` says why to those that ask about the operations that changed."""
        changed = {
            position: Pin(bool(label), Cause.TIME, reason)
            for position, (label, before) in enumerate(zip(labels, self.labels, strict=True))
            if label != before
        }
        return replace(self, problem=self.problem.with_pins(changed), labels=labels, error=None)

    def to_dict(self) -> dict[str, object]:
        """The plan and its whole problem as plain data for JSON."""
        return {**super().to_dict(), self.framework: self._own()}

    def _own(self) -> dict[str, object]:
        return {"structure": self.structure, "seconds": dict(self.seconds), "error": self.error}

    @classmethod
    def _read(cls, own: Any) -> dict[str, Any]:
        return {**own}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """The plan that ``to_dict`` described. Raises PlanError where the data is no plan of such a function."""
        made = plan.Plan.from_dict(data)
        try:
            return cls.of(made, **cls._read(data.get(cls.framework)))
        except (KeyError, TypeError) as error:
            raise PlanError(
                f"This is no plan of a {cls.title} function. Make one with castwise.{cls.framework}.plan."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, atomically."""
        _files.write_text(path, json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan file. Raises PlanError that names the file where it is no plan of such a function."""
        plan.Plan.load(path)  # its errors name the file
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except PlanError as error:
            raise PlanError(f"{os.fspath(path)!r}: {error}") from error
