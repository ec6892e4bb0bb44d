"""Castwise's ONNX conversion beside other converters, on models that none of them was written for.

    python benchmarks/onnx_convert.py [--corpus nodes light wheels cases detector] [--wheels FOLDER] [--cases FOLDER]
                                      [--every N] [--failures]

A conversion passes *strictly* where the result goes through ONNX's full checker, loads in ONNX Runtime, gives outputs
of the same types as before, and is within 2e-2 of fp32 (max |difference| / max(1, max |fp32 value|)), with NaN and
infinities only where fp32 has them. Leaving a model alone would pass too, so the share of matrix products and
convolutions that take 16-bit inputs is counted, over the conversions that pass. Some cannot be lowered: those that read
or write values beyond fp16's largest on these inputs are counted apart ("beyond"), by running the fp32 model, not by
asking a converter. Below Castwise's rows stand the reasons that its reports give for products left in fp32.

Corpora: the node tests that the onnx package generates; its "light" real topologies; models that ship in the wheels of
silero-vad, rapidocr-onnxruntime, magika and nudenet (`pip install --no-deps --target FOLDER ...`, then `--wheels`); and
single cases, each a file with `build()` and `inputs()` (`--cases`). "detector" converts the wheels' text detector with
drawn pages and compares its masks with fp32's on four others (intersection over union): as ONNX Runtime computes them
on a CPU, where it keeps in fp32 what passes between nodes that it has no 16-bit kernels for, and with every result
rounded to its type, as a GPU has to.

The other converters are run where they are installed: onnxconverter-common's float16, ONNX Runtime's float16 (as it is,
and with its nodes sorted afterwards), and nvidia-modelopt's AutoCast. Every conversion runs in this process, one after
the other; times are wall-clock and meant to be compared with each other only.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from castwise.catalogue import load_catalogue
from castwise.onnx import convert
from castwise.onnx._emulate import emulated
from castwise.onnx._evaluate import infer
from castwise.onnx._run import Runner

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "onnx"))
from _onnx_corpora import Feed, case_models, light_models, node_tests, page, wheel_models
from judging import distance, run

TOLERANCE = 2e-2
FP16_MAX = 65504.0
MASK = 0.3
"""The detector's own threshold of a pixel that belongs to text."""
PROBABILITY = 0.15
"""How far that of a single pixel may be off: at the edges of letters it goes from 0 to 1 within a few pixels."""
REASONS: Counter[str] = Counter()
"""Why Castwise left products in fp32, without names and numbers."""
Converter = Callable[[onnx.ModelProto, Feed], onnx.ModelProto]


@dataclass
class Score:
    """What one converter did on one corpus."""

    models: int = 0
    passed: int = 0
    products: int = 0
    low: int = 0
    hazards: int = 0
    wide: int = 0
    casts: int = 0
    seconds: float = 0.0
    bytes: int = 0
    error: float = 0.0
    failures: list[str] = field(default_factory=list)

    def row(self, corpus: str, converter: str) -> str:
        strict, share = f"{self.passed}/{self.models}", f"{self.low}/{self.products}"
        return (
            f"{corpus:8}{converter:30}{strict:>12}{share:>18}{self.hazards:>8}{self.wide:>12}{self.casts:>7}"
            f"{self.error:>10.2g}{self.seconds:>8.1f}{self.bytes / 1e6:>8.2f}"
        )


def castwise(model: onnx.ModelProto, feed: Feed) -> onnx.ModelProto:
    done = convert(model, format="float16", calibration=[feed], tolerance=TOLERANCE)
    for row in done.report.wide:
        if _is_product(onnx.helper.make_node(row.op, ["a", "b"], ["c"])):
            REASONS[re.sub(r"'[^']*'|\d[\d.e+-]*", "…", row.reason)] += 1
    return done.model


def castwise_alone(model: onnx.ModelProto, feed: Feed) -> onnx.ModelProto:
    """Without calibration data, as the other converters work."""
    return convert(model, format="float16").model


def converter_common(model: onnx.ModelProto, feed: Feed) -> onnx.ModelProto:
    from onnxconverter_common import float16

    return float16.convert_float_to_float16(_copy(model), keep_io_types=True)


def runtime_float16(model: onnx.ModelProto, feed: Feed) -> onnx.ModelProto:
    from onnxruntime.transformers import float16

    return float16.convert_float_to_float16(_copy(model), keep_io_types=True)


def runtime_float16_sorted(model: onnx.ModelProto, feed: Feed) -> onnx.ModelProto:
    from onnxruntime.transformers.onnx_model import OnnxModel

    wrapped = OnnxModel(_copy(model))
    wrapped.convert_float_to_float16(keep_io_types=True, use_symbolic_shape_infer=False)
    wrapped.topological_sort()
    return wrapped.model


def autocast(model: onnx.ModelProto, feed: Feed) -> onnx.ModelProto:
    import tempfile

    from modelopt.onnx.autocast import convert_to_mixed_precision

    with tempfile.TemporaryDirectory() as folder:
        path, data = Path(folder) / "model.onnx", Path(folder) / "data.npz"
        onnx.save(model, path)
        np.savez(data, **feed)
        return convert_to_mixed_precision(
            str(path), low_precision_type="fp16", calibration_data=str(data), keep_io_types=True
        )


CONVERTERS: dict[str, tuple[str, Converter]] = {
    "castwise": ("castwise", castwise),
    "castwise, no data": ("castwise", castwise_alone),
    "onnxconverter-common": ("onnxconverter_common", converter_common),
    "onnxruntime float16": ("onnxruntime", runtime_float16),
    "onnxruntime float16, sorted": ("onnxruntime", runtime_float16_sorted),
    "modelopt autocast": ("modelopt", autocast),
}


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


# ---- judging ---------------------------------------------------------------------------------------------------------


def hazards(model: onnx.ModelProto, feed: Feed) -> int:
    """How many products of the main graph read or write values that fp16 cannot hold, or none that are finite."""
    nodes = [node for node in model.graph.node if _is_product(node)]
    wanted = {name for node in nodes for name in [*node.input[:2], *node.output[:1]] if name}
    copy = _copy(model)
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    had = {info.name for info in model.graph.output}
    extra = sorted(wanted - set(held) - set(feed) - had)
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in extra)
    try:
        results, _ = run(copy, feed)
    except Exception:
        return 0
    seen = {**held, **feed, **dict(zip([info.name for info in copy.graph.output], results, strict=True))}
    return sum(any(_beyond(seen.get(name)) for name in [*node.input[:2], *node.output[:1]]) for node in nodes)


def _beyond(value: Any) -> bool:
    array = np.asarray(value)
    return array.dtype == np.float32 and array.size > 0 and not np.abs(array).max() <= FP16_MAX


def _is_product(node: onnx.NodeProto) -> bool:
    entry = load_catalogue().lookup("onnx", node.op_type)
    return entry is not None and entry.product and len(node.input) > 1 and node.domain in ("", "ai.onnx")


def products(model: onnx.ModelProto) -> tuple[int, int, int]:
    """How many products and convolutions a model has, how many of them read 16 bits, and how many nodes write fp32."""
    low = total = wide = 0
    narrow = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    inferred = onnx.shape_inference.infer_shapes(model)
    stack: list[tuple[onnx.GraphProto, dict[str, int]]] = [(inferred.graph, {})]
    while stack:
        graph, outer = stack.pop()
        types = {**outer, **{tensor.name: tensor.data_type for tensor in graph.initializer}}
        types |= {i.name: i.type.tensor_type.elem_type for i in [*graph.input, *graph.value_info, *graph.output]}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                types[node.output[0]] = node.attribute[0].t.data_type
            stack += [(a.g, types) for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
            wide += node.op_type not in ("Cast", "Constant") and any(
                types.get(name) == onnx.TensorProto.FLOAT for name in node.output
            )
            if _is_product(node):
                read = [types.get(name, 0) for name in node.input[:2]]
                if any(elem in (*narrow, onnx.TensorProto.FLOAT) for elem in read):
                    total, low = total + 1, low + all(elem in narrow for elem in read)
    return total, low, wide


def judge(score: Score, name: str, model: onnx.ModelProto, feed: Feed, convert_one: Converter, fp32: Any) -> None:
    score.models += 1
    wanted, types, _ = fp32
    started = time.perf_counter()
    try:
        result = convert_one(model, feed)
        score.seconds += time.perf_counter() - started
        onnx.checker.check_model(result, full_check=True)
        got, got_types = run(result, feed, optimize=True)
        if got_types != types:
            raise ValueError(f"output types {got_types}, not {types}")
        error = distance(wanted, got)
        if not error <= TOLERANCE and not _draws(model):
            raise ValueError(f"off by {error:.3g}")
    except Exception as failure:
        score.failures.append(f"{name}: {type(failure).__name__}: {' '.join(str(failure).split())[:140]}")
        return
    total, low, wide = products(result)
    score.wide, score.hazards = score.wide + wide, score.hazards + fp32[2]
    score.passed, score.products, score.low = score.passed + 1, score.products + total, score.low + low
    score.casts += sum(node.op_type == "Cast" for node in result.graph.node)
    score.casts -= sum(node.op_type == "Cast" for node in model.graph.node)
    score.bytes += result.ByteSize()
    score.error = max(score.error, 0.0 if _draws(model) else error)


def detector(wheels: Path, chosen: dict[str, Converter]) -> None:
    """Masks of the text detector: the smallest overlap with fp32's over pages that no converter saw."""
    path = next(path for path in sorted(wheels.rglob("*.onnx")) if "_det_" in path.stem)
    model = onnx.load(path)
    held_out = [{"x": page(100 + seed)} for seed in range(4)]
    masks = [run(model, feed, optimize=True)[0][0] > MASK for feed in held_out]
    print(f"{'detector':30}{'overlap':>10}{'all rounded':>13}{'fp32 nodes':>12}{'casts':>7}")
    for name, convert_one in chosen.items():
        try:
            calibration = [{"x": page(seed)} for seed in range(3)]
            if convert_one is castwise:
                result = convert(model, calibration=calibration, tolerance=PROBABILITY).model
            else:
                result = convert_one(model, calibration[0])
            found = [run(result, feed, optimize=True)[0][0] > MASK for feed in held_out]
            exact = Runner(emulated(infer(result)), {})
            rounded = [exact.run(feed)[0] > MASK for feed in held_out]
        except Exception as failure:
            print(f"{name:30} {type(failure).__name__}: {' '.join(str(failure).split())[:90]}")
            continue
        overlap, strictly = (
            min((a & b).sum() / (a | b).sum() for a, b in zip(masks, those, strict=True)) for those in (found, rounded)
        )
        casts = sum(node.op_type == "Cast" for node in result.graph.node)
        print(f"{name:30}{overlap:>10.5f}{strictly:>13.5f}{products(result)[2]:>12}{casts:>7}", flush=True)


def _draws(model: onnx.ModelProto) -> bool:
    """Whether a model draws random numbers, so that two runs differ."""
    kinds = {
        "RandomNormal",
        "RandomUniform",
        "RandomNormalLike",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
        "Dropout",
    }
    return any(node.op_type in kinds for node in model.graph.node)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ONNX converters.")
    parser.add_argument("--corpus", nargs="+", default=["nodes", "light", "wheels", "cases"])
    parser.add_argument("--wheels", type=Path, help="folder into which the wheels were installed")
    parser.add_argument("--cases", type=Path, help="folder of case files")
    parser.add_argument("--every", type=int, default=1, help="take every n-th node test")
    parser.add_argument("--converters", nargs="+", default=list(CONVERTERS))
    parser.add_argument("--failures", action="store_true", help="list what failed")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    corpora: dict[str, Iterator[tuple[str, onnx.ModelProto, Feed]]] = {
        "nodes": node_tests(args.every),
        "light": light_models(),
        "wheels": wheel_models(args.wheels) if args.wheels else iter(()),
        "cases": case_models(args.cases) if args.cases else iter(()),
    }
    chosen = {
        n: c for n, (module, c) in CONVERTERS.items() if n in args.converters and importlib.util.find_spec(module)
    }
    print(
        f"{'corpus':8}{'converter':30}{'strict':>12}{'16-bit products':>18}{'beyond':>8}{'fp32 nodes':>12}{'casts':>7}"
        f"{'error':>10}{'s':>8}{'MB':>8}"
    )
    for corpus in args.corpus:
        if corpus == "detector":
            detector(args.wheels, chosen)
            continue
        scores = {name: Score() for name in chosen}
        for name, model, feed in corpora[corpus]:
            try:
                fp32 = (*run(model, feed, optimize=True), hazards(model, feed))
            except Exception:
                continue  # not a model that this runtime runs at all
            for converter, convert_one in chosen.items():
                judge(scores[converter], name, model, feed, convert_one, fp32)
        for converter, score in scores.items():
            if score.models:
                print(score.row(corpus, converter), flush=True)
                if converter == "castwise":
                    print("".join(f"    {count} products in fp32: {why}\n" for why, count in REASONS.items()), end="")
                    REASONS.clear()
                if args.failures:
                    print("\n".join(f"    {failure}" for failure in score.failures))


if __name__ == "__main__":
    main()
