"""Errors: one base class, the fitting built-in beside it, and suggestions."""

from __future__ import annotations

import pytest

from castwise import errors
from castwise.errors import CastwiseError, did_you_mean, nearest


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        *[(name, ValueError) for name in ("FormatError", "PolicyError", "CatalogueError", "HardwareError")],
        *[("PlanError", ValueError), ("StudyError", ValueError), ("MissingExtraError", ImportError)],
        *[("ScaleStalledError", RuntimeError), ("NonFiniteError", RuntimeError)],
    ],
)
def test_an_error_is_castwises_and_the_built_in_that_fits(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, CastwiseError)
    assert issubclass(error, builtin)


def test_the_nearest_names_come_first_in_their_own_spelling() -> None:
    assert nearest("BFLOAT61", ["float16", "BFloat16", "linear"]) == ["BFloat16", "float16"]
    assert nearest("soft_max", ["softmax", "Softmax", "softmin", "softplus"], n=2) == ["softmax", "softmin"]
    assert nearest("xyz", ["softmax"]) == []


def test_a_suggestion_reads_as_a_sentence_or_is_empty() -> None:
    assert did_you_mean("softmx", ["softmax"]) == " Did you mean 'softmax'?"
    assert did_you_mean("float1", ["float16", "float8"]) == " Did you mean 'float16' or 'float8'?"
    assert did_you_mean("zzz", ["softmax"]) == ""
