"""Small models of the kinds that people train, for tests of plans."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


class GPT(nn.Module):
    """With tied embeddings and a mapping as output."""

    def __init__(self, width: int = 64, layers: int = 2, vocabulary: int = 40, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


class ConvNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))) + x, 2)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(30, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 30)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, (last, _) = self.lstm(self.embed(ids))
        return self.head(hidden), last


class Encoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True, activation="gelu", dropout=0.0)
        self.embed, self.layers = nn.Embedding(40, width), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool = nn.Linear(width, width)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layers(self.embed(ids), src_key_padding_mask=~mask)
        return {"hidden": hidden, "pooled": torch.tanh(self.pool(hidden[:, 0]))}


class WideFeedForward(nn.Module):
    """Hidden values in the millions, as T5's feed-forward has them: beyond fp16's 65504, but not beyond bf16."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.wi, self.wo = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.last = nn.Linear(width, width)
        with torch.no_grad():
            self.wi.weight.mul_(3000)
            self.wo.weight.mul_(3000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.wo(F.relu(self.wi(x))) * 1e-6
        return self.last(x)


class InPlace(nn.Module):
    """Changes a tensor through a view and by itself after it was read, and casts by itself."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self.first(x).clone()
        before = kept + 1.0
        kept[:, :3].add_(1.0)
        kept.mul_(2.0)
        return self.second(kept) + self.second(before), x.float().softmax(-1, dtype=torch.float32).to(torch.float16)


class Branching(nn.Module):
    """Its control flow depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else -x


def cases() -> dict[str, tuple[nn.Module, object]]:
    """Models with example inputs, made anew with the same numbers each time."""
    torch.manual_seed(0)
    return {
        "gpt": (GPT(), (torch.randint(40, (3, 12)),)),
        "convnet": (ConvNet(), (torch.randn(4, 3, 8, 8),)),
        "lstm": (Recurrent(), (torch.randint(30, (3, 6)),)),
        "encoder": (Encoder(), {"ids": torch.randint(40, (3, 7)), "mask": torch.ones(3, 7, dtype=torch.bool)}),
        "wide": (WideFeedForward(), (torch.randn(16, 32),)),
        "in_place": (InPlace(), (torch.randn(8, 32),)),
    }
