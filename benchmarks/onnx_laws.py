"""What must hold for any ONNX model, on many more of them than the test suite has time for.

    python benchmarks/onnx_laws.py [--random 2000] [--damaged 520] [--first SEED]

Random models hold, mixed together, what converters trip over: branches, loops, scans, functions, sequences, casts,
quantization, clashing names, shared and overridable initializers, opsets 9 to 21. Each is converted to fp16 with
tolerance 2e-2; the result must pass ONNX's full checker, load in ONNX Runtime, keep its types, and be within the
tolerance of fp32. Every tenth is converted to bfloat16 as well and compared by ``verify``, as ONNX Runtime has no
kernels for it. The share of products in 16 bits is counted, as leaving a model alone would pass too.

Damaged files are of the kinds in tests/onnx/corrupted.py. Each must be refused with an error that names the file and
what is wrong in it, and leave nothing behind.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import onnx

from castwise.onnx import convert, verify

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "onnx"))
from corrupted import KINDS, fault
from judging import distance, run
from random_models import random_model

TOLERANCE = 2e-2
BFLOAT16_TOLERANCE = 8e-2
EVERY = 10
"""Of how many random models one is converted to bfloat16 as well."""


def random_models(count: int, first: int) -> None:
    low = products = casts = 0
    failures: list[str] = []
    started = time.perf_counter()
    for seed in range(first, first + count):
        model, feed = random_model(seed)
        try:
            wanted, types = run(model, feed)
            done = convert(model, calibration=feed, tolerance=TOLERANCE)
            onnx.checker.check_model(done.model, full_check=True)
            got, got_types = run(done.model, feed)
            if got_types != types:
                raise ValueError(f"types {got_types}, not {types}")
            error = distance(wanted, got)
            if not error <= TOLERANCE:
                raise ValueError(f"off by {error:.3g}")
            if seed % EVERY == 0:
                narrow = convert(model, format="bfloat16", calibration=feed, tolerance=BFLOAT16_TOLERANCE).model
                onnx.checker.check_model(narrow, full_check=True)
                if not verify(narrow, model, calibration=feed).ok:
                    raise ValueError("bfloat16: verify finds the tolerance missed")
        except Exception as failure:  # whatever it is, it is counted
            failures.append(f"seed {seed}: {type(failure).__name__}: {' '.join(str(failure).split())[:200]}")
            continue
        low, products = low + done.report.products_low, products + done.report.products
        casts += done.report.casts
    seconds = time.perf_counter() - started
    print(
        f"random models: {count - len(failures)} of {count} valid, loading, of the same types and close; {low} of "
        f"{products} products in 16 bits; {casts} casts; {seconds:.0f} s"
    )
    print("".join(f"    {failure}\n" for failure in failures), end="", flush=True)


def damaged_files(count: int) -> None:
    said: Counter[str] = Counter()
    wrong: list[str] = []
    each = -(-count // len(KINDS))
    converted = 0
    for kind in KINDS:
        for seed in range(each):
            with tempfile.TemporaryDirectory() as name:
                try:
                    found, message = fault(kind, seed, Path(name))
                except Exception as failure:  # no error of Castwise's own, or a result that is not valid
                    found, message = f"{type(failure).__name__}: {failure}", ""
            if found:
                wrong.append(f"{kind}, seed {seed}: {found[:200]}")
            converted += message == "converted"
            said[re.sub(r"'[^']*'|\d+", "…", message)[:60]] += 1
    total = each * len(KINDS)
    largest = max(count for text, count in said.items() if text)
    print(
        f"damaged files: {total} of {len(KINDS)} kinds; {total - converted - len(wrong)} refused by name with nothing "
        f"left behind, {converted} that ONNX's checker accepts converted to what it accepts, {len(wrong)} wrong; "
        f"{len(said)} different messages, the most frequent one {largest} times"
    )
    print("".join(f"    {text}\n" for text in wrong), end="")


def main() -> None:
    parser = argparse.ArgumentParser(description="Check what must hold for any ONNX model.")
    parser.add_argument("--random", type=int, default=2000, help="how many random models")
    parser.add_argument("--damaged", type=int, default=520, help="how many damaged files, at least")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first random model")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if args.damaged:
        damaged_files(args.damaged)
    if args.random:
        random_models(args.random, args.first)


if __name__ == "__main__":
    main()
