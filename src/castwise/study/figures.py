"""The report's figures: small, one idea each, as SVG for light and for dark pages.

Small on purpose: at 4.4 inches a figure fits a phone without its text becoming unreadable, and two stand side by side on a
desktop. Colours are from the palette of Okabe and Ito (jfly.uni-koeln.de/color), which readers with colour blindness can
tell apart, lightened for dark pages; arms differ in line style too.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from castwise._extras import require

__all__ = ["DARK", "LIGHT", "Figure", "Theme", "figures_of", "render"]

_SIZE = (4.4, 2.9)  # inches
_WIDE_RANGE = 30.0  # a curve that spans more than this factor is drawn on a logarithmic axis
_STYLES = ("-", "--", "-.", ":")
_STALL = 1e-9  # 1 - cosine below this is rounding of the cosine itself


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one kind of page; ``arms``: fp32 first."""

    name: str
    ink: str
    faint: str
    grid: str
    good: str
    arms: tuple[str, ...]


LIGHT = Theme(
    "light", "#1f2430", "#5b6472", "#e3e6eb", "#d9efe2", ("#4d5562", "#0072b2", "#d55e00", "#007f5f", "#b0499b", "#8a6d00", "#2f9fc9")
)
DARK = Theme(
    "dark", "#e7eaf0", "#a3acba", "#343b47", "#1f4433", ("#b4bcc9", "#5cb8f0", "#f5955c", "#4cc9a0", "#e08fce", "#e0c14a", "#8fd8f2")
)


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


def figures_of(results: Mapping[str, Any]) -> list[Figure]:
    """The figures that these results have data for."""
    metric = results["verdict"]["measures"][0]
    loss_scaled = any(arm["loss_scaling"] for arm in results["arms"].values())
    skipped = any(sum(arm["skipped_steps"]) for arm in results["arms"].values())
    found = [_interval(results, metric), _finals(results, metric), _curves(results, "metric", metric["name"], metric["name"])]
    if any(value is not None for arm in results["arms"].values() for run in arm["validation"] for value in run):
        found.append(_curves(results, "validation", "Validation loss", "validation loss"))
    found += [_curves(results, "loss", "Training loss", "training loss"), _drift(results, metric)]
    found += [_norms(results), _direction(results)]
    if loss_scaled:
        found.append(_curves(results, "loss_scale", "Loss scale", "loss scale", powers_of_two=True))
    if skipped or loss_scaled:
        found.append(_skips(results))
    return [figure for figure in found if figure is not None]


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
        # No date and no random ids: the same results give the same report.
        canvas.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return target.getvalue()


@contextmanager
def _style(theme: Theme, salt: str) -> Iterator[None]:
    import matplotlib

    settings = {
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


# ------------------------------------------------------------------------------------------------------------ figures


def _interval(results: Mapping[str, Any], metric: Mapping[str, Any]) -> Figure | None:
    comparisons = results["verdict"]["comparisons"]
    shown = {name: found["metric"] for name, found in comparisons.items() if found.get("metric")}
    if not shown:
        return None

    def draw(axes: Any, theme: Theme) -> None:
        margin = metric["margin"]
        axes.axvspan(-margin, margin, color=theme.good, linewidth=0)
        axes.axvline(0, color=theme.faint, linewidth=1)
        for row, (name, found) in enumerate(shown.items()):
            colour = _colour(results, name, theme)
            low, high = found["interval"]
            if low is not None:
                axes.plot([low, high], [row, row], color=colour, linewidth=3, solid_capstyle="butt", zorder=3)
            axes.plot(found["each"], [row + 0.2] * len(found["each"]), "o", color=colour, alpha=0.45, markersize=4, zorder=2)
            axes.plot(found["worse_by"], row, "D", color=colour, markersize=7, zorder=4)
        axes.set_yticks(range(len(shown)), list(shown))
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"worse than fp32 by ({metric['unit'] or metric['name']})")
        _plain_ticks(axes.xaxis, 5)

    said = "; ".join(f"{name} {_signed(found['worse_by'])}" for name, found in shown.items())
    return Figure(
        "interval",
        f"{metric['name'].capitalize()} against fp32",
        "Diamond: mean worsening over the seeds. Bar: its 90 % interval. Small dots: each seed. Shaded: the margin. "
        "An arm is safe when its bar ends inside, on the right.",
        f"Mean worsening of {metric['name']} against fp32: {said}. The margin is {metric['margin']:.3g}.",
        draw,
    )


def _finals(results: Mapping[str, Any], metric: Mapping[str, Any]) -> Figure:
    def draw(axes: Any, theme: Theme) -> None:
        for place, (name, arm) in enumerate(results["arms"].items()):
            values = [value for value in arm["final_metric"] if value is not None]
            colour = _colour(results, name, theme)
            # A fixed sideways step for each seed: the same seed stands at the same place in every arm.
            spread = [place + 0.24 * (2 * (seed + 0.5) / len(arm["final_metric"]) - 1) for seed in range(len(arm["final_metric"]))]
            points = [(x, y) for x, y in zip(spread, arm["final_metric"], strict=True) if y is not None]
            if points:
                axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=5.5, alpha=0.8)
                mean = math.fsum(values) / len(values)
                axes.plot([place - 0.32, place + 0.32], [mean, mean], color=colour, linewidth=2)
            else:
                axes.text(place, 0.5, "no run\nended", ha="center", va="center", transform=axes.get_xaxis_transform(), color=theme.faint)
        _arm_ticks(axes, list(results["arms"]))
        axes.set_ylabel(_label(metric))

    means = {name: [value for value in arm["final_metric"] if value is not None] for name, arm in results["arms"].items()}
    said = "; ".join(f"{name} {math.fsum(v) / len(v):.4g}" if v else f"{name}: no run ended" for name, v in means.items())
    return Figure(
        "finals",
        f"Final {metric['name']}, seed by seed",
        f"One dot a seed, the same seed at the same place in every arm; the line is the mean. "
        f"{'Higher' if metric['higher_is_better'] else 'Lower'} is better.",
        f"Mean final {metric['name']}: {said}.",
        draw,
    )


def _curves(results: Mapping[str, Any], key: str, title: str, label: str, *, powers_of_two: bool = False) -> Figure:
    def draw(axes: Any, theme: Theme) -> None:
        drawn: list[float] = []
        for name, arm in results["arms"].items():
            colour, style = _colour(results, name, theme), _line(results, name)
            runs = [_points(arm["evaluated_at"], run) for run in arm[key]]
            for steps, values in runs:
                axes.plot(steps, values, color=colour, alpha=0.28, linewidth=0.9)
            steps, mean = _mean(arm["evaluated_at"], arm[key])
            axes.plot(steps, mean, color=colour, linestyle=style, linewidth=2, label=name)
            _mark_ends(axes, arm, runs, colour)
            drawn += [value for _, values in runs for value in values]
        positive = [value for value in drawn if value > 0]
        if powers_of_two:
            axes.set_yscale("log", base=2)
        elif positive and len(positive) == len(drawn) and max(positive) > _WIDE_RANGE * min(positive):
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.legend(loc="best")

    return Figure(
        key,
        title[:1].upper() + title[1:],
        "Thick: mean over seeds; thin: each seed. A cross marks a run that broke down.",
        f"{title} over training steps, one line for each arm.",
        draw,
    )


def _drift(results: Mapping[str, Any], metric: Mapping[str, Any]) -> Figure | None:
    reference = results["arms"]["fp32"]
    key = metric["key"]
    sign = -1.0 if metric["higher_is_better"] else 1.0
    steps = reference["evaluated_at"]
    rows: dict[str, list[list[float]]] = {}
    for name, arm in results["arms"].items():
        pairs = zip(arm[key], reference[key], strict=False)
        runs = [_worsening(ours, theirs, sign) for ours, theirs in pairs]
        if name != "fp32" and any(runs):
            rows[name] = runs
    if not rows:
        return None

    def draw(axes: Any, theme: Theme) -> None:
        margin = metric["margin"]
        axes.axhspan(-margin, margin, color=theme.good, linewidth=0)
        axes.axhline(0, color=theme.faint, linewidth=1)
        for name, runs in rows.items():
            colour = _colour(results, name, theme)
            length = min(len(run) for run in runs)
            mean = [math.fsum(run[i] for run in runs) / len(runs) for i in range(length)]
            if length and len(runs) > 1:
                low, high = zip(*((min(run[i] for run in runs), max(run[i] for run in runs)) for i in range(length)), strict=True)
                axes.fill_between(steps[:length], low, high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(steps[:length], mean, color=colour, linestyle=_line(results, name), linewidth=2, label=name)
        axes.set_xlabel("step")
        axes.set_ylabel(f"worse by ({metric['unit'] or metric['name']})")
        late = [value for runs in rows.values() for run in runs for value in run[len(run) // 3 :]]
        reach = max([3.0 * margin, *(1.3 * abs(value) for value in late)])
        axes.set_ylim(-reach, reach)
        axes.legend(loc="best")

    return Figure(
        "drift",
        f"Gap in {metric['name']} over time",
        "Line: mean worsening against fp32 at each evaluation; band: all seeds; shaded: the margin. A gap that widens "
        "towards the end would be trouble still to come. Early training, which swings, may leave the frame.",
        f"Worsening of {metric['name']} against fp32 over training steps.",
        draw,
    )


def _norms(results: Mapping[str, Any]) -> Figure:
    def draw(axes: Any, theme: Theme) -> None:
        for place, (name, arm) in enumerate(results["arms"].items()):
            logs = [math.log10(norm) for run in arm["step_grad_norm"] for norm in run if norm is not None and norm > 0]
            colour = _colour(results, name, theme)
            if len(logs) > 1 and max(logs) > min(logs):
                parts = axes.violinplot([logs], [place], widths=0.8, showextrema=False, points=80)
                for body in parts["bodies"]:
                    body.set(facecolor=colour, alpha=0.45, linewidth=0)
                low, middle, high = _quartiles(logs)
                axes.plot([place, place], [low, high], color=colour, linewidth=3)
                axes.plot(place, middle, "o", color=colour, markersize=6)
            else:
                axes.text(place, 0.5, "none", ha="center", transform=axes.get_xaxis_transform(), color=theme.faint)
        _arm_ticks(axes, list(results["arms"]))
        axes.set_ylabel("gradient norm")
        axes.yaxis.set_major_formatter(lambda value, _: f"{10.0**value:.3g}")

    return Figure(
        "norms",
        "Gradient norms, all steps",
        "Distribution of the unscaled gradient norm over all steps and seeds, on a logarithmic axis; dot and bar: median and "
        "quartiles. Arms that see the same training look alike.",
        "Distributions of gradient norms, one for each arm.",
        draw,
    )


def _direction(results: Mapping[str, Any]) -> Figure | None:
    rows: dict[str, tuple[list[int], list[float]]] = {}
    for name, arm in results["arms"].items():
        if name == "fp32":
            continue
        gaps = [[None if value is None else max(1.0 - value, _STALL) for value in run] for run in arm["direction"]]
        steps, mean = _mean(arm["evaluated_at"], gaps)
        if steps:
            rows[name] = (steps, mean)
    if not rows:
        return None

    def draw(axes: Any, theme: Theme) -> None:
        for name, (steps, mean) in rows.items():
            axes.plot(steps, mean, color=_colour(results, name, theme), linestyle=_line(results, name), marker="o", markersize=3.5, label=name)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("1 − cosine")
        axes.legend(loc="best")

    return Figure(
        "direction",
        "Direction of the gradient",
        "How far the arm's gradient points away from fp32's at the same weights on the same batch: 0.01 is an angle of 8°, "
        "1 a right angle. It grows as the gradient itself shrinks.",
        "One minus the cosine between each arm's gradient and fp32's, over training steps.",
        draw,
    )


def _skips(results: Mapping[str, Any]) -> Figure:
    def draw(axes: Any, theme: Theme) -> None:
        for name, arm in results["arms"].items():
            runs = [run for run in arm["skipped"] if run]
            length = max(map(len, runs), default=0)
            total = [sum(run[i] for run in runs if i < len(run)) for i in range(length)]
            running = [sum(total[: i + 1]) for i in range(length)]
            axes.plot(
                [0, *arm["evaluated_at"][:length]], [0, *running], color=_colour(results, name, theme),
                linestyle=_line(results, name), linewidth=2, drawstyle="steps-post", label=name,
            )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("step")
        axes.set_ylabel("skipped steps, all seeds")
        axes.legend(loc="best")

    said = "; ".join(f"{name} {sum(arm['skipped_steps'])}" for name, arm in results["arms"].items())
    return Figure(
        "skips",
        "Skipped steps",
        "Steps not taken because gradients were not finite, counted up over all seeds. A few at the start are a scale being "
        "found; a line that keeps climbing is a range that does not hold.",
        f"Skipped steps over all seeds: {said}.",
        draw,
    )


# ------------------------------------------------------------------------------------------------------------ helpers


def _colour(results: Mapping[str, Any], name: str, theme: Theme) -> str:
    return theme.arms[list(results["arms"]).index(name) % len(theme.arms)]


def _line(results: Mapping[str, Any], name: str) -> str:
    return _STYLES[list(results["arms"]).index(name) % len(_STYLES)]


def _points(steps: Sequence[int], values: Sequence[float | None]) -> tuple[list[int], list[float]]:
    pairs = [(step, value) for step, value in zip(steps, values, strict=False) if value is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _mean(steps: Sequence[int], runs: Sequence[Sequence[float | None]]) -> tuple[list[int], list[float]]:
    """The mean over the runs that have a value, at each step where one has."""
    found: list[tuple[int, float]] = []
    for index, step in enumerate(steps):
        values = [value for run in runs if index < len(run) and (value := run[index]) is not None]
        if values:
            found.append((step, math.fsum(values) / len(values)))
    return [step for step, _ in found], [value for _, value in found]


def _worsening(ours: Sequence[float | None], theirs: Sequence[float | None], sign: float) -> list[float]:
    """The worsening at each evaluation, as far as both runs have a number."""
    found: list[float] = []
    for a, b in zip(ours, theirs, strict=False):
        if a is None or b is None:
            break
        found.append(sign * (a - b))
    return found


def _mark_ends(axes: Any, arm: Mapping[str, Any], runs: Sequence[tuple[list[int], list[float]]], colour: str) -> None:
    for ending, (steps, values) in zip(arm["ended"], runs, strict=True):
        if ending is not None and steps:
            axes.plot(steps[-1], values[-1], "X", color=colour, markersize=8)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
    return low, middle, high


def _arm_ticks(axes: Any, names: Sequence[str]) -> None:
    crowded = sum(map(len, names)) > 30
    axes.set_xticks(range(len(names)), names, rotation=20 if crowded else 0, ha="right" if crowded else "center")
    axes.set_xlim(-0.6, len(names) - 0.4)


def _plain_ticks(axis: Any, most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most))


def _label(metric: Mapping[str, Any]) -> str:
    unit = metric["unit"]
    return f"{metric['name']} ({unit})" if unit and unit not in metric["name"] else str(metric["name"])


def _signed(value: float) -> str:
    return f"{value:+.3g}"
