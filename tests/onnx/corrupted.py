"""Kinds of damage to an ONNX model: most are valid protocol buffers that say something impossible.

Each kind changes a small model in place, or writes a folder, and says what a message about it must name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as H
from onnx import numpy_helper as N

from castwise.errors import CastwiseError
from castwise.onnx import convert

vi = H.make_tensor_value_info
Damage = Callable[[onnx.ModelProto, np.random.Generator], str]
IN_THE_GRAPH: dict[str, Damage] = {}
IN_THE_FILES: dict[str, Callable[[Path, np.random.Generator], str]] = {}


def _graph_kind(damage: Damage) -> Damage:
    IN_THE_GRAPH[damage.__name__.lstrip("_")] = damage
    return damage


def _file_kind(damage: Callable[[Path, np.random.Generator], str]) -> Callable[[Path, np.random.Generator], str]:
    IN_THE_FILES[damage.__name__.lstrip("_")] = damage
    return damage


def sound_model(seed: int) -> onnx.ModelProto:
    """A valid model with a product, a branch, a loop, a function and large weights; its sizes vary with the seed."""
    random = np.random.default_rng(seed)
    width = int(random.integers(17, 40))

    def weight(name: str) -> onnx.TensorProto:
        return N.from_array(random.standard_normal((width, width)).astype(np.float32) / 8, name)

    branch = [
        H.make_graph(
            [H.make_node(op, ["h"], [f"{op}_out"], f"in_{op}")], op, [], [vi(f"{op}_out", T.FLOAT, [2, width])]
        )
        for op in ("Tanh", "Relu")
    ]
    body = H.make_graph(
        [H.make_node("Sin", ["s"], ["s2"], "in_loop"), H.make_node("Identity", ["go"], ["go2"], "go_on")],
        "body",
        [vi("i", T.INT64, []), vi("go", T.BOOL, []), vi("s", T.FLOAT, [2, width])],
        [vi("go2", T.BOOL, []), vi("s2", T.FLOAT, [2, width])],
    )
    nodes = [
        H.make_node("MatMul", ["x", "w"], ["h"], "first"),
        H.make_node("If", ["flag"], ["b"], "choose", then_branch=branch[0], else_branch=branch[1]),
        H.make_node("Loop", ["trips", "", "b"], ["l"], "repeat", body=body),
        H.make_node("Twice", ["l"], ["f"], "call", domain="my"),
        H.make_node("Softmax", ["f"], ["p"], "soft", axis=-1),
        H.make_node("MatMul", ["p", "v"], ["y"], "last"),
    ]
    twice = H.make_function(
        "my", "Twice", ["a"], ["c"], [H.make_node("Add", ["a", "a"], ["c"], "add")], [H.make_opsetid("", 17)]
    )
    graph = H.make_graph(
        nodes,
        "sound",
        [vi("x", T.FLOAT, [2, width]), vi("flag", T.BOOL, [])],
        [vi("y", T.FLOAT, [2, width])],
        [weight("w"), weight("v"), N.from_array(np.array(2), "trips")],
    )
    return H.make_model(
        graph, opset_imports=[H.make_opsetid("", 17), H.make_opsetid("my", 1)], functions=[twice], ir_version=8
    )


def _node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def _weight(model: onnx.ModelProto, name: str = "w") -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def _any_node(model: onnx.ModelProto, random: np.random.Generator) -> onnx.NodeProto:
    return model.graph.node[int(random.integers(len(model.graph.node)))]


# ---- names and edges -------------------------------------------------------------------------------------------------


@_graph_kind
def _input_that_nothing_makes(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _any_node(model, random).input[0] = "nowhere"
    return "nowhere"


@_graph_kind
def _capture_that_nothing_makes(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "choose").attribute[int(random.integers(2))].g.node[0].input[0] = "nowhere"
    return "nowhere"


@_graph_kind
def _output_that_nothing_makes(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.graph.output[0].name = "nowhere"
    return "nowhere"


@_graph_kind
def _removed_node(model: onnx.ModelProto, random: np.random.Generator) -> str:
    place = int(random.integers(len(model.graph.node)))
    name = model.graph.node[place].output[0]
    del model.graph.node[place]
    return name


@_graph_kind
def _removed_weight(model: onnx.ModelProto, random: np.random.Generator) -> str:
    place = int(random.integers(len(model.graph.initializer)))
    name = model.graph.initializer[place].name
    del model.graph.initializer[place]
    return name


@_graph_kind
def _node_that_reads_itself(model: onnx.ModelProto, random: np.random.Generator) -> str:
    node = _any_node(model, random)
    node.input[len(node.input) - 1] = node.output[0]
    return node.name


@_graph_kind
def _cycle_of_two_nodes(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "call").input[0] = "p"
    return "call"


@_graph_kind
def _two_nodes_with_one_result(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "soft").output[0] = "h"
    return "h"


@_graph_kind
def _weight_named_as_a_result(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.graph.initializer.append(N.from_array(np.zeros(400, np.float32), "p"))
    return "p"


@_graph_kind
def _two_weights_of_one_name(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.graph.initializer.append(N.from_array(np.zeros((40, 40), np.float32), "w"))
    return "w"


# ---- types and shapes ------------------------------------------------------------------------------------------------


@_graph_kind
def _weight_of_integers_for_floats(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _weight(model).data_type = T.INT32
    return "first"


@_graph_kind
def _input_of_a_wrong_type(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.graph.input[0].type.tensor_type.elem_type = int(random.choice([T.BOOL, T.STRING, T.INT64, T.DOUBLE]))
    return "first"


@_graph_kind
def _output_of_a_wrong_type(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.graph.output[0].type.tensor_type.elem_type = T.INT64
    return "last"


@_graph_kind
def _condition_that_is_no_bool(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.graph.input[1].type.tensor_type.elem_type = T.FLOAT
    return "choose"


@_graph_kind
def _weight_of_a_wrong_shape(model: onnx.ModelProto, random: np.random.Generator) -> str:
    rows = int(random.integers(41, 60))
    _weight(model).CopyFrom(N.from_array(np.zeros((rows, 8), np.float32), "w"))
    return "first"


@_graph_kind
def _input_without_a_type(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.graph.input[0].ClearField("type")
    return "x"


@_graph_kind
def _unknown_element_type(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _weight(model).data_type = int(random.choice([0, 77, 1000]))
    return "w"


@_graph_kind
def _negative_size(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _weight(model).dims[int(random.integers(2))] = -3
    return "w"


@_graph_kind
def _size_beyond_memory(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _weight(model).dims[0] = 1 << int(random.integers(40, 62))
    return "w"


# ---- values ----------------------------------------------------------------------------------------------------------


@_graph_kind
def _bytes_cut_short(model: onnx.ModelProto, random: np.random.Generator) -> str:
    tensor = _weight(model)
    tensor.raw_data = tensor.raw_data[: int(random.integers(len(tensor.raw_data)))]
    return "w"


@_graph_kind
def _bytes_too_many(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _weight(model).raw_data += bytes(int(random.integers(1, 9)))
    return "w"


@_graph_kind
def _too_few_floats(model: onnx.ModelProto, random: np.random.Generator) -> str:
    tensor = _weight(model)
    tensor.ClearField("raw_data")
    tensor.float_data.extend([1.0] * int(random.integers(1, 200)))
    return "w"


@_graph_kind
def _bytes_of_a_small_weight_cut_short(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _weight(model, "trips").raw_data = b"\x01\x02\x03"
    return "trips"


@_graph_kind
def _sparse_index_outside(model: onnx.ModelProto, random: np.random.Generator) -> str:
    values = N.from_array(np.ones(2, np.float32), "s")
    indices = N.from_array(np.array([0, int(random.integers(5, 90))]), "s_indices")
    model.graph.sparse_initializer.append(H.make_sparse_tensor(values, indices, [4]))
    return "s"


@_graph_kind
def _sparse_indices_of_floats(model: onnx.ModelProto, random: np.random.Generator) -> str:
    values, indices = N.from_array(np.ones(2, np.float32), "s"), N.from_array(np.ones(2, np.float32), "s_indices")
    model.graph.sparse_initializer.append(H.make_sparse_tensor(values, indices, [4]))
    return "s"


# ---- operators and versions ------------------------------------------------------------------------------------------


@_graph_kind
def _unknown_operator(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "soft").op_type = "Sofmax"
    return "Sofmax"


@_graph_kind
def _empty_operator(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "soft").op_type = ""
    return "soft"


@_graph_kind
def _opset_that_does_not_exist(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.opset_import[0].version = int(random.choice([999, 10**9, 0, -1]))
    return "opset"


@_graph_kind
def _no_opset(model: onnx.ModelProto, random: np.random.Generator) -> str:
    del model.opset_import[:]
    return "opset"


@_graph_kind
def _domain_without_a_version(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "soft").domain = "elsewhere"
    return "elsewhere"


@_graph_kind
def _ir_version_that_does_not_exist(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.ir_version = int(random.choice([0, 99, 10**6]))
    return "ir_version"


@_graph_kind
def _unknown_attribute(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "soft").attribute.append(H.make_attribute("axes", 1))
    return "axes"


@_graph_kind
def _attribute_of_a_wrong_type(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "soft").attribute[0].CopyFrom(H.make_attribute("axis", "last"))
    return "axis"


@_graph_kind
def _missing_attribute(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "soft").CopyFrom(H.make_node("Cast", ["f"], ["p"], "soft"))
    return "soft"


@_graph_kind
def _axis_that_does_not_exist(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "soft").attribute[0].i = int(random.integers(2, 9))
    return "soft"


@_graph_kind
def _too_many_inputs(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "soft").input.extend(["h", "h"])
    return "soft"


@_graph_kind
def _too_few_inputs(model: onnx.ModelProto, random: np.random.Generator) -> str:
    del _node(model, "first").input[1]
    return "first"


# ---- graphs in graphs ------------------------------------------------------------------------------------------------


@_graph_kind
def _branch_missing(model: onnx.ModelProto, random: np.random.Generator) -> str:
    del _node(model, "choose").attribute[int(random.integers(2))]
    return "choose"


@_graph_kind
def _branches_that_give_different_counts(model: onnx.ModelProto, random: np.random.Generator) -> str:
    _node(model, "choose").attribute[0].g.output.append(vi("h", T.FLOAT, None))
    return "choose"


@_graph_kind
def _body_of_a_loop_without_its_state(model: onnx.ModelProto, random: np.random.Generator) -> str:
    body = _node(model, "repeat").attribute[0].g
    del body.output[1]
    return "repeat"


@_graph_kind
def _function_that_is_missing(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.functions[0].name = "Thrice"
    del model.opset_import[1]
    return "my"


@_graph_kind
def _function_that_calls_itself(model: onnx.ModelProto, random: np.random.Generator) -> str:
    function = model.functions[0]
    function.node[0].CopyFrom(H.make_node("Twice", ["a"], ["c"], "again", domain="my"))
    function.opset_import.append(H.make_opsetid("my", 1))
    return "Twice"


@_graph_kind
def _function_that_reads_what_it_is_not_given(model: onnx.ModelProto, random: np.random.Generator) -> str:
    model.functions[0].node[0].input[1] = "nowhere"
    return "nowhere"


# ---- files -----------------------------------------------------------------------------------------------------------


def _with_external(folder: Path, random: np.random.Generator) -> onnx.ModelProto:
    model = sound_model(int(random.integers(100)))
    onnx.save(model, folder / "in.onnx", save_as_external_data=True, location="in.bin", size_threshold=0)
    return onnx.load(folder / "in.onnx", load_external_data=False)


def _external(model: onnx.ModelProto, key: str, value: str) -> None:
    tensor = _weight(model)
    kept = [(entry.key, entry.value) for entry in tensor.external_data if entry.key != key]
    del tensor.external_data[:]
    for name, old in [*kept, (key, value)]:
        tensor.external_data.add(key=name, value=value if name == key else old)


@_file_kind
def _external_offset_beyond_the_file(folder: Path, random: np.random.Generator) -> str:
    model = _with_external(folder, random)
    _external(model, "offset", str(int(random.integers(10**5, 10**12))))
    (folder / "in.onnx").write_bytes(model.SerializeToString())
    return "w"


@_file_kind
def _external_offset_that_is_no_offset(folder: Path, random: np.random.Generator) -> str:
    model = _with_external(folder, random)
    _external(model, "offset", str(random.choice(["-4", "four", "1e3", "", "0x10"])))
    (folder / "in.onnx").write_bytes(model.SerializeToString())
    return "w"


@_file_kind
def _external_length_that_does_not_fit(folder: Path, random: np.random.Generator) -> str:
    model = _with_external(folder, random)
    _external(model, "length", str(random.choice(["-1", "7", "many", "999999999999"])))
    (folder / "in.onnx").write_bytes(model.SerializeToString())
    return "w"


@_file_kind
def _external_file_missing(folder: Path, random: np.random.Generator) -> str:
    _with_external(folder, random)
    (folder / "in.bin").unlink()
    return "in.bin"


@_file_kind
def _external_file_cut_short(folder: Path, random: np.random.Generator) -> str:
    _with_external(folder, random)
    path = folder / "in.bin"
    path.write_bytes(path.read_bytes()[: int(random.integers(1000))])
    return "in.bin"


@_file_kind
def _external_file_elsewhere(folder: Path, random: np.random.Generator) -> str:
    model = _with_external(folder, random)
    _external(model, "location", str(random.choice(["../in.bin", "/etc/hostname", "..", ".", ""])))
    (folder / "in.onnx").write_bytes(model.SerializeToString())
    return "w"


@_file_kind
def _file_cut_short(folder: Path, random: np.random.Generator) -> str:
    content = sound_model(int(random.integers(100))).SerializeToString()
    (folder / "in.onnx").write_bytes(content[: int(random.integers(len(content) - 1))])
    return "in.onnx"


@_file_kind
def _file_of_something_else(folder: Path, random: np.random.Generator) -> str:
    kinds = [
        b"",
        b"<html></html>",
        b"PK\x03\x04" + bytes(100),
        b"\x89PNG\r\n",
        bytes(random.bytes(500)),
        b"version https",
    ]
    (folder / "in.onnx").write_bytes(kinds[int(random.integers(len(kinds)))])
    return "in.onnx"


@_file_kind
def _text_that_is_no_text(folder: Path, random: np.random.Generator) -> str:
    content = sound_model(int(random.integers(100))).SerializeToString()
    (folder / "in.onnx").write_bytes(content.replace(b"soft", b"\xff\xfe\xfd\xfc"))
    return "in.onnx"


@_file_kind
def _names_that_are_no_text(folder: Path, random: np.random.Generator) -> str:
    content = sound_model(int(random.integers(100))).SerializeToString()
    (folder / "in.onnx").write_bytes(content.replace(b"trips", b"tr\xffps"))
    return "in.onnx"


# ---- what becomes of them --------------------------------------------------------------------------------------------

MAY_CONVERT = frozenset({"axis_that_does_not_exist"})
"""Kinds that ONNX's full checker accepts: they are refused or converted to something that it accepts as well."""
KINDS = (*IN_THE_GRAPH, *IN_THE_FILES)


def write_damaged(kind: str, seed: int, folder: Path) -> str:
    """Write ``in.onnx``, damaged so, into an empty folder. Returns what a message about it must name."""
    random = np.random.default_rng(seed)
    if kind in IN_THE_FILES:
        return IN_THE_FILES[kind](folder, random)
    model = sound_model(seed)
    name = IN_THE_GRAPH[kind](model, random)
    (folder / "in.onnx").write_bytes(model.SerializeToString())
    return name


def fault(kind: str, seed: int, folder: Path) -> tuple[str, str]:
    """What a conversion of a damaged file does wrong ("" where nothing), and what it says.

    Right is an error of Castwise's own that names the file and the node, tensor or file that is damaged, and nothing
    beside the input afterwards; for :data:`MAY_CONVERT` also a result that the full checker accepts.
    """
    name = write_damaged(kind, seed, folder)
    before = sorted(path.name for path in folder.iterdir())
    try:
        convert(folder / "in.onnx").save(folder / "out.onnx")
    except CastwiseError as error:
        missing = [text for text in ("in.onnx", name) if text not in str(error)]
        left = sorted(path.name for path in folder.iterdir())
        if missing:
            return f"does not name {missing}", str(error)
        return ("" if left == before else f"leaves {left}"), str(error)
    if kind not in MAY_CONVERT:
        return "is converted", ""
    onnx.checker.check_model(str(folder / "out.onnx"), full_check=True)
    return "", "converted"
