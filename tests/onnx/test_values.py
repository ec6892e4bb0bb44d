"""Values that 16 bits cannot hold: nothing is clipped or flushed without a word, and the tolerance is kept."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper as H
from onnx import numpy_helper as N
from onnx.reference import ReferenceEvaluator

from castwise.onnx import ConversionError, convert

vi = H.make_tensor_value_info
RNG = np.random.default_rng(0)


def model(nodes, inputs, outputs, inits=(), opset=17, ir=8):
    graph = H.make_graph(
        list(nodes), "g", list(inputs), list(outputs), [N.from_array(np.asarray(a), n) for n, a in inits]
    )
    return H.make_model(graph, opset_imports=[H.make_opsetid("", opset)], ir_version=ir)


def normal(*shape, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def rows(done):
    return {row.node: row for row in done.report.nodes}


def test_an_epsilon_that_would_become_zero_keeps_its_readers_in_fp32_even_where_calibration_never_needs_it():
    nodes = [
        H.make_node("MatMul", ["x", "w"], ["h"], "mm"),
        H.make_node("Abs", ["h"], ["n"], "abs"),
        H.make_node("Add", ["n", "eps"], ["e"], "guard"),
        H.make_node("Div", ["h", "e"], ["y"], "div"),
    ]
    m = model(
        nodes,
        [vi("x", T.FLOAT, [2, 4])],
        [vi("y", T.FLOAT, [2, 4])],
        [("w", normal(4, 4)), ("eps", np.float32(1e-12))],
    )
    done = convert(m, calibration={"x": normal(2, 4)}, tolerance=2e-2)
    assert rows(done)["mm"].format == "fp16"
    assert rows(done)["guard"].format == rows(done)["div"].format == "fp32"
    assert "1e-12" in rows(done)["guard"].reason and "away from 0" in rows(done)["div"].reason
    zero = {"x": np.zeros((2, 4), np.float32)}
    assert np.isfinite(ReferenceEvaluator(done.model).run(None, zero)[0]).all()


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
@pytest.mark.parametrize("lowest", [float(np.finfo(np.float32).min), -1e9])
def test_a_mask_is_brought_within_range_and_the_report_says_so(fmt, lowest):
    nodes = [
        H.make_node("MatMul", ["q", "k"], ["s"], "scores"),
        H.make_node("Sub", ["one", "keep"], ["drop"], "drop"),
        H.make_node("Mul", ["drop", "lowest"], ["bias"], "bias"),
        H.make_node("Add", ["s", "bias"], ["masked"], "add"),
        H.make_node("Softmax", ["masked"], ["y"], "softmax", axis=-1),
    ]
    m = model(
        nodes,
        [vi("q", T.FLOAT, [2, 4]), vi("keep", T.FLOAT, [1, 6])],
        [vi("y", T.FLOAT, [2, 6])],
        [("k", normal(4, 6)), ("one", np.float32(1)), ("lowest", np.float32(lowest))],
    )
    feed = {"q": normal(2, 4), "keep": np.array([[1, 1, 1, 0, 0, 1]], np.float32)}
    done = convert(m, format=fmt, calibration=feed, tolerance=2e-2)
    if fmt == "float16" or lowest < -1e30:
        assert any("mask constant 'lowest'" in note for note in done.report.notes)
    assert all(row.format != "fp32" for row in done.report.nodes)
    got = ReferenceEvaluator(done.model).run(None, feed)[0]
    assert np.isfinite(got).all() and (got[:, 3:5] == 0).all()


def test_a_huge_negative_number_that_is_no_mask_is_left_as_it_is():
    nodes = [H.make_node("Mul", ["x", "c"], ["y"], "mul")]
    m = model(nodes, [vi("x", T.FLOAT, [4])], [vi("y", T.FLOAT, [4])], [("c", np.float32(-1e9))])
    done = convert(m, calibration={"x": normal(4)})
    assert rows(done)["mul"].format == "fp32"
    assert N.to_array(done.model.graph.initializer[0]) == np.float32(-1e9)


def test_weights_that_become_zero_are_counted_in_the_report():
    w = normal(16, 16)
    w[0, :3] = [1e-9, -3e-9, 2e-9]
    m = model(
        [H.make_node("MatMul", ["x", "w"], ["y"], "mm")],
        [vi("x", T.FLOAT, [2, 16])],
        [vi("y", T.FLOAT, [2, 16])],
        [("w", w)],
    )
    done = convert(m, calibration={"x": normal(2, 16)})
    assert any("3 of 256 values of 'w' become 0" in note and "3e-09" in note for note in done.report.notes)
    assert rows(done)["mm"].format == "fp16"


def test_a_variance_beyond_the_range_is_not_clipped():
    nodes = [
        H.make_node("Conv", ["x", "w"], ["c"], "conv"),
        H.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["y"], "bn"),
    ]
    inits = [("w", normal(4, 3, 1, 1)), ("s", np.ones(4, np.float32)), ("b", np.zeros(4, np.float32))]
    inits += [("m", np.zeros(4, np.float32)), ("v", np.full(4, 9.8e7, np.float32))]
    for opset in (9, 14, 17):
        m = model(nodes, [vi("x", T.FLOAT, [1, 3, 5, 5])], [vi("y", T.FLOAT, [1, 4, 5, 5])], inits, opset, 8)
        done = convert(m, calibration={"x": normal(1, 3, 5, 5)}, tolerance=1e-2)
        variance = next(t for t in done.model.graph.initializer if t.name == "v")
        assert N.to_array(variance).dtype == np.float32 and (N.to_array(variance) == np.float32(9.8e7)).all()
        assert rows(done)["conv"].format == "fp16"
        assert rows(done)["bn"].format == ("fp32" if opset == 9 else "fp16")


def test_squares_beyond_the_range_stay_wide_where_they_are_measured():
    nodes = [
        H.make_node("MatMul", ["x", "w"], ["h"], "mm"),
        H.make_node("Mul", ["h", "h"], ["q"], "square"),
        H.make_node("ReduceMean", ["q"], ["m"], "mean", axes=[-1]),
        H.make_node("Sqrt", ["m"], ["r"], "root"),
        H.make_node("Div", ["h", "r"], ["y"], "div"),
    ]
    m = model(nodes, [vi("x", T.FLOAT, [2, 8])], [vi("y", T.FLOAT, [2, 8])], [("w", normal(8, 8))])
    feed = {"x": normal(2, 8, scale=200)}
    done = convert(m, calibration=feed, tolerance=1e-2)
    assert rows(done)["square"].format == rows(done)["mean"].format == "fp32"
    assert rows(done)["mm"].format == "fp16"
    assert (
        np.abs(ReferenceEvaluator(done.model).run(None, feed)[0] - ReferenceEvaluator(m).run(None, feed)[0]).max()
        < 1e-2
    )


def _deep(layers=12, width=16):
    nodes, inits = [], []
    for i in range(layers):
        inits.append((f"w{i}", normal(width, width) / 4))
        nodes += [
            H.make_node("MatMul", [f"h{i}", f"w{i}"], [f"m{i}"], f"mm{i}"),
            H.make_node("Tanh", [f"m{i}"], [f"h{i + 1}"], f"tanh{i}"),
        ]
    nodes[0].input[0] = "x"
    return model(nodes, [vi("x", T.FLOAT, [4, width])], [vi(f"h{layers}", T.FLOAT, [4, width])], inits)


def test_a_tighter_tolerance_keeps_more_ops_wide_and_is_kept():
    m, feed = _deep(), {"x": normal(4, 16)}
    wide, errors = [], []
    for tolerance in (1e-2, 3e-4, 1e-4, 1e-7):
        done = convert(m, calibration=feed, tolerance=tolerance)
        wide.append(len(done.report.wide))
        errors.append(done.report.error)
        assert done.report.error <= tolerance
        got = ReferenceEvaluator(done.model).run(None, feed)[0]
        assert np.abs(got - ReferenceEvaluator(m).run(None, feed)[0]).max() <= 2 * tolerance + 1e-6
    assert wide == sorted(wide) and wide[0] == 0 < wide[1] < wide[-1] == 24
    assert len(done.report.steps) > 1


def test_measuring_the_noise_takes_far_fewer_runs_than_there_are_ops():
    done = convert(_deep(layers=60), calibration={"x": normal(4, 16)}, tolerance=5e-5)
    measured = next(step.what for step in done.report.steps if step.what.startswith("measured"))
    runs = int(measured.split()[-2])
    assert runs <= 41 < 120


def test_a_tolerance_that_a_policy_makes_impossible_is_refused():
    with pytest.raises(ConversionError, match="tolerance"):
        convert(_deep(), calibration={"x": normal(4, 16)}, tolerance=1e-9, policy={"ops": {"class:matmul": "low"}})


def test_all_calibration_samples_count(tmp_path):
    nodes = [H.make_node("MatMul", ["x", "w"], ["h"], "mm"), H.make_node("Mul", ["h", "h"], ["y"], "square")]
    m = model(nodes, [vi("x", T.FLOAT, [1, 8])], [vi("y", T.FLOAT, [1, 8])], [("w", np.eye(8, dtype=np.float32))])
    for number, scale in enumerate((1.0, 1.0, 400.0)):
        np.savez(tmp_path / f"{number}.npz", x=np.full((1, 8), scale, np.float32))
    assert rows(convert(m, calibration=tmp_path / "0.npz"))["square"].format == "fp16"
    done = convert(m, calibration=tmp_path)
    assert done.report.samples == 3
    assert rows(done)["square"].format == "fp32"


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_the_evaluator_rounds_where_the_converted_model_rounds(fmt):
    m, feed = _deep(), {"x": normal(4, 16)}
    done = convert(m, format=fmt, calibration=feed, tolerance=0.5)
    got = ReferenceEvaluator(done.model).run(None, feed)[0]
    actual = np.abs(got - ReferenceEvaluator(m).run(None, feed)[0]).max()
    # The reference evaluator sums products in 16 bits here and there, so the two agree to a rounding, not to a bit.
    assert done.report.error == pytest.approx(actual, rel=0.7)


def test_an_overflow_that_a_cpu_would_hide_is_seen():
    nodes = [H.make_node("MatMul", ["x", "w"], ["h"], "mm"), H.make_node("Mul", ["h", "h"], ["q"], "square")]
    nodes += [H.make_node("Sqrt", ["q"], ["y"], "root")]
    m = model(nodes, [vi("x", T.FLOAT, [1, 8])], [vi("y", T.FLOAT, [1, 8])], [("w", np.eye(8, dtype=np.float32))])
    feed = {"x": np.full((1, 8), 300.0, np.float32)}
    forced = convert(m, calibration=feed, policy={"ops": {"mul": "low", "sqrt": "low"}})
    assert forced.report.error == np.inf and any("the error is inf" in note for note in forced.report.notes)
    with pytest.raises(ConversionError, match="error is inf"):
        convert(m, calibration=feed, tolerance=1e-2, policy={"ops": {"mul": "low", "sqrt": "low"}})
    assert np.isfinite(convert(m, calibration=feed).report.error)


def test_an_op_whose_result_is_not_finite_though_its_inputs_are_goes_back_to_fp32():
    # 0.001 - 0.00100005 is 0 in fp16 and not in fp32, so only running it shows that the division fails.
    nodes = [
        H.make_node("MatMul", ["x", "w"], ["h"], "mm"),
        H.make_node("Sub", ["h", "z"], ["d"], "sub"),
        H.make_node("Div", ["h", "d"], ["y"], "div"),
    ]
    inputs = [vi("x", T.FLOAT, [1, 4]), vi("z", T.FLOAT, [1, 4])]
    m = model(nodes, inputs, [vi("y", T.FLOAT, [1, 4])], [("w", np.eye(4, dtype=np.float32))])
    feed = {"x": np.full((1, 4), 1.0, np.float32), "z": np.full((1, 4), 1.0001, np.float32)}
    done = convert(m, calibration=feed, tolerance=1e-2)
    assert rows(done)["sub"].format == "fp32"
    assert done.report.error <= 1e-2


def test_without_calibration_data_inputs_are_made_up_and_what_that_cannot_show_is_said(caplog):
    with caplog.at_level("WARNING", logger="castwise.onnx"):
        done = convert(_deep(), tolerance=1e-2)
    assert not done.report.calibrated and done.report.samples == 1
    assert any("made up" in note and "give calibration data" in note for note in done.report.notes)
    assert any("cannot show whether real values leave the range" in record.message for record in caplog.records)
