"""The verdict in plain words: what was found, and what the study could not have seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["counted", "headline", "limits", "listed", "number", "rate"]


def number(value: float | None) -> str:
    """A value with four significant digits (two below 0.1), trailing zeros kept; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e5 or size < 0.1:
        return f"{value:.2g}"
    return f"{value:#.4g}".rstrip(".")


def rate(value: float | None) -> str:
    """A throughput: whole numbers with separators from 100 up."""
    return f"{value:,.0f}" if value is not None and value >= 100 else number(value)


def counted(count: int, what: str) -> str:
    """``"1 seed"``, ``"2 seeds"``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def listed(words: Sequence[str]) -> str:
    """``"a"``, ``"a and b"``, ``"a, b and c"``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def headline(results: Mapping[str, Any]) -> list[str]:
    """Two or three sentences that a reader in a hurry needs."""
    verdict, name = results["verdict"], results["task_details"]["name"]
    status = verdict["status"]
    others = [arm for arm in status if arm != "fp32"]
    by_status = {word: [arm for arm in others if status[arm] == word] for word in ("safe", "unsafe", "cannot tell")}
    said: list[str] = []
    if by_status["safe"]:
        verb = "train" if len(by_status["safe"]) > 1 else "trains"
        said.append(f"On {name}, {listed(by_status['safe'])} {verb} as well as fp32, within the margin.")
    if by_status["unsafe"]:
        verb = "are" if len(by_status["unsafe"]) > 1 else "is"
        said.append(
            f"{listed(by_status['unsafe'])} {verb} unsafe: do not train with "
            f"{_them(by_status['unsafe'])} as set up here."
        )
    if by_status["cannot tell"]:
        said.append(
            f"This study cannot tell whether {listed(by_status['cannot tell'])} {_is(by_status['cannot tell'])} safe."
        )
    cured = {arm: cure for arm, cure in verdict["remedies"].items() if cure}
    said += [f"{arm} becomes safe with {results['arms'][cure]['remedy']} ({cure})." for arm, cure in cured.items()]
    return said


def limits(results: Mapping[str, Any]) -> list[str]:
    """What the study could not have seen, each in a sentence."""
    verdict, settings = results["verdict"], results["settings"]
    metric = verdict["measures"][0]
    unit = f" {metric['unit']}" if metric["unit"] else ""
    said: list[str] = []
    detectable = verdict["detectable_difference"]
    if (
        detectable is None
        and any(found["metric"] for found in verdict["comparisons"].values())
        and settings["seeds"] > 1
    ):
        said.append(
            f"Every run that is compared gave the same {metric['name']} as fp32's: how small a difference would have "
            f"shown cannot be estimated."
        )
    elif detectable is None:
        said.append(
            f"With {counted(settings['seeds'], 'seed')}, no difference in {metric['name']} can be told from luck."
        )
    else:
        said.append(
            f"A worsening of {metric['name']} smaller than "
            f"{number(detectable)}{unit} would have gone unnoticed more than "
            f"one time in five: that is the smallest difference that {settings['seeds']} seeds show."
        )
    stated = "stated by the task or on the command line" if metric["margin_stated"] else "2 % of what fp32 gained"
    said.append(
        f"“Safe” means within the margin of {number(metric['margin'])}{unit} "
        f"({stated}). Whoever needs less has to say so "
        f"with --margin."
    )
    said.append(
        f"Runs ended after {counted(settings['steps'], 'step')}. Trouble that needs longer to build up, such as "
        f"slowly growing activations, was not there to be seen."
    )
    said.append(
        "The verdict is about this model, these data and this optimizer. Other learning rates, sizes or data may need "
        "another one."
    )
    if any(arm["emulated"] for arm in results["arms"].values()):
        emulated = [name for name, arm in results["arms"].items() if arm["emulated"]]
        said.append(
            f"{listed(emulated)} ran by emulation: values are rounded exactly "
            "as on hardware that has the format, and sums "
            "are made in fp32 as in tensor cores, but in another order of "
            "additions. Speed says nothing about real hardware."
        )
    return said


def _them(names: Sequence[str]) -> str:
    return "them" if len(names) > 1 else "it"


def _is(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"
