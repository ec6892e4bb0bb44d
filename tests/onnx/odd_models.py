"""Small valid models, each with something in it that a converter may not have thought of."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto as T
from onnx import helper as H
from onnx import numpy_helper as N

MODELS: dict[str, tuple[onnx.ModelProto, dict[str, Any]]] = {}

vi, node = H.make_tensor_value_info, H.make_node
_RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return (_RANDOM.standard_normal(shape) / 2).astype(np.float32)


W = ("w", normal(4, 4))
X, FEED = vi("x", T.FLOAT, [2, 4]), {"x": normal(2, 4)}


def _add(name: str, nodes, feed=None, inputs=(X,), outputs=("y",), inits=(W,), opset=17, ir=8, **more) -> None:
    """Add a model whose outputs get the types that are inferred for them."""
    tensors = [N.from_array(np.asarray(array), label) for label, array in inits]
    ends = [vi(end, T.FLOAT, None) if isinstance(end, str) else end for end in outputs]
    graph = H.make_graph(list(nodes), "g", list(inputs), ends, tensors, sparse_initializer=list(more.get("sparse", ())))
    opsets = [H.make_opsetid("", opset), *(H.make_opsetid(domain, 1) for domain in more.get("domains", ()))]
    model = H.make_model(graph, opset_imports=opsets, ir_version=ir, functions=list(more.get("functions", ())))
    inlined = onnx.inliner.inline_local_functions(model) if model.functions else model
    for end, known in zip(
        model.graph.output, onnx.shape_inference.infer_shapes(inlined, data_prop=True).graph.output, strict=True
    ):
        if end.type.HasField("tensor_type"):
            end.type.CopyFrom(known.type)
            if not end.type.tensor_type.HasField("shape"):
                end.type.CopyFrom(vi("", T.FLOAT, ["a", "b"]).type)
    MODELS[name] = (model, FEED if feed is None else feed)


def _body(nodes, inputs, outputs, inits=()) -> onnx.GraphProto:
    ends = [vi(end, T.FLOAT, None) if isinstance(end, str) else end for end in outputs]
    return H.make_graph(nodes, ends[0].name, list(inputs), ends, [N.from_array(np.asarray(a), k) for k, a in inits])


def _product(source: str, target: str, weight: str = "w") -> onnx.NodeProto:
    return node("MatMul", [source, weight], [target])


# ---- sequences, optionals, sparse tensors ----------------------------------------------------------------------------

_tensor = H.make_tensor_type_proto(T.FLOAT, ["a", "b"])
_sequence = H.make_sequence_type_proto(_tensor)
_optional = H.make_optional_type_proto(H.make_tensor_type_proto(T.FLOAT, [2, 4]))
_add(
    "optional",
    [_product("x", "h"), node("Optional", ["h"], ["o"]), node("OptionalGetElement", ["o"], ["e"]), _product("e", "y")],
    opset=18,
)
_add(
    "optional input",
    [node("OptionalGetElement", ["o"], ["e"]), _product("e", "y")],
    {"o": normal(2, 4)},
    [onnx.ValueInfoProto(name="o", type=_optional)],
    opset=18,
)
_add(
    "sequence in and out",
    [
        node("SequenceAt", ["s", "i"], ["e"]),
        _product("e", "h"),
        node("SequenceInsert", ["s", "h"], ["t"]),
        node("ConcatFromSequence", ["t"], ["y"], axis=0),
    ],
    {"s": [normal(2, 4), normal(2, 4)]},
    [onnx.ValueInfoProto(name="s", type=_sequence)],
    ["y", onnx.ValueInfoProto(name="t", type=_sequence)],
    [W, ("i", np.array(0))],
)
_add(
    "sequence map",
    [
        node("SequenceConstruct", ["x", "x"], ["s"]),
        node("SequenceMap", ["s"], ["t"], body=_body([_product("a", "b")], [vi("a", T.FLOAT, None)], ["b"])),
        node("ConcatFromSequence", ["t"], ["c"], axis=0),
        _product("c", "y"),
    ],
)
_values, _places = N.from_array(normal(3), "s"), N.from_array(np.array([[0, 1], [2, 2], [3, 0]]), "s_places")
_add(
    "sparse initializer",
    [node("Identity", ["s"], ["d"]), node("MatMul", ["x", "w"], ["y"])],
    sparse=[H.make_sparse_tensor(_values, _places, [4, 4])],
)
_flat = H.make_sparse_tensor(N.from_array(normal(3), ""), N.from_array(np.array([1, 7, 9]), ""), [4, 4])
_add("sparse constant", [node("Constant", [], ["w"], sparse_value=_flat), _product("x", "y")], inits=())

# ---- graphs in graphs ------------------------------------------------------------------------------------------------

_slice, _state = vi("e", T.FLOAT, [4]), vi("s", T.FLOAT, [4])
_add(
    "scan of opset 8",
    [
        _product("x", "h"),
        node("Unsqueeze", ["h"], ["u"], axes=[0]),
        node(
            "Scan",
            ["", "z", "u"],
            ["f", "t"],
            body=_body(
                [node("Add", ["s", "e"], ["s2"]), node("Tanh", ["s2"], ["o"])],
                [_state, _slice],
                [vi("s2", T.FLOAT, [4]), vi("o", T.FLOAT, [4])],
            ),
            num_scan_inputs=1,
        ),
        _product("t", "y"),
    ],
    inits=[W, ("z", np.zeros((1, 4), np.float32))],
    opset=8,
    ir=4,
)
_add(
    "branches with one name for two weights",
    [
        _product("x", "h"),
        node(
            "If",
            ["flag"],
            ["y"],
            then_branch=_body([_product("h", "b", "k")], [], ["b"], [("k", normal(4, 4))]),
            else_branch=_body([_product("h", "b", "k")], [], ["b"], [("k", normal(4, 4))]),
        ),
    ],
    {**FEED, "flag": np.array(True)},
    [X, vi("flag", T.BOOL, [])],
)
_loop = _body(
    [
        node("ReduceSum", ["s"], ["r"], keepdims=0),
        node("Less", ["r", "zero"], ["c"]),
        node(
            "If",
            ["c"],
            ["s2"],
            then_branch=_body([_product("s", "it")], [], ["it"]),
            else_branch=_body([node("Add", ["s", "h"], ["ie"])], [], ["ie"]),
        ),
        _product("s2", "so"),
        node("Identity", ["g"], ["g2"]),
    ],
    [vi("i", T.INT64, []), vi("g", T.BOOL, []), vi("s", T.FLOAT, [2, 4])],
    [vi("g2", T.BOOL, []), vi("s2", T.FLOAT, [2, 4]), vi("so", T.FLOAT, [2, 4])],
)
_add(
    "branch in a loop with captures",
    [_product("x", "h"), node("Loop", ["n", "", "h"], ["l", "all"], body=_loop), _product("l", "y")],
    outputs=["y", vi("all", T.FLOAT, [3, 2, 4])],
    inits=[W, ("n", np.array(3)), ("zero", np.float32(0))],
)
_slope = node("LeakyRelu", ["t"], ["c"])
_slope.attribute.append(onnx.AttributeProto(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope"))
_inner = [node("Constant", [], ["k"], value_float=2.0), node("Mul", ["a", "k"], ["c"])]
_outer = [_product("a", "m"), node("Inner", ["m"], ["t"], domain="my"), _slope]
_add(
    "function in a function with an attribute",
    [
        node("Outer", ["x", "w"], ["h"], domain="my", slope=0.1),
        node("Outer", ["h", "w"], ["y"], domain="my", slope=0.3),
    ],
    domains=["my"],
    functions=[
        H.make_function("my", "Inner", ["a"], ["c"], _inner, [H.make_opsetid("", 17)]),
        H.make_function(
            "my", "Outer", ["a", "w"], ["c"], _outer, [H.make_opsetid("", 17), H.make_opsetid("my", 1)], ["slope"]
        ),
    ],
)
_thing = node("Thing", ["h"], ["t"], domain="odd", g=_body([node("Exp", ["h"], ["q"])], [], ["q"]))
_add(
    "custom operator that holds a graph",
    [_product("x", "h"), _thing, _product("t", "y")],
    outputs=[vi("y", T.FLOAT, [2, 4])],
    domains=["odd"],
)

# ---- edges, names, types ---------------------------------------------------------------------------------------------

_add("input that is an output", [_product("x", "y")], outputs=["y", X])
_add("no nodes", [], outputs=[X], inits=())
_add("product of vectors", [_product("x", "y")], {"x": normal(4)}, [vi("x", T.FLOAT, [4])], inits=[("w", normal(4))])
_add(
    "empty batch",
    [_product("x", "h"), node("ReduceMax", ["h"], ["m"], keepdims=0), node("Gemm", ["h", "w"], ["y"])],
    {"x": np.zeros((0, 4), np.float32)},
    [vi("x", T.FLOAT, ["n", 4])],
)
_add(
    "names that a converter would choose, of tensors and of nodes",
    [
        node("MatMul", ["x", "w"], ["x_fp16"], "x_fp16_cast"),
        node("Tanh", ["x_fp16"], ["y_cast"], "y_cast"),
        node("MatMul", ["y_cast", "w"], ["w_fp16"]),
        node("Exp", ["w_fp16"], ["y"]),
    ],
)
_add(
    "constants by value_floats",
    [
        node("Constant", [], ["c"], value_floats=[1.0, 2.0, 3.0, 4.0]),
        node("Constant", [], ["d"], value_float=0.5),
        _product("x", "h"),
        node("Mul", ["h", "c"], ["m"]),
        node("Add", ["m", "d"], ["y"]),
    ],
)
_add(
    "float64 island that is an output",
    [
        _product("x", "h"),
        node("Cast", ["h"], ["d"], to=T.DOUBLE),
        node("Exp", ["d"], ["e"]),
        node("Cast", ["e"], ["s"], to=T.FLOAT),
        _product("s", "y"),
    ],
    outputs=["y", vi("e", T.DOUBLE, None)],
)
_add(
    "both 16-bit formats already",
    [
        node("Cast", ["x"], ["c"], to=T.FLOAT16),
        _product("c", "h"),
        node("Cast", ["h"], ["f"], to=T.FLOAT),
        node("Exp", ["f"], ["e"]),
        node("Cast", ["e"], ["g"], to=T.BFLOAT16),
        node("Cast", ["g"], ["y"], to=T.FLOAT),
    ],
    inits=[("w", normal(4, 4).astype(np.float16))],
)
_add(
    "input of 16 bits",
    [node("Cast", ["x"], ["c"], to=T.FLOAT), _product("c", "y")],
    {"x": normal(2, 4).astype(np.float16)},
    [vi("x", T.FLOAT16, [2, 4])],
)
_add(
    "infinite mask",
    [_product("x", "h"), node("Where", ["c", "h", "lowest"], ["m"]), node("Softmax", ["m"], ["y"], axis=-1)],
    inits=[W, ("c", np.array([1, 1, 0, 1], bool)), ("lowest", np.float32(-np.inf))],
)
_add(
    "unused input, weight and node",
    [_product("x", "y"), node("Exp", ["x"], ["dead"])],
    {**FEED, "unused": normal(3)},
    [X, vi("unused", T.FLOAT, [3])],
    inits=[W, ("nobody", normal(600))],
)

# ---- operators -------------------------------------------------------------------------------------------------------

_add(
    "lstm with inputs and outputs left out",
    [node("LSTM", ["x", "wi", "r", "", "", "h0"], ["y", "", "c"], hidden_size=3)],
    {"x": normal(5, 2, 4)},
    [vi("x", T.FLOAT, [5, 2, 4])],
    ["y", "c"],
    [("wi", normal(1, 12, 4)), ("r", normal(1, 12, 3)), ("h0", normal(1, 2, 3))],
)
_add("einsum", [node("Einsum", ["x", "w"], ["h"], equation="bi,ij->bj"), node("Softmax", ["h"], ["y"])])
_add(
    "fourier transform",
    [_product("x", "h"), node("Unsqueeze", ["h", "last"], ["u"]), node("DFT", ["u"], ["y"], axis=1)],
    inits=[W, ("last", np.array([2]))],
)
_add(
    "attention of opset 23",
    [node("Attention", ["q", "q", "q"], ["y"])],
    {"q": normal(1, 2, 3, 4)},
    [vi("q", T.FLOAT, [1, 2, 3, 4])],
    inits=(),
    opset=23,
    ir=10,
)
_add(
    "gemm of opset 6 in IR 3",
    [node("Gemm", ["x", "w", "b"], ["h"], broadcast=1), node("Relu", ["h"], ["y"])],
    inputs=[X, vi("w", T.FLOAT, [4, 4]), vi("b", T.FLOAT, [4])],
    inits=[W, ("b", normal(4))],
    opset=6,
    ir=3,
)
