"""Odd models convert strictly like any other, in both formats, and converting them again changes nothing."""

from __future__ import annotations

import onnx
import pytest
from odd_models import MODELS

from castwise.onnx import convert

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
