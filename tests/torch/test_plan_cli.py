"""`castwise plan` on a file's model, with its page and its plan file."""

from __future__ import annotations

import itertools
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from castwise._plan_graph import graph_svg
from castwise.cli import main
from castwise.cost import roofline
from castwise.graph import GraphBuilder
from castwise.hardware import get_device
from castwise.plan import Plan, solve
from castwise.policy import Policy
from castwise.risk import Risks

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
    assert page.count('class="op-box"') == len(Plan.load(out).formats)
    assert "http" not in page


class _Page(HTMLParser):
    """Where boxes are, and whether every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.boxes: list[tuple[int, int]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "rect":
            self.boxes.append((int(values["x"] or 0), int(values["y"] or 0)))
        elif tag in ("svg", "g", "path", "text", "title"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_a_graph_of_2000_ops_is_drawn_without_overlaps_in_a_page_of_a_few_megabytes() -> None:
    build = GraphBuilder("deep", framework="torch")
    stream = build.tensor("x", (4, 4), kind="input")
    while len(build) < 2000:
        number = len(build)
        left, right = (build.op(f"p{number}{s}", "matmul", [stream], [(f"t{number}{s}", (4, 4))]) for s in "lr")
        stream = build.op(f"a{number}", "add", [left, right, stream], [(f"s{number}", (4, 4))])
    graph = build.build()
    noise = np.ones(len(graph.tensors))
    costs = roofline(graph, get_device("a100"), "bf16")
    decided = solve(graph, costs, Risks.from_sensitivities(graph, "bf16", noise), Policy.preset("bfloat16"), lam=1e-9)
    drawn = graph_svg(decided)
    page = _Page()
    page.feed(drawn)
    assert len(page.boxes) == len(graph.ops) and not page.open
    assert len(set(page.boxes)) == len(page.boxes)
    assert all(
        b[1] > a[1] or b[0] >= a[0] + 118 for a, b in itertools.pairwise(sorted(page.boxes, key=lambda p: p[::-1]))
    )
    assert len(drawn) < 3_000_000


def test_a_model_that_does_not_say_its_inputs_is_told_how(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{model}:Silent", "--device", "t4"]) == 1
    assert "example_inputs" in capsys.readouterr().err
