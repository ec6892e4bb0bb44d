"""Optimizer state in 8 bits: torchao's tensors, and no value that stands still."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from castwise.errors import PolicyError
from castwise.torch import Amp, Lion
from castwise.torch._casts import CastCache
from castwise.torch._stepping import Stepper

pytest.importorskip("torchao.optim")

from castwise.torch._eight_bit import BLOCK, EightBit, zeros
from castwise.torch._noise import Noise

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("default")  # torchao's own


def state_of(values: torch.Tensor, signed: bool, noise: Noise | None) -> Any:
    made = zeros(values, signed)
    EightBit.of(made).write(values.clone(), noise)
    return made


@pytest.mark.parametrize("signed", [True, False])
def test_values_are_right_on_average_and_next_to_a_number_of_torchaos(signed: bool) -> None:
    x = torch.randn(32 * BLOCK, generator=torch.Generator().manual_seed(0))
    x = x if signed else x.square()
    noise = Noise()
    read = torch.stack([state_of(x, signed, noise).dequantize() for _ in range(400)])
    spread, gap = read.std(0), read.amax(0) - read.amin(0)
    even = spread > 0.3 * gap  # where 400 roundings are nearly a bell
    assert even.float().mean() > 0.5
    assert ((read.mean(0) - x).abs() < 5.5 * spread / 20.0)[even].all()
    nearest = state_of(x, signed, None)
    assert torch.equal(nearest.dequantize(), own_read(nearest))
    largest = x.view(-1, BLOCK).abs().amax(1, keepdim=True)
    assert ((nearest.dequantize() - x).view(-1, BLOCK).abs() < 0.01 * largest).all()


def own_read(state: Any) -> torch.Tensor:
    out = torch.empty(state.shape)
    EightBit.of(state).read(out.view(-1))
    return out


def test_what_is_not_negative_does_not_become_zero() -> None:
    x = torch.full((16 * BLOCK,), 1e-12)
    x[::BLOCK] = 1.0
    x[1::BLOCK] = 0.0
    read = state_of(x, False, Noise()).dequantize()
    assert read.view(-1, BLOCK)[:, 1].eq(0).all() and read.view(-1, BLOCK)[:, 2:].gt(0).all()


def test_the_largest_of_a_block_does_not_shrink_whatever_its_sign() -> None:
    for sign in (1.0, -1.0):
        x = torch.zeros(16 * BLOCK)
        x[::BLOCK] = sign
        state = state_of(x, True, None)
        for _ in range(50):
            state = state_of(state.dequantize(), True, Noise())
        assert state.dequantize()[::BLOCK].mean().item() == pytest.approx(sign, rel=0.01)


@pytest.mark.parametrize("rest", [1.0, 0.05])
def test_a_second_moment_of_8_bits_does_not_stall(rest: float) -> None:
    """Rounded to the nearest, all but the largest of a block would stay where they are: steps are of a thousandth."""
    p = nn.Parameter(torch.ones(64, 64))
    gradient = torch.full((64, 64), rest)
    gradient.view(-1)[::BLOCK] = 1.0
    mine = Stepper(torch.optim.AdamW([p], 1e-4, weight_decay=0.0), "auto", CastCache(), optimizer_state="8bit")
    for _ in range(1000):
        p.grad = gradient.clone()
        mine.step(1.0)
    v = mine.optimizer.state[p]["exp_avg_sq"]
    assert type(v).__name__ == "OptimState8bit"
    expected = gradient.square().mean().item() * (1 - 0.999**1000)
    assert v.dequantize().mean().item() == pytest.approx(expected, rel=0.03)
    assert p.mean().item() == pytest.approx(0.9, abs=0.003)


@pytest.mark.parametrize("mode", ["auto", "split"])
@pytest.mark.parametrize("name", ["adamw", "momentum", "lion", "muon"])
def test_every_optimizer_follows_its_float32_state(name: str, mode: str) -> None:
    make: Any = {
        "adamw": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
        "momentum": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
        "lion": lambda p: Lion(p, 1e-4),
        "muon": lambda p: torch.optim.Muon(p, 1e-3),
    }[name]
    g = torch.Generator().manual_seed(0)
    start, noise = torch.randn(64, 64, generator=g), torch.randn(20, 64, 64, generator=g)
    ends = []
    for state in ("float32", "8bit"):
        small = nn.Parameter(torch.ones(3, 5, dtype=torch.float32 if mode == "auto" else BF16))
        p = nn.Parameter(start.to(small.dtype, copy=True))
        mine = Stepper(make([p, small]), mode, CastCache(), optimizer_state=state)
        for i in range(20):
            p.grad, small.grad = 0.5 + noise[i], torch.ones(3, 5)
            mine.step(1.0)
        ends.append(p.detach().float() - start)
        stepped = [mine.wide.kept[1].wide if mode != "auto" else small]
        assert all(s.dtype is torch.float32 for k, s in mine.optimizer.state[stepped[0]].items() if k != "step")
    assert (ends[0] - ends[1]).square().mean() < 0.1 * ends[0].square().mean()


def test_pieces_are_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from castwise.torch import _fused

    monkeypatch.setattr(_fused, "_CPU_PIECE", 5 * BLOCK + 7)
    p = nn.Parameter(torch.ones(64, 64))
    mine = Stepper(torch.optim.AdamW([p], 1e-3, weight_decay=0.0), "auto", CastCache(), optimizer_state="8bit")
    p.grad = torch.ones(64, 64)
    mine.step(1.0)
    torch.testing.assert_close(p.detach(), torch.full((64, 64), 0.999))


def test_it_survives_a_checkpoint_and_can_be_taken_up_and_given_up(tmp_path: Any) -> None:
    def build(state: str) -> tuple[nn.Module, torch.optim.Optimizer, Amp]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64).to(BF16)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        return model, optimizer, Amp(model, optimizer, "bfloat16", weights="split", optimizer_state=state)

    def run(amp: Amp, steps: int) -> None:
        for _ in range(steps):
            with amp:
                loss = amp.model(torch.ones(2, 64, dtype=BF16)).float().square().mean()
            assert amp.step(loss).stepped

    model, optimizer, amp = build("8bit")
    run(amp, 3)
    torch.save([model.state_dict(), optimizer.state_dict(), amp.state_dict()], tmp_path / "all.pt")
    run(amp, 3)
    for state in ("8bit", "float32", "bfloat16"):
        again, other, resumed = build(state)
        saved = torch.load(tmp_path / "all.pt", weights_only=True)
        for part, values in zip((again, other, resumed), saved, strict=True):
            part.load_state_dict(values)
        run(resumed, 3)
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(p, q) or state != "8bit"
            torch.testing.assert_close(p, q, rtol=2**-6, atol=1e-3)


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim.subclass_8bit", None)
    model = nn.Linear(2, 2)
    with pytest.raises(PolicyError, match="pip install torchao"):
        Amp(model, torch.optim.AdamW(model.parameters()), optimizer_state="8bit")
