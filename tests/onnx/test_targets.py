"""Runtimes, and the command line."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as H
from onnx import numpy_helper as N

import castwise.cli
from castwise.onnx import TARGETS, ConversionError, _targets, convert, verify
from castwise.onnx._stamp import STAMP

vi = H.make_tensor_value_info
FEED = {"x": np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)}


def _model():
    weight = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32) / 16
    nodes = [H.make_node("MatMul", ["x", "w"], ["h"], "mm"), H.make_node("Compress", ["h", "c"], ["y"], "pick", axis=0)]
    inits = [N.from_array(weight, "w"), N.from_array(np.arange(64) % 2 == 0, "c")]
    graph = H.make_graph(nodes, "g", [vi("x", T.FLOAT, [64, 256])], [vi("y", T.FLOAT, [32, 256])], inits)
    return H.make_model(graph, opset_imports=[H.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_names_its_source_and_only_operators_that_exist(name):
    target = _targets.get(name)
    assert target.source and target.runtime
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    for said in target.kernels.values():
        for key in ("has", "lacks"):
            assert set(str(said.get(key, "")).split()) <= known
        assert set(said.get("from", {})) <= known


def test_the_list_of_this_onnxruntime_is_what_it_registers():
    state = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    if not hasattr(state, "get_all_opkernel_def") or not state.get_all_opkernel_def():
        pytest.skip("this build does not list its kernels")
    target = _targets.get("onnxruntime-cpu")
    for fmt, name in (("fp16", "tensor(float16)"), ("bf16", "tensor(bfloat16)")):
        registered = {
            kernel.op_name
            for kernel in state.get_all_opkernel_def()
            if kernel.provider == "CPUExecutionProvider" and kernel.domain in ("", "ai.onnx")
            if any(name in kinds for kinds in kernel.type_constraints.values())
        }
        listed = set(str(target.kernels[fmt]["has"]).split())
        assert listed <= registered | {"Attention", "RotaryEmbedding", "RMSNormalization", "TensorScatter"}


def test_what_a_target_cannot_compute_stays_fp32_and_the_report_says_why():
    row = {r.node: r for r in convert(_model(), calibration=FEED, target="tensorrt").report.nodes}
    assert row["mm"].format == "fp16"
    assert row["pick"].format == "fp32" and "tensorrt has no fp16 kernel of Compress" in row["pick"].reason
    assert {r.node: r.format for r in convert(_model(), calibration=FEED, target="onnxruntime-cuda").report.nodes}[
        "pick"
    ] == "fp16"


def test_a_cpu_target_is_told_that_it_will_not_be_faster_and_auto_leaves_its_products_alone():
    asked = convert(_model(), calibration=FEED, target="onnxruntime-cpu").report
    assert asked.products_low == 1 and any("will not be faster" in note for note in asked.notes)
    assert convert(_model(), calibration=FEED, target="onnxruntime-cpu", format="auto").report.products_low == 0


def test_auto_lowers_a_product_that_pays_for_its_casts_and_not_one_that_does_not():
    width = 2048
    nodes = [H.make_node("MatMul", ["x", "w"], ["h"]), H.make_node("MatMul", ["h", "v"], ["y"])]
    inputs = [vi("x", T.FLOAT, [width, width]), vi("w", T.FLOAT, [width, width]), vi("v", T.FLOAT, [width, width])]
    large = H.make_model(
        H.make_graph(nodes, "g", inputs, [vi("y", T.FLOAT, [width, width])]),
        opset_imports=[H.make_opsetid("", 17)],
        ir_version=8,
    )
    small = _model()
    feed = {name: np.zeros((width, width), np.float32) for name in ("x", "w", "v")}
    assert convert(large, format="auto", calibration=feed, target="onnxruntime-cuda").report.products_low == 2
    assert convert(small, format="auto", calibration=FEED, target="onnxruntime-cuda").report.products_low == 0


def test_auto_takes_bfloat16_where_values_leave_the_range_of_float16_and_the_device_has_both():
    width = 1024
    nodes = [H.make_node("MatMul", ["x", "w"], ["h"]), H.make_node("MatMul", ["h", "v"], ["y"])]
    inputs = [vi(name, T.FLOAT, [width, width]) for name in ("x", "w", "v")]
    model = H.make_model(
        H.make_graph(nodes, "g", inputs, [vi("y", T.FLOAT, [width, width])]),
        opset_imports=[H.make_opsetid("", 17)],
        ir_version=8,
    )
    feed = {name: np.zeros((width, width), np.float32) for name in ("x", "w", "v")}
    assert convert(model, format="auto", calibration=feed, target="onnxruntime-cuda").fmt == "fp16"
    large = {**feed, "x": np.full((width, width), 2.0**20, np.float32)}
    done = convert(model, format="auto", calibration=large, target="onnxruntime-cuda")
    assert done.fmt == "bf16" and done.report.products_low == 2


def test_a_changed_model_is_noticed_when_it_is_verified():
    source = _model()
    done = convert(source, calibration=FEED, tolerance=1e-2)
    found = verify(done.model, source, calibration=FEED)
    assert found.ok and found.tolerance == 1e-2 and not found.differences
    changed = onnx.ModelProto()
    changed.CopyFrom(done.model)
    changed.graph.node[0].doc_string = "edited"
    assert any("changed after" in text for text in verify(changed, source, calibration=FEED).differences)
    weights = N.to_array(source.graph.initializer[0]) * 1.5
    source.graph.initializer[0].CopyFrom(N.from_array(weights, "w"))
    assert not verify(done.model, source, calibration=FEED).ok


def _with_record(model, change):
    """A copy of a converted model with another record of how it was made, as if it came from another machine."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    entry = next(entry for entry in copy.metadata_props if entry.key == STAMP)
    record = json.loads(entry.value)
    change(record)
    entry.value = json.dumps(record)
    return copy


def test_a_model_from_a_machine_with_other_versions_is_checked_and_told_what_differs():
    source = _model()
    made = convert(source, calibration=FEED, tolerance=1e-2).model
    here = verify(made, source, calibration=FEED)
    assert here.ok and not here.differences
    assert here.fingerprint["onnx version"] == onnx.__version__ and here.fingerprint["castwise version"]

    def older(record):
        record["fingerprint"] |= {"onnx version": "1.2.3", "castwise version": "0.0.1"}
        del record["fingerprint"]["onnxruntime version"]

    elsewhere = verify(_with_record(made, older), source, calibration=FEED)
    assert elsewhere.ok and elsewhere.error == here.error and len(elsewhere.differences) == 3
    assert f"converted with onnx 1.2.3, checked with onnx {onnx.__version__}" in elsewhere.differences
    assert any("with no onnxruntime, checked with onnxruntime" in text for text in elsewhere.differences)
    assert elsewhere.fingerprint["castwise version"] == "0.0.1"


def test_a_model_that_was_made_from_another_one_is_told_apart():
    source, other = _model(), _model()
    other.graph.node[0].name = "other"
    made = convert(source, calibration=FEED).model
    assert any("from another model" in text for text in verify(made, other, calibration=FEED).differences)


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"fingerprint": 1, "settings": {}}'])
def test_a_record_that_cannot_be_read_is_no_reason_not_to_check(record):
    source = _model()
    made = convert(source, calibration=FEED).model
    next(entry for entry in made.metadata_props if entry.key == STAMP).value = record
    found = verify(made, source, calibration=FEED)
    assert found.ok and not found.fingerprint and any("cannot be read" in text for text in found.differences)


def test_a_model_that_runs_on_another_target_than_it_was_made_for_is_told_what_that_one_lacks():
    source = _model()
    made = convert(source, calibration=FEED, target="onnxruntime-cuda").model
    assert verify(made, source, calibration=FEED).fingerprint["target"] == "onnxruntime-cuda"
    assert not verify(made, source, calibration=FEED, target="onnxruntime-cuda").differences
    moved = verify(made, source, calibration=FEED, target="tensorrt")
    assert moved.ok and "converted for onnxruntime-cuda, checked for tensorrt" in moved.differences
    assert any("tensorrt has no fp16 kernel of Compress, which 1 of the nodes are" in t for t in moved.differences)
    with pytest.raises(ConversionError, match="tensorrt"):
        verify(made, source, calibration=FEED, target="tensorr")


def test_the_command_line_converts_reports_and_verifies(tmp_path, capsys):
    source, target, data = tmp_path / "in.onnx", tmp_path / "out.onnx", tmp_path / "x.npz"
    onnx.save(_model(), source)
    np.savez(data, **FEED)
    report = tmp_path / "report.html"
    options = ["--calibrate", str(data), "--tolerance", "1e-2"]
    assert castwise.cli.main(["convert", str(source), str(target), *options, "--report", str(report)]) == 0
    assert "1 of 1 products" in capsys.readouterr().out and report.exists()
    onnx.checker.check_model(str(target), full_check=True)
    check = ["verify", str(target), "--against", str(source), "--calibrate", str(data)]
    assert castwise.cli.main([*check, "--target", "tensorrt"]) == 0
    out = capsys.readouterr().out
    assert f"onnx version {onnx.__version__}" in out and "converted for no target, checked for tensorrt" in out
    assert castwise.cli.main([*check, "--tolerance", "1e-9"]) == 1
    assert "NOT kept" in capsys.readouterr().out


def test_the_command_line_keeps_what_it_is_told_to_and_writes_nothing_where_it_refuses(tmp_path, capsys):
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(_model(), source)
    assert castwise.cli.main(["convert", str(source), str(target), "--keep", "mm"]) == 0
    assert "0 of 1 products" in capsys.readouterr().out
    source.write_bytes(source.read_bytes()[:100])
    target.unlink()
    assert castwise.cli.main(["convert", str(source), str(target)]) == 1
    assert not target.exists() and "in.onnx" in capsys.readouterr().err


def test_a_policy_file_with_devices_serves_every_target_and_an_asked_format_comes_first(tmp_path, capsys):
    source, policy = _saved(tmp_path), tmp_path / "policy.toml"
    policy.write_text('format = "float16"\n[ops]\nsoftmax = "high"\n[devices.cpu]\nformat = "bfloat16"\n')
    for number, (options, name) in enumerate(
        [
            ([], "fp16"),
            (["--target", "onnxruntime-cpu"], "bf16"),
            (["--target", "tensorrt"], "fp16"),
            (["--to", "float16", "--target", "onnxruntime-cpu"], "fp16"),
            (["--to", "bfloat16"], "bf16"),
        ]
    ):
        out = str(tmp_path / f"{number}.onnx")
        assert castwise.cli.main(["convert", str(source), out, "--policy", str(policy), *options]) == 0
        assert f"1 of 1 products and convolutions in {name}" in capsys.readouterr().out


def test_a_report_whose_name_says_no_kind_is_refused_before_anything_is_written(tmp_path, capsys):
    source = _saved(tmp_path)
    out, report = tmp_path / "out.onnx", tmp_path / "report.txt"
    assert castwise.cli.main(["convert", str(source), str(out), "--report", str(report)]) == 1
    assert "report.txt" in capsys.readouterr().err and not out.exists() and not report.exists()


def test_where_there_was_nothing_to_compare_it_is_said(tmp_path):
    source = _saved(tmp_path)
    width = onnx.load(source).graph.input[0].type.tensor_type.shape.dim[1].dim_value
    for feed in ({"x": np.full((2, width), np.nan, np.float32)}, {"x": np.zeros((0, width), np.float32)}):
        done = convert(source, calibration=feed)
        assert any("nothing was compared" in note for note in done.report.notes)
        assert any("nothing was compared" in one for one in verify(done.model, source, calibration=feed).differences)


def test_the_weights_of_the_model_that_is_read_are_never_overwritten(tmp_path, capsys):
    source, data = _saved(tmp_path), tmp_path / "big.onnx.data"
    onnx.save(onnx.load(source), source, save_as_external_data=True, location=data.name, size_threshold=0)
    before = data.read_bytes()
    assert castwise.cli.main(["convert", str(source), str(data)]) == 1
    assert "big.onnx.data holds the weights of model.onnx" in capsys.readouterr().err
    with pytest.raises(ConversionError, match="not overwritten"):
        convert(source).save(tmp_path / "big.onnx", external=True)
    assert data.read_bytes() == before and not (tmp_path / "big.onnx").exists()


def test_calibration_files_that_are_no_npz_files_are_refused_by_name(tmp_path, capsys):
    source, x = _saved(tmp_path), np.ones((2, 16), np.float32)
    np.save(tmp_path / "single.npy", x)
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "objects.npz", x=np.array([None, 1]))
    np.savez(tmp_path / "whole.npz", x=x)
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "damaged.npz").write_bytes(whole[:60] + b"\0" * 40 + whole[100:])
    (tmp_path / "cut.npz").write_bytes(whole[:-30])
    for name in ("single.npy", "text.npz", "empty.npz", "objects.npz", "damaged.npz", "cut.npz"):
        data, out = tmp_path / name, tmp_path / "out.onnx"
        assert castwise.cli.main(["convert", str(source), str(out), "--calibrate", str(data)]) == 1
        said = capsys.readouterr().err
        assert name in said and "numpy.savez" in said and "pickle" not in said and not out.exists()
    assert castwise.cli.main(["convert", str(source), str(tmp_path)]) == 1
    assert "is a folder" in capsys.readouterr().err


def _saved(folder):
    weight = onnx.numpy_helper.from_array(np.eye(16, 4, dtype=np.float32), "w")
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 16] x) => (float[N, 4] y) '
        "{ h = MatMul(x, w)  y = Softmax(h) }"
    )
    model.graph.initializer.append(weight)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"
