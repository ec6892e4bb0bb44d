"""``report.html``: the study for people. One file that needs no network, no script and no fonts of its own.

It is made from ``results.json`` alone, so that a report can be made again from results of long ago. Figures are
embedded as SVG images, each drawn for light and for dark pages; the browser picks by ``prefers-color-scheme``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from castwise._extras import require
from castwise._files import write_text
from castwise.study._drawing import DARK, LIGHT, Figure, recoloured, render
from castwise.study.figures import figures_of
from castwise.study.words import counted, headline, limits, listed, number, rate

__all__ = ["html_of", "write_report"]


def write_report(results: Mapping[str, Any], path: str | Path) -> Path:
    """Write the report of ``results`` (see ``results.results_of``) to ``path``, atomically, and return the path.

    Raises:
        MissingExtraError: Jinja2 or Matplotlib is not installed.
    """
    return write_text(path, html_of(results))


def html_of(results: Mapping[str, Any]) -> str:
    """The report as one HTML document."""
    jinja2 = require("jinja2", extra="study")
    folder = files("castwise.study")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"counted": counted, "number": _typeset, "rate": rate, "bytes": _bytes, "listed": listed}
    template = environment.from_string((folder / "report.html.j2").read_text(encoding="utf-8"))
    text: str = template.render(
        results=results,
        details=results["task_details"],
        settings=results["settings"],
        verdict=results["verdict"],
        metric=results["verdict"]["measures"][0],
        css=(folder / "report.css").read_text(encoding="utf-8"),
        headline=headline(results),
        limits=limits(results),
        arms=[_arm(name, results) for name in results["arms"]],
        figures=[_embedded(figure) for figure in figures_of(results)],
    )
    return text


def _embedded(figure: Figure) -> dict[str, str]:
    light = render(figure, LIGHT)
    return {
        "key": figure.key,
        "title": figure.title,
        "caption": figure.caption,
        "alt": figure.alt,
        "light": _data_url(light),
        "dark": _data_url(recoloured(light, LIGHT, DARK)),
    }


def _data_url(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode("ascii")


def _arm(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """What the cards and the table say about an arm."""
    arm, verdict = results["arms"][name], results["verdict"]
    finals = [value for value in arm["final_metric"] if value is not None]
    status = verdict["status"].get(name, "not cured")
    comparison = (verdict["comparisons"].get(name) or {}).get("metric")
    return {
        "name": name,
        "status": status,
        "kind": {"safe": "safe", "unsafe": "unsafe", "not cured": "unsafe"}.get(status, "unclear"),
        "mark": {"safe": "✓", "unsafe": "✕", "not cured": "✕"}.get(status, "?"),
        "format": arm["format"],
        "emulated": arm["emulated"],
        "on_device": arm["on_device"],
        "remedy": arm["remedy"],
        "policy": arm["policy"],
        "reference": name == "fp32",
        "recommended": name == verdict["recommended"],
        "reasons": [reason.partition(": ")[2] for reason in verdict["reasons"] if reason.startswith(f"{name}: ")],
        "mean": math.fsum(finals) / len(finals) if finals else None,
        "spread": _spread(finals),
        "comparison": comparison,
        "ended": [ending["message"] for ending in arm["ended"] if ending],
        "runs": len(arm["ended"]),
        "skipped": sum(arm["skipped_steps"]),
        "steps": sum(map(len, arm["step_grad_norm"])),
        "throughput": arm["throughput"],
        "throughput_unit": arm["throughput_unit"],
        "memory": sum(arm["memory"].values()),
        "memory_parts": ", ".join(f"{part} {_bytes(size)}" for part, size in arm["memory"].items()),
    }


def _typeset(value: float | None) -> str:
    """A number with a real minus sign."""
    return number(value).replace("-", "−")


def _spread(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
