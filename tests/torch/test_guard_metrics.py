"""What a run logs of itself."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from castwise.errors import PolicyError
from castwise.policy import Policy
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


def layers_of(fmt: str, gain: float) -> dict[str, Any]:
    seen: list[Any] = []
    trained(fmt, seen.append, steps=1, gain=gain, layers_every=1)
    return dict(seen[0])


def test_layers_are_told_on_request_by_their_own_formats_limits() -> None:
    """2e-10 at the loss is subnormal in float16, scaled by 65536; in bfloat16 it is as good as any number."""
    half, brain, full = layers_of("float16", 1e-5), layers_of("bfloat16", 1e-5), layers_of("float32", 1e-5)
    assert half["subnormal/0"] > 0.5 and half["grad_norm/0"] > 0
    assert half["activation_subnormal/0"] == half["activation_underflow/0"] == 0.0, "the forward is not the backward"
    assert brain["subnormal/0"] == brain["underflow/0"] == 0.0 < brain["grad_norm/0"]
    assert "grad_norm/0" in full and "underflow/0" not in full
    tiny = layers_of("bfloat16", 1e-20)
    assert tiny["subnormal/model"] + tiny["underflow/model"] == 1.0, "its normal numbers end at 1.2e-38"


def test_what_a_format_has_lost_already_is_counted_too() -> None:
    """Values that underflow are zero afterwards: only beside float32 can they be told from zeros that were meant."""
    for gain, share in ((1e-8, 1.0), (1.0, 0.0)):
        assert layers_of("float16", gain)["underflow/model"] == share, "the cast of what the loss sends back"


def test_only_sampled_steps_tell_of_layers() -> None:
    seen: list[Any] = []
    trained("float16", seen.append, steps=3, layers_every=2)
    assert ["overflow/0" in r for r in seen] == [True, False, True]
    assert ["numerics/stale_updates" in r for r in seen] == [True, False, True]
    assert seen[0]["numerics/casts"] > 0


def test_overflow_shares_are_those_of_the_layer_that_overflows() -> None:
    seen: list[Any] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[1].weight.mul_(1e6)  # type: ignore[operator]
    guard = {"raise_layers": False}
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.0), Policy.from_dict({"format": "float16", "guard": guard}))
    watch(amp, seen.append, layers_every=1, look_every=0)
    with amp:
        loss = model(torch.ones(2, 4)).float().mean()
    amp.step(loss)
    record = next(r for r in seen if "event" not in r)
    assert record["activation_overflow/1"] > 0.5
    assert record["activation_overflow/0"] == record["activation_overflow/2"] == 0.0


@pytest.mark.parametrize("rate,share", [(1e-8, 1.0), (1e-2, 0.0)])
def test_stale_updates_are_those_that_the_weights_own_format_does_not_see(rate: float, share: float) -> None:
    """Half a unit in the last place of 1.0 is 0.002 in bfloat16; kept in split form, nothing is lost for good."""
    seen: list[Any] = []
    model = nn.Linear(4, 4).bfloat16()
    for p in model.parameters():
        nn.init.ones_(p)
    amp = Amp(model, torch.optim.Adam(model.parameters(), rate), "bfloat16", weights="split")
    watch(amp, seen.append)
    with amp:
        loss = model(torch.rand(8, 4)).float().square().mean()
    amp.step(loss)
    assert next(r for r in seen if "event" not in r)["numerics/stale_updates"] == share


def test_samples_and_tokens_of_changing_batches_are_counted() -> None:
    seen: list[Any] = []
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), "float32")
    watcher = watch(amp, seen.append, look_every=0, every=2)
    for size in (2, 6):
        with amp:
            loss = model(torch.randn(size, 4)).square().mean()
        watcher.count(samples=size, tokens=4 * size)
        amp.step(loss)
    (record,) = seen
    assert record["perf/samples_per_second"] == pytest.approx(4.0 * record["perf/steps_per_second"])
    assert record["perf/tokens_per_second"] == pytest.approx(16.0 * record["perf/steps_per_second"])


def test_tensorboards_own_writer_takes_records_under_the_names_that_dashboards_know(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that TensorBoard is made of
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(tmp_path))  # type: ignore[no-untyped-call]
        trained("float16", writer)
        writer.close()  # type: ignore[no-untyped-call]
        read = EventAccumulator(str(tmp_path)).Reload()  # type: ignore[no-untyped-call]
        tags = read.Tags()["scalars"]
        assert {"train/loss", "train/grad_norm", "train/learning_rate", "train/loss_scale"} <= set(tags)
        assert [e.step for e in read.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
        assert "castwise/finding/text_summary" in read.Tags()["tensors"]


def test_a_loop_without_an_amp_logs_the_same_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watcher = watch(optimizer, tmp_path / "run.jsonl", model=model, scaler=scaler, samples=8)
    norms = []
    for step in range(4):
        x = torch.randn(8, 4) * (math.inf if step == 2 else 1.0)
        loss = model(x).square().mean()
        watcher.loss(loss)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    watcher.close()
    records = [r for r in read_jsonl(tmp_path / "run.jsonl")[0] if "event" not in r]
    assert [r["step"] for r in records] == [1, 2, 3], "a step that the scaler skips is none"
    assert [r["train/loss_scale"] for r in records] == [1024.0, 1024.0, 512.0]
    assert [r["train/grad_norm"] for r in records] == pytest.approx([norms[0] / 1024, norms[1] / 1024, norms[3] / 512])
    assert all(r["perf/samples_per_second"] > 0 for r in records)


@pytest.mark.parametrize("options", [{"every": 0}, {"look_every": -1}, {"samples": -1}, {"model": nn.Linear(1, 1)}])
def test_wrong_options_are_named_before_a_file_is_made(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="watch:"):
        trained("float32", **options)
    with pytest.raises(PolicyError, match="Amp"):
        watch(nn.Linear(1, 1), tmp_path / "run.jsonl")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="layers_every"):
        watch(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), tmp_path / "run.jsonl", layers_every=1)
    assert not (tmp_path / "run.jsonl").exists()


def test_only_the_steps_that_are_asked_for_are_logged() -> None:
    seen: list[Any] = []
    trained("float32", seen.append, steps=3, every=2)
    assert [r["step"] for r in seen if "event" not in r] == [2]


def trained_once(watched: bool, compiled: bool) -> tuple[list[Any], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), "float16")
    seen: list[Any] = []
    if watched:
        watch(amp, seen.append, layers_every=2)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for _ in range(3):
        with amp:
            loss = call(torch.randn(8, 4)).float().square().mean()
        amp.step(loss)
    return seen, [p.detach().clone() for p in model.parameters()]


def test_a_close_look_changes_nothing_of_what_is_trained() -> None:
    (_, alone), (seen, watched) = trained_once(False, False), trained_once(True, False)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert seen[0]["activation_subnormal/0"] >= 0.0


def test_a_compiled_model_is_looked_at_too() -> None:
    seen, _ = trained_once(True, True)
    steps = [record for record in seen if "event" not in record]
    assert ["activation_subnormal/0" in record for record in steps] == [True, False, True]


def test_a_look_that_an_exception_cuts_short_leaves_nothing_behind() -> None:
    model = nn.Linear(4, 1)
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), "float16")
    watch(amp)
    with pytest.raises(RuntimeError), amp:
        model(torch.randn(2, 3))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not model._forward_hooks and not model._forward_pre_hooks
