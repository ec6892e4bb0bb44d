"""``castwise convert`` and ``castwise verify`` of SavedModels."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from castwise import _files
from castwise.policy import Policy
from castwise.tensorflow._errors import ConversionError
from castwise.tensorflow.converting import convert, verify

__all__ = ["main", "main_verify"]


def main(args: argparse.Namespace) -> int:
    """Convert a SavedModel, write it and say what was done."""
    for option in ("target", "change_io"):
        if getattr(args, option, None):
            raise ConversionError(f"--{option.replace('_', '-')} is for ONNX models. Leave it out for a SavedModel.")
    policy = Policy() if args.policy is None else Policy.load(args.policy)
    if args.keep:
        data = policy.to_dict()
        layers = data.get("layers", [])
        rules = [
            *(layers if isinstance(layers, (list, tuple)) else []),
            *({"match": k, "format": "float32"} for k in args.keep),
        ]
        policy = Policy.from_dict({**data, "layers": rules})
    done = convert(
        args.input,
        args.output,
        format=args.to,
        calibration=args.calibrate,
        tolerance=args.tolerance,
        policy=policy,
    )
    if args.report is not None:
        if Path(args.report).suffix != ".json":
            raise ConversionError("--report: of SavedModels it is written as .json.")
        _files.write_text(args.report, json.dumps(done.to_dict(), indent=1) + "\n")
    print(done.summary())
    return 0


def main_verify(args: argparse.Namespace) -> int:
    """Compare a converted SavedModel with its original. Exit status 1 where the tolerance is not kept."""
    errors, tolerance = verify(args.model, args.against, calibration=args.calibrate, tolerance=args.tolerance)
    for name, error in errors.items():
        print(f"{name}: error {error:.3g}")
    if args.calibrate is None:
        print("note: inputs were made up; give --calibrate to check on real ones")
    kept = max(errors.values()) <= (float("inf") if tolerance is None else tolerance)
    allowed = "no tolerance is known" if tolerance is None else f"tolerance {tolerance:g}"
    print(f"{'kept' if kept else 'NOT kept'}: error {max(errors.values()):.3g}, {allowed}")
    return 0 if kept else 1
