"""``castwise plan``: plan a torch model from the command line, and show the front that the plan was chosen from."""

from __future__ import annotations

import argparse
import html
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise._files import write_text
from castwise._load import is_object_spec, load_object
from castwise._model_spec import add_model, example_inputs
from castwise._plan_graph import COLOURS, graph_svg
from castwise._units import show_seconds
from castwise.errors import PlanError

if TYPE_CHECKING:
    from castwise.plan import Plan

__all__ = ["add_arguments", "main"]

_WIDTH, _HEIGHT = 56, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``castwise plan``."""
    add_model(parser)
    parser.add_argument("--policy", default="auto", help="a preset or policy file (default: auto)")
    parser.add_argument("--budget", type=float, help="relative error of the outputs that the plan may cause")
    parser.add_argument("--favour", choices=("speed", "memory"), default="speed", help="what to save (default: speed)")
    parser.add_argument("--inference", action="store_true", help="plan inference, not a training step")
    parser.add_argument("--out", type=Path, help="write the plan as JSON, and a page about it beside it as .html")


def main(args: argparse.Namespace) -> int:
    """Plan the model and print the plan."""
    from castwise.torch.planning import prepare, verified

    model, inputs = _model(args.model)
    model.train(not args.inference)
    ready = prepare(model, inputs, policy=args.policy, device=args.device)
    found = verified(ready, ready.solve(args.budget, args.favour))
    print(found.summary())
    if found.verification is not None:
        print(f"  {found.verification}")
    front = ready.front(favour=args.favour) if ready.risks.measured else []
    if len(front) > 1:
        print(terminal_plot(front, found))
    if args.out is not None:
        found.save(args.out)
        write_text(args.out.with_suffix(".html"), page(found, front))
        print(f"\nwritten: {args.out} and {args.out.with_suffix('.html')}")
    return 0


def _model(spec: str) -> tuple[Any, Any]:
    """A module and example inputs: of a study task, or of a class or factory of a file."""
    from torch import nn

    made: Any = load_object(spec) if is_object_spec(spec) else None
    if callable(made) and not isinstance(made, nn.Module):
        made = made()
    if isinstance(made, nn.Module):
        return made, example_inputs(made, spec, PlanError)
    return _of_task(spec)


def _of_task(spec: str) -> tuple[Any, Any]:
    """The model of a study task and the inputs that its loss calls it with on the first training batch."""
    from castwise.study.protocol import load_task

    task = load_task(spec)
    model = task.model(0)
    calls: list[Any] = []

    def note(_module: Any, args: Any, kwargs: Any) -> None:
        calls.append(dict(kwargs) if kwargs and not args else args)

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    batches: Iterable[Any] = task.batches(0)
    try:
        for batch in itertools.islice(batches, 1):
            task.loss(model, batch)
    finally:
        hook.remove()
    if not calls:
        raise PlanError(f"The loss of {spec!r} never calls its model, so there is nothing to plan.")
    return model, calls[0]


# ---- the front -------------------------------------------------------------------------------------------------------


def terminal_plot(front: Sequence[Plan], chosen: Plan) -> str:
    """Predicted time against predicted error of each plan of a front, the chosen one marked."""
    points = [(plan.score.seconds, max(plan.relative_error, 1e-9), "o") for plan in front]
    points.append((chosen.score.seconds, max(chosen.relative_error, 1e-9), "X"))
    times, errors = [p[0] for p in points], [math.log10(p[1]) for p in points]
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for (seconds, _, mark), error in zip(points, errors, strict=True):
        column = _place(seconds, min(times), max(times), _WIDTH)
        row = _place(error, min(errors), max(errors), _HEIGHT)
        rows[_HEIGHT - 1 - row][column] = mark
    lines = ["", f"  predicted error of the outputs, {10 ** max(errors):.1e} (top) to {10 ** min(errors):.1e}"]
    lines += ["  |" + "".join(row).rstrip() for row in rows]
    lines.append("  +" + "-" * _WIDTH)
    lines.append(f"   {show_seconds(min(times))} to {show_seconds(max(times))} a step; X: this plan")
    return "\n".join(lines)


def _place(value: float, low: float, high: float, size: int) -> int:
    return round((value - low) / (high - low) * (size - 1)) if high > low else 0


# ---- the page --------------------------------------------------------------------------------------------------------

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body{{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;color:#1d2430}}
pre{{background:#f4f5f7;padding:1rem;overflow:auto}}
details{{margin:.15rem 0 .15rem 1rem}}
summary{{cursor:pointer}}
.op{{display:inline-block;margin:1px;padding:0 .4rem;border-radius:3px;color:#fff;font-size:.8rem}}
svg{{border:1px solid #d5d9e0;max-width:100%}}
.op-box text{{fill:#fff;font:12px system-ui,sans-serif;pointer-events:none}}
.op-box.found rect{{stroke:#111;stroke-width:4}}
</style>
<h1>{title}</h1><pre>{summary}</pre>{plot}
<h2>The graph</h2>{graph}
<h2>Ops by layer</h2><p>{legend} Hover over an op for its source and reason.</p>
{layers}</html>
"""


def page(plan: Plan, front: Sequence[Plan]) -> str:
    """A self-contained HTML page: the summary, the front, and every op in its layer, coloured by format."""
    title = html.escape(f"Plan of {plan.problem.graph.name or 'a model'}")
    used = dict.fromkeys(["fp32", plan.fmt])
    legend = " ".join(f'<span class="op" style="background:{COLOURS[f]}">{f}</span>' for f in used)
    return _PAGE.format(
        title=title,
        summary=html.escape(str(plan.summary())),
        plot=_svg(front, plan) if len(front) > 1 else "",
        legend=legend,
        graph=graph_svg(plan),
        layers=_layers(plan),
    )


def _layers(plan: Plan) -> str:
    graph = plan.problem.graph
    by_layer: dict[str, list[str]] = {}
    for position, op in enumerate(graph.ops):
        pin = plan.problem.pins.get(position)
        why = pin.reason if pin is not None else plan.causes[position].value
        tip = html.escape(f"{op.id} · {plan.formats[op.id]} · {op.source} · {why}", quote=True)
        colour = COLOURS[plan.formats[op.id]]
        shown = f'<span class="op" style="background:{colour}" title="{tip}">{html.escape(op.name)}</span>'
        by_layer.setdefault(op.layer, []).append(shown)
    return "\n".join(
        f"<details open><summary>{html.escape(layer) or '(model)'}</summary>{''.join(ops)}</details>"
        for layer, ops in by_layer.items()
    )


def _svg(front: Sequence[Plan], chosen: Plan) -> str:
    width, height, margin = 560, 260, 40
    points = [(p.score.seconds, math.log10(max(p.relative_error, 1e-9)), p is chosen) for p in (*front, chosen)]
    times, errors = [p[0] for p in points], [p[1] for p in points]
    dots = []
    for seconds, error, mine in points:
        x = margin + _place(seconds, min(times), max(times), width - 2 * margin)
        y = height - margin - _place(error, min(errors), max(errors), height - 2 * margin)
        dots.append(
            f'<circle cx="{x}" cy="{y}" r="{6 if mine else 4}" fill="{"#c0392b" if mine else "#3a6ea5"}">'
            f"<title>{show_seconds(seconds)}, error {10**error:.2e}</title></circle>"
        )
    return (
        f'<h2>Speed and accuracy</h2><svg viewBox="0 0 {width} {height}" width="{width}">{"".join(dots)}'
        f'<text x="{margin}" y="{height - 10}" font-size="12">{show_seconds(min(times))} to '
        f"{show_seconds(max(times))} a step; up: error {10 ** min(errors):.1e} to {10 ** max(errors):.1e}</text></svg>"
    )
