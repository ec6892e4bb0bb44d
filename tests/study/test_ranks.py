"""A study on several processes is the study of the same training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from castwise.cli import main
from castwise.errors import StudyError
from castwise.study import study
from castwise.study._torch_ranks import part_of

TASK = """
import torch
from torch import nn

class Slope:
    metric, direction, steps, seeds, threads = "error", "lower", 6, 1, 1

    def model(self, seed):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        model.scale = 2.0
        return model

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def batches(self, seed):
        draws = torch.Generator().manual_seed(seed)
        while True:  # 9 samples, which two ranks cannot divide evenly
            yield torch.randn(9, 8, generator=draws)

    def loss(self, model, x):
        return (model(x).float() * model.scale - x.sum(1, keepdim=True)).square().mean()

    def evaluate(self, model):
        return float(self.loss(model, torch.randn(64, 8, generator=torch.Generator().manual_seed(7))))
"""


def curve(results: dict[str, Any], arm: str) -> list[float]:
    """The losses and metrics of the one run of an arm."""
    found: dict[str, list[list[float]]] = results["arms"][arm]
    return [*found["loss"][0], *found["metric"][0]]


def test_a_study_on_two_processes_has_the_losses_of_one(tmp_path: Path) -> None:
    (tmp_path / "slope.py").write_text(TASK, encoding="utf-8")
    task = f"{tmp_path / 'slope.py'}:Slope"
    alone = study(task, precisions=["bf16"], out=tmp_path / "one", report=False)
    words = ["study", task, "--precisions", "bf16", "--nproc", "2", "--out", str(tmp_path / "two"), "--quiet"]
    assert main(words) == 0
    shared = json.loads((tmp_path / "two" / "results.json").read_text(encoding="utf-8"))
    for arm, tolerance in (("fp32", 1e-5), ("bf16", 2e-2)):
        assert all(
            math.isclose(a, b, rel_tol=tolerance) for a, b in zip(curve(shared, arm), curve(alone, arm), strict=True)
        )
    assert shared["settings"]["ranks"] == 2 and len(curve(shared, "fp32")) == 12


def test_parts_of_a_batch_make_up_the_batch_and_its_mean() -> None:
    batch = {"x": torch.arange(9.0), "weights": torch.ones(3), "pair": [torch.arange(9), "kept"]}
    parts = [part_of(batch, rank, 4, "task") for rank in range(4)]
    assert torch.equal(torch.cat([part["x"] for part, _ in parts]), batch["x"])
    assert all(len(part["weights"]) == 3 and part["pair"][1] == "kept" for part, _ in parts)
    mean = sum(float(part["x"].mean()) * share for part, share in parts) / 4
    assert math.isclose(mean, 4.0)
    with pytest.raises(StudyError, match="a batch of 3 cannot be divided among 4 ranks"):
        part_of(torch.ones(3), 0, 4, "task")


def test_a_wrong_number_of_processes_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "digits", "--nproc", "0", "--out", str(tmp_path / "out")]) == 1
    assert "--nproc is 0" in capsys.readouterr().err
