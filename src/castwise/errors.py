"""The errors Castwise raises, all under one base so that a caller can catch the library's errors and nothing else.

Each class also derives from the built-in exception that fits it, so code that knows nothing of Castwise
(``except ValueError``) still behaves. Messages name the offending key, op, layer or file, and end with what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CastwiseError",
    "CatalogueError",
    "FormatError",
    "HardwareError",
    "MissingExtraError",
    "NonFiniteError",
    "PlanError",
    "PolicyError",
    "ScaleStalledError",
    "StudyError",
    "did_you_mean",
    "nearest",
]

# difflib's similarity, 0 to 1: below this a suggestion reads like a random guess. difflib's own default.
_SIMILAR_ENOUGH = 0.6


class CastwiseError(Exception):
    """Base class of every error that Castwise raises on purpose."""


class FormatError(CastwiseError, ValueError):
    """A number format that is not known, or values that cannot be rounded to one."""


class PolicyError(CastwiseError, ValueError):
    """A policy with an unknown key, a value out of range, or rules that contradict each other."""


class CatalogueError(CastwiseError, ValueError):
    """An op that the catalogue does not know, or a catalogue that is not well formed."""


class HardwareError(CastwiseError, ValueError):
    """A device that is not known, or a device table that is not well formed."""


class PlanError(CastwiseError, ValueError):
    """A graph that cannot be planned, or a budget that no plan meets."""


class StudyError(CastwiseError, ValueError):
    """A study task, option or result folder that cannot be used."""


class ScaleStalledError(CastwiseError, RuntimeError):
    """The loss scale cannot go lower and gradients are still not finite: training has stopped making steps."""


class NonFiniteError(CastwiseError, RuntimeError):
    """A value that must be finite is infinite or not a number."""


class MissingExtraError(CastwiseError, ImportError):
    """A framework or tool that this call needs is not installed; the message names the extra to install."""


def nearest(word: str, candidates: Iterable[str], n: int = 3) -> list[str]:
    """The candidates most like ``word``, best first, without regard to case.

    Args:
        word: what the user wrote.
        candidates: the spellings that would have been accepted.
        n: the most suggestions to return.

    Returns:
        At most ``n`` candidates, in their own spelling; empty when none is similar.
    """
    by_folded: dict[str, str] = {}
    for candidate in candidates:
        by_folded.setdefault(candidate.casefold(), candidate)
    close = difflib.get_close_matches(word.casefold(), by_folded, n=n, cutoff=_SIMILAR_ENOUGH)
    return [by_folded[folded] for folded in close]


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """A sentence to append to an error message: ``" Did you mean 'x' or 'y'?"``, or ``""`` when nothing is similar."""
    close = nearest(word, candidates)
    if not close:
        return ""
    quoted = [repr(candidate) for candidate in close]
    alternatives = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
    return f" Did you mean {alternatives}?"
