"""Each cause that advice names, provoked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from castwise.policy import Policy
from castwise.torch import Amp
from castwise.watch.advice import trend_advice


class Does(nn.Module):
    """A linear layer, and then what a test wants."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.linear(x))


def causes(model: nn.Module, x: torch.Tensor, fmt: str = "float16") -> set[str]:
    guard = {"raise_layers": False, "patience": 0}
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), Policy.from_dict({"format": fmt, "guard": guard}))
    with amp:
        loss = model(x).float().square().mean()
    amp.step(loss)
    return {event.data["cause"] for event in amp.events if event.name == "advice"}


def attention(y: torch.Tensor) -> torch.Tensor:
    scores = torch.bmm(y[None] * 100.0, y[None].transpose(1, 2) * 1000.0)
    return (scores / 1e5).softmax(-1)[0] @ y


def masked(y: torch.Tensor) -> torch.Tensor:
    return y.masked_fill(torch.ones(y.shape, dtype=torch.bool), -math.inf).softmax(-1) * y


@pytest.mark.parametrize(
    "cause,then,fmt",
    [
        ("exponentials", lambda y: (y * 0 + 1e3).exp(), "bfloat16"),
        ("logarithm", lambda y: (y * 0).log(), "bfloat16"),
        ("epsilon", lambda y: y / (y.abs() * 0.0 + 1e-9), "float16"),
        ("epsilon", lambda y: (y.float() * 0).sqrt(), "float32"),
        ("mask", masked, "float16"),
        ("attention scores", attention, "float16"),
    ],
)
def test_what_an_operation_did_is_named(cause: str, then: Callable[[Any], Any], fmt: str) -> None:
    torch.manual_seed(0)
    model = Does(then)
    nn.init.constant_(model.linear.weight, 1.0)
    assert cause in causes(model, torch.ones(3, 4), fmt)


def test_bad_and_outsized_inputs_are_told_apart() -> None:
    torch.manual_seed(0)
    assert causes(nn.Linear(4, 4), torch.full((3, 4), math.nan)) == {"inputs"}
    assert causes(nn.Linear(4, 4), torch.full((3, 4), 1e6)) == {"inputs out of range"}


def test_weights_that_are_bad_or_beyond_the_format_are_told_apart() -> None:
    torch.manual_seed(0)
    bad, large = nn.Linear(4, 4), nn.Linear(4, 4)
    nn.init.constant_(bad.weight, math.nan)
    nn.init.constant_(large.weight, 1e6)
    assert causes(bad, torch.ones(3, 4)) == {"weights"}
    assert causes(large, torch.ones(3, 4)) == {"weights beyond the format"}


def test_statistics_that_overflow_are_named() -> None:
    torch.manual_seed(0)
    model = Does(lambda y: y * (y.float() * 1e20).var())
    assert "statistics" in causes(model, torch.randn(3, 4), "float32")


def curve(rate: float, steps: int = 80) -> list[float]:
    """A linear regression by plain gradient descent."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    weight, losses = torch.zeros(4), []
    for _ in range(steps):
        error = x @ weight - x.sum(1)
        losses.append(float(error.square().mean()) + 0.01)
        weight = weight - rate * 2 * x.t() @ error / 64
    return losses


def test_loss_curves_are_read() -> None:
    assert trend_advice(curve(0.05)) == []
    assert [name for name, _ in trend_advice(curve(1.2))] == ["learning rate"]
    assert [name for name, _ in trend_advice(curve(0.0))] == ["stagnation"]
    swings = [1.0 + 0.9 * (-1) ** step for step in range(80)]
    assert [name for name, _ in trend_advice(swings)] == ["oscillation"]
    assert [name for name, _ in trend_advice([math.nan] * 80)] == ["not finite"]
    assert trend_advice(curve(0.05)[:20]) == []


@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_a_mean_over_no_labels_is_named_among_the_reasons_of_a_loss_that_is_nan(policy: str) -> None:
    model = nn.Linear(4, 3)
    amp = Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    with amp:
        loss = nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.full((5,), -100))
    amp.step(loss)
    said = str(amp.finding)
    assert "labels that are all ignored" in said and said.count("loss") == 2


class _Summed(nn.Module):
    """A variational autoencoder whose loss is a sum: its gradients need a loss scale of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        seen = self.decode(mean + torch.exp(0.5 * log_variance) * noise)
        divergence = 1 + log_variance - mean.square() - log_variance.exp()
        return nn.functional.mse_loss(seen, x, reduction="sum") - 0.5 * divergence.sum()


def test_a_run_is_not_stopped_while_a_lower_loss_scale_is_still_to_come() -> None:
    torch.manual_seed(0)
    model = _Summed()
    amp = Amp(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "float16")
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(40):
        x, noise = torch.randn(64, 8, generator=generator) * 5, torch.randn(64, 4, generator=generator)
        with amp:
            loss = model(x, noise)
        if amp.step(loss).stepped:
            losses.append(float(loss.detach()))
    assert len(losses) >= 20 and losses[-1] < losses[0] / 1.5
