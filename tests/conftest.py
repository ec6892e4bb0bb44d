"""Settings and helpers that all tests share."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture
def check_claims(tmp_path: Path) -> Callable[..., None]:
    """Run the tests of a folder's ``claims_*.py`` in a process of their own: each has to be there, and none may fail.

    Skips where a package is missing, by name. Further names are environment variables.
    """

    def check(folder: Path, packages: tuple[str, ...], **environment: str) -> None:
        for package in packages:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed: pip install 'castwise[{package}]'")
        files, report = sorted(folder.glob("claims_*.py")), tmp_path / "report.xml"
        environment = {**os.environ, **environment, "TF_CPP_MIN_LOG_LEVEL": "2"}
        environment.pop("PYTEST_ADDOPTS", None)
        command = [sys.executable, "-m", "pytest", *map(str, files), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["-o", f"pythonpath={folder}", f"--junitxml={report}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder.parents[1])
        assert report.is_file(), f"no report: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        tried: set[str] = set()
        faults: list[str] = []
        for case in ET.parse(report).getroot().iter("testcase"):
            tried.add(case.get("name", "").partition("[")[0])
            faults += [f"{case.get('name')}: {fault.text}" for fault in case if fault.tag in ("failure", "error")]
        assert not faults, "\n\n".join(faults)
        written = {name for file in files for name in _tests_of(file)}
        assert written and tried >= written, f"claims that were not tried: {sorted(written - tried)}"

    return check


def _tests_of(file: Path) -> list[str]:
    nodes = ast.parse(file.read_text("utf8")).body
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
