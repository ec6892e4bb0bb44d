"""Damaged models are refused by name and leave nothing behind. ``benchmarks/onnx_laws.py`` runs many more of them."""

from __future__ import annotations

import onnx
import pytest
from corrupted import KINDS, fault, sound_model

from castwise.onnx import convert


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_model_is_refused_by_name_and_leaves_nothing_behind(kind, tmp_path):
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        wrong, said = fault(kind, seed, folder)
        assert not wrong, said


def test_the_model_that_is_damaged_is_sound_before(run, distance):
    model = sound_model(0)
    onnx.checker.check_model(model, full_check=True)
    assert convert(model).report.products_low == 2


def test_a_model_that_no_input_can_be_made_up_for_is_converted_and_the_report_says_why():
    model = sound_model(0)
    next(node for node in model.graph.node if node.name == "soft").attribute[0].i = 7
    assert any("not run" in note and "axis" in note for note in convert(model).report.notes)
