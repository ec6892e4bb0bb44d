"""``castwise convert`` and ``castwise verify``: folders, as SavedModels are, go to TensorFlow, all else to ONNX."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from castwise.errors import CastwiseError, MissingExtraError
from castwise.policy import LayerRule, Policy

__all__ = ["TO", "add_arguments", "add_verify_arguments", "asked_policy", "check_report", "main", "main_verify"]

TO = "float16, bfloat16 or auto (default: what the policy file says, else float16)"
"""Help of ``--to``."""
_ONNX, _TENSORFLOW = "castwise.onnx.cli", "castwise.tensorflow.cli"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``castwise convert``: those of ONNX models where ONNX is installed, else what both have."""
    try:
        importlib.import_module(_ONNX).add_arguments(parser)
    except MissingExtraError:
        parser.add_argument("input", type=Path, help="a TensorFlow SavedModel; ONNX models need castwise[onnx]")
        parser.add_argument("output", type=Path, help="where to write the converted model")
        parser.add_argument("--to", metavar="FORMAT", help=TO)
        _add_shared(parser)
        parser.add_argument("--keep", action="append", default=[], metavar="GLOB", help="keep layers in fp32")
        parser.add_argument("--policy", type=Path, help="a policy file with more rules")
        parser.add_argument("--report", type=Path, help="write what was done, as .json")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``castwise verify``."""
    try:
        importlib.import_module(_ONNX).add_verify_arguments(parser)
    except MissingExtraError:
        parser.add_argument("model", type=Path, help="the converted model")
        parser.add_argument("--against", type=Path, required=True, help="the fp32 model that it was made from")
        _add_shared(parser)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calibrate", type=Path, metavar="PATH", help="inputs: an .npz file or a folder of such files")
    parser.add_argument(
        "--tolerance", type=float, help="largest error of an output: max |difference| / max(1, max |fp32 value|)"
    )


def asked_policy(args: argparse.Namespace) -> Policy:
    """The policy of ``--policy``, with what ``--keep`` adds."""
    policy = Policy() if args.policy is None else Policy.load(args.policy)
    return replace(policy, layers=(*policy.layers, *(LayerRule(glob, format="float32") for glob in args.keep)))


def check_report(path: Path | None, *suffixes: str) -> None:
    """Raise before any work where a report cannot be written as what its name says."""
    if path is not None and path.suffix not in suffixes:
        raise CastwiseError(f"--report: {path} is not written. Give a name that ends in {' or '.join(suffixes)}.")


def main(args: argparse.Namespace) -> int:
    """Convert a model with the front end that it belongs to."""
    return int(_room(args.input).main(args))


def main_verify(args: argparse.Namespace) -> int:
    """Verify a model with the front end that it belongs to."""
    return int(_room(args.model).main_verify(args))


def _room(path: Path) -> Any:
    return importlib.import_module(_TENSORFLOW if path.is_dir() else _ONNX)
