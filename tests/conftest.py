"""Settings and helpers that all tests share."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable

import hypothesis
import pytest

# Time limits for single examples fail on a busy machine and say nothing about the code. Everything else stays as
# hypothesis chooses it, which in CI is: the same examples every time.
hypothesis.settings.register_profile("castwise", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("castwise")

# Runs in a child process before anything else: what `hidden(name)` is true of cannot be imported, as if not installed.
_HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if hidden(name.partition(".")[0]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
hidden = lambda name: %s
"""


RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Run code in a Python of its own; ``hidden`` is an expression in ``name``, true of packages to hide from it."""

    def run(code: str, *, hidden: str = "False") -> subprocess.CompletedProcess[str]:
        whole = _HIDE % hidden + textwrap.dedent(code)
        return subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=120, check=False)

    return run
