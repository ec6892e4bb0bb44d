"""A run in the terminal: a sparkline per metric, and the newest events."""

from __future__ import annotations

import textwrap

from .events import ALARMS
from .series import Run, sparkline

__all__ = ["render"]

_EVENTS_SHOWN = 12
_LAYERS_SHOWN = 3
_NARROWEST = 8  # columns of a sparkline, or of a name
_FIXED = 16 + _NARROWEST  # columns beside the name: gaps, the value, and the shortest sparkline
_MARKS = {"stop": "■", "finding": "!", "scale_low": "!", "advice": "→", "raise": "↑", "give_back": "↓"}


def render(run: Run, width: int = 80, events: int = _EVENTS_SHOWN) -> str:
    """The run as text of at most `width` columns."""
    if not run.series and not run.events:
        return "nothing has been logged yet"
    names = [*run.general(), *(name for layers in run.by_layer().values() for name in layers[:_LAYERS_SHOWN])]
    longest = min(max((len(name) for name in names), default=0), max(width - _FIXED, _NARROWEST))
    room = max(_NARROWEST, width - longest - _FIXED + _NARROWEST)
    lines = [f"step {run.step:,}"]
    for name in names:
        values = [value for _, value in run.points(name)]
        lines.append(f"{_shortened(name, longest):<{longest}}  {values[-1]:>11.5g}  {sparkline(values, room)}")
    more = sum(max(len(layers) - _LAYERS_SHOWN, 0) for layers in run.by_layer().values())
    if more:
        lines.append(
            f"  (of layers, the {_LAYERS_SHOWN} largest of each metric; {more} more on the page: --html)"[:width]
        )
    for cause, words in run.advice():
        lines += _wrapped(f"→ {cause}: {words}", width)
    shown = run.events[-events:]
    if shown:
        lines += ["", f"events ({len(run.events)})"]
    for event in shown:
        name = str(event["event"])
        cause = f" ({event['cause']})" if "cause" in event else ""
        text = f"{_MARKS.get(name, '·')} {event['step']:>7}  {name}{cause}: {event.get('message', '')}"
        lines += _wrapped(text, width) if name in ALARMS else [_cut(f"  {text}", width)]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _shortened(name: str, room: int) -> str:
    """A name cut in its middle: layers differ at the end of their paths."""
    if len(name) <= room:
        return name
    head = f"{name.partition('/')[0]}/…"
    head = head if room - len(head) >= _NARROWEST else "…"
    return head + name[len(name) - (room - len(head)) :]
