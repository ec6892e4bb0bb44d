"""Laws that hold for any model: results are valid, load, keep types, are close; converting again adds nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import random_model

from castwise.errors import CastwiseError
from castwise.onnx import convert, verify

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SLOW = settings(deadline=None, suppress_health_check=list(HealthCheck))


def _casts_in_a_row(graph: onnx.GraphProto) -> list[str]:
    """Casts from fp32 to 16 bits and straight back, or the reverse, that a converter could have spared."""
    made = {node.output[0]: node for node in graph.node if node.op_type == "Cast"}
    return [
        node.name
        for node in graph.node
        if node.op_type == "Cast" and node.name.endswith("_cast") and node.input[0] in made
        and made[node.input[0]].name.endswith("_cast")
    ]  # fmt: skip


@settings(SLOW, max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_a_random_model_becomes_a_valid_loading_close_one_of_the_same_types(seed, run, distance):
    model, feed = random_model(seed)
    before = model.SerializeToString(deterministic=True)
    wanted, types = run(model, feed)
    done = convert(model, calibration=feed, tolerance=2e-2)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(done.model, full_check=True)
    got, got_types = run(done.model, feed)
    assert got_types == types
    assert distance(wanted, got) <= 2e-2
    assert not _casts_in_a_row(done.model.graph)


def test_products_of_random_models_become_narrow():
    low = total = 0
    for seed in range(40):
        model, feed = random_model(seed)
        report = convert(model, calibration=feed, tolerance=2e-2).report
        low, total = low + report.products_low, total + report.products
    assert low >= 0.95 * total > 0


@settings(SLOW, max_examples=12)
@given(seed=st.integers(0, 10**6))
def test_converting_again_adds_no_node_even_where_nothing_says_that_it_was_converted(seed):
    model, feed = random_model(seed)
    once = convert(model, calibration=feed, tolerance=2e-2).model
    again = onnx.ModelProto()
    again.CopyFrom(once)
    del again.metadata_props[:]
    assert len(convert(again, calibration=feed, tolerance=2e-2).model.graph.node) == len(once.graph.node)
    assert convert(once, calibration=feed, tolerance=2e-2).model == once


@settings(SLOW, max_examples=12)
@given(seed=st.integers(0, 10**6))
def test_bfloat16_keeps_its_tolerance_as_a_second_look_finds_it(seed):
    model, feed = random_model(seed)
    done = convert(model, format="bfloat16", calibration=feed, tolerance=8e-2)
    onnx.checker.check_model(done.model, full_check=True)
    assert verify(done.model, model, calibration=feed).ok


@settings(SLOW, max_examples=80)
@given(seed=st.integers(0, 30), data=st.data())
def test_a_corrupted_file_is_refused_or_converted_and_never_leaves_half_a_result(seed, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corrupt")
    content = bytearray(random_model(seed)[0].SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(1, len(content))) :]
    source, target = folder / "in.onnx", folder / "out.onnx"
    source.write_bytes(content)
    try:
        convert(source).save(target)
    except CastwiseError as error:
        assert "in.onnx" in str(error)
        assert [path.name for path in folder.iterdir()] == ["in.onnx"]
    else:
        onnx.checker.check_model(str(target), full_check=True)


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\x07", b"PK\x03\x04" + bytes(100)])
def test_what_is_no_model_is_named_as_such(content: bytes, tmp_path: Path):
    path = tmp_path / "odd.onnx"
    path.write_bytes(content)
    with pytest.raises(CastwiseError, match=r"odd\.onnx"):
        convert(path)


def test_the_same_seed_makes_the_same_model():
    (first, feed), (second, other) = random_model(7), random_model(7)
    assert first == second
    assert all(np.array_equal(feed[name], other[name]) for name in feed)
