"""What runtimes fuse into one kernel, they still fuse after a conversion."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from castwise.onnx import convert

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
_FUSED = ("Attention", "LayerNormalization", "SkipLayerNormalization", "Gelu", "BiasGelu")
_HEADS, _WIDTH = 4, 32


class _Layer(nn.Module):
    """Attention as BERT writes it, which fuses into one node."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.first, self.second = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x, mask):
        batch, length, width = x.shape

        def heads(y):
            return y.view(batch, length, _HEADS, width // _HEADS).permute(0, 2, 1, 3)

        scores = heads(self.q(x)) @ heads(self.k(x)).transpose(-1, -2) / (width // _HEADS) ** 0.5 + mask
        mixed = (scores.softmax(-1) @ heads(self.v(x))).permute(0, 2, 1, 3).contiguous().view(batch, length, width)
        x = self.first(self.out(mixed) + x)
        return self.second(self.down(nn.functional.gelu(self.up(x))) + x)


class _Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(), _Layer()])

    def forward(self, x, mask):
        hidden = (1.0 - mask[:, None, None, :]) * torch.finfo(torch.float32).min
        for layer in self.layers:
            x = layer(x, hidden)
        return x


def _exported(opset: int, scale: float, path):
    torch.manual_seed(0)
    mask = torch.ones(2, 16)
    mask[0, 10:] = 0
    x = torch.randn(2, 16, _WIDTH) * scale
    with torch.no_grad():
        torch.onnx.export(_Bert().eval(), (x, mask), path, input_names=["x", "mask"], opset_version=opset, dynamo=False)
    return onnx.load(path), {"x": x.numpy(), "mask": mask.numpy()}


def _fused(model: onnx.ModelProto, path) -> dict[str, int]:
    from onnxruntime.transformers.optimizer import optimize_model

    onnx.save(model, path)
    optimized = optimize_model(str(path), model_type="bert", num_heads=_HEADS, hidden_size=_WIDTH, opt_level=0)
    found = Counter(node.op_type for node in optimized.model.graph.node)
    return {name: found[name] for name in _FUSED}


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
@pytest.mark.parametrize("opset", [14, 17])
def test_attention_normalisation_and_gelu_fuse_as_in_fp32(opset, fmt, tmp_path):
    model, feed = _exported(opset, 1.0, tmp_path / "m.onnx")
    before = _fused(model, tmp_path / "a.onnx")
    assert before["Attention"] == 2 and before["SkipLayerNormalization"] == 4 and before["BiasGelu"] == 2
    done = convert(model, format=fmt, calibration=feed, tolerance=5e-2)
    assert done.report.products_low == done.report.products
    assert _fused(done.model, tmp_path / "b.onnx") == before


def test_a_normalisation_whose_squares_overflow_stays_fp32_as_a_whole_and_still_fuses(tmp_path):
    model, feed = _exported(14, 400.0, tmp_path / "m.onnx")
    before = _fused(model, tmp_path / "a.onnx")
    done = convert(model, calibration=feed, tolerance=2e-2)
    assert any("fuse" in row.reason for row in done.report.wide)
    after = _fused(done.model, tmp_path / "b.onnx")
    assert after["SkipLayerNormalization"] + after["LayerNormalization"] == before["SkipLayerNormalization"]
    assert after["BiasGelu"] == before["BiasGelu"]


def test_masks_that_large_scores_would_show_through_are_left_alone(tmp_path):
    model, feed = _exported(14, 400.0, tmp_path / "m.onnx")
    feed = {**feed, "x": feed["x"] * np.float32(2)}
    report = convert(model, calibration=feed, tolerance=2e-2).report
    assert report.error <= 2e-2
    assert any("mask constants were left as they are" in note for note in report.notes)
    assert not any("became" in note for note in report.notes)
