"""Odd models convert strictly like any other, in both formats, and converting them again changes nothing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from odd_models import MODELS

from castwise.onnx import convert, verify

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
_RUNTIME_LACKS = ("custom operator that holds a graph", "gemm of opset 6 in IR 3")
_NO_PRODUCT = ("no nodes", "both 16-bit formats already")


@pytest.mark.parametrize("name", MODELS)
def test_an_odd_model_is_valid_narrow_close_and_of_the_same_types(name, run, distance):
    model, feed = MODELS[name]
    done = convert(model, calibration=feed, tolerance=2e-2)
    onnx.checker.check_model(done.model, full_check=True)
    assert done.report.products_low == done.report.products
    assert (done.report.products == 0) == (name in _NO_PRODUCT)
    assert convert(done.model, calibration=feed, tolerance=2e-2).model == done.model
    if name not in _RUNTIME_LACKS:
        (wanted, types), (got, got_types) = run(model, feed), run(done.model, feed)
        assert types == got_types and distance(wanted, got) <= 2e-2


@pytest.mark.parametrize("name", MODELS)
def test_an_odd_model_is_valid_in_bfloat16_with_inputs_and_outputs_that_change(name):
    model, feed = MODELS[name]
    done = convert(model, format="bfloat16", calibration=feed, keep_io=False)
    onnx.checker.check_model(done.model, full_check=True)


def test_a_sparse_constant_keeps_its_values():
    model, feed = MODELS["sparse constant"]
    report = convert(model, calibration=feed).report
    assert any("sparse constant 'w' is stored densely" in note for note in report.notes)
    assert 0 < report.error < 1e-3


@pytest.mark.parametrize("values", [200, 300, 400, 1000])
@pytest.mark.parametrize("stored", ["inside", "outside", "sparse"])
def test_converting_again_changes_nothing_however_large_weights_are_and_wherever_they_are_stored(
    values, stored, tmp_path
):
    weight = np.random.default_rng(0).normal(size=(values // 4, 4)).astype(np.float32)
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[N, {values // 4}] x) => (float[N, 4] y) '
        "{ y = MatMul(x, w) }"
    )
    tensor = onnx.numpy_helper.from_array(weight, "w")
    if stored == "sparse":
        flat = onnx.numpy_helper.from_array(weight.reshape(-1), "w")
        places = onnx.numpy_helper.from_array(np.arange(weight.size), "w_places")
        model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(flat, places, weight.shape))
    else:
        model.graph.initializer.append(tensor)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=stored == "outside", size_threshold=0)
    feed = {"x": np.ones((2, values // 4), np.float32)}
    convert(path, calibration=feed).save(tmp_path / "once.onnx")
    again = convert(tmp_path / "once.onnx", calibration=feed)
    assert again.model == onnx.load(tmp_path / "once.onnx")
    assert any("converted with these settings before" in note for note in again.report.notes)
    assert not [note for note in verify(tmp_path / "once.onnx", path, calibration=feed).differences if note]
