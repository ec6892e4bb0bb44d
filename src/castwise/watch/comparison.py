"""One step in two precisions, side by side: what each layer added to the error, as values, a table and a page."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from castwise.errors import PolicyError

__all__ = ["Comparison", "LayerDifference"]

_DIVERGED = 0.1  # relative error of outputs from which two runs are no longer the same computation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """What one layer's output is off by; relative errors are Euclidean norms over the float32 value's norm.

    What the layer itself does (`own` to `accumulation`) is NaN for one that has others inside.

    Attributes:
        layer: its path. order: its place in the forward.
        total: of its output in the other precision, what came in included.
        own: of its output from float32's own inputs: what the layer itself adds.
        casts: of that, what rounding its inputs and weights to the format does.
        rounding: of that, what rounding its result to the format does.
        accumulation: of that, what is left: sums and steps inside the layer.
        overflow: the share of its output that is finite in float32 and not in the other precision.
        underflow: the share that is zero there, and not in float32.
        backward: of the gradient that its output receives, at the loss scale; NaN where it receives none.
        vanished: the share of that gradient that is zero there, and not in float32.
        unscaled: as `backward`, without a loss scale.
    """

    layer: str
    order: int
    total: float
    own: float
    casts: float
    rounding: float
    accumulation: float
    overflow: float
    underflow: float
    backward: float
    vanished: float
    unscaled: float


_FORWARD = ("total", "own", "casts", "rounding", "accumulation", "overflow", "underflow")
_COLUMNS = (*_FORWARD, "backward", "vanished", "unscaled")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step in float32 beside the same step in another precision.

    Attributes:
        precision: the other one's name.
        layers: in the order of the forward.
        scale: the loss scale of the other precision's backward.
    """

    precision: str
    layers: tuple[LayerDifference, ...]
    scale: float = 1.0

    @property
    def title(self) -> str:
        """What is compared, in words."""
        scaled = f", its gradients at a loss scale of {self.scale:g}" if self.scale != 1.0 else ""
        return f"float32 beside {self.precision}{scaled}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that are shown: without a loss scale, two would say the same."""
        return _COLUMNS if self.scale != 1.0 else _COLUMNS[:-1]

    @property
    def first_divergence(self) -> LayerDifference | None:
        """The first layer whose error is above 10 %, or not finite, or None where none is."""
        return next((d for d in self.layers if not d.total <= _DIVERGED or d.overflow > 0), None)

    @property
    def first_backward_divergence(self) -> LayerDifference | None:
        """The layer nearest the loss whose output receives a gradient that is off by more than 10 %, or not finite."""
        return next((d for d in reversed(self.layers) if d.backward > _DIVERGED), None)

    @property
    def verdict(self) -> str:
        """Where the two come apart, forward and backward, in words."""
        first, back = self.first_divergence, self.first_backward_divergence
        forward = f"first to diverge: {first.layer}" if first else "no layer diverges"
        backward = f"first to diverge at {back.layer}" if back else "none diverges"
        if self.scale == 1.0:
            return f"{forward}; gradients: {backward}"
        plain = next((d for d in reversed(self.layers) if d.unscaled > _DIVERGED), None)
        without = f"they diverge first at {plain.layer}" if plain else "none does either"
        return f"{forward}; gradients: {backward} at a loss scale of {self.scale:g}; without one, {without}"

    def ordered(self, by: str = "order") -> list[LayerDifference]:
        """The layers by a column, the largest first (by order: the first first).

        Raises:
            PolicyError: there is no such column.
        """
        if by == "order":
            return list(self.layers)
        if by not in _COLUMNS:
            raise PolicyError(f"compare: there is no column {by!r}. Sort by order, {', '.join(_COLUMNS)}.")
        return sorted(self.layers, key=lambda d: _rank(getattr(d, by)), reverse=True)

    def __str__(self) -> str:
        return self.table()

    def table(self, by: str = "order") -> str:
        """The comparison as text, one line a layer."""
        width = max((len(d.layer) for d in self.layers), default=5)
        lines = [f"{self.title}: relative errors", f"{'layer':<{width}}"]
        lines[-1] += "".join(f"{name:>13}" for name in self.columns)
        for d in self.ordered(by):
            lines.append(f"{d.layer:<{width}}" + "".join(f"{_shown(getattr(d, name)):>13}" for name in self.columns))
        return "\n".join([*lines, self.verdict])

    def page(self) -> str:
        """The comparison as one HTML page whose columns sort when their heads are clicked."""
        return _page(self)


def _rank(value: float) -> float:
    return -1.0 if math.isnan(value) else value  # what was not measured comes last


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else "0" if value == 0 else f"{value:.2e}"


_SCRIPT = """
document.querySelectorAll('th').forEach((head, i) => head.addEventListener('click', () => {
  const body = document.querySelector('tbody'), up = head.dataset.up = head.dataset.up === '1' ? '' : '1';
  [...body.rows].sort((a, b) => (up ? -1 : 1) * (i ? a.cells[i].dataset.v - b.cells[i].dataset.v :
    a.rowIndex - b.rowIndex)).forEach(row => body.append(row));
}));
"""
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;max-width:80rem}
div{overflow-x:auto}table{border-collapse:collapse}th{cursor:pointer;text-align:right}
th:first-child,td:first-child{text-align:left}td{text-align:right;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .6rem;border-bottom:1px solid #8884}tr.first{background:#cf222e22}
"""


def _page(found: Comparison) -> str:
    first = found.first_divergence
    heads = "".join(f"<th>{name}</th>" for name in ("layer", *found.columns))
    rows = []
    for d in found.layers:
        cells = "".join(
            f'<td data-v="{_rank(v) if math.isfinite(_rank(v)) else 1e308:.9g}">{_shown(v)}</td>'
            for v in (getattr(d, name) for name in found.columns)
        )
        rows.append(f'<tr class="{"first" if d is first else ""}"><td>{html.escape(d.layer)}</td>{cells}</tr>')
    title = html.escape(found.title)
    verdict = found.verdict[0].upper() + html.escape(found.verdict[1:])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>
<p>Relative errors of the same step, layer by layer. {verdict}.</p>
<div><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>
<script>{_SCRIPT}</script></body></html>
"""
