"""Front ends ask here for their framework, so that a missing one is always answered with the extra to install.

Castwise's core runs on NumPy, SciPy and ml_dtypes alone. Each front end (``castwise.torch``, ``castwise.jax``, …)
starts with ``require("torch", extra="torch")``; where the framework is absent, the reader learns what to type instead
of meeting a bare ``ModuleNotFoundError`` from deep inside.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from castwise.errors import MissingExtraError


def require(module: str, *, extra: str) -> ModuleType:
    """Import ``module`` and return it.

    Args:
        module: the import name, such as ``"torch"`` or ``"sklearn"``.
        extra: the extra of Castwise that installs it, such as ``"study"``.

    Raises:
        MissingExtraError: if ``module`` itself is not installed. An import that fails inside an installed module is a
            different fault, and its own error passes through.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name != module.partition(".")[0]:
            raise
        raise MissingExtraError(
            f"this part of castwise needs {module!r}, which is not installed; "
            f"install it with: pip install 'castwise[{extra}]'"
        ) from error
