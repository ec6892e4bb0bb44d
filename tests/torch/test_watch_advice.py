"""Each cause provoked in a training run, and runs in which there is nothing to advise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from castwise.policy import Policy
from castwise.torch import Amp, GradScaler, autocast, watch

Batches = Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
WIDTH, CLASSES = 8, 4


def classes(data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, WIDTH, generator=data)
    return x, x[:, :CLASSES].argmax(1)


def mlp(depth: int = 2, width: int = 16, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [WIDTH, *[width] * (depth - 1)]
    hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], CLASSES))


def causes_of(
    model: nn.Module,
    batches: Batches = classes,
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor] = functional.cross_entropy,
    *,
    fmt: str | Policy = "bfloat16",
    steps: int = 3,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    rate: float = 3e-3,
    between: Callable[[Amp], None] = lambda amp: None,
    **options: Any,
) -> list[str]:
    """Train, and return the causes that advice named, in order. An exception ends the run, not the test."""
    amp = Amp(model, optimizer(model.parameters(), lr=rate), fmt)
    seen: list[Any] = []
    watch(amp, seen.append, **options)
    data = torch.Generator().manual_seed(1)
    try:
        for _ in range(steps):
            x, y = batches(data)
            with amp:
                loss = loss_of(model(x), y)
            amp.backward(loss)
            between(amp)
            amp.step()
    except (RuntimeError, IndexError):
        pass
    return [r["cause"] for r in seen if r.get("event") == "advice"]


# ---- the loss curve --------------------------------------------------------------------------------------------------


def test_a_learning_rate_that_is_too_high_is_named_once_the_loss_grows() -> None:
    causes = causes_of(mlp(), optimizer=torch.optim.SGD, rate=60.0, steps=80)
    assert causes == ["learning rate"]


@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_a_run_that_blows_up_is_put_down_to_its_learning_rate_and_not_to_the_format(fmt: str) -> None:
    def squares(guess: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (guess.float() - y[:, None]).square().mean()

    causes = causes_of(mlp(3), loss_of=squares, optimizer=torch.optim.SGD, rate=5.0, steps=60, fmt=fmt)
    assert "learning rate" in causes


def test_an_oscillating_loss_is_named() -> None:
    """Batches of two kinds, in turn by twos, pull a weight to and fro, and each step goes all the way."""
    kinds = itertools.cycle([1.0, 1.0, -1.0, -1.0])
    model = nn.Linear(1, 1, bias=False)

    def squares(guess: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (guess.float() - y).square().mean()

    def pulled(_: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(4, 1)
        return x, x * next(kinds)

    assert causes_of(model, pulled, squares, optimizer=torch.optim.SGD, rate=0.45, steps=120) == ["oscillation"]


def test_a_stagnating_loss_is_named() -> None:
    """Sigmoids, seven deep: no gradient arrives."""
    fixed = classes(torch.Generator().manual_seed(3))
    causes = causes_of(mlp(8, activation=nn.Sigmoid), lambda _: fixed, optimizer=torch.optim.SGD, rate=1e-4, steps=60)
    assert causes == ["stagnation"]


@pytest.mark.parametrize("gain", [40.0, 1e-3])
def test_a_poor_initialisation_is_named(gain: float) -> None:
    model = mlp(6)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(gain)
    assert causes_of(model, steps=1)[0] == "initialisation"


def test_weights_that_all_began_alike_are_a_poor_initialisation() -> None:
    model = mlp(3)
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    assert causes_of(model, steps=1) == ["initialisation"]


# ---- attention -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One head by hand, with a padding mask as people write it, and positions as they are asked for."""

    def __init__(self, *, mask: str = "fill", scaled: bool = True, gain: float = 1.0, rope: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.scaled, self.rope = mask, scaled, rope
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.qkv.weight[: 2 * WIDTH].mul_(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.rope:
            q, k = self.turned(q), self.turned(k)
        scores = q @ k.transpose(1, 2) / (math.sqrt(WIDTH) if self.scaled else 1.0)
        seen = torch.ones(x.shape[:2], dtype=scores.dtype)
        seen[0] = 0.0  # an empty sequence
        hidden = 1.0 - seen[:, None, :]
        if self.mask == "fill":
            scores = scores.masked_fill(hidden > 0, -1e9)
        elif self.mask == "product":
            scores = scores + hidden * -1e9
        elif self.mask == "cast":
            scores = scores + (hidden.float() * torch.finfo(torch.float32).min).to(scores.dtype)
        return self.head((scores.softmax(-1) @ v).mean(1))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions, half of the width each."""
        rates = 0.01 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
        places = torch.arange(x.shape[1], dtype=torch.float32)
        if self.rope == "cast":
            angles = places.to(x.dtype)[:, None] * rates.to(x.dtype)
        elif self.rope == "einsum":
            angles = torch.einsum("i,j->ij", places, rates)
        else:
            angles = places[:, None] * rates
        sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)


def sequences(length: int, size: float = 1.0) -> Batches:
    def batch(data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, length, WIDTH, generator=data) * size
        return x, x.mean(1)[:, :CLASSES].argmax(1)

    return batch


@pytest.mark.parametrize("mask", ["product", "cast"])
def test_a_mask_constant_out_of_range_is_named(mask: str) -> None:
    assert causes_of(Attention(mask=mask), sequences(6), fmt="float16", steps=2) == ["mask constant"]


def test_attention_scores_that_overflow_are_named() -> None:
    causes = causes_of(Attention(scaled=False, gain=200.0), sequences(6, 5.0), fmt="float16", steps=2)
    assert "attention scores" in causes


def test_attention_scores_that_leave_the_softmax_no_choice_are_named_before_anything_overflows() -> None:
    assert causes_of(Attention(scaled=False, gain=10.0), sequences(6)) == ["attention scores"]


def test_rotary_positions_beyond_256_in_bfloat16_are_named() -> None:
    assert causes_of(Attention(rope="cast"), sequences(300)) == ["positions"]
    assert causes_of(Attention(rope="cast"), sequences(200)) == []


@pytest.mark.parametrize("rope", ["float32", "einsum"])  # an outer product sums nothing and stays wide
def test_positions_in_float32_are_no_cause(rope: str) -> None:
    assert causes_of(Attention(rope=rope), sequences(300)) == []


# ---- sums, exponentials, statistics ----------------------------------------------------------------------------------


class Summed(nn.Module):
    """A layer whose outputs over time are added up one by one, as a scan does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head, self.dtype = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = self.cell(x).sigmoid().to(self.dtype)
        total = torch.zeros_like(terms[:, 0])
        for step in range(x.shape[1]):
            total = total + terms[:, step]
        return self.head(total / x.shape[1])


def test_sums_that_are_carried_in_bfloat16_are_named() -> None:
    assert causes_of(Summed(torch.bfloat16), sequences(450), steps=1) == ["reductions"]
    assert causes_of(Summed(torch.float32), sequences(450), steps=1) == []


def test_a_loss_that_is_reduced_in_bfloat16_is_named() -> None:
    def narrow(guess: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(guess, y).to(torch.bfloat16)

    assert causes_of(mlp(), loss_of=narrow) == ["reductions"]


class Energies(nn.Module):
    """A softmax by hand, over energies that grow with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.layers(x) * 100.0).exp()
        return weights / weights.sum(-1, keepdim=True)


def test_exponentials_are_named() -> None:
    def likelihood(shares: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -(shares.float().gather(1, y[:, None]) + 1e-6).log().mean()

    causes = causes_of(Energies(), loss_of=likelihood, fmt="float16", steps=20, rate=0.1)
    assert "exponentials" in causes


def test_batch_norm_statistics_that_are_kept_in_16_bits_are_named() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    assert causes_of(model) == []
    assert causes_of(model.bfloat16()) == ["statistics"]


def test_batch_norm_statistics_that_overflow_are_named() -> None:
    """The variance is infinite, everything else stays finite: training goes on, and evaluation is ruined."""

    def outlying(data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = classes(data)
        return x * 1e20, y

    model = nn.Sequential(nn.BatchNorm1d(WIDTH), mlp())
    assert "statistics" in causes_of(model, outlying)


# ---- data ------------------------------------------------------------------------------------------------------------


def test_labels_beyond_the_classes_are_named_and_the_error_stays() -> None:
    def batch(data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = classes(data)
        return x, y + 1

    model = mlp()
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), "bfloat16")
    watch(amp)
    x, y = batch(torch.Generator().manual_seed(1))
    y[0] = CLASSES
    with pytest.raises(IndexError, match="out of bounds"), amp:
        functional.cross_entropy(model(x), y)
    assert [event.data["cause"] for event in amp.events] == ["labels out of range"]


def test_labels_that_are_no_probabilities_are_named() -> None:
    def marks(guess: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(guess.float(), functional.one_hot(y, CLASSES) * 2.0)

    assert causes_of(mlp(), loss_of=marks) == ["labels out of range"]


def test_targets_that_nobody_has_normalised_are_named() -> None:
    def prices(guess: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(guess.float(), functional.one_hot(y, CLASSES) * 2e5)

    assert causes_of(mlp(), loss_of=prices, steps=1) == ["labels out of range"]


def test_inputs_far_from_unit_scale_are_named_before_they_overflow() -> None:
    def counts(data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = classes(data)
        return x * 2e4, y

    assert "inputs out of range" in causes_of(mlp(), counts, steps=1)
    assert "inputs out of range" in causes_of(mlp(), lambda d: (classes(d)[0] * 1e6, classes(d)[1]), fmt="float16")


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_trained_in_bfloat16_and_run_in_float16_is_named() -> None:
    """Trained in bfloat16 with its weights in bfloat16, where activations may grow as they like."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    with torch.no_grad():
        model[0].weight.mul_(1e5)
        model[4].weight.div_(1e5)
    model = model.bfloat16()
    assert causes_of(model, steps=30, look_every=0) == []
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    resumed = mlp(3, 32).requires_grad_()
    resumed.load_state_dict({name: value.float() for name, value in saved.items()})
    assert "checkpoint of bfloat16" in causes_of(resumed, fmt="float16", steps=2, look_every=0)


def test_the_same_overflow_of_weights_with_more_digits_is_no_checkpoint_of_bfloat16() -> None:
    model = mlp(3, 32)
    with torch.no_grad():
        model[0].weight.mul_(3e5)
    causes = causes_of(model, fmt="float16", steps=2, look_every=0)
    assert "checkpoint of bfloat16" not in causes


# ---- loops that step their optimizer by themselves -------------------------------------------------------------------


def causes_of_loop(
    dtype: torch.dtype, *, rate: float, eps: float = 1e-8, steps: int = 5, clip: float = 0.0, scaled: bool = False
) -> list[str]:
    """Plain torch: Adam on parameters of a dtype; a scaler where asked, and clipping where no one should."""
    model = mlp().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), rate, eps=eps, foreach=False)
    scaler = GradScaler("cpu", enabled=scaled, init_scale=2.0**16)
    seen: list[Any] = []
    watcher = watch(optimizer, seen.append, model=model, scaler=scaler if scaled else None, look_every=2)
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = classes(data)
        with autocast("cpu", dtype=torch.float16 if scaled else torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        watcher.loss(loss)
        scaler.scale(loss).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [r["cause"] for r in seen if r.get("event") == "advice"]


def test_an_epsilon_that_its_format_does_not_have_is_named() -> None:
    assert causes_of_loop(torch.float16, rate=1e-2) == ["optimizer epsilon"]
    assert causes_of_loop(torch.float16, rate=1e-2, eps=1e-4) == []
    assert causes_of_loop(torch.float32, rate=1e-2) == []


def test_half_precision_parameters_without_masters_are_named_where_their_updates_are_lost() -> None:
    assert causes_of_loop(torch.bfloat16, rate=1e-4) == ["half-precision parameters"]
    assert causes_of_loop(torch.float32, rate=1e-4) == []


def test_the_same_parameters_with_masters_lose_nothing() -> None:
    assert causes_of(mlp().bfloat16(), rate=1e-4) == []


def test_clipping_before_unscaling_is_named_in_a_loop_with_a_scaler() -> None:
    assert causes_of_loop(torch.float32, rate=1e-2, scaled=True, clip=1.0) == ["clip before unscale"]
    assert causes_of_loop(torch.float32, rate=1e-2, scaled=True) == []


@pytest.mark.parametrize("how", ["norm", "value"])
def test_clipping_before_unscaling_is_named(how: str) -> None:
    def clip(amp: Amp) -> None:
        if how == "norm":
            nn.utils.clip_grad_norm_(amp.model.parameters(), 1.0)
        else:
            nn.utils.clip_grad_value_(amp.model.parameters(), 0.5)

    def unscale_and_clip(amp: Amp) -> None:
        amp.unscale()
        clip(amp)

    def halve(amp: Amp) -> None:
        for p in amp.model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)

    assert causes_of(mlp(), fmt="float16", between=clip, steps=6) == ["clip before unscale"]
    for harmless in (unscale_and_clip, halve):
        assert causes_of(mlp(), fmt="float16", between=harmless, steps=6) == []
    assert causes_of(mlp(), fmt="bfloat16", between=clip, steps=6) == []


# ---- healthy runs ----------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(12, 16), nn.Embedding(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.words(x) + self.places(torch.arange(x.shape[1]))))  # type: ignore[no-any-return]


def words(data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 12, (8, 8), generator=data)
    return x, x.flip(1)


def images(data: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 1, 8, 8, generator=data)
    return x, (x.mean((1, 2, 3)) > 0).long()


def of_words(guess: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(guess.flatten(0, 1), y.flatten())


def convnet() -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*block, nn.Flatten(), nn.Linear(8, 2))


HEALTHY: dict[str, tuple[Callable[[], nn.Module], Batches, Any]] = {
    "mlp": (mlp, classes, functional.cross_entropy),
    "convnet": (convnet, images, functional.cross_entropy),
    "transformer": (Transformer, words, of_words),
    "attention": (lambda: Attention(rope="float32"), sequences(8), functional.cross_entropy),
}


@pytest.mark.parametrize("fmt", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_gets_no_advice(kind: str, fmt: str) -> None:
    make, batches, loss_of = HEALTHY[kind]
    assert causes_of(make(), batches, loss_of, fmt=fmt, steps=60, look_every=20, layers_every=30) == []
