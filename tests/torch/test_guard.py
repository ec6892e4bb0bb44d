"""The guard at work: layers raised and given back, scales lowered, runs resumed, losses that end where float32's do."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from castwise.cli import main
from castwise.errors import CastwiseError, NonFiniteError, PolicyError
from castwise.policy import Policy
from castwise.torch import Amp, _scale, watch
from castwise.watch import read_jsonl

NAN = float("nan")


class FeedForward(nn.Module):
    """T5 1.1's gated feed-forward, whose products outgrow float16 in large checkpoints."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        with torch.no_grad():
            self.gate.weight.mul_(gain)
            self.up.weight.mul_(gain)
            self.down.weight.div_(gain * gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, width: int, gain: float, crossed: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True) if crossed else None
        self.ff = FeedForward(width, gain)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory, memory, need_weights=False)[0]
        return x + self.ff(self.norms[2](x))


class EncoderDecoder(nn.Module):
    """T5-like: the feed-forward of one encoder layer and one decoder layer are beyond float16."""

    def __init__(self, gain: float = 2000.0, width: int = 16, words: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.encoder = nn.ModuleList(Layer(width, gain if i == 1 else 1.0, False) for i in range(2))
        self.decoder = nn.ModuleList(Layer(width, gain if i == 0 else 1.0, True) for i in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, x = self.words(source), self.words(target)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.norms[0](memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(self.norms[1](x))  # type: ignore[no-any-return]


GUILTY = ("encoder.1.ff", "decoder.0.ff")


def policy(fmt: str, **guard: Any) -> Policy:
    return Policy.from_dict({"format": fmt, "guard": guard})


def train(amp: Amp, steps: int, seed: int = 1) -> list[float]:
    """Copying words backwards; the loss of each step."""
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        source = torch.randint(0, 12, (8, 6), generator=data)
        with amp:
            logits = amp.model(source, source.flip(1))
            loss = functional.cross_entropy(logits.float().flatten(0, 1), source.flatten())
        amp.step(loss, clip_norm=1.0)
        losses.append(loss.item())
    return losses


def started(fmt: str, seed: int = 0, **guard: Any) -> Amp:
    torch.manual_seed(seed)
    model = EncoderDecoder()
    return Amp(model, torch.optim.AdamW(model.parameters(), 3e-3), policy(fmt, **guard))


# ---- raising ---------------------------------------------------------------------------------------------------------


def test_a_model_that_overflows_float16_trains_to_float32s_loss_with_only_the_guilty_layers_raised() -> None:
    steps, last = 50, 10
    wide = [sum(train(started("float32", seed), steps)[-last:]) / last for seed in (0, 1, 2)]
    amp = started("float16", 0)
    narrow = sum(train(amp, steps)[-last:]) / last
    noise = max(wide) - min(wide)
    assert abs(narrow - wide[0]) <= max(noise, 0.05 * wide[0])
    raised = {rule.match for rule in amp.policy.layers}
    assert raised and all(match.startswith(GUILTY) for match in raised), raised
    assert {next(g for g in GUILTY if match.startswith(g)) for match in raised} == set(GUILTY)
    assert amp.scale_state.skipped <= 2 and amp.loss_scale == 2.0**16, "the scale was not to blame"
    prices = [event.data for event in amp.events if event.name == "raise"]
    assert prices and all("bytes" in p and "milliseconds" in p for p in prices)


def test_without_the_guard_it_does_not_train() -> None:
    with pytest.raises(CastwiseError, match="stalled"):
        train(started("float16", enabled=False), 40)


def test_the_next_run_starts_with_what_this_one_found(tmp_path: Path) -> None:
    amp = started("float16")
    train(amp, 3)
    file = amp.save_policy(tmp_path / "policy.toml")
    assert "guard" in file.read_text().splitlines()[0]
    again = Policy.load(file)
    assert again == amp.policy and again.layers
    torch.manual_seed(0)
    model = EncoderDecoder()
    fresh = Amp(model, torch.optim.AdamW(model.parameters(), 3e-3), again)
    train(fresh, 5)
    assert fresh.scale_state.skipped == 0 and not fresh.events


def test_a_layer_is_given_back_once_it_is_well_and_later_each_time_it_is_not() -> None:
    amp = started("float16", give_back_after=4)
    train(amp, 14)
    postponed = [event.step for event in amp.events if event.name == "postpone"]
    assert postponed and postponed[0] >= 4
    assert all(later - earlier >= 8 for earlier, later in itertools.pairwise(sorted(set(postponed))))
    assert amp.policy.layers
    for name in GUILTY:
        for layer in amp.model.get_submodule(name).children():
            layer.reset_parameters()  # type: ignore[operator]
    train(amp, 20)
    assert not amp.policy.layers
    assert [event.name for event in amp.events].count("give_back") >= 2


def test_where_raising_is_not_allowed_the_run_stops_and_says_which_layer() -> None:
    with pytest.raises(NonFiniteError, match=r"range too small: mul in encoder\.1\.ff"):
        train(started("float16", raise_layers=False), 30)


def test_decisions_are_the_same_each_time() -> None:
    first, second = started("float16", give_back_after=4), started("float16", give_back_after=4)
    assert train(first, 12) == pytest.approx(train(second, 12), abs=0, nan_ok=True)
    assert [(e.step, e.name) for e in first.events] == [(e.step, e.name) for e in second.events]


# ---- scaling ---------------------------------------------------------------------------------------------------------


class Detector(nn.Module):
    """SSD-like: where boxes are and what they hold, from one body. The first loss is summed over many boxes, and its
    gradients are tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.boxes, self.classes = nn.Linear(32, 4), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x)
        return self.boxes(h), self.classes(h)


def detect(scaling: dict[str, Any], *targets: Any, steps: int = 150) -> tuple[list[float], Amp]:
    """The boxes' losses, and what trained. Their gradients are of 1e-9: below float16's smallest number, 6e-8."""
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-20)
    amp = Amp(model, optimizer, Policy.from_dict({"format": "float16", "scaling": scaling}))
    if targets:
        watch(amp, *targets)
    data = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 8, generator=data)
        with amp:
            boxes, classes = model(x)
            where = (boxes.float() - x[:, :4]).square().mean()
            what = functional.cross_entropy(classes.float(), x[:, 4:7].argmax(1))
        amp.step(where * 1e-6 + what * 1e-5)
        losses.append(where.item())
    return losses, amp


def test_a_loss_with_gradients_below_float16_trains_with_scaling_and_diverges_without() -> None:
    scaled, amp = detect({})
    unscaled, _ = detect({"enabled": False})
    assert sum(scaled[-10:]) < 0.2 * sum(scaled[:10])
    assert sum(unscaled[-10:]) > 1.2 * sum(unscaled[:10])
    assert not [e for e in amp.events if e.alarm]


def test_scale_skips_and_events_in_the_log_tell_the_story_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.jsonl"
    losses, _ = detect({"init_scale": 2.0**40, "max_scale": 2.0**40, "growth_interval": 40}, log, steps=60)
    records, _ = read_jsonl(log)
    steps = [r for r in records if "event" not in r]
    assert [r["step"] for r in steps] == list(range(1, 61)) and losses[-1] < losses[0]
    totals = [0, *(r["train/skipped_steps"] for r in steps)]
    skips = [after - before for before, after in itertools.pairwise(totals)]
    scales = [2.0**40, *(r["train/loss_scale"] for r in steps)]  # after each step

    # Down from a scale that is too high, one skip at a time, ...
    first = skips.index(0)
    assert first >= 2 and skips[:first] == [1] * first
    assert scales[: first + 1] == sorted(scales[: first + 1], reverse=True) and scales[first] < scales[0]
    # ... each of them an event of that step, before the step's own numbers, ...
    told = [r for r in records if r.get("event") in ("backoff", "overflow")]
    assert [r["step"] for r in told[:first]] == list(range(first))
    for r in told[:first]:
        assert f"{scales[r['step']]:g}" in r["message"] or r["scale"] == scales[r["step"]]
        assert records.index(r) < records.index(steps[r["step"]])
    # ... and up again after 40 good steps.
    assert not any(skips[first : first + 40]) and scales[first + 40] == 2 * scales[first + 39] == 2 * scales[first]

    assert main(["watch", str(log)]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines() if " backoff: " in line or " overflow: " in line]
    assert [int(words[1]) for words in lines][:first] == list(range(first))
    assert all(name in text for name in ("train/loss_scale", "train/skipped_steps", "step 60"))


class Steep(nn.Module):
    """A layer whose gradients are beyond float16 at scales above 2**11 or so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def steep(amp: Amp, factor: float, steps: int) -> None:
    for _ in range(steps):
        with amp:
            y = amp.model(torch.ones(2, 4))
        amp.step((y * factor).sum())


def test_the_search_for_a_scale_is_no_alarm() -> None:
    torch.manual_seed(0)
    model = Steep()
    amp = Amp(model, torch.optim.SGD(model.parameters(), 1e-9), "float16")
    steep(amp, 8.0, 12)  # 65536 * 8 is beyond float16
    assert 1 <= amp.scale_state.skipped <= 6
    assert [e.name for e in amp.events if e.alarm] == []
    assert "backoff" in {e.name for e in amp.events}


def test_a_scale_under_the_warning_level_is_told_once() -> None:
    torch.manual_seed(0)
    model = Steep()
    amp = Amp(model, torch.optim.SGD(model.parameters(), 1e-9), "float16")
    steep(amp, 2.0**10, 16)  # needs a scale of 32
    warnings = [e for e in amp.events if e.name == "scale_low"]
    assert len(warnings) == 1 and "below 128" in warnings[0].message


# ---- devices that run ahead ------------------------------------------------------------------------------------------


def test_a_device_that_runs_ahead_is_guarded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scale, "ASYNCHRONOUS", frozenset({"cpu"}))
    torch.manual_seed(0)
    model = EncoderDecoder()
    amp = Amp(model, torch.optim.AdamW(model.parameters(), 3e-3, fused=True), policy("float16"))
    losses = train(amp, 30)
    assert {next(g for g in GUILTY if rule.match.startswith(g)) for rule in amp.policy.layers} == set(GUILTY)
    assert sum(losses[-5:]) / 5 < 0.97 * sum(losses[2:5]) / 3  # what the device knew late is NaN before


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_resumed_run_decides_as_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = started("float16", give_back_after=4)
    reference = train(whole, 6) + train(whole, 14, seed=2)
    first = started("float16", give_back_after=4)
    losses = train(first, 6)
    first.save(tmp_path / "run.pt", {"place": 6})
    second = started("float16", seed=5, give_back_after=4)
    assert second.load(tmp_path / "run.pt") == {"place": 6}
    assert second.policy == first.policy and second.policy.layers
    losses += train(second, 14, seed=2)
    assert losses == pytest.approx(reference, abs=0, nan_ok=True)
    assert [(e.step, e.name) for e in whole.events if e.step >= 6] == [(e.step, e.name) for e in second.events]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_run_resumed_between_micro_batches_finds_what_broke_before_and_after(tmp_path: Path, broken: int) -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.inner[1](self.inner[0](batch["x"]).square() / 8.0)  # type: ignore[no-any-return]

    def begun() -> Amp:
        torch.manual_seed(0)
        model = Squares()
        return Amp(model, torch.optim.SGD(model.parameters(), 1e-3), policy("float16", patience=0), accumulate=2)

    def micro_batch(amp: Amp, number: int) -> None:
        x = torch.ones(2, 4) * (6000.0 if number == broken else 1.0)
        with amp:
            loss = amp.model({"x": x}).float().mean() * 1e-6
        amp.step(loss)

    whole, first, second = begun(), begun(), begun()
    micro_batch(whole, 0)
    micro_batch(first, 0)
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    for amp in (whole, second):
        micro_batch(amp, 1)
    told = [[(e.step, e.name, e.data.get("layer"), e.data.get("line")) for e in amp.events] for amp in (whole, second)]
    assert told[0] == told[1] and "raise" in {name for _, name, _, _ in told[0]}
    assert second.policy == whole.policy


def test_a_file_that_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(PolicyError, match=r"other\.pt"):
        started("float16").load(tmp_path / "other.pt")


def test_a_grad_scalers_state_loads() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    amp = started("float16")
    amp.load_state_dict(scaler.state_dict() | {"scale": 512.0})
    assert amp.loss_scale == 512.0


RUN = """
import os, random, signal, sys, time, torch
from pathlib import Path
from torch import nn
from castwise.torch import Amp

torch.set_num_threads(1)

def run(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    amp = Amp(model, torch.optim.AdamW(model.parameters(), 1e-2), "float16")
    step = amp.load(folder / "run.pt")["step"] if (folder / "run.pt").exists() else 0
    while step < 20:
        x = torch.randn(16, 4)
        with amp:
            loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        amp.step(loss)
        step += 1
        with open(folder / "losses.txt", "a") as file:
            file.write(f"{step} {loss.item().hex()}\\n")
        amp.save(folder / "run.pt", {"step": step})

def forked(folder, seconds=None):
    child = os.fork()
    if not child:
        run(folder)
        os._exit(0)
    if seconds is not None:
        while not (folder / "run.pt").exists():
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

whole, killed = Path(sys.argv[1]), Path(sys.argv[2])
forked(whole)
for seconds in map(float, sys.argv[3:]):
    forked(killed, seconds)
forked(killed)
"""


def curve(folder: Path) -> dict[int, str]:
    """The loss of each step; a step that was done again must have given the same."""
    losses: dict[int, str] = {}
    for line in (folder / "losses.txt").read_text().splitlines():
        if line.count(" ") == 1:
            step, value = line.split()
            assert losses.setdefault(int(step), value) == value
    return losses


def test_a_run_that_is_killed_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    kills = ["0.03", "0.3"]
    subprocess.run([sys.executable, "-c", RUN, str(whole), str(killed), *kills], check=True, timeout=200)
    assert curve(killed) == curve(whole) and len(curve(whole)) == 20
