"""Random valid ONNX models that hold, mixed together, what converters trip over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as H
from onnx import numpy_helper as N

WIDTHS = (4, 6)
ROWS = 3


class Maker:
    """Grows one graph. Every tensor that it offers is fp32 of shape [ROWS, width]."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.inits: list[onnx.TensorProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.opset = int(self.rng.choice([9, 11, 13, 17, 18, 21]))
        self.count = 0
        self.pool: list[tuple[str, int]] = []

    def name(self, stem: str = "t") -> str:
        """A fresh name, at times one that a converter might want to make itself."""
        self.count += 1
        clash = self.rng.random() < 0.1 and self.pool
        return f"{self.pool[-1][0]}_fp16_{self.count}" if clash else f"{stem}{self.count}"

    def node(self, op: str, inputs: list[str], outputs: int = 1, **attributes: object) -> list[str]:
        names = [self.name() for _ in range(outputs)]
        label = "" if self.rng.random() < 0.3 else f"{op}_{self.count}"
        self.nodes.append(H.make_node(op, inputs, names, label, **attributes))
        return names

    def constant(self, array: np.ndarray) -> str:
        """An initializer or a Constant node."""
        array = np.asarray(array, np.float32) if np.asarray(array).dtype.kind == "f" else np.asarray(array)
        name = self.name("c")
        if self.rng.random() < 0.3:
            self.nodes.append(H.make_node("Constant", [], [name], value=N.from_array(array)))
        else:
            self.inits.append(N.from_array(array, name))
        return name

    def pick(self, width: int | None = None) -> tuple[str, int]:
        offered = [item for item in self.pool if width is None or item[1] == width]
        return offered[int(self.rng.integers(len(offered)))]

    def keep(self, name: str, width: int) -> None:
        self.pool.append((name, width))

    def weight(self, *shape: int) -> np.ndarray:
        return (self.rng.standard_normal(shape) / max(shape[0], 1) ** 0.5).astype(np.float32)


def _matmul(m: Maker) -> None:
    x, width = m.pick()
    out = int(m.rng.choice(WIDTHS))
    weights = [t.name for t in m.inits if tuple(t.dims) == (width, out)]
    w = weights[0] if weights and m.rng.random() < 0.5 else m.constant(m.weight(width, out))
    m.keep(m.node("MatMul", [x, w])[0], out)


def _gemm(m: Maker) -> None:
    x, width = m.pick()
    m.keep(m.node("Gemm", [x, m.constant(m.weight(5, width)), m.constant(m.weight(5))], transB=1)[0], 5)
    m.keep(m.node("MatMul", [m.pool[-1][0], m.constant(m.weight(5, 4))])[0], 4)


def _conv(m: Maker) -> None:
    x, width = m.pick()
    shape = m.constant(np.array([1, ROWS, width, 1], np.int64))
    image = m.node("Reshape", [x, shape])[0]
    made = m.node("Conv", [image, m.constant(m.weight(ROWS, ROWS, 1, 1))], kernel_shape=[1, 1])[0]
    m.keep(m.node("Reshape", [made, m.constant(np.array([ROWS, width], np.int64))])[0], width)


def _unary(m: Maker) -> None:
    x, width = m.pick()
    op = str(m.rng.choice(["Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Identity", "Elu", "Erf", "Softplus"]))
    m.keep(m.node(op, [x])[0], width)


def _binary(m: Maker) -> None:
    x, width = m.pick()
    y = m.pick(width)[0] if m.rng.random() < 0.6 else m.constant(m.weight(width))
    made = m.node(str(m.rng.choice(["Add", "Sub", "Mul", "Max"])), [x, y])[0]
    m.keep(m.node("Tanh", [made])[0], width)


def _softmax(m: Maker) -> None:
    x, width = m.pick()
    m.keep(m.node("Softmax", [x], axis=1)[0], width)


def _rms(m: Maker) -> None:
    x, width = m.pick()
    square = m.node("Mul", [x, x])[0]
    axes = {"axes": [1]} if m.opset < 18 else {}
    inputs = [square] if m.opset < 18 else [square, m.constant(np.array([1], np.int64))]
    mean = m.node("ReduceMean", inputs, keepdims=1, **axes)[0]
    safe = m.node("Add", [mean, m.constant(np.array(1e-6, np.float32))])[0]
    m.keep(m.node("Div", [x, m.node("Sqrt", [safe])[0]])[0], width)


def _split(m: Maker) -> None:
    x, width = m.pick()
    if width % 2 or m.opset >= 18:
        return
    inputs = [x] if m.opset < 13 else [x, m.constant(np.array([width // 2] * 2, np.int64))]
    attributes: dict[str, object] = {"axis": 1} | ({"split": [width // 2] * 2} if m.opset < 13 else {})
    first, second = m.node("Split", inputs, 2, **attributes)
    m.keep(m.node("Concat", [second, first], axis=1)[0], width)


def _casts(m: Maker) -> None:
    x, width = m.pick()
    if m.rng.random() < 0.4:
        low = m.node("Cast", [x], to=T.FLOAT16)[0]
        m.keep(m.node("Cast", [m.node("Relu", [low])[0]], to=T.FLOAT)[0], width)
    elif m.rng.random() < 0.5:
        wide = m.node("Cast", [x], to=T.DOUBLE)[0]
        m.keep(m.node("Cast", [m.node("Add", [wide, wide])[0]], to=T.FLOAT)[0], width)
    else:
        whole = m.node("Cast", [x], to=T.INT64)[0]
        m.keep(m.node("Cast", [whole], to=T.FLOAT)[0], width)


def _where(m: Maker) -> None:
    x, width = m.pick()
    y, _ = m.pick(width)
    mask = m.constant(m.rng.random((ROWS, width)) < 0.5)
    m.keep(m.node("Where", [mask, x, y])[0], width)


def _shape(m: Maker) -> None:
    x, width = m.pick()
    flat = m.node("Reshape", [x, m.constant(np.array([-1], np.int64))])[0]
    m.keep(m.node("Reshape", [flat, m.node("Shape", [x])[0]])[0], width)


def _filled(m: Maker) -> None:
    x, width = m.pick()
    shape = m.node("Shape", [x])[0]
    value = N.from_array(np.array([0.5], np.float32))
    m.keep(m.node("Add", [x, m.node("ConstantOfShape", [shape], value=value)[0]])[0], width)


def _branch(m: Maker, x: str, width: int, stem: str) -> onnx.GraphProto:
    made, local = f"{stem}_m", f"{stem}_w"
    op = str(m.rng.choice(["Tanh", "Sigmoid", "Relu"]))
    nodes = [H.make_node("MatMul", [x, local], [made]), H.make_node(op, [made], [f"{stem}_o"])]
    out = H.make_tensor_value_info(f"{stem}_o", T.FLOAT, None)
    return H.make_graph(nodes, stem, [], [out], [N.from_array(m.weight(width, width), local)])


def _if(m: Maker) -> None:
    x, width = m.pick()
    y, _ = m.pick(width)
    stem = m.name("b")
    branches = {"then_branch": _branch(m, x, width, f"{stem}a"), "else_branch": _branch(m, y, width, f"{stem}b")}
    m.keep(m.node("If", ["flag"], **branches)[0], width)


def _loop(m: Maker) -> None:
    x, width = m.pick()
    y, _ = m.pick(width)
    stem = m.name("l")
    state, made = f"{stem}_s", f"{stem}_n"
    nodes = [
        H.make_node("MatMul", [state, f"{stem}_w"], [f"{stem}_mm"]),
        H.make_node("Add", [f"{stem}_mm", y], [f"{stem}_a"]),
        H.make_node("Tanh", [f"{stem}_a"], [made]),
        H.make_node("Relu", [f"{stem}_a"], [f"{stem}_scan"]),
        H.make_node("Identity", [f"{stem}_c"], [f"{stem}_c2"]),
    ]
    vi = H.make_tensor_value_info
    body = H.make_graph(
        nodes,
        stem,
        [vi(f"{stem}_i", T.INT64, []), vi(f"{stem}_c", T.BOOL, []), vi(state, T.FLOAT, [ROWS, width])],
        [vi(f"{stem}_c2", T.BOOL, []), vi(made, T.FLOAT, [ROWS, width]), vi(f"{stem}_scan", T.FLOAT, [ROWS, width])],
        [N.from_array(m.weight(width, width), f"{stem}_w")],
    )
    trips = m.constant(np.array(2, np.int64))
    final, stacked = m.node("Loop", [trips, "", x], 2, body=body)
    m.keep(final, width)
    shape = m.constant(np.array([2 * ROWS, width], np.int64))
    tall = m.node("Reshape", [stacked, shape])[0]
    m.keep(m.node("MatMul", [m.constant(m.weight(ROWS, 2 * ROWS)), tall])[0], width)


def _scan(m: Maker) -> None:
    x, width = m.pick()
    stem = m.name("s")
    nodes = [
        H.make_node("Add", [f"{stem}_s", f"{stem}_x"], [f"{stem}_n"]),
        H.make_node("Tanh", [f"{stem}_n"], [f"{stem}_o"]),
    ]
    vi = H.make_tensor_value_info
    body = H.make_graph(
        nodes,
        stem,
        [vi(f"{stem}_s", T.FLOAT, [width]), vi(f"{stem}_x", T.FLOAT, [width])],
        [vi(f"{stem}_n", T.FLOAT, [width]), vi(f"{stem}_o", T.FLOAT, [width])],
    )
    start = m.constant(np.zeros(width, np.float32))
    m.keep(m.node("Scan", [start, x], 2, body=body, num_scan_inputs=1)[1], width)


def _function(m: Maker) -> None:
    x, width = m.pick()
    kind = f"F{len(m.functions)}"
    value = N.from_array(np.array(1.5, np.float32))
    nodes = [
        H.make_node("Constant", [], ["c"], value=value),
        H.make_node("Mul", ["a", "c"], ["t"]),
        H.make_node("Tanh", ["t"], ["o"]),
    ]
    m.functions.append(H.make_function("my", kind, ["a"], ["o"], nodes, [H.make_opsetid("", m.opset)]))
    name = m.name()
    m.nodes.append(H.make_node(kind, [x], [name], domain="my"))
    m.keep(name, width)


def _quantized(m: Maker) -> None:
    x, width = m.pick()
    if m.opset < 13:
        return
    scale, zero = m.constant(np.array(0.01, np.float32)), m.constant(np.array(0, np.int8))
    m.keep(m.node("DequantizeLinear", [m.node("QuantizeLinear", [x, scale, zero])[0], scale, zero])[0], width)


def _sequence(m: Maker) -> None:
    x, width = m.pick()
    y, _ = m.pick(width)
    if m.opset < 11:
        return
    made = m.node("SequenceConstruct", [x, y])[0]
    m.keep(m.node("SequenceAt", [made, m.constant(np.array(1, np.int64))])[0], width)


STEPS: tuple[Callable[[Maker], None], ...] = (
    _matmul, _matmul, _gemm, _conv, _unary, _unary, _binary, _binary, _softmax, _rms, _split, _casts, _where, _shape,
    _filled, _if, _loop, _scan, _function, _quantized, _sequence,
)  # fmt: skip


def random_model(seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A valid model and a feed for it. The same seed makes the same model."""
    m = Maker(seed)
    vi = H.make_tensor_value_info
    m.keep("x", 4)
    m.keep("z", 6)
    _matmul(m)
    for _ in range(int(m.rng.integers(3, 14))):
        STEPS[int(m.rng.integers(len(STEPS)))](m)
    _matmul(m)
    offered = m.pool[2:]
    chosen = {m.pool[-1]} | {offered[int(m.rng.integers(len(offered)))] for _ in range(2)}
    outputs = [vi(name, T.FLOAT, [None, width]) for name, width in sorted(chosen)]
    if m.inits and m.rng.random() < 0.2 and m.inits[0].data_type == T.FLOAT:
        outputs.append(vi(m.inits[0].name, T.FLOAT, list(m.inits[0].dims)))
    rows = "rows" if m.rng.random() < 0.3 else ROWS
    inputs = [vi("x", T.FLOAT, [rows, 4]), vi("z", T.FLOAT, [rows, 6]), vi("flag", T.BOOL, [])]
    graph = H.make_graph(m.nodes, "random", inputs, outputs, m.inits)
    opsets = [H.make_opsetid("", m.opset), *([H.make_opsetid("my", 1)] if m.functions else [])]
    model = H.make_model(graph, opset_imports=opsets, functions=m.functions)
    model.ir_version = int(m.rng.choice([8, 9, 10]))
    feed = {
        "x": m.rng.standard_normal((ROWS, 4)).astype(np.float32),
        "z": m.rng.standard_normal((ROWS, 6)).astype(np.float32),
        "flag": np.array(bool(m.rng.random() < 0.5)),
    }
    return model, feed
