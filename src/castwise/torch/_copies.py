"""What goes with an applied module into copies and files: its model, plan and chosen kernels, and no captured graph."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from castwise.guard import Raised
from castwise.plan import Plan

from ._chosen import Chosen

if TYPE_CHECKING:
    from .apply import Applied

__all__ = ["InPlace", "remade"]


def remade(
    kind: type[Applied],
    model: nn.Module,
    plan: Plan,
    emulate: bool | None,
    raised: tuple[Raised, ...],
    chosen: Chosen,
    more: Mapping[str, Any],
) -> Applied:
    """The plan applied to a copy of the model, which is captured when it is first called, for the same kernels."""
    made = kind(model, plan, emulate=emulate, **more)
    made._chosen = chosen
    made.raise_layers(raised)
    return made


class InPlace:
    """An applied module's forward in the place of its model's. A copy of the model gets the model's own."""

    def __init__(self, applied: Applied) -> None:
        self.applied = applied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the applied module gives."""
        return self.applied.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = self.applied.castwise_model
        copied = memo.get(id(model))
        return self if copied is None else MethodType(type(model).forward, copied)
