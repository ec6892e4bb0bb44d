"""The claims of the files beside this one, in a process of their own: TensorFlow gets two virtual devices there, and
Keras its TensorFlow backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_every_claim_holds(check_claims: Callable[..., None]) -> None:
    packages = ("tensorflow", "keras")
    check_claims(Path(__file__).parent, packages, KERAS_BACKEND="tensorflow", TF_ENABLE_ONEDNN_OPTS="1")
