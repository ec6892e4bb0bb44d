"""A step in two precisions: what each layer adds, and from what."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from castwise.cli import main
from castwise.errors import PolicyError
from castwise.policy import LayerRule, Policy
from castwise.torch import compare

from .faulty import Steep


def model_and_inputs() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(32, 8), nn.Linear(8, 4)
    )
    return model, torch.randn(8, 16)


def test_float32_beside_itself_differs_nowhere() -> None:
    model, x = model_and_inputs()
    found = compare(model, x, "float32")
    assert [d.layer for d in found.layers] == ["0", "1", "2", "3", "4", "5"]
    assert all(d.total == d.own == d.casts == d.overflow == d.underflow == 0.0 for d in found.layers)
    assert found.first_divergence is None and "no layer diverges" in str(found)


@pytest.mark.parametrize("fmt,eps", [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_errors_are_of_the_size_of_the_formats_rounding_and_come_from_casts(fmt: str, eps: float) -> None:
    model, x = model_and_inputs()
    found = compare(model, x, fmt)
    first = found.layers[0]
    assert eps / 8 < first.own < 2 * eps and first.total == first.own
    assert first.casts > first.accumulation and first.rounding > 0
    assert found.layers[-1].total > found.layers[-1].own > 0
    assert all(0 < d.backward < 30 * eps for d in found.layers)


def test_a_layer_that_overflows_is_the_first_to_diverge() -> None:
    model, x = model_and_inputs()
    with torch.no_grad():
        model.get_parameter("4.weight").mul_(1e6)
    found = compare(model, x, "float16")
    assert found.first_divergence is not None and found.first_divergence.layer == "4"
    assert found.first_divergence.overflow > 0.5
    assert compare(model, x, "bfloat16").first_divergence is None
    raised = Policy(format="float16", layers=[LayerRule("4", format="float32"), LayerRule("5", format="float32")])
    assert compare(model, x, raised).first_divergence is None


def test_a_gradient_that_overflows_is_told_at_the_layer_that_receives_it() -> None:
    class Cliff(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Steep.apply(x, 1e10)  # type: ignore[no-any-return,no-untyped-call]

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Cliff(), nn.Linear(4, 4)), torch.randn(8, 4)
    found = compare(model, x, "float16", scale=1.0)
    assert found.first_divergence is None
    assert found.first_backward_divergence is not None and found.first_backward_divergence.layer == "1"
    assert math.isinf(found.first_backward_divergence.backward)
    assert "gradients: first to diverge at 1" in found.table() and "gradients: first to diverge at 1" in found.page()
    assert compare(model, x, "bfloat16").first_backward_divergence is None


def test_gradients_are_compared_at_the_scale_that_training_settles_at_and_without_one() -> None:
    model, x = model_and_inputs()
    small = Policy.from_dict({"format": "float16", "scaling": {"init_scale": 2.0**20, "max_scale": 2.0**20}})
    found = compare(model, x, small, loss=lambda y: y.float().square().mean() * 1e-6)
    assert found.scale == 2.0**20
    assert all(d.backward < 0.02 and d.vanished == 0.0 for d in found.layers)
    assert all(d.unscaled > 0.1 for d in found.layers)  # of such gradients float16 keeps few bits, or none
    told = found.table()
    assert "gradients: none diverges at a loss scale of 1.04858e+06; without one, they diverge first at 5" in told
    assert "unscaled" in told and "unscaled" in found.page() and found.title in found.page().partition("</h1>")[0]
    steep = compare(model, x, "float16", loss=lambda y: y.float().square().mean() * 64.0)
    assert steep.scale < 2.0**16 and all(d.backward < 0.02 for d in steep.layers)
    fixed = compare(model, x, small, scale=1.0, loss=lambda y: y.float().square().mean() * 1e-6)
    assert fixed.scale == 1.0 and [d.backward for d in fixed.layers] == [d.unscaled for d in found.layers]
    assert "unscaled" not in fixed.table() and "loss scale" not in fixed.table()
    assert compare(model, x, "bfloat16").scale == 1.0
    with pytest.raises(PolicyError, match=r"scale: 0\.0"):
        compare(model, x, "float16", scale=0.0)


def test_a_gradient_that_overflows_at_every_scale_is_told_at_the_lowest() -> None:
    class Cliff(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Steep.apply(x, 1e10)  # type: ignore[no-any-return,no-untyped-call]

    found = compare(nn.Sequential(nn.Linear(4, 4), Cliff(), nn.Linear(4, 4)), torch.randn(8, 4), "float16")
    assert found.scale == 1.0 and found.first_backward_divergence is not None
    assert found.first_backward_divergence.layer == "0"


def test_a_model_that_writes_into_its_input_is_given_the_same_one_each_time() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2.0)

    x = torch.ones(2, 4)
    found = compare(nn.Sequential(Doubled(), nn.Linear(4, 4)), x, "float16")
    assert found.layers[0].total == 0.0 and bool((x == 1.0).all())


def test_a_mask_of_infinities_is_no_difference() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(x < 0, -math.inf)

    model, x = nn.Sequential(nn.Linear(4, 4), Masked(), nn.Softmax(-1), nn.Linear(4, 4)), torch.randn(8, 4).abs() + 1
    found = compare(model, x, "float16", loss=lambda y: y.float().nan_to_num().sum())
    assert found.layers[1].total < 0.1 and found.layers[1].overflow == 0.0


def test_it_leaves_the_model_as_it_was() -> None:
    model, x = model_and_inputs()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    compare(model, x, "bfloat16")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_columns_sort_and_the_page_says_what_diverges() -> None:
    model, x = model_and_inputs()
    found = compare(model, x, "bfloat16")
    totals = [d.total for d in found.ordered("total")]
    assert totals == sorted(totals, reverse=True)
    with pytest.raises(PolicyError, match="sideways"):
        found.ordered("sideways")
    assert found.page().count("<tr") == len(found.layers) + 1


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(PolicyError, match="nothing to compare"):
        compare(_Integers(), torch.ones(2), "bfloat16")


class _Integers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.long()


def test_a_shared_layer_has_a_line_for_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))  # type: ignore[no-any-return]

    found = compare(Twice(), {"x": torch.randn(2, 4)}, "bfloat16")
    assert [d.layer for d in found.layers] == ["layer", "layer#2"]
    assert not math.isnan(found.layers[0].backward)


def test_what_a_block_computes_after_its_layers_is_told_as_the_blocks() -> None:
    class Gated(nn.Module):
        def __init__(self, gain: float) -> None:
            super().__init__()
            self.up, self.gate, self.gain = nn.Linear(4, 8), nn.Linear(4, 8), gain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x) * self.gain * self.gate(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Gated(1e6), nn.Linear(8, 4))
    found = compare(model, torch.randn(4, 4), "float16", loss=lambda y: (y.float() * 1e-6).square().mean())
    assert [d.layer for d in found.layers] == ["0", "1.up", "1.gate", "1", "2"]
    assert found.first_divergence is not None and found.first_divergence.layer == "1"
    assert found.first_divergence.overflow > 0 and math.isnan(found.first_divergence.own)
    assert not math.isnan(found.ordered("own")[0].own), "what was not measured comes last"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_compiled_torchscript_is_a_layer() -> None:
    found = compare(nn.Sequential(torch.jit.script(nn.ReLU()), nn.Linear(4, 4)), torch.randn(2, 4), "bfloat16")
    assert [d.layer for d in found.layers] == ["0", "1"]


def test_the_command_compares_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task.py").write_text(TASK)
    assert main(["compare", f"{tmp_path / 'task.py'}:Task", "--precisions", "fp32,fp16", "--html", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "float32 beside float16, its gradients at a loss scale of " in told and "no layer diverges" in told
    assert main(["compare", f"{tmp_path / 'task.py'}:Task", "--precisions", "fp32,fp16,bf16", "--scale", "8"]) == 0
    told = capsys.readouterr().out
    assert "a loss scale of 8" in told and "float32 beside bfloat16: relative errors" in told
    assert (tmp_path / "compare-fp16.html").exists()
    assert main(["compare", f"{tmp_path / 'task.py'}:Task", "--precisions", "fp32"]) == 1


TASK = """
import torch
from torch import nn

class Task:
    def model(self, seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.1)
    def batches(self, seed):
        return [torch.randn(4, 4)]
    def loss(self, model, batch):
        return model(batch).float().square().mean()
    def evaluate(self, model):
        return 0.0
"""


def test_a_task_whose_model_is_no_module_of_torch_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.py").write_text(
        TASK.replace("return nn.Sequential(", "return dict(parts=(").replace("Linear(8, 1))", "Linear(8, 1)))")
    )
    assert main(["compare", f"{tmp_path / 'task.py'}:Task", "--precisions", "fp32,fp16"]) == 1
    told = capsys.readouterr().err
    assert "is a dict" in told and "castwise study" in told
