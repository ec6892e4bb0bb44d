"""Globs on dotted module paths, as layer rules use them.

A path names a module by the attributes that lead to it from the model: ``encoder.layers.3.mlp``. A glob is read segment
by segment (a segment is what stands between two dots), from the model down:

==========  ======================================================================
``*``       any characters within one segment
``?``       one character within a segment
``[ab]``    one of these characters; ``[!ab]`` one of all others
``**``      as a whole segment: any number of segments, none included
==========  ======================================================================

A glob that matches a module covers everything inside it: ``encoder.layers.3`` covers ``encoder.layers.3.mlp.fc1`` too,
and ``**`` covers the whole model. ``norm`` is a child of the model itself; ``**.norm`` is one at any depth. Upper and
lower case differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from castwise.errors import PolicyError, nearest

__all__ = ["check", "covers", "suggest"]

_SHOWN_WHEN_NOTHING_IS_NEAR = 5


def covers(glob: str, path: str) -> bool:
    """Whether a module at ``path`` (``""`` for the model itself) is matched by ``glob`` or lies inside one that is."""
    return _compiled(glob).match(f"{path}." if path else "") is not None


def check(glob: str) -> None:
    """Raise ``PolicyError`` where ``glob`` is not well formed."""
    _compiled(glob)


def suggest(glob: str, paths: Iterable[str]) -> list[str]:
    """The paths most like ``glob``; where none is like it, the first few modules at the top, to start from."""
    known = [path for path in paths if path]
    top = [path for path in known if "." not in path]
    return nearest(glob, known) or nearest(glob.replace("*", ""), known) or top[:_SHOWN_WHEN_NOTHING_IS_NEAR]


@lru_cache(maxsize=4096)
def _compiled(glob: str) -> re.Pattern[str]:
    # Every segment ends in a dot here, so a match from the start always ends where a segment does: that makes
    # "covers what is inside" a prefix match.
    return re.compile("".join(_segment(glob, segment) for segment in glob.split(".")), re.DOTALL)


def _segment(glob: str, segment: str) -> str:
    if segment == "**":
        return r"(?:[^.]+\.)*"
    if not segment:
        raise PolicyError(f"match: {glob!r} has an empty segment. Write a path such as 'encoder.layers.*', or '**'.")
    if "**" in segment:
        raise PolicyError(f"match: in {glob!r}, '**' must be a segment of its own. Write '**.{segment.strip('*')}'.")
    pattern, rest = "", segment
    while rest:
        char, rest = rest[0], rest[1:]
        if char == "*":
            pattern += "[^.]*"
        elif char == "?":
            pattern += "[^.]"
        elif char == "[":
            inside, closed, rest = rest.partition("]")
            negated, chars = inside.startswith("!"), inside.removeprefix("!")
            if not closed or not chars:
                raise PolicyError(f"match: {glob!r} opens a '[' that it does not close. Write '[abc]' or '[!abc]'.")
            pattern += f"[{'^.' if negated else ''}{_char_class(chars)}]"
        else:
            pattern += re.escape(char)
    return pattern + r"\."


def _char_class(chars: str) -> str:
    """The inside of a character class: ranges such as ``0-9`` stay ranges, all else stands for itself."""
    out = ""
    while chars:
        if len(chars) >= 3 and chars[1] == "-":
            low, high = chars[0], chars[2]
            if low > high:
                raise PolicyError(f"match: the range '{low}-{high}' is empty. Write the smaller character first.")
            out += f"{re.escape(low)}-{re.escape(high)}"
            chars = chars[3:]
        else:
            out += re.escape(chars[0])
            chars = chars[1:]
    return out
