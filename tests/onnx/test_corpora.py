"""Models not made for these tests: a sample of ONNX's node tests and of its real topologies, and torch exports."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T

from castwise.onnx import convert

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
_EVERY = 41
_DRAWS = ("random", "bernoulli", "multinomial", "dropout")


def _node_tests():
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        cases = [case for case in collect_testcases() if case.model is not None and case.data_sets]
    return [case for case in cases if any(i.type.tensor_type.elem_type == T.FLOAT for i in case.model.graph.input)]


def test_a_sample_of_onnx_own_node_tests_converts_strictly(run, distance):
    failed, tried, products, low = [], 0, 0, 0
    for case in _node_tests()[::_EVERY]:
        inputs, _ = case.data_sets[0]
        feed = {info.name: value for info, value in zip(case.model.graph.input, inputs, strict=False)}
        try:
            wanted, types = run(case.model, feed)
        except Exception:
            continue  # not a model that this runtime runs
        tried += 1
        done = convert(case.model, calibration=feed, tolerance=2e-2)
        onnx.checker.check_model(done.model, full_check=True)
        got, got_types = run(done.model, feed)
        close = distance(wanted, got) <= 2e-2 or any(word in case.name for word in _DRAWS)
        if got_types != types or not close:
            failed.append(case.name)
        products, low = products + done.report.products, low + done.report.products_low
    assert tried > 20 and not failed
    assert low >= 0.95 * products > 0


@pytest.mark.parametrize("name", ["light_shufflenet", "light_densenet121"])
def test_a_real_topology_becomes_narrow_with_two_casts_in_seconds(name, run, distance):
    path = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"{name}.onnx"
    if not path.is_file():
        pytest.skip("this release of onnx does not ship its light models")
    model = onnx.load(path)
    held = {tensor.name for tensor in model.graph.initializer}
    info = next(info for info in model.graph.input if info.name not in held)
    shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
    feed = {info.name: np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)}
    done = convert(path, calibration=feed, tolerance=2e-2)
    assert done.report.products_low == done.report.products > 0 and done.report.casts == 2
    assert distance(run(model, feed)[0], run(done.model, feed)[0]) < 2e-2


torch = pytest.importorskip("torch")
nn = torch.nn


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        scores = scores + (1 - mask[:, None, None, :]) * torch.finfo(torch.float32).min
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.feed(self.second(x))


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(64, 4) for _ in range(4)])

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x


def _convolutions():
    def layer(inputs, outputs):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
    return nn.Sequential(
        layer(3, 16), nn.MaxPool2d(2), layer(16, 32), layer(32, 32), up, layer(32, 16), nn.Conv2d(16, 3, 1)
    )


def _exported(module, arguments, names, opset):
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), arguments, file, input_names=names, opset_version=opset, dynamo=False)
    return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize(("fmt", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_a_masked_transformer_is_narrow_with_at_most_four_casts(opset, fmt, tolerance):
    torch.manual_seed(0)
    mask = torch.ones(2, 32)
    mask[0, 20:] = 0
    x = torch.randn(2, 32, 64)
    model = _exported(_Transformer(), (x, mask), ["x", "mask"], opset)
    report = convert(model, format=fmt, calibration={"x": x.numpy(), "mask": mask.numpy()}, tolerance=tolerance).report
    assert report.products_low == report.products == 24
    assert report.casts <= 4 and report.error <= tolerance


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_a_convolutional_network_with_a_resize_is_narrow_with_at_most_three_casts(fmt):
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32)
    model = _exported(_convolutions(), (x,), ["x"], 17)
    report = convert(model, format=fmt, calibration={"x": x.numpy()}, tolerance=2e-2).report
    assert report.products_low == report.products == 5
    assert report.casts <= 3
