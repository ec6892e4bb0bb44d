"""A run in the terminal: a sparkline per metric, and the newest events."""

from __future__ import annotations

from .series import Run, sparkline

__all__ = ["render"]

_EVENTS_SHOWN = 12
_MARKS = {"stop": "■", "finding": "!", "scale_low": "!", "advice": "→", "raise": "↑", "give_back": "↓"}


def render(run: Run, width: int = 80, events: int = _EVENTS_SHOWN) -> str:
    """The run as text of at most `width` columns."""
    names = sorted(run.series)
    if not names and not run.events:
        return "nothing has been logged yet"
    longest = max((len(name) for name in names), default=0)
    room = max(8, width - longest - 16)
    lines = [f"step {run.step:,}"]
    for name in names:
        values = [value for _, value in run.points(name)]
        lines.append(f"{name:<{longest}}  {values[-1]:>11.5g}  {sparkline(values, room)}")
    for cause, words in run.advice():
        text = f"  → {cause}: {words}"
        lines.append(text if len(text) <= width else text[: width - 1] + "…")
    shown = run.events[-events:]
    if shown:
        lines += ["", f"events ({len(run.events)})"]
    for event in shown:
        text = (
            f"  {_MARKS.get(str(event['event']), '·')} {event['step']:>7}  {event['event']}: {event.get('message', '')}"
        )
        lines.append(text if len(text) <= width else text[: width - 1] + "…")
    return "\n".join(lines)
