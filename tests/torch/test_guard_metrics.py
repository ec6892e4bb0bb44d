"""What a run logs of itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from castwise.errors import PolicyError
from castwise.torch import Amp, watch
from castwise.watch import read_jsonl


def trained(fmt: str, *targets: Any, steps: int = 6, gain: float = 1.0, **options: Any) -> Amp:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.01), fmt)
    watch(amp, *targets, **options)
    for step in range(steps):
        x = torch.randn(8, 4) * (math.nan if step == 3 else 1.0)
        with amp:
            loss = (model(x).float() * gain).square().mean()
        amp.step(loss)
    return amp


def test_steps_skips_and_events_tell_the_story(tmp_path: Path) -> None:
    trained("float16", tmp_path / "run.jsonl", samples=8)
    records, _ = read_jsonl(tmp_path / "run.jsonl")
    steps = [r for r in records if "event" not in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert [r["train/skipped_steps"] for r in steps] == [0, 0, 0, 1, 1, 1]
    assert math.isnan(steps[3]["train/loss"]) and all(math.isfinite(steps[i]["train/loss"]) for i in (0, 1, 2, 4, 5))
    assert steps[2]["train/loss_scale"] == 2 * steps[3]["train/loss_scale"] == 65536.0
    assert all(r["perf/samples_per_second"] > 0 and r["memory/peak_bytes"] >= 0 for r in steps)
    finding = next(r for r in records if r.get("event") == "finding")
    assert finding["kind"] == "bad input data" and finding["source"] == "input 0"


def test_the_gradient_norm_is_the_true_one_in_every_format() -> None:
    norms = {}
    for fmt in ("float32", "float16", "bfloat16"):
        seen: list[Any] = []
        trained(fmt, seen.append, steps=1)
        norms[fmt] = seen[0]["train/grad_norm"]
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.01)
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.03)


def test_layers_are_told_on_request_and_bfloat16_is_not_judged_by_float16s_limits() -> None:
    seen: list[Any] = []
    trained("float16", seen.append, steps=2, gain=1e-5, layers_every=2)
    assert seen[0]["subnormal/0"] + seen[0]["underflow/0"] > 0.5 and seen[0]["grad_norm/0"] > 0
    assert "underflow/0" not in seen[1]
    brain: list[Any] = []
    trained("bfloat16", brain.append, steps=1, gain=1e-5, layers_every=1)
    assert "grad_norm/0" in brain[0] and "underflow/0" not in brain[0]


def test_only_the_steps_that_are_asked_for_are_logged() -> None:
    seen: list[Any] = []
    trained("float32", seen.append, steps=3, every=2)
    assert [r["step"] for r in seen if "event" not in r] == [2]
    with pytest.raises(PolicyError):
        trained("float32", seen.append, every=0)
