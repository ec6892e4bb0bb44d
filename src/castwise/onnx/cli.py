"""``castwise convert`` and ``castwise verify``."""

from __future__ import annotations

import argparse
from pathlib import Path

from castwise._convert_cli import TO, asked_policy, check_report
from castwise.onnx import TARGETS, convert, verify
from castwise.onnx._errors import ConversionError

__all__ = ["add_arguments", "add_verify_arguments", "main", "main_verify"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``castwise convert``."""
    parser.add_argument("input", type=Path, help="an ONNX model, or the folder of a SavedModel")
    parser.add_argument("output", type=Path, help="where to write the converted model")
    parser.add_argument("--to", metavar="FORMAT", help=TO)
    parser.add_argument("--calibrate", type=Path, metavar="PATH", help="inputs: an .npz file or a folder of such files")
    parser.add_argument(
        "--tolerance", type=float, help="largest error of an output: max |difference| / max(1, max |fp32 value|)"
    )
    parser.add_argument(
        "--keep", action="append", default=[], metavar="GLOB", help="keep layers in fp32: a module path or node name"
    )
    parser.add_argument("--policy", type=Path, help="a policy file with more rules")
    parser.add_argument("--target", choices=TARGETS, help="the runtime an ONNX model is for")
    parser.add_argument(
        "--change-io", action="store_true", help="let inputs and outputs of ONNX change their types too"
    )
    parser.add_argument("--report", type=Path, help="write what was done, as .html (ONNX) or .json")


def main(args: argparse.Namespace) -> int:
    """Convert a model, write it and say what was done."""
    if args.output.resolve() == args.input.resolve():
        raise ConversionError(f"{args.output} is the input. Give the result another name.")
    if args.output.is_dir():
        raise ConversionError(f"{args.output} is a folder. Give the name of a file to write.")
    check_report(args.report, ".html", ".json")
    done = convert(
        args.input,
        format=args.to,
        calibration=args.calibrate,
        tolerance=args.tolerance,
        keep_io=not args.change_io,
        policy=asked_policy(args),
        target=args.target,
    )
    done.save(args.output)
    if args.report is not None:
        done.report.save(args.report)
    print(done.report.summary())
    return 0


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``castwise verify``."""
    parser.add_argument("model", type=Path, help="the converted model")
    parser.add_argument("--against", type=Path, required=True, help="the fp32 model that it was made from")
    parser.add_argument("--calibrate", type=Path, metavar="PATH", help="inputs: an .npz file or a folder of such files")
    parser.add_argument(
        "--tolerance", type=float, help="largest error of an output (default: what it was converted for)"
    )
    parser.add_argument("--target", choices=TARGETS, help="the runtime here, if an ONNX model was made for another")


def main_verify(args: argparse.Namespace) -> int:
    """Compare a converted model with its original. Exit status 1 where the tolerance is not kept."""
    found = verify(args.model, args.against, calibration=args.calibrate, tolerance=args.tolerance, target=args.target)
    for output in found.outputs:
        print(f"{output.name}: error {output.error:.3g} (absolute {output.absolute:.3g}, of {output.largest:.4g})")
    if found.fingerprint:
        made = ", ".join(f"{key} {value}" for key, value in sorted(found.fingerprint.items()) if value)
        print(f"made with: {made}")
    for difference in found.differences:
        print(f"note: {difference}")
    if not found.calibrated:
        print("note: inputs were made up; give --calibrate to check on real ones")
    allowed = "no tolerance is known" if found.tolerance is None else f"tolerance {found.tolerance:g}"
    print(f"{'kept' if found.ok else 'NOT kept'}: error {found.error:.3g}, {allowed}")
    return 0 if found.ok else 1
