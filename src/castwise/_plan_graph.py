"""A plan's graph as a picture in a page: ops as boxes coloured by format, tensors as lines, casts marked on them.

Laid out in rows by the longest way from an input, and in each row by where an op's inputs are, which is enough to
follow a model of 2,000 ops. The page carries the picture and its own few lines of script: the wheel zooms, dragging
moves, a field finds ops, and no network is needed.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from castwise.plan import Plan

__all__ = ["COLOURS", "graph_svg"]

COLOURS = {"fp32": "#7a869a", "bf16": "#2f8f5b", "fp16": "#c2702b"}
_BOX, _GAP, _ROW = 118, 12, 52
_HEIGHT = 22
_CAST = "#c0392b"

_SCRIPT = """<script>
(()=>{const svg=document.getElementById('graph'),box=svg.viewBox.baseVal;
const at=e=>{const r=svg.getBoundingClientRect();
return[box.x+(e.clientX-r.left)/r.width*box.width,box.y+(e.clientY-r.top)/r.height*box.height]};
svg.addEventListener('wheel',e=>{e.preventDefault();const[x,y]=at(e),f=e.deltaY<0?0.8:1.25;
box.x=x-(x-box.x)*f;box.y=y-(y-box.y)*f;box.width*=f;box.height*=f},{passive:false});
let held=null;svg.addEventListener('pointerdown',e=>{held=at(e);svg.setPointerCapture(e.pointerId)});
svg.addEventListener('pointermove',e=>{if(held){const[x,y]=at(e);box.x+=held[0]-x;box.y+=held[1]-y}});
svg.addEventListener('pointerup',()=>{held=null});
const full=[box.x,box.y,box.width,box.height];
document.getElementById('whole').onclick=()=>{[box.x,box.y,box.width,box.height]=full};
document.getElementById('find').oninput=e=>{const word=e.target.value;let first=null;
for(const op of svg.querySelectorAll('g.op-box')){const hit=word&&op.dataset.id.includes(word);
op.classList.toggle('found',hit);if(hit&&!first)first=op}
if(first){const b=first.getBBox();box.width=900;box.height=600;box.x=b.x-450+b.width/2;box.y=b.y-300}};
})()</script>"""


def graph_svg(plan: Plan) -> str:
    """The graph as an SVG element and the script that moves it."""
    graph = plan.problem.graph
    if not graph.ops:
        return ""
    across, down = _places(plan)
    width, height = float(across.max()) + _BOX + _GAP, float(down.max()) + _ROW
    lines = "".join(_lines(plan, across, down))
    boxes = "".join(_box(plan, op, float(across[op]), float(down[op])) for op in range(len(graph.ops)))
    return (
        '<p><input id="find" placeholder="find an op or a layer"> <button id="whole">whole graph</button> '
        f'The wheel zooms, dragging moves. <span style="color:{_CAST}">Red lines</span> are casts.</p>'
        f'<svg id="graph" viewBox="0 0 {width:.0f} {height:.0f}" style="width:100%;height:70vh;touch-action:none">'
        f"{lines}{boxes}</svg>{_SCRIPT}"
    )


def _places(plan: Plan) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    """[ops] where each box starts, across and down."""
    graph = plan.problem.graph
    producer = graph.index.producer
    row = np.zeros(len(graph.ops), int)
    across = np.zeros(len(graph.ops))
    for position, op in enumerate(graph.ops):
        before = [int(producer[t]) for t in op.inputs if producer[t] >= 0]
        row[position] = max((row[p] + 1 for p in before), default=0)
    for number in range(int(row.max()) + 1):
        members = np.flatnonzero(row == number)
        wanted = {}
        for position in members.tolist():
            places = [float(across[producer[t]]) for t in graph.ops[position].inputs if producer[t] >= 0]
            wanted[position] = sum(places) / len(places) if places else 0.0
        free = 0.0
        for position in sorted(wanted, key=lambda op: (wanted[op], op)):
            across[position] = max(free, wanted[position])
            free = across[position] + _BOX + _GAP
    return across, row * float(_ROW)


def _lines(plan: Plan, across: np.ndarray, down: np.ndarray) -> list[str]:
    graph, used = plan.problem.graph, plan.usage
    producer, lines = graph.index.producer, []
    for tensor, op in zip(graph.index.reads.tensor.tolist(), graph.index.reads.op.tolist(), strict=True):
        source = int(producer[tensor])
        if source < 0:
            continue
        cast = (used.cast_down[tensor] and plan.labels[op]) or (used.cast_up[tensor] and not plan.labels[op])
        x1, y1 = across[source] + _BOX / 2, down[source] + _HEIGHT
        x2, y2 = across[op] + _BOX / 2, down[op]
        bend = (y2 - y1) / 2
        stroke = f'stroke="{_CAST}" stroke-width="2"' if cast else 'stroke="#b8bec9"'
        path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
        title = html.escape(graph.tensors[tensor].name)
        lines.append(f'<path d="{path}" fill="none" {stroke}><title>{title}</title></path>')
    return lines


def _box(plan: Plan, position: int, x: float, y: float) -> str:
    op = plan.problem.graph.ops[position]
    pin = plan.problem.pins.get(position)
    fmt = plan.formats[op.id]
    why = pin.reason if pin is not None else plan.causes[position].value
    said = html.escape(f"{op.id}: {fmt}\n{op.layer} {op.source}\n{why}", quote=True)
    known = html.escape(f"{op.id} {op.layer}", quote=True)
    return (
        f'<g class="op-box" data-id="{known}"><title>{said}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_BOX}" height="{_HEIGHT}" rx="4" fill="{COLOURS[fmt]}"/>'
        f'<text x="{x + 6:.0f}" y="{y + 15:.0f}">{html.escape(op.name[:16])}</text></g>'
    )
