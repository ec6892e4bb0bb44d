"""Models and training steps that the PyTorch benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from castwise.torch import Amp

Step = Callable[[], object]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 512, layers: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h))).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def convnet(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for i, o in ((3, width), (width, width), (width, 2 * width)):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


@dataclass(frozen=True)
class Task:
    """A model and one batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _text(batch: int, time: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    return lambda: (torch.randint(0, 256, (batch, time)), torch.randint(0, 256, (batch * time,)))


def _classes(*shape: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    return lambda: (torch.randn(*shape), torch.randint(0, 10, (shape[0],)))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def tasks(full: bool) -> list[Task]:
    """The tasks at full size, or shrunk for machines whose 16-bit kernels are scalar code."""
    if full:
        return [
            Task("MLP 512, batch 256", lambda: mlp(512), _classes(256, 512)),
            Task("convnet 64, 32 images", lambda: convnet(64), _classes(32, 3, 32, 32)),
            Task("GPT 4x512, 4x128 tokens", GPT, _text(4, 128)),
            Task("GPT 4x512, 1x64 tokens", GPT, _text(1, 64)),
            Task("LSTM 512, 32x64 steps", lambda: Recurrent(512), _classes(32, 64, 64)),
        ]
    return [
        Task("MLP 128, batch 32", lambda: mlp(128), _classes(32, 128)),
        Task("convnet 8, 2 images", lambda: convnet(8), _classes(2, 3, 16, 16)),
        Task("GPT 4x64, 2x16 tokens", lambda: GPT(64), _text(2, 16)),
        Task("LSTM 64, 4x16 steps", lambda: Recurrent(64), _classes(4, 16, 64)),
    ]


def _setup(task: Task, device: str, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = task.build().to(device)
    x, y = task.batch()
    return model, torch.optim.AdamW(model.parameters(), 1e-4, fused=fused), x.to(device), y.to(device)


def plain_step(task: Task, device: str = "cpu", dtype: torch.dtype | None = None, fused: bool = True) -> Step:
    """A full step (clip, AdamW) in float32, or with torch.amp in `dtype`."""
    model, optimizer, x, y = _setup(task, device, fused)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)

    def step() -> None:
        with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def amp_step(task: Task, policy: str, device: str = "cpu", fused: bool = True) -> Step:
    """The same step by `castwise.torch.Amp`."""
    model, optimizer, x, y = _setup(task, device, fused)
    amp = Amp(model, optimizer, policy)

    def step() -> None:
        with amp:
            loss = F.cross_entropy(model(x), y)
        amp.step(loss, clip_norm=1.0)

    return step
