"""Which tensor makes how much noise: told from few runs, and right where it is known."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as H
from onnx import numpy_helper as N

from castwise.onnx import convert
from castwise.onnx._unmix import contributions


def test_contributions_to_many_independent_outputs_are_told_apart_from_signs_alone():
    rng = np.random.default_rng(0)
    amounts = 10.0 ** rng.uniform(-4, 0, 200)
    columns = rng.standard_normal((200, 4000)) * np.sqrt(amounts / 4000)[:, None]
    runs = []

    def run(dials):
        runs.append(dials)
        return dials @ columns

    found, _ = contributions(run, 200, 48, 8)
    assert len(runs) == 56
    loud = np.argsort(-amounts)[:20]
    assert np.allclose(found[loud], amounts[loud], rtol=0.5)


def test_tensors_whose_noise_moves_one_output_are_told_apart_by_single_runs():
    weights = np.array([0.01] * 120)
    weights[[5, 77]] = 3.0, -2.0
    found, alone = contributions(lambda dials: np.array([dials @ weights]), 120, 16, 16)
    assert alone[5] and found[5] == pytest.approx(9.0)
    assert alone[77] and found[77] == pytest.approx(4.0)


def test_a_disturbance_that_is_not_finite_is_an_error():
    with pytest.raises(RuntimeError, match="not finite"):
        contributions(lambda dials: np.array([np.inf]), 100, 8, 8)


def _one_loud_product(branch: bool) -> onnx.ModelProto:
    """Twelve products; the sixth works on a small difference of large numbers, which 16 bits lose."""
    rng = np.random.default_rng(1)
    nodes, inits, last = [], [], "x"
    for i in range(12):
        inits.append(N.from_array((rng.standard_normal((16, 16)) / 4).astype(np.float32), f"w{i}"))
        nodes.append(H.make_node("MatMul", [last, f"w{i}"], [f"m{i}"], f"mm{i}"))
        last = f"m{i}"
        if i == 5:
            inits.append(N.from_array(np.float32(100.0), "big"))
            nodes += [
                H.make_node("Add", [last, "big"], ["up"], "up"),
                H.make_node("Sub", ["up", "big"], ["back"], "back"),
            ]
            last = "back"
        nodes.append(H.make_node("Tanh", [last], [f"t{i}"], f"tanh{i}"))
        last = f"t{i}"
    info = H.make_tensor_value_info
    out = info(last, T.FLOAT, [4, 16])
    given = [info("x", T.FLOAT, [4, 16])]
    if branch:
        bodies = [H.make_graph(nodes, "a", [], [out], inits), H.make_graph(nodes, "b", [], [out], inits)]
        nodes = [H.make_node("If", ["flag"], ["y"], "if", then_branch=bodies[0], else_branch=bodies[1])]
        out, inits = info("y", T.FLOAT, [4, 16]), []
        given.append(info("flag", T.BOOL, []))
    model = H.make_model(H.make_graph(nodes, "g", given, [out], inits), opset_imports=[H.make_opsetid("", 17)])
    model.ir_version = 8
    return model


@pytest.mark.parametrize("branch", [False, True])
def test_only_the_loud_part_goes_back_to_fp32(branch):
    feed = {"x": np.random.default_rng(2).standard_normal((4, 16)).astype(np.float32)}
    if branch:
        feed["flag"] = np.array(True)
    model = _one_loud_product(branch)
    loose = convert(model, calibration=feed, tolerance=0.5).report
    assert not loose.wide
    report = convert(model, calibration=feed, tolerance=loose.error / 8).report
    assert report.error <= loose.error / 8
    wide = {row.node for row in report.wide}
    assert {"up", "back"} & {name.split("_")[0] for name in wide}
    assert len(wide) <= 6
    assert report.products_low >= report.products - 2
