"""`castwise plan` on a file's model, with its page and its plan file."""

from __future__ import annotations

from pathlib import Path

import pytest

from castwise.cli import main
from castwise.plan import Plan

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

    def example_inputs(self):
        return (torch.randn(512, 1024),)

class Silent(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return path


def test_a_models_plan_is_shown_and_written(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = model.with_name("plan.json")
    assert main(["plan", f"{model}:Net", "--device", "t4", "--inference", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "NVIDIA T4" in shown and "X: this plan" in shown and "verified on" in shown
    assert Plan.load(out).format_of("linear") == "fp16"
    page = out.with_suffix(".html").read_text()
    assert page.count('class="op"') == len(Plan.load(out).formats) + 2  # and the legend's
    assert "http" not in page


def test_a_model_that_does_not_say_its_inputs_is_told_how(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{model}:Silent", "--device", "t4"]) == 1
    assert "example_inputs" in capsys.readouterr().err
