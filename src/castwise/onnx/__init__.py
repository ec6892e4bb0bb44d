"""ONNX: any model to mixed precision, valid, verified, and no further from fp32 than asked.

    from castwise.onnx import convert

    done = convert("model.onnx", format="float16", calibration="samples/", tolerance=1e-2)
    done.save("model.fp16.onnx")
    done.report.save("report.html")

The plan comes from the same graph, catalogue, policy and solver as everywhere in Castwise; this room reads a model into
them and writes the plan back.
"""

from __future__ import annotations

from castwise import _extras

_extras.require("onnx", extra="onnx")

from castwise.onnx._convert import Conversion, convert  # noqa: E402
from castwise.onnx._errors import ConversionError  # noqa: E402
from castwise.onnx._export import Exported, export  # noqa: E402
from castwise.onnx._report import Report  # noqa: E402
from castwise.onnx._targets import TARGETS  # noqa: E402
from castwise.onnx._verify import Verification, verify  # noqa: E402

__all__ = [
    "TARGETS",
    "Conversion",
    "ConversionError",
    "Exported",
    "Report",
    "Verification",
    "convert",
    "export",
    "verify",
]
