"""A planned torch model as ONNX: the same ops in the same formats, and the same numbers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import castwise.torch as ct  # noqa: E402
from castwise.errors import CastwiseError  # noqa: E402
from castwise.onnx import export  # noqa: E402

nn = torch.nn
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class _Block(nn.Module):
    def __init__(self, causal: bool, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.heads, self.causal = nn.LayerNorm(width), nn.LayerNorm(width), heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.second(x))


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(50, 32), nn.Sequential(_Block(True), _Block(True))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens))))


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, activation="gelu")
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.body(x).mean(1)).log_softmax(-1)


def _convolutions() -> nn.Module:
    def layer(inputs, outputs):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    return nn.Sequential(
        layer(3, 64), nn.MaxPool2d(2), layer(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4)
    )


def _case(name: str):
    torch.manual_seed(0)
    if name == "language":
        return _Language().eval(), torch.randint(0, 50, (2, 16))
    if name == "convolutions":
        return _convolutions().eval(), torch.randn(8, 3, 48, 48)
    return _Encoder().eval(), torch.randn(48, 64, 64)


def _narrow_products(model: onnx.ModelProto, elem: int) -> tuple[int, int]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {t.name: t.data_type for t in graph.initializer}
    types |= {i.name: i.type.tensor_type.elem_type for i in [*graph.input, *graph.value_info, *graph.output]}
    nodes = [node for node in graph.node if node.op_type in ("MatMul", "Gemm", "Conv")]
    return sum(types[node.input[0]] == elem for node in nodes), len(nodes)


@pytest.mark.parametrize(
    ("name", "fmt"), [("language", "bfloat16"), ("convolutions", "bfloat16"), ("encoder", "float16")]
)
def test_a_planned_model_becomes_onnx_with_the_formats_of_its_plan(name, fmt, tmp_path):
    model, x = _case(name)
    plan = ct.plan(model, x, policy=fmt, device="h100", budget=3e-2)
    assert plan.labels.any()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    done = export(model, x, tmp_path / "m.onnx", plan=plan)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    planned = plan.formats
    products = [op.id for op in plan.problem.graph.ops if op.name in ("matmul", "linear", "convolution", "conv")]
    assert set(products) <= set(done.formats)
    assert len(done.formats) >= 0.7 * len(planned)
    assert all(planned[op] == found for op, found in done.formats.items())
    written = onnx.load(done.path)
    onnx.checker.check_model(written, full_check=True)
    low, total = _narrow_products(
        written, int(onnx.TensorProto.BFLOAT16 if fmt == "bfloat16" else onnx.TensorProto.FLOAT16)
    )
    assert low > 0 and (low == total or any(planned[op] == "fp32" for op in products))
    assert done.error <= max(4 * done.torch_error, 2 ** (-6 if fmt == "bfloat16" else -9))


def test_a_layer_that_a_policy_keeps_in_fp32_is_fp32_in_onnx(tmp_path):
    model, x = _case("language")
    policy = {"format": "float16", "layers": [{"match": "head", "format": "float32"}]}
    plan = ct.plan(model, x, policy=ct_policy(policy), device="h100")
    done = export(ct.apply(model, plan), x, tmp_path / "m.onnx")
    heads = [op.id for op in plan.problem.graph.ops if op.layer == "head"]
    assert heads and all(done.formats[op] == "fp32" for op in heads if op in done.formats)


def ct_policy(data):
    from castwise.policy import Policy

    return Policy.from_dict(data)


def test_runtimes_load_what_was_exported_and_sizes_may_vary_where_asked(tmp_path, run):
    model, x = _case("language")
    plan = ct.plan(model, x, policy="float16", device="h100")
    dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    done = export(model, x, tmp_path / "m.onnx", plan=plan, input_names=["tokens"], dynamic_shapes=(dims,))
    longer = torch.randint(0, 50, (3, 9))
    got, _ = run(onnx.load(done.path), {"tokens": longer.numpy()})
    assert np.abs(got[0] - model(longer).detach().numpy()).max() < 2e-2


class _Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -x


def test_a_model_with_python_between_its_graphs_is_refused_with_a_way_out(tmp_path):
    model, x = _Branching(), torch.ones(2, 8)
    plan = ct.plan(model, x, policy="bfloat16", device="h100")
    with pytest.raises(CastwiseError, match=r"2 graphs.*control flow depends on data.*torch.where or torch.cond"):
        export(model, x, tmp_path / "m.onnx", plan=plan)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_plan_and_a_tolerance_that_is_missed_are_refused_and_nothing_is_written(tmp_path):
    model, x = _case("convolutions")
    with pytest.raises(CastwiseError, match="no plan"):
        export(model, x, tmp_path / "m.onnx")
    plan = ct.plan(model, x, policy="bfloat16", device="h100")
    with pytest.raises(CastwiseError, match="is off by"):
        export(model, x, tmp_path / "m.onnx", plan=plan, tolerance=1e-9)
    assert not list(tmp_path.iterdir())
