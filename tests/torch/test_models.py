"""Whole models of the kinds people train, and data-parallel training, in regions."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from castwise.torch import GradScaler, autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Rotary(nn.Module):
    """A causal decoder block with rotary positions, RMS norms, a gated MLP and an additive -1e9 mask."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)

    @staticmethod
    def _turned(x: torch.Tensor) -> torch.Tensor:
        rates = 1.0 / 10000 ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
        angles = torch.arange(x.shape[-2]).float()[:, None] @ rates[None]
        angles = torch.cat([angles, angles], -1)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = self._turned(q) @ self._turned(k).transpose(-1, -2) * (w // self.heads) ** -0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -1e9)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, w)
        x = x + self.out(y)
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Tied embeddings, two blocks, a cross entropy that ignores padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Rotary(), Rotary()])
        self.norm = nn.RMSNorm(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.table.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


class ConvNet(nn.Module):
    """Strided and transposed convolutions, batch and group norm, pooling, interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 8, 2, 2), nn.GroupNorm(2, 8), nn.GELU())
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(self.up(self.down(x)), size=x.shape[-2:], mode="bilinear")
        return F.smooth_l1_loss(self.head(y), x)


class Graph(nn.Module):
    """Messages gathered over edges and added up with `index_add`; positions written by `setitem`."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(16, 8), nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.randint(0, 10, (2, 40), generator=torch.Generator().manual_seed(0))
        h = torch.zeros(10, 8)
        h[torch.arange(10)] = F.relu(self.message(torch.cat([x, x], -1)))
        for _ in range(2):
            sent = self.message(torch.cat([h[a], h[b]], -1))
            h = self.update(torch.zeros(10, 8).index_add(0, b, sent), h)
        return (h - x.roll(1, 0)).square().mean()


class Reader(nn.Module):
    """A packed LSTM under a CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 16, bidirectional=True), nn.Linear(32, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([12, 10, 9]))
        y, lengths = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0])
        targets = torch.tensor([[1, 2, 3], [2, 2, 1], [5, 4, 3]])
        return F.ctc_loss(self.head(y).log_softmax(-1), targets, lengths, torch.tensor([3, 3, 3]))


def _tokens() -> torch.Tensor:
    return torch.randint(1, 32, (4, 12), generator=torch.Generator().manual_seed(0))


MODELS = {
    "decoder": (Decoder, _tokens),
    "convnet": (ConvNet, lambda: torch.rand(2, 3, 16, 16)),
    "graph": (Graph, lambda: torch.rand(10, 8)),
    "reader": (Reader, lambda: torch.rand(12, 3, 8)),
}


def _losses(name: str, dtype: torch.dtype, steps: int = 30) -> list[float]:
    make, data = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", init_scale=1024.0, enabled=dtype is FP16)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        assert scaler.stepped
        scaler.update()
        assert all(p.grad is None or p.grad.dtype is p.dtype is FP32 for p in model.parameters())
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_models_train_in_both_16_bit_formats_as_in_float32(name: str) -> None:
    wide = _losses(name, FP32)
    assert wide[-1] < 0.8 * wide[0]  # it learns at all
    for dtype in (BF16, FP16):
        low = _losses(name, dtype)
        assert low[0] == pytest.approx(wide[0], rel=0.02)
        assert low[-1] == pytest.approx(wide[-1], abs=0.05 * wide[0])


# ---- data-parallel ---------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_data_parallel_accumulation_without_synchronisation_gives_the_models_own_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(3, 4, 8)

    def accumulate(forward: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        scaler = GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for i, part in enumerate(x):
            last = i == len(x) - 1
            quiet = isinstance(forward, DistributedDataParallel) and not last
            with forward.no_sync() if quiet else torch.enable_grad(), autocast("cpu", dtype=dtype):
                out = forward(part)
                assert out.dtype is dtype
                loss = out.float().square().mean()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        assert scaler.stepped
        return [p.grad.clone() for p in model.parameters()]

    alone = accumulate(model)
    together = accumulate(DistributedDataParallel(model))
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b)
