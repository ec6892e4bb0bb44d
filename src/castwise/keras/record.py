"""What ran in which format: one record for each operation of a prepared model's call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from castwise.errors import PolicyError

from ._region import root_of

__all__ = ["OpRecord", "Records", "record"]


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One operation.

    Attributes:
        layer: dotted path of the layer whose ``call`` ran it; "" for the model itself.
        op: its name in the catalogue, or the backend's.
        rule: "low", "high" or "widest": what was decided; "" where it was left as written.
        format: what it was computed in, by its long name.
        inputs: formats of its floating inputs, before casts on torch and TensorFlow, after them on JAX.
        outputs: formats of its floating results.
        reason: what decided.
    """

    layer: str
    op: str
    rule: str
    format: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reason: str


class Records(Sequence[OpRecord]):
    """The operations of one call, in order; ``print`` shows them as a table."""

    def __init__(self, ops: Sequence[OpRecord]) -> None:
        self.ops = tuple(ops)

    def __len__(self) -> int:
        return len(self.ops)

    def __getitem__(self, index: Any) -> Any:
        return self.ops[index]

    def __iter__(self) -> Iterator[OpRecord]:
        return iter(self.ops)

    def of(self, op: str = "", layer: str = "") -> tuple[OpRecord, ...]:
        """Those of an op by name, and those in a layer or inside it."""
        inside = f"{layer}."
        here = [r for r in self.ops if not layer or r.layer == layer or r.layer.startswith(inside)]
        return tuple(r for r in here if op in ("", r.op))

    @property
    def by_format(self) -> dict[str, int]:
        """How many operations computed in each format."""
        return dict(Counter(r.format for r in self.ops))

    def __str__(self) -> str:
        formats = ", ".join(f"{count} in {name}" for name, count in sorted(self.by_format.items()))
        lines = [f"  {r.layer or '·':<36} {r.op:<24} {r.format:<10} {r.reason}" for r in self.ops]
        return "\n".join([f"{len(self.ops)} operations: {formats or 'none'}", *lines])


def record(model: Any, *args: Any, **kwargs: Any) -> Records:
    """Call a prepared model once and say what each operation was computed in.

    Args:
        model: what ``apply`` returned.
        args: of the call.
        kwargs: of the call, such as ``training=True``.

    Raises:
        PolicyError: ``apply`` has not prepared this model, or its policy computes everything in float32 as Keras does.
    """
    root = root_of(model)
    if root is None or root.model is not model:
        raise PolicyError(
            f"record: {getattr(model, 'name', model)!r} runs as Keras runs it. Prepare it with "
            "castwise.keras.apply(model, policy) first; a policy that is float32 throughout leaves nothing to record."
        )
    found: list[OpRecord] = []
    root.log = found
    try:
        model(*args, **kwargs)
    finally:
        root.log = None
    return Records(found)
