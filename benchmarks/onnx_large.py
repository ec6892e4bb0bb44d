"""A model with more weights than one protocol buffer holds: converted, saved, loaded, and what that takes of memory.

    python benchmarks/onnx_large.py FOLDER [--gigabytes 4.4]

Writes a chain of products with external data into FOLDER, converts it with a calibration sample and saves the result,
whose weights are half as large and go to a file of their own where they are too many for one message. Weights that were
not changed are mapped, so that what counts is the memory that is no file's (anonymous): it is sampled during the
conversion and is to stay far below the size of the weights. Then ONNX's checker looks at the result, and ONNX Runtime
loads and runs it. The files are deleted again.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as H

from castwise.onnx import convert

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "onnx"))
from judging import distance

ROWS, WIDTH = 4, 8192
_EVERY = 0.02
"""Seconds between two looks at the memory."""


def write(folder: Path, count: int) -> Path:
    """A chain of ``count`` products of WIDTH, each with weights of its own, kept in one external file."""
    block = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5)
    nodes, inits, last = [], [], "x"
    with (folder / "in.data").open("wb") as file:
        for i in range(count):
            start = file.tell()
            np.roll(block, i, axis=1).tofile(file)
            tensor = T(name=f"w{i}", data_type=T.FLOAT, dims=[WIDTH, WIDTH], data_location=T.EXTERNAL)
            for key, value in (("location", "in.data"), ("offset", start), ("length", file.tell() - start)):
                tensor.external_data.add(key=key, value=str(value))
            inits.append(tensor)
            nodes += [
                H.make_node("MatMul", [last, f"w{i}"], [f"m{i}"], f"mm{i}"),
                H.make_node("Tanh", [f"m{i}"], [f"h{i}"], f"tanh{i}"),
            ]
            last = f"h{i}"
    info = H.make_tensor_value_info
    graph = H.make_graph(nodes, "large", [info("x", T.FLOAT, ["n", WIDTH])], [info(last, T.FLOAT, ["n", WIDTH])], inits)
    path = folder / "in.onnx"
    path.write_bytes(H.make_model(graph, opset_imports=[H.make_opsetid("", 17)], ir_version=8).SerializeToString())
    return path


class Memory:
    """The most anonymous memory that this process took beyond what it had at the start, in bytes."""

    def __enter__(self) -> Memory:
        self.start, self.peak, self._stop = _anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY):
            self.peak = max(self.peak, _anonymous() - self.start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _anonymous() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _run(path: Path, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feed))


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a model of more than 2 GB.")
    parser.add_argument("folder", type=Path, help="where there is room for one and a half times the weights")
    parser.add_argument("--gigabytes", type=float, default=4.4, help="fp32 weights of the model")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    work = args.folder / "castwise_large"
    work.mkdir(parents=True)
    try:
        count = max(1, round(args.gigabytes * 1e9 / (4 * WIDTH * WIDTH)))
        source, target = write(work, count), work / "out.onnx"
        feed = {"x": np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)}
        started = time.perf_counter()
        with Memory() as memory:
            done = convert(source, calibration=feed, tolerance=1e-2)
            done.save(target)
        seconds = time.perf_counter() - started
        onnx.checker.check_model(str(target), full_check=True)
        before = (work / "in.data").stat().st_size
        after = sum(file.stat().st_size for file in work.glob("out.onnx*"))  # one file where one message holds it
        print(done.report.summary())
        print(f"{before / 1e9:.2f} GB of weights became {after / 1e9:.2f} GB, in {seconds:.0f} s")
        print(f"most memory that is no file's: {memory.peak / 1e9:.2f} GB, {memory.peak / before:.2f} of the weights")
        error = distance(_run(source, feed), _run(target, feed))
        print(f"ONNX Runtime loads and runs both: they differ by {error:.2g}")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
