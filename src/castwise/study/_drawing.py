"""How the report's figures look: themes, sizes, rendering to SVG, and the small helpers that drawings share.

Colours are from the palette of Okabe and Ito (jfly.uni-koeln.de/color), which readers with colour blindness can tell
apart, lightened for dark pages; arms differ in line style too.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from castwise._extras import require

__all__ = ["DARK", "LIGHT", "Figure", "Theme", "recoloured", "render"]

_SIZE = (4.4, 2.9)  # inches
_STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one kind of page; ``arms``: fp32 first."""

    name: str
    ink: str
    faint: str
    grid: str
    good: str
    arms: tuple[str, ...]

    @property
    def colours(self) -> tuple[str, ...]:
        """All colours, in one order for all themes."""
        return (self.ink, self.faint, self.grid, self.good, *self.arms)


LIGHT = Theme(
    "light",
    "#1f2430",
    "#5b6472",
    "#e3e6eb",
    "#d9efe2",
    ("#4d5562", "#0072b2", "#d55e00", "#007f5f", "#b0499b", "#8a6d00", "#2f9fc9"),
)
DARK = Theme(
    "dark",
    "#e7eaf0",
    "#a3acba",
    "#343b47",
    "#172e22",
    ("#b4bcc9", "#5cb8f0", "#f5955c", "#4cc9a0", "#e08fce", "#e0c14a", "#8fd8f2"),
)


def recoloured(svg: str, old: Theme, new: Theme) -> str:
    """An SVG drawn in one theme, in another: drawing is slow, and colours are all that differs."""
    for before, after in zip(old.colours, new.colours, strict=True):
        svg = svg.replace(before, after)
    return svg


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that can be drawn in any theme.

    Attributes:
        key: unique in the report.
        title: what it shows.
        caption: how to read it.
        alt: what one would see, for readers who do not.
        draw: draws on the axes in a theme.
    """

    key: str
    title: str
    caption: str
    alt: str
    draw: Callable[[Any, Theme], None]


def render(figure: Figure, theme: Theme) -> str:
    """The figure as an SVG document with a transparent background."""
    require("matplotlib", extra="study")
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    with _style(theme, figure.key):
        canvas = Canvas(figsize=_SIZE, layout="constrained")
        FigureCanvasSVG(canvas)
        axes = canvas.add_subplot()
        axes.grid(axis="y", color=theme.grid, linewidth=0.8)
        axes.set_axisbelow(True)
        figure.draw(axes, theme)
        target = io.StringIO()
        with warnings.catch_warnings():
            # The reader's browser draws the text, in fonts of its own; here it is only measured.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            # No date and no random ids: the same results give the same report.
            canvas.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return target.getvalue()


@contextmanager
def _style(theme: Theme, salt: str) -> Iterator[None]:
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": f"{salt}-{theme.name}",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica Neue", "Arial"],
        "font.size": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": theme.faint,
        "axes.labelcolor": theme.ink,
        "text.color": theme.ink,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "legend.frameon": False,
        "legend.fontsize": 9.5,
    }
    with matplotlib.rc_context(settings):
        yield


def colour_of(results: Mapping[str, Any], name: str, theme: Theme) -> str:
    return theme.arms[list(results["arms"]).index(name) % len(theme.arms)]


def line_of(results: Mapping[str, Any], name: str) -> str:
    return _STYLES[list(results["arms"]).index(name) % len(_STYLES)]


def points_of(steps: Sequence[int], values: Sequence[float | None]) -> tuple[list[int], list[float]]:
    pairs = [(step, value) for step, value in zip(steps, values, strict=False) if value is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def mean_of(steps: Sequence[int], runs: Sequence[Sequence[float | None]]) -> tuple[list[int], list[float]]:
    """The mean over the runs that have a value, at each step where one has."""
    found: list[tuple[int, float]] = []
    for index, step in enumerate(steps):
        values = [value for run in runs if index < len(run) and (value := run[index]) is not None]
        if values:
            found.append((step, math.fsum(values) / len(values)))
    return [step for step, _ in found], [value for _, value in found]


def worsening(ours: Sequence[float | None], theirs: Sequence[float | None], sign: float) -> list[float]:
    """The worsening at each evaluation, as far as both runs have a number."""
    found: list[float] = []
    for a, b in zip(ours, theirs, strict=False):
        if a is None or b is None:
            break
        found.append(sign * (a - b))
    return found


def mark_ends(axes: Any, arm: Mapping[str, Any], runs: Sequence[tuple[list[int], list[float]]], colour: str) -> None:
    for ending, (steps, values) in zip(arm["ended"], runs, strict=True):
        if ending is not None and steps:
            axes.plot(steps[-1], values[-1], "X", color=colour, markersize=8)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
    return low, middle, high


def arm_ticks(axes: Any, names: Sequence[str]) -> None:
    crowded = sum(map(len, names)) > 30
    axes.set_xticks(range(len(names)), names, rotation=20 if crowded else 0, ha="right" if crowded else "center")
    axes.set_xlim(-0.6, len(names) - 0.4)


def plain_ticks(axis: Any, most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most))


def label_of(metric: Mapping[str, Any]) -> str:
    unit = metric["unit"]
    return f"{metric['name']} ({unit})" if unit and unit not in metric["name"] else str(metric["name"])


def legend(axes: Any) -> None:
    """A legend, where there is anything to name."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def decade_ticks(axis: Any, low: float, high: float) -> None:
    """Ticks at 1, 2, 5 times powers of ten on an axis of log10 values; powers of ten alone where those are enough."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    places = [d + math.log10(m) for d in decades for m in (1, 2, 5) if low <= d + math.log10(m) <= high]
    if len(places) > 6:
        step = max(1, len(decades) // 5)
        places = [float(d) for d in decades if low <= d <= high and d % step == 0]
    axis.set_ticks(places, [f"{10.0**place:.3g}" for place in places])


def signed(value: float) -> str:
    return f"{value:+.3g}"
