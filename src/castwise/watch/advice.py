"""Advice tied to causes: what a finding usually comes from, and what to do about it."""

from __future__ import annotations

from castwise.guard import Finding, Kind

__all__ = ["advice_for"]


def advice_for(finding: Finding) -> list[tuple[str, str]]:
    """The causes that a finding points to, each with what to do; empty where it points to none.

    Returns:
        Pairs of a cause's name and a sentence or two.
    """
    found: list[tuple[str, str]] = []
    if finding.kind is Kind.DATA:
        found.append(("inputs", f"{finding.source} holds infinite or NaN values: clean the data before the model."))
    return found
