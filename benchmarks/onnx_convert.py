"""Castwise's ONNX conversion beside other converters, on models that none of them was written for.

    python benchmarks/onnx_convert.py [--corpus nodes light wheels cases] [--wheels FOLDER] [--cases FOLDER] [--every N]

A conversion passes *strictly* where the result goes through ONNX's full checker, loads in ONNX Runtime, gives outputs
of the same types as before, and is within 2e-2 of fp32 (max |difference| / max(1, max |fp32 value|)), with NaN and
infinities only where fp32 has them. Leaving a model alone would pass too, so the share of matrix products and
convolutions that take 16-bit inputs is counted, over the conversions that pass.

Corpora: the node tests that the onnx package generates; its "light" real topologies; models that ship in the wheels of
silero-vad, rapidocr-onnxruntime, magika and nudenet (`pip install --no-deps --target FOLDER ...`, then `--wheels`); and
single cases, each a file with `build()` and `inputs()` (`--cases`).

The other converters are run where they are installed: onnxconverter-common's float16, ONNX Runtime's float16 (as it is,
and with its nodes sorted afterwards), and nvidia-modelopt's AutoCast. Every conversion runs in this process, one after
the other; times are wall-clock and meant to be compared with each other only.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from castwise.catalogue import load_catalogue
from castwise.onnx import convert

TOLERANCE = 2e-2
Feed = dict[str, Any]
Converter = Callable[[onnx.ModelProto, Feed], onnx.ModelProto]


@dataclass
class Score:
    """What one converter did on one corpus."""

    models: int = 0
    passed: int = 0
    products: int = 0
    low: int = 0
    casts: int = 0
    seconds: float = 0.0
    bytes: int = 0
    error: float = 0.0
    failures: list[str] = field(default_factory=list)


def castwise(model: onnx.ModelProto, feed: Feed) -> onnx.ModelProto:
    return convert(model, format="float16", calibration=[feed], tolerance=TOLERANCE).model


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
        return convert_to_mixed_precision(str(path), low_precision_type="fp16", calibration_data=str(data))


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


# ---- corpora ---------------------------------------------------------------------------------------------------------


def node_tests(every: int) -> Iterator[tuple[str, onnx.ModelProto, Feed]]:
    """Node tests with fp32 among their inputs or outputs."""
    from onnx.backend.test.case.node import collect_testcases

    try:
        cases = collect_testcases()
    except TypeError:  # older releases want an operator type
        cases = collect_testcases(None)
    found = [case for case in cases if case.model is not None and case.data_sets and _has_fp32(case.model)]
    for case in found[::every]:
        inputs, _ = case.data_sets[0]
        yield case.name, case.model, {info.name: v for info, v in zip(case.model.graph.input, inputs, strict=False)}


def _has_fp32(model: onnx.ModelProto) -> bool:
    return any(
        onnx.TensorProto.FLOAT
        in (
            info.type.tensor_type.elem_type,
            info.type.sequence_type.elem_type.tensor_type.elem_type,
            info.type.optional_type.elem_type.tensor_type.elem_type,
        )
        for info in [*model.graph.input, *model.graph.output]
    )


def light_models() -> Iterator[tuple[str, onnx.ModelProto, Feed]]:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in sorted(folder.glob("*.onnx")):
        model = onnx.load(path)
        yield path.stem, model, made_up(model, path)


def wheel_models(folder: Path) -> Iterator[tuple[str, onnx.ModelProto, Feed]]:
    for path in sorted(folder.rglob("*.onnx")):
        model = onnx.load(path)
        yield path.stem, model, made_up(model, path)


def case_models(folder: Path) -> Iterator[tuple[str, onnx.ModelProto, Feed]]:
    sys.path.insert(0, str(folder))
    for path in sorted(folder.glob("c*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield path.stem, module.build(), module.inputs()


# Sizes for dimensions that these models leave open, by a part of the file's name.
_OPEN = {"det": (1, 3, 320, 320), "_rec_": (1, 3, 48, 320), "cls": (1, 3, 48, 192), "320n": (1, 3, 320, 320)}


def made_up(model: onnx.ModelProto, path: Path) -> Feed:
    """Uniform numbers in the range that audio, images and bytes have."""
    random = np.random.default_rng(1)
    held = {tensor.name for tensor in model.graph.initializer}
    feed: Feed = {}
    for info in model.graph.input:
        if info.name in held:
            continue
        kind = info.type.tensor_type
        shape = [dim.dim_value if dim.dim_value > 0 else 1 for dim in kind.shape.dim]
        shape = next((list(size) for part, size in _OPEN.items() if part in path.stem), shape)
        if "silero" in path.stem:
            shape = {"input": [1, 576], "x": [1, 576], "state": [2, 1, 128], "sr": []}.get(info.name, shape)
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        if info.name == "sr":
            feed[info.name] = np.array(16000, dtype)
        elif dtype.kind in "iu":
            feed[info.name] = random.integers(0, 256, shape).astype(dtype)
        else:
            feed[info.name] = random.uniform(-1, 1, shape).astype(dtype)
    return feed


# ---- judging ---------------------------------------------------------------------------------------------------------


def run(model: onnx.ModelProto, feed: Feed) -> tuple[list[Any], list[str]]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feed), [output.type for output in session.get_outputs()]


def distance(wanted: list[Any], got: list[Any]) -> float:
    worst = 0.0
    for a, b in zip(wanted, got, strict=True):
        if isinstance(a, list):
            worst = max(worst, distance(a, b) if len(a) == len(b) else np.inf)
        elif a is None or b is None or np.asarray(a).dtype.kind in "OUS":
            worst = max(worst, 0.0 if a is b or np.array_equal(a, b) else np.inf)
        else:
            x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
            finite = np.isfinite(x)
            if x.shape != y.shape or not np.array_equal(finite, np.isfinite(y)):
                return float("inf")
            if finite.any():
                worst = max(worst, float(np.abs(x - y)[finite].max() / max(1.0, np.abs(x[finite]).max())))
    return worst


def products(model: onnx.ModelProto) -> tuple[int, int]:
    """How many products and convolutions a model has, and how many of them read 16 bits."""
    low = total = 0
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
            entry = load_catalogue().lookup("onnx", node.op_type)
            if entry is not None and entry.product and len(node.input) > 1 and node.domain in ("", "ai.onnx"):
                read = [types.get(name, 0) for name in node.input[:2]]
                if any(elem in (*narrow, onnx.TensorProto.FLOAT) for elem in read):
                    total, low = total + 1, low + all(elem in narrow for elem in read)
    return total, low


def judge(score: Score, name: str, model: onnx.ModelProto, feed: Feed, convert_one: Converter, fp32: Any) -> None:
    score.models += 1
    wanted, types = fp32
    started = time.perf_counter()
    try:
        result = convert_one(model, feed)
        score.seconds += time.perf_counter() - started
        onnx.checker.check_model(result, full_check=True)
        got, got_types = run(result, feed)
        if got_types != types:
            raise ValueError(f"output types {got_types}, not {types}")
        error = distance(wanted, got)
        if not error <= TOLERANCE and not _draws(model):
            raise ValueError(f"off by {error:.3g}")
    except Exception as failure:
        score.failures.append(f"{name}: {type(failure).__name__}: {' '.join(str(failure).split())[:140]}")
        return
    total, low = products(result)
    score.passed, score.products, score.low = score.passed + 1, score.products + total, score.low + low
    score.casts += sum(node.op_type == "Cast" for node in result.graph.node)
    score.casts -= sum(node.op_type == "Cast" for node in model.graph.node)
    score.bytes += result.ByteSize()
    score.error = max(score.error, 0.0 if _draws(model) else error)


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
        f"{'corpus':8}{'converter':30}{'strict':>12}{'16-bit products':>18}{'casts':>7}{'error':>10}{'s':>8}{'MB':>8}"
    )
    for corpus in args.corpus:
        scores = {name: Score() for name in chosen}
        for name, model, feed in corpora[corpus]:
            try:
                fp32 = run(model, feed)
            except Exception:
                continue  # not a model that this runtime runs at all
            for converter, convert_one in chosen.items():
                judge(scores[converter], name, model, feed, convert_one, fp32)
        for converter, score in scores.items():
            if score.models:
                print(
                    f"{corpus:8}{converter:30}{f'{score.passed}/{score.models}':>12}{f'{score.low}/{score.products}':>18}"
                    f"{score.casts:>7}{score.error:>10.2g}{score.seconds:>8.1f}{score.bytes / 1e6:>8.2f}",
                    flush=True,
                )
                if args.failures:
                    print("\n".join(f"    {failure}" for failure in score.failures))


if __name__ == "__main__":
    main()
