"""The report's figures: small, one idea each.

Small on purpose: at 4.4 inches a figure fits a phone without its text becoming unreadable, and two stand side by side
on a desktop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from castwise.study._drawing import (
    Figure,
    Theme,
    arm_ticks,
    colour_of,
    decade_ticks,
    label_of,
    legend,
    line_of,
    mark_ends,
    mean_of,
    plain_ticks,
    points_of,
    quartiles,
    signed,
    worsening,
)

__all__ = ["figures_of"]

_WIDE_RANGE = 30.0  # a curve that spans more than this factor is drawn on a logarithmic axis
_STALL = 1e-9  # 1 - cosine below this is rounding of the cosine itself


def figures_of(results: Mapping[str, Any]) -> list[Figure]:
    """The figures that these results have data for."""
    metric = results["verdict"]["measures"][0]
    loss_scaled = any(arm["loss_scaling"] for arm in results["arms"].values())
    skipped = any(sum(arm["skipped_steps"]) for arm in results["arms"].values())
    found = [
        _interval(results, metric),
        _finals(results, metric),
        _curves(results, "metric", metric["name"], metric["name"]),
    ]
    if any(value is not None for arm in results["arms"].values() for run in arm["validation"] for value in run):
        found.append(_curves(results, "validation", "Validation loss", "validation loss"))
    found += [_curves(results, "loss", "Training loss", "training loss"), _drift(results, metric)]
    found += [_norms(results), _direction(results)]
    if loss_scaled:
        found.append(_scale(results))
    if skipped:
        found.append(_skips(results))
    return [figure for figure in found if figure is not None]


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
            colour = colour_of(results, name, theme)
            low, high = found["interval"]
            if low is not None:
                axes.plot([low, high], [row, row], color=colour, linewidth=3, solid_capstyle="butt", zorder=3)
            axes.plot(
                found["each"], [row + 0.2] * len(found["each"]), "o", color=colour, alpha=0.45, markersize=4, zorder=2
            )
            axes.plot(found["worse_by"], row, "D", color=colour, markersize=7, zorder=4)
        axes.set_yticks(range(len(shown)), list(shown))
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"worse than fp32 by ({metric['unit'] or metric['name']})")
        plain_ticks(axes.xaxis, 5)

    said = "; ".join(f"{name} {signed(found['worse_by'])}" for name, found in shown.items())
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
            colour = colour_of(results, name, theme)
            # A fixed sideways step for each seed: the same seed stands at the same place in every arm.
            spread = [
                place + 0.24 * (2 * (seed + 0.5) / len(arm["final_metric"]) - 1)
                for seed in range(len(arm["final_metric"]))
            ]
            points = [(x, y) for x, y in zip(spread, arm["final_metric"], strict=True) if y is not None]
            if points:
                axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=5.5, alpha=0.8)
                mean = math.fsum(values) / len(values)
                axes.plot([place - 0.32, place + 0.32], [mean, mean], color=colour, linewidth=2)
            else:
                axes.text(
                    place,
                    0.5,
                    "no run\nended",
                    ha="center",
                    va="center",
                    transform=axes.get_xaxis_transform(),
                    color=theme.faint,
                )
        arm_ticks(axes, list(results["arms"]))
        axes.set_ylabel(label_of(metric))

    means = {
        name: [value for value in arm["final_metric"] if value is not None] for name, arm in results["arms"].items()
    }
    said = "; ".join(
        f"{name} {math.fsum(v) / len(v):.4g}" if v else f"{name}: no run ended" for name, v in means.items()
    )
    return Figure(
        "finals",
        f"Final {metric['name']}, seed by seed",
        f"One dot a seed, the same seed at the same place in every arm; the line is the mean. "
        f"{'Higher' if metric['higher_is_better'] else 'Lower'} is better.",
        f"Mean final {metric['name']}: {said}.",
        draw,
    )


def _curves(results: Mapping[str, Any], key: str, title: str, label: str) -> Figure:
    def draw(axes: Any, theme: Theme) -> None:
        drawn: list[float] = []
        for name, arm in results["arms"].items():
            steps, series = arm["evaluated_at"], arm[key]
            if f"initial_{key}" in arm:
                steps = [0, *steps]
                series = [[first, *run] for first, run in zip(arm[f"initial_{key}"], series, strict=True)]
            drawn += _draw_arm(axes, theme, results, name, steps, series)
        positive = [value for value in drawn if value > 0]
        if positive and len(positive) == len(drawn) and max(positive) > _WIDE_RANGE * min(positive):
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        legend(axes)

    return Figure(
        key,
        title[:1].upper() + title[1:],
        "Thick: mean over seeds; thin: each seed. fp32 lies broad underneath. A cross marks a run that broke down.",
        f"{title} over training steps, one line for each arm.",
        draw,
    )


def _draw_arm(
    axes: Any,
    theme: Theme,
    results: Mapping[str, Any],
    name: str,
    steps: list[int],
    series: list[list[float | None]],
) -> list[float]:
    """Draw the seeds and the mean of one arm; returns every value drawn."""
    colour = colour_of(results, name, theme)
    runs = [points_of(steps, run) for run in series]
    for where, values in runs:
        axes.plot(where, values, color=colour, alpha=0.3, linewidth=0.9)
    broad = {"linewidth": 5.0, "alpha": 0.45} if name == "fp32" else {"linewidth": 2.0}
    where, mean = mean_of(steps, series)
    if where:
        axes.plot(where, mean, color=colour, linestyle=line_of(results, name), label=name, **broad)
    mark_ends(axes, results["arms"][name], runs, colour)
    return [value for _, values in runs for value in values]


def _scale(results: Mapping[str, Any]) -> Figure:
    scaled = [name for name, arm in results["arms"].items() if arm["loss_scaling"]]

    def draw(axes: Any, theme: Theme) -> None:
        for name in scaled:
            arm = results["arms"][name]
            _draw_arm(axes, theme, results, name, arm["evaluated_at"], arm["loss_scale"])
        axes.set_yscale("log", base=2)
        low, high = axes.get_ylim()
        if high < 8 * low:  # a scale that never moved
            axes.set_ylim(low / 4, high * 4)
        axes.set_xlabel("step")
        axes.set_ylabel("loss scale")
        legend(axes)

    return Figure(
        "scale",
        "Loss scale",
        "The scale at each evaluation. It falls where gradients overflow "
        "and rises again after a long run of good steps.",
        f"Loss scale over training steps of {', '.join(scaled)}.",
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
        runs = [worsening(ours, theirs, sign) for ours, theirs in pairs]
        if name != "fp32" and any(runs):
            rows[name] = runs
    if not rows:
        return None

    def draw(axes: Any, theme: Theme) -> None:
        margin = metric["margin"]
        axes.axhspan(-margin, margin, color=theme.good, linewidth=0)
        axes.axhline(0, color=theme.faint, linewidth=1)
        for name, runs in rows.items():
            colour = colour_of(results, name, theme)
            length = min(len(run) for run in runs)
            mean = [math.fsum(run[i] for run in runs) / len(runs) for i in range(length)]
            if length and len(runs) > 1:
                low, high = zip(
                    *((min(run[i] for run in runs), max(run[i] for run in runs)) for i in range(length)), strict=True
                )
                axes.fill_between(steps[:length], low, high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(steps[:length], mean, color=colour, linestyle=line_of(results, name), linewidth=2, label=name)
        axes.set_xlabel("step")
        axes.set_ylabel(f"worse by ({metric['unit'] or metric['name']})")
        late = [value for runs in rows.values() for run in runs for value in run[len(run) // 3 :]]
        reach = max([3.0 * margin, *(1.3 * abs(value) for value in late)])
        axes.set_ylim(-reach, reach)
        legend(axes)

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
        seen: list[float] = []
        for place, (name, arm) in enumerate(results["arms"].items()):
            logs = [math.log10(norm) for run in arm["step_grad_norm"] for norm in run if norm is not None and norm > 0]
            colour = colour_of(results, name, theme)
            if len(logs) > 1 and max(logs) > min(logs):
                parts = axes.violinplot([logs], [place], widths=0.8, showextrema=False, points=80)
                for body in parts["bodies"]:
                    body.set(facecolor=colour, alpha=0.45, linewidth=0)
                low, middle, high = quartiles(logs)
                axes.plot([place, place], [low, high], color=colour, linewidth=3)
                axes.plot(place, middle, "o", color=colour, markersize=6)
                seen += logs
            else:
                axes.text(place, 0.5, "none", ha="center", transform=axes.get_xaxis_transform(), color=theme.faint)
        arm_ticks(axes, list(results["arms"]))
        axes.set_ylabel("gradient norm")
        if seen:
            decade_ticks(axes.yaxis, *axes.get_ylim())

    return Figure(
        "norms",
        "Gradient norms, all steps",
        "Distribution of the unscaled gradient norm over all steps and seeds, "
        "on a logarithmic axis; dot and bar: median and "
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
        steps, mean = mean_of(arm["evaluated_at"], gaps)
        if steps:
            rows[name] = (steps, mean)
    if not rows:
        return None

    def draw(axes: Any, theme: Theme) -> None:
        for name, (steps, mean) in rows.items():
            axes.plot(
                steps,
                mean,
                color=colour_of(results, name, theme),
                linestyle=line_of(results, name),
                marker="o",
                markersize=3.5,
                label=name,
            )
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("1 − cosine")
        legend(axes)

    return Figure(
        "direction",
        "Direction of the gradient",
        "How far the arm's gradient points away from fp32's at the same "
        "weights on the same batch: 0.01 is an angle of 8°, "
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
                [0, *arm["evaluated_at"][:length]], [0, *running], color=colour_of(results, name, theme),
                linestyle=line_of(results, name), linewidth=2, label=name,
            )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("step")
        axes.set_ylabel("skipped steps, all seeds")
        legend(axes)

    said = "; ".join(f"{name} {sum(arm['skipped_steps'])}" for name, arm in results["arms"].items())
    return Figure(
        "skips",
        "Skipped steps",
        "Steps not taken because gradients were not finite, counted up over "
        "all seeds. A few at the start are a scale being "
        "found; a line that keeps climbing is a range that does not hold.",
        f"Skipped steps over all seeds: {said}.",
        draw,
    )
