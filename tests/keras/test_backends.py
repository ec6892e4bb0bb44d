"""The claims of the files beside this one, on each Keras backend. Keras has one backend in a process, so each gets its
own; one test for each, so that tests which run on several processes do not repeat them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_every_claim_holds(backend: str, check_claims: Callable[..., None]) -> None:
    check_claims(
        HERE,
        ("keras", backend),
        KERAS_BACKEND=backend,
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
        CASTWISE_EXAMPLES=str(HERE.parent.parent / "examples"),
    )
