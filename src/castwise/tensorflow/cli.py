"""``castwise convert`` and ``castwise verify`` of SavedModels."""

from __future__ import annotations

import argparse
import json

from castwise import _files
from castwise._convert_cli import asked_policy, check_report
from castwise.tensorflow._errors import ConversionError
from castwise.tensorflow.converting import convert, verify

__all__ = ["main", "main_verify"]


def main(args: argparse.Namespace) -> int:
    """Convert a SavedModel, write it and say what was done."""
    _refuse_those_of_onnx(args)
    check_report(args.report, ".json")
    done = convert(
        args.input,
        args.output,
        format=args.to,
        calibration=args.calibrate,
        tolerance=args.tolerance,
        policy=asked_policy(args),
    )
    if args.report is not None:
        _files.write_text(args.report, json.dumps(done.to_dict(), indent=1) + "\n")
    print(done.summary())
    return 0


def _refuse_those_of_onnx(args: argparse.Namespace) -> None:
    for option in ("target", "change_io"):
        if getattr(args, option, None):
            raise ConversionError(f"--{option.replace('_', '-')} is for ONNX models. Leave it out for a SavedModel.")


def main_verify(args: argparse.Namespace) -> int:
    """Compare a converted SavedModel with its original. Exit status 1 where the tolerance is not kept."""
    _refuse_those_of_onnx(args)
    errors, tolerance = verify(args.model, args.against, calibration=args.calibrate, tolerance=args.tolerance)
    for name, error in errors.items():
        print(f"{name}: error {error:.3g}")
    if args.calibrate is None:
        print("note: inputs were made up; give --calibrate to check on real ones")
    kept = max(errors.values()) <= (float("inf") if tolerance is None else tolerance)
    allowed = "no tolerance is known" if tolerance is None else f"tolerance {tolerance:g}"
    print(f"{'kept' if kept else 'NOT kept'}: error {max(errors.values()):.3g}, {allowed}")
    return 0 if kept else 1
