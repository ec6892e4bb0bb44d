"""The table that ``castwise study`` prints: one line for each arm, the verdict last."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from castwise.study.words import counted, number, rate

__all__ = ["table"]


def table(results: Mapping[str, Any]) -> str:
    """The study in plain text, at most about 100 columns wide."""
    details, verdict = results["task_details"], results["verdict"]
    metric = verdict["measures"][0]
    rows = [["", metric["name"], "worse than fp32 by", "skipped", "speed", "verdict"]]
    rows += [_row(name, arm, results) for name, arm in results["arms"].items()]
    settings = results["settings"]
    head = f"{details['name']} on {results['device']}: "
    head += f"{counted(settings['steps'], 'step')}, {counted(settings['seeds'], 'seed')}"
    lines = [head, "", *_aligned(rows), ""]
    if any(arm["emulated"] for arm in results["arms"].values()):
        lines.append("Emulated formats have the numbers of the real ones, not their speed.")
    lines += [f"- {reason}" for reason in verdict["reasons"]]
    lines += ["", f"recommended: {verdict['recommended_because']}"]
    return "\n".join(lines)


def _row(name: str, arm: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    finals = [value for value in arm["final_metric"] if value is not None]
    mean = math.fsum(finals) / len(finals) if finals else math.nan
    comparison = (results["verdict"]["comparisons"].get(name) or {}).get("metric")
    worse = "–"
    if comparison and comparison["interval"][0] is not None:
        low, high = comparison["interval"]
        worse = f"{number(comparison['worse_by'])} [{number(low)}, {number(high)}]"
    status = results["verdict"]["status"].get(name, "not cured")
    ended = sum(ending is not None for ending in arm["ended"])
    if ended:
        status += f" ({ended} of {len(arm['ended'])} runs failed)"
    speed = f"{rate(arm['throughput'])} {arm['throughput_unit']}{' (emulated)' if arm['emulated'] else ''}"
    return [name, number(mean), worse, str(sum(arm["skipped_steps"])), speed, status]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
