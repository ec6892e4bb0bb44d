"""Models that ``onnx_convert.py`` compares converters on, each with a feed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

__all__ = ["Feed", "case_models", "light_models", "made_up", "node_tests", "page", "wheel_models"]

Feed = dict[str, Any]


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


def page(seed: int) -> np.ndarray[Any, Any]:
    """A drawn page of text, as the detector wants it."""
    from PIL import Image, ImageDraw

    random = np.random.default_rng(seed)
    image = Image.new("RGB", (640, 480), (240, 240, 235))
    draw = ImageDraw.Draw(image)
    for line in range(18):
        text = f"The quick brown fox {random.integers(10**6)} jumps"
        place = int(random.integers(5, 320)), 5 + 26 * line
        draw.text(place, text, fill=(10, 20, 30), font_size=int(random.integers(12, 24)))
    pixels = (np.asarray(image, np.float32) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)
