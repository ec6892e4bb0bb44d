"""Each claim of `claims.py`, on each Keras backend. Keras has one backend in a process, so each gets its own."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLAIMS = [node.name for node in ast.parse((HERE / "claims.py").read_text("utf8")).body
          if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]  # fmt: skip
BACKENDS = ("torch", "jax", "tensorflow")


@functools.cache
def _outcomes(backend: str) -> dict[str, list[str]]:
    """Claim -> what failed of it, in a process where Keras runs on the backend."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        environment["TF_CPP_MIN_LOG_LEVEL"] = "2"
        environment["CASTWISE_EXAMPLES"] = str(HERE.parent.parent / "examples")
        command = [sys.executable, "-m", "pytest", str(HERE / "claims.py"), "-q", "-p", "no:cacheprovider"]
        command += ["-o", "filterwarnings=", f"--junitxml={report}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent.parent)
        if not report.is_file():
            pytest.fail(f"no report: {done.stdout[-4000:]}{done.stderr[-4000:]}")
        outcomes: dict[str, list[str]] = {}
        for case in ET.parse(report).getroot().iter("testcase"):
            faults = [fault.text or fault.get("message", "") for fault in case if fault.tag in ("failure", "error")]
            outcomes.setdefault(case.get("name", "").partition("[")[0], []).extend(faults)
        return outcomes


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_holds(backend: str, claim: str) -> None:
    for module, extra in (("keras", "keras"), (backend, backend)):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install 'castwise[{extra}]'")
    outcomes = _outcomes(backend)
    assert claim in outcomes, "the claim was not tried"
    assert not outcomes[claim], "\n".join(outcomes[claim])
