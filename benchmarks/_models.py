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


Past = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class Speaker(GPT):
    """The GPT for generation: takes the keys and values of all tokens before, and returns them with the new ones."""

    def forward(self, x: torch.Tensor, past: Past) -> tuple[torch.Tensor, Past]:
        batch, time = x.shape
        before = past[0][0].shape[2]
        h = self.tokens(x) + self.positions(torch.arange(before, before + time, device=x.device))
        kept = []
        for block, (keys, values) in zip(self.blocks, past, strict=True):
            q, k, v = block.qkv(block.norm1(h)).view(batch, time, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
            k, v = torch.cat((keys, k), 2), torch.cat((values, v), 2)
            h = h + block.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, time, -1))
            h = h + block.down(F.gelu(block.up(block.norm2(h))))
            kept.append((k, v))
        return self.head(self.norm(h[:, -1])), tuple(kept)

    def past(self, length: int) -> Past:
        """Random keys and values of ``length`` tokens."""
        block = self.blocks[0]
        shape = (1, block.heads, length, block.out.in_features // block.heads)
        return tuple((torch.randn(shape), torch.randn(shape)) for _ in self.blocks)


class Encoder(nn.Module):
    """BERT-like: normalised after each residual sum, read from both sides, classified by its first token."""

    def __init__(self, width: int, layers: int = 4, vocabulary: int = 1000) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, batch_first=True, activation="gelu", dropout=0.0
        )
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        return self.head(torch.tanh(self.pool(h[:, 0])))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, width: int, layers: int = 1) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, width, layers, batch_first=True), nn.Linear(width, 10)

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


def longer_tasks() -> list[Task]:
    """Tasks whose steps take some 10 to 200 ms on scalar 16-bit kernels, as usual sizes do on kernels that are not."""
    return [
        Task("MLP 256, batch 64", lambda: mlp(256), _classes(64, 256)),
        Task("convnet 32, 8 images", lambda: convnet(32), _classes(8, 3, 16, 16)),
        Task("GPT 4x128, 4x32 tokens", lambda: GPT(128), _text(4, 32)),
        Task("LSTM 128, 8x32 steps", lambda: Recurrent(128), _classes(8, 32, 64)),
    ]


def _tokens(batch: int, time: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    return lambda: (torch.randint(0, 1000, (batch, time)), torch.randint(0, 10, (batch,)))


def planned_tasks(full: bool) -> dict[str, Task]:
    """The tasks that plans are measured on, by short name; shrunk for machines whose 16-bit kernels are scalar code."""
    if full:
        tasks = {
            "gpt": Task("GPT 4x512, 4x128 tokens", GPT, _text(4, 128)),
            "gpt-short": Task("GPT 4x512, 1x64 tokens", GPT, _text(1, 64)),
            "convnet": Task("ResNet 32, 16 images", lambda: ResNet(32), _classes(16, 3, 32, 32)),
            "encoder": Task("encoder 4x256, 8x64 tokens", lambda: Encoder(256), _tokens(8, 64)),
            "lstm": Task("LSTM 2x256, 16x64 steps", lambda: Recurrent(256, 2), _classes(16, 64, 64)),
        }
    else:
        tasks = {
            "gpt": Task("GPT 4x64, 4x32 tokens", lambda: GPT(64), _text(4, 32)),
            "gpt-short": Task("GPT 4x64, 1x16 tokens", lambda: GPT(64), _text(1, 16)),
            "convnet": Task("ResNet 8, 4 images", lambda: ResNet(8), _classes(4, 3, 16, 16)),
            "encoder": Task("encoder 2x64, 4x16 tokens", lambda: Encoder(64, 2), _tokens(4, 16)),
            "lstm": Task("LSTM 2x64, 4x16 steps", lambda: Recurrent(64, 2), _classes(4, 16, 64)),
        }
    return tasks


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
