"""Studies: train one task in several precisions, compare, decide, report.

    from castwise.study import study

    results = study("train.py:Faces", precisions=["fp16", "bf16"], out="faces-study")
    results["verdict"]["status"]        # {"fp32": "safe", "fp16": "unsafe", "bf16": "safe"}

From a shell: ``castwise study TASK``. A task is any object with the methods of ``Task``. Everything here but the
backends imports no framework.
"""

from __future__ import annotations

from castwise.study.api import study
from castwise.study.protocol import Task
from castwise.study.results import read_results

__all__ = ["Task", "read_results", "study"]
