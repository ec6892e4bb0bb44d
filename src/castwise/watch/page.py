"""A run as one HTML page with nothing to load: readable on a phone, in the dark, and without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .events import ALARMS
from .series import Run, sparkline

__all__ = ["render"]

_WIDTH, _HEIGHT, _POINTS = 320, 90, 400
_BARS_SHOWN = 16  # of a layer's sparkline: three columns fit a phone
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--line:#0969da;--bad:#cf222e;--back:#fff;--card:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#58a6ff;--bad:#ff7b72;--back:#0d1117;
--card:#161b22}}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;
max-width:70rem;color:var(--ink);background:var(--back)}
h1{font-size:1.3rem}
h2{font-size:1.1rem}
.grid{display:grid;gap:1rem;
grid-template-columns:repeat(auto-fill,minmax(min(100%,18rem),1fr))}
figure{margin:0;padding:.7rem;border-radius:.5rem;background:var(--card)}
figcaption{display:flex;justify-content:space-between;gap:1rem}
figcaption b{overflow-wrap:anywhere}
svg{width:100%;height:auto}
path{fill:none;stroke:var(--line);stroke-width:1.5}
circle{fill:var(--bad)}
summary{padding:.4rem 0;cursor:pointer}
table{width:100%;border-collapse:collapse;font-size:.85rem}
td,th{text-align:left;padding:.2rem .4rem .2rem 0;border-bottom:1px solid var(--card);vertical-align:top}
td:first-child{overflow-wrap:anywhere}
td:nth-child(2){font-variant-numeric:tabular-nums}
td:last-child{white-space:nowrap;line-height:1;color:var(--line)}
small{color:var(--soft)}
ol{padding-left:0;list-style:none}
li{padding:.4rem 0;border-bottom:1px solid var(--card);overflow-wrap:anywhere}
li.alarm b{color:var(--bad)}
"""


def render(run: Run, title: str = "A run") -> str:
    """The page: a plot per metric, then the events, the newest first."""
    plots = "\n".join(_figure(name, run.points(name)) for name in run.general())
    layers = "\n".join(_table(run, family, names) for family, names in run.by_layer().items())
    events = "\n".join(
        f'<li class="{"alarm" if e["event"] in ALARMS else "calm"}"><small>step {int(e["step"]):,}</small> '
        f"<b>{html.escape(_titled(e))}</b> {html.escape(str(e.get('message', '')))}</li>"
        for e in reversed(run.events)
    )
    advice = "".join(f"<p><b>{html.escape(cause)}</b> {html.escape(words)}</p>\n" for cause, words in run.advice())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1><p><small>step {run.step:,}, {len(run.events)} events</small></p>
{advice}<div class="grid">{plots or "<p>No metrics have been logged yet.</p>"}</div>
{f"<h2>Layers</h2>{layers}" if layers else ""}<h2>Events</h2><ol>{events or "<li>None.</li>"}</ol></body></html>
"""


def _titled(event: Mapping[str, Any]) -> str:
    return f"{event['event']} ({event['cause']})" if "cause" in event else str(event["event"])


def _table(run: Run, family: str, names: Sequence[str]) -> str:
    """A metric of all layers, folded: the largest newest value first."""
    rows = []
    for name in names:
        values = [value for _, value in run.points(name)]
        layer = html.escape(name.partition("/")[2])
        rows.append(f"<tr><td>{layer}</td><td>{values[-1]:.4g}</td><td>{sparkline(values, _BARS_SHOWN)}</td></tr>")
    heads = "<tr><th>layer</th><th>newest</th><th>so far</th></tr>"
    title = html.escape(family.replace("_", " "))
    return f"<details><summary>{title} ({len(names)})</summary><table>{heads}{''.join(rows)}</table></details>"


def _figure(name: str, points: Sequence[tuple[int, float]]) -> str:
    thinned = points if len(points) <= _POINTS else [points[i * len(points) // _POINTS] for i in range(_POINTS)]
    finite = [(step, value) for step, value in thinned if math.isfinite(value)]
    low, high = min((v for _, v in finite), default=0.0), max((v for _, v in finite), default=0.0)
    first, last = points[0][0], points[-1][0]

    def x(step: int) -> float:
        return 2 + (_WIDTH - 4) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return _HEIGHT - 4 - (_HEIGHT - 8) * ((value - low) / (high - low) if high > low else 0.5)

    path = " ".join(f"{'M' if i == 0 else 'L'}{x(s):.1f} {y(v):.1f}" for i, (s, v) in enumerate(finite))
    bad = "".join(f'<circle cx="{x(s):.1f}" cy="6" r="2.5"/>' for s, v in points if not math.isfinite(v))
    label = html.escape(name)
    return (
        f"<figure><figcaption><b>{label}</b><span>{points[-1][1]:.5g}</span></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"><path d="{path}"/>{bad}</svg>'
        f"<small>{low:.4g} to {high:.4g}, steps {first:,} to {last:,}</small></figure>"
    )
