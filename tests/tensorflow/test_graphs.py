"""The claims of the files beside this one, in a process of their own: TensorFlow gets two virtual devices there, and
Keras its TensorFlow backend."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("claims_*.py"))
CLAIMS = {
    node.name
    for file in FILES
    for node in ast.parse(file.read_text("utf8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
}


def test_every_claim_holds(tmp_path: Path) -> None:
    for module in ("tensorflow", "keras"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install 'castwise[{module}]'")
    report = tmp_path / "report.xml"
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", *map(str, FILES), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-o", f"pythonpath={HERE}", f"--junitxml={report}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent.parent)
    assert report.is_file(), f"no report: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    tried: set[str] = set()
    faults: list[str] = []
    for case in ET.parse(report).getroot().iter("testcase"):
        tried.add(case.get("name", "").partition("[")[0])
        faults += [f"{case.get('name')}: {fault.text}" for fault in case if fault.tag in ("failure", "error")]
    assert not faults, "\n\n".join(faults)
    assert tried >= CLAIMS, f"claims that were not tried: {sorted(CLAIMS - tried)}"
