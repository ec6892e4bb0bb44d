"""Plans of models with graph breaks put to work: each graph as an applied module of its own, Python between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from castwise._joined import in_part
from castwise.graph import Graph, Op
from castwise.guard import Raised
from castwise.plan import Plan

from ._part import Part
from .parts import Broken

if TYPE_CHECKING:
    from .apply import Applied

__all__ = ["AppliedParts", "part_of", "parts_of", "with_raised"]


class AppliedParts:
    """Runs a model's graphs in the plan's formats. ``make`` applies the plan to one of them."""

    def __init__(self, model: nn.Module, plan: Plan, make: Callable[[Part], Applied]) -> None:
        self.broken, self.plan, self.make = Broken(model), plan, make
        self._applied: dict[Part, Applied] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The model's results."""
        return self.run_by(lambda applied, own: applied(*own), *args, **kwargs)

    def run_by(self, run: Callable[[Applied, list[Any]], Any], *args: Any, **kwargs: Any) -> Any:
        """As ``run``, where ``run`` computes each graph, from its applied module and what that is called with."""
        return self.broken.run(lambda part, own: run(self._of(part), own), *args, **kwargs)

    def formats_run(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """Per op id of the plan, the format that was seen at dispatch to compute it."""
        found: dict[str, str] = {}

        def recorded(part: Part, own: list[Any]) -> Any:
            outputs, formats = self._of(part).recorded(*own)
            found.update(self._named(part, own, formats))
            return outputs

        self.broken.run(recorded, *args, **kwargs)
        return found

    def formats(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """Per op id of the plan, the format decided for the graphs of such a call."""
        found: dict[str, str] = {}

        def noted(part: Part, own: list[Any]) -> Any:
            found.update(self._named(part, own, self._of(part).formats(*own)))
            return self._of(part)(*own)

        self.broken.run(noted, *args, **kwargs)
        return found

    def raise_layers(self, raised: tuple[Raised, ...]) -> None:
        """See ``Applied.raise_layers``."""
        for applied in self._applied.values():
            applied.raise_layers(raised)

    def _named(self, part: Part, own: list[Any], formats: Mapping[str, str]) -> dict[str, str]:
        number = part_of(self._of(part).graph_for(tuple(own), {}).planned, self.plan.problem.graph)
        return {op if number is None else in_part(number, op): fmt for op, fmt in formats.items()}

    def _of(self, part: Part) -> Applied:
        if part not in self._applied:
            self._applied[part] = self.make(part)
        return self._applied[part]


def with_raised(formats: Mapping[str, str], graph: Graph, raised: tuple[Raised, ...]) -> Mapping[str, str]:
    """The formats of a graph where ops that the guard has raised are computed in fp32."""
    wide = {op.id: "fp32" for op in graph.ops for one in raised if one.covers(op.layer, op.name)}
    return {**formats, **wide} if wide else formats


def part_of(mine: Graph, joined: Graph) -> int | None:
    """Which part of a joined graph a captured graph is: the one with the same ops, or with the most of them."""
    best, most = None, 0
    wanted = set(_places(mine.ops))
    for number, ops in enumerate(parts_of(joined)):
        stripped = [in_part(number, op.id) for op in mine.ops]
        if stripped == [op.id for op in ops] and _places(mine.ops) == _places(ops):
            return number
        shared = len(wanted & set(_places(ops)))
        if shared > most:
            best, most = number, shared
    return best


def parts_of(joined: Graph) -> list[tuple[Op, ...]]:
    """The ops of each part."""
    found, start = [], 0
    for count in joined.parts:
        found.append(joined.ops[start : start + count])
        start += count
    return found


def _places(ops: tuple[Op, ...]) -> list[tuple[str, str, str]]:
    return [(op.name, op.layer, op.source) for op in ops]
