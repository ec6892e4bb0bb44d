"""Kinds of models: what must survive a conversion, and what must become narrow in it."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as H
from onnx import numpy_helper as N

from castwise.onnx import ConversionError, _evaluate, convert, verify

vi = H.make_tensor_value_info
RNG = np.random.default_rng(1)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def model(nodes, inputs, outputs, inits=(), opset=17, ir=8, extra=(), value_info=()):
    tensors = [N.from_array(np.asarray(array), name) for name, array in inits]
    graph = H.make_graph(list(nodes), "g", list(inputs), list(outputs), tensors, value_info=list(value_info))
    return H.make_model(graph, opset_imports=[H.make_opsetid("", opset), *extra], ir_version=ir)


def mlp(opset=17, ir=8, width=8):
    nodes = [
        H.make_node("MatMul", ["x", "w"], ["h"]),
        H.make_node("Relu", ["h"], ["r"]),
        H.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    inits = [("w", normal(width, width)), ("v", normal(width, 3))]
    return model(nodes, [vi("x", T.FLOAT, ["n", width])], [vi("y", T.FLOAT, ["n", 3])], inits, opset, ir)


def types(done):
    inferred = onnx.shape_inference.infer_shapes(done.model)
    found = {i.name: i.type.tensor_type.elem_type for i in [*inferred.graph.value_info, *inferred.graph.output]}
    return found | {t.name: t.data_type for t in inferred.graph.initializer}


def casts(done):
    return [node for node in done.model.graph.node if node.op_type == "Cast"]


@pytest.mark.parametrize("opset", [7, 9, 13, 21, onnx.defs.onnx_opset_version()])
def test_two_casts_are_enough_for_a_chain_in_any_opset(opset):
    done = convert(mlp(opset), calibration={"x": normal(4, 8)}, tolerance=1e-2)
    assert len(casts(done)) == 2 and done.report.products_low == done.report.products == 2
    assert types(done)["w"] == types(done)["v"] == T.FLOAT16


def test_inputs_and_outputs_may_change_their_types_where_that_is_allowed():
    done = convert(mlp(), calibration={"x": normal(4, 8)}, keep_io=False)
    assert not casts(done)
    assert done.model.graph.input[0].type.tensor_type.elem_type == T.FLOAT16
    assert done.model.graph.output[0].type.tensor_type.elem_type == T.FLOAT16


def test_a_tensor_read_in_16_bits_by_many_is_cast_once():
    nodes = [H.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(6)]
    inits = [(f"w{i}", normal(4, 4)) for i in range(6)]
    m = model(nodes, [vi("x", T.FLOAT, [2, 4])], [vi(f"y{i}", T.FLOAT, [2, 4]) for i in range(6)], inits)
    done = convert(m, calibration={"x": normal(2, 4)})
    assert sum(node.input[0] == "x" for node in casts(done)) == 1


def test_an_initializer_needed_in_both_formats_exists_twice_and_is_never_cast():
    nodes = [H.make_node("MatMul", ["x", "w"], ["h"]), H.make_node("Identity", ["w"], ["copy"])]
    m = model(
        nodes,
        [vi("x", T.FLOAT, [2, 4])],
        [vi("h", T.FLOAT, [2, 4]), vi("copy", T.FLOAT, [4, 4])],
        [("w", normal(4, 4))],
    )
    done = convert(m, calibration={"x": normal(2, 4)})
    kinds = sorted(t.data_type for t in done.model.graph.initializer)
    assert kinds in ([T.FLOAT, T.FLOAT16], [T.FLOAT16])
    assert all(node.input[0] not in ("w", "w_fp16") for node in casts(done)) or kinds == [T.FLOAT16]


def test_an_initializer_that_is_an_output_keeps_its_type(run):
    m = model(
        [H.make_node("MatMul", ["x", "w"], ["y"])],
        [vi("x", T.FLOAT, [2, 4])],
        [vi("y", T.FLOAT, [2, 4]), vi("w", T.FLOAT, [4, 4])],
        [("w", normal(4, 4))],
    )
    done = convert(m, calibration={"x": normal(2, 4)})
    assert done.report.products_low == 1
    assert run(done.model, {"x": normal(2, 4)})[1] == ["tensor(float)"] * 2


def test_an_initializer_that_callers_may_override_still_takes_fp32(run, distance):
    m = mlp()
    m.graph.input.append(vi("w", T.FLOAT, [8, 8]))
    feed = {"x": normal(4, 8)}
    done = convert(m, calibration=feed, tolerance=1e-2)
    assert done.report.products_low == 2
    other = {**feed, "w": normal(8, 8)}
    assert distance(run(m, other)[0], run(done.model, other)[0]) < 1e-2
    assert distance(run(m, feed)[0], run(done.model, feed)[0]) < 1e-2


def test_old_models_that_list_every_initializer_as_an_input_become_narrow():
    m = mlp(opset=7, ir=3)
    for tensor in m.graph.initializer:
        m.graph.input.append(vi(tensor.name, T.FLOAT, list(tensor.dims)))
    done = convert(m, calibration={"x": normal(4, 8)})
    onnx.checker.check_model(done.model, full_check=True)
    assert len(casts(done)) == 2 and {t.data_type for t in done.model.graph.initializer} == {T.FLOAT16}


def test_operators_of_unknown_domains_are_kept_as_they_are_and_the_report_says_so():
    nodes = [
        H.make_node("MatMul", ["x", "w"], ["h"], "mm"),
        H.make_node("Odd", ["h"], ["o"], "odd", domain="acme"),
        H.make_node("MatMul", ["o", "w"], ["y"], "mm2"),
    ]
    m = model(
        nodes,
        [vi("x", T.FLOAT, [2, 4])],
        [vi("y", T.FLOAT, [2, 4])],
        [("w", normal(4, 4))],
        extra=[H.make_opsetid("acme", 1)],
    )
    done = convert(m, calibration={"x": normal(2, 4)})
    rows = {row.node: row for row in done.report.nodes}
    assert "acme" in rows["odd"].reason and rows["mm"].format == rows["mm2"].format == "fp16"
    assert any("not run" in note for note in done.report.notes)
    odd = next(node for node in done.model.graph.node if node.op_type == "Odd")
    assert odd.input[0] in {node.output[0] for node in casts(done)}


def test_islands_of_float64_stay_what_they_are(run):
    nodes = [
        H.make_node("MatMul", ["x", "w"], ["h"]),
        H.make_node("Cast", ["h"], ["d"], to=T.DOUBLE),
        H.make_node("Add", ["d", "c"], ["e"]),
        H.make_node("Cast", ["e"], ["y"], to=T.FLOAT),
    ]
    m = model(
        nodes, [vi("x", T.FLOAT, [2, 4])], [vi("y", T.FLOAT, [2, 4])], [("w", normal(4, 4)), ("c", np.float64(1e-9))]
    )
    done = convert(m, calibration={"x": normal(2, 4)})
    assert types(done)["c"] == types(done)["e"] == T.DOUBLE and done.report.products_low == 1


def test_quantized_products_are_left_to_the_integers_around_them():
    q = [("s", np.float32(0.1)), ("z", np.int8(0)), ("wq", RNG.integers(-9, 9, (4, 4)).astype(np.int8))]
    nodes = [
        H.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        H.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        H.make_node("DequantizeLinear", ["wq", "s", "z"], ["wd"]),
        H.make_node("MatMul", ["xd", "wd"], ["h"], "mm"),
        H.make_node("QuantizeLinear", ["h", "s", "z"], ["hq"]),
        H.make_node("DequantizeLinear", ["hq", "s", "z"], ["y"]),
    ]
    m = model(nodes, [vi("x", T.FLOAT, [2, 4])], [vi("y", T.FLOAT, [2, 4])], q)
    done = convert(m, calibration={"x": normal(2, 4)})
    assert not casts(done)
    assert "8 bits" in next(row.reason for row in done.report.nodes if row.node == "mm")


def test_names_that_a_converter_would_choose_may_be_taken():
    nodes = [
        H.make_node("MatMul", ["x", "w"], ["x_fp16"], "x_fp16_cast"),
        H.make_node("Relu", ["x_fp16"], ["y_fp32"], "n"),
        H.make_node("MatMul", ["y_fp32", "w"], ["y"], "n"),
    ]
    m = model(nodes, [vi("x", T.FLOAT, [2, 4])], [vi("y", T.FLOAT, [2, 4])], [("w", normal(4, 4))])
    done = convert(m, calibration={"x": normal(2, 4)})
    names = [output for node in done.model.graph.node for output in node.output]
    assert len(names) == len(set(names)) and done.report.products_low == 2


@pytest.mark.parametrize("shape", [[], [0, 4], ["n", 4]])
def test_scalar_empty_and_dynamic_shapes_convert(shape):
    m = model(
        [H.make_node("Relu", ["x"], ["r"]), H.make_node("Add", ["r", "r"], ["y"])],
        [vi("x", T.FLOAT, shape)],
        [vi("y", T.FLOAT, shape)],
    )
    size = [3 if dim == "n" else dim for dim in shape]
    done = convert(m, calibration={"x": normal(*size)})
    onnx.checker.check_model(done.model, full_check=True)


def test_a_model_out_of_order_is_put_in_order():
    m = mlp()
    nodes = list(reversed([onnx.NodeProto.FromString(node.SerializeToString()) for node in m.graph.node]))
    del m.graph.node[:]
    m.graph.node.extend(nodes)
    done = convert(m, calibration={"x": normal(4, 8)})
    onnx.checker.check_model(done.model, full_check=True)
    assert any("topological order" in note for note in done.report.notes)


def test_external_data_is_read_and_written_beside_the_model(tmp_path, run, distance):
    m, feed = mlp(width=64), {"x": normal(4, 64)}
    saved = onnx.ModelProto.FromString(m.SerializeToString())  # saving moves the values out of the model
    source, target = tmp_path / "in.onnx", tmp_path / "out" / "out.onnx"
    onnx.save(saved, source, save_as_external_data=True, location="in.data", size_threshold=0)
    done = convert(source, calibration=feed, tolerance=1e-2)
    done.save(target, external=True)
    onnx.checker.check_model(str(target), full_check=True)
    assert (tmp_path / "out" / "out.onnx.data").stat().st_size < (tmp_path / "in.data").stat().st_size
    assert distance(run(m, feed)[0], run(onnx.load(target), feed)[0]) < 1e-2
    assert verify(target, source, calibration=feed).ok


def test_external_data_that_is_missing_or_outside_of_the_folder_is_refused(tmp_path):
    source = tmp_path / "in.onnx"
    onnx.save(mlp(width=64), source, save_as_external_data=True, location="in.data", size_threshold=0)
    (tmp_path / "in.data").write_bytes(b"short")
    with pytest.raises(ConversionError, match=r"in\.data"):
        convert(source)
    m = onnx.load(source, load_external_data=False)
    m.graph.initializer[0].external_data[0].value = "../in.data"
    source.write_bytes(m.SerializeToString())
    with pytest.raises(ConversionError, match="outside"):
        convert(source)


def test_weights_that_are_too_large_for_one_message_are_streamed(tmp_path, monkeypatch):
    from castwise.onnx import _assemble

    monkeypatch.setattr(_assemble, "LIMIT", 4096)
    done = convert(mlp(width=64), calibration={"x": normal(4, 64)})
    with pytest.raises(ConversionError, match="save"):
        _ = done.model
    done.save(tmp_path / "large.onnx")
    onnx.checker.check_model(str(tmp_path / "large.onnx"), full_check=True)
    assert (tmp_path / "large.onnx.data").exists()


def test_weights_too_large_to_keep_rounded_are_rounded_where_they_are_needed_with_the_same_result(monkeypatch):
    m, feed = mlp(width=32), {"x": normal(2, 32)}
    kept = convert(m, calibration=feed)
    monkeypatch.setattr(_evaluate, "_MOST_KEPT", 0)
    streamed = convert(m, calibration=feed)
    assert streamed.model == kept.model and streamed.report.outputs == kept.report.outputs
    assert streamed.report.error > 0


def test_rules_for_layers_and_ops_are_followed_and_named_in_the_report():
    nodes = [
        H.make_node("MatMul", ["x", "w"], ["h"], "/enc/0/MatMul"),
        H.make_node("MatMul", ["h", "w"], ["y"], "/head/MatMul"),
    ]
    m = model(nodes, [vi("x", T.FLOAT, [2, 4])], [vi("y", T.FLOAT, [2, 4])], [("w", normal(4, 4))])
    policy = {"layers": [{"match": "head", "format": "float32"}]}
    rows = {r.node: r for r in convert(m, calibration={"x": normal(2, 4)}, policy=policy).report.nodes}
    assert rows["/enc/0/MatMul"].format == "fp16"
    assert rows["/head/MatMul"].format == "fp32" and "head" in rows["/head/MatMul"].reason


def test_a_report_says_what_was_done_in_json_and_html(tmp_path):
    done = convert(mlp(), calibration={"x": normal(4, 8)}, tolerance=1e-2, policy={"ops": {"relu": "high"}})
    data = json.loads(done.report.save(tmp_path / "r.json").read_text())
    assert data["products_low"] == 2 and data["wide"] == 1 and 0 < data["error"] < 1e-2
    assert data["bytes_after"] * 2 == data["bytes_before"]
    page = done.report.save(tmp_path / "r.html").read_text()
    assert "ops[&#x27;relu&#x27;]" in page and "Relu_1" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibration": {"z": normal(4, 8)}}, "no input 'z'"),
        ({"calibration": {}}, "missing"),
        ({"calibration": []}, "no sample"),
        ({"calibration": {"x": normal(4, 7)}}, "shape"),
        ({"calibration": {"x": np.zeros((4, 8), complex)}}, "complex"),
        ({"calibration": "nowhere.npz"}, "does not exist"),
        ({"tolerance": -1}, "tolerance"),
        ({"format": "float12"}, "format"),
        ({"format": "float8_e4m3fn"}, "float16 or bfloat16"),
        ({"target": "tensorflow"}, "target"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments, message):
    with pytest.raises(ConversionError, match=message):
        convert(mlp(), **arguments)
