"""Layer globs: one segment at a time, and everything inside a matched module is covered."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from castwise import PolicyError
from castwise._globs import check, covers, suggest

NAMES = st.sampled_from(["a", "ab", "b", "0", "10", "norm", "norm1"])
PATHS = st.lists(NAMES, max_size=5).map(".".join)
SEGMENTS = st.sampled_from(["a", "b", "*", "a*", "?", "norm?", "[ab]", "[!a]", "[0-9]", "**", "norm"])
GLOBS = st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join)


def covers_by_definition(glob: list[str], path: list[str]) -> bool:
    """The documented meaning, by recursion over segments, with the standard library's fnmatch for each segment."""
    if not glob:
        return True  # the module is matched; whatever is left of the path lies inside it
    if glob[0] == "**":
        return any(covers_by_definition(glob[1:], path[skipped:]) for skipped in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], glob[0]) and covers_by_definition(glob[1:], path[1:])


@given(GLOBS, PATHS)
@example("**", "")
@example("a.**", "a")
@example("**.norm", "norm")
def test_a_glob_covers_what_its_definition_says(glob: str, path: str) -> None:
    segments = path.split(".") if path else []
    assert covers(glob, path) == covers_by_definition(glob.split("."), segments)


@given(GLOBS, PATHS, NAMES)
def test_what_covers_a_module_covers_everything_inside_it(glob: str, path: str, child: str) -> None:
    if covers(glob, path):
        assert covers(glob, f"{path}.{child}" if path else child)


@pytest.mark.parametrize(
    ("glob", "covered", "spared"),
    [
        ("encoder", ["encoder", "encoder.layers.0"], ["encoder2", "decoder.encoder", ""]),
        ("encoder.layers.*", ["encoder.layers.0", "encoder.layers.0.mlp"], ["encoder.layers", "encoder"]),
        ("*.norm", ["block.norm"], ["norm", "block.inner.norm"]),
        ("**.norm", ["norm", "a.norm", "a.b.norm.weight_holder"], ["a.norm1"]),
        ("layers.[0-3].attn", ["layers.2.attn"], ["layers.4.attn", "layers.12.attn"]),
        ("a+b", ["a+b"], ["aab"]),
    ],
)
def test_examples_of_the_documentation(glob: str, covered: list[str], spared: list[str]) -> None:
    assert [path for path in covered + spared if covers(glob, path)] == covered


@pytest.mark.parametrize("glob", ["", ".", "a..b", ".a", "a.", "a**", "**norm.b", "a.[", "a.[]", "a.[!]", "[z-a]"])
def test_a_malformed_glob_is_an_error_that_says_what_to_write(glob: str) -> None:
    with pytest.raises(PolicyError, match=r"^match: .*Write"):
        check(glob)


def test_suggestions_are_the_nearest_paths_and_else_the_top_of_the_model() -> None:
    paths = ["", "encoder", "encoder.layers", "encoder.layers.0", "head"]
    assert suggest("encodr.layers.*", paths)[0] in {"encoder.layers", "encoder.layers.0"}
    assert suggest("xyz", paths) == ["encoder", "head"]
