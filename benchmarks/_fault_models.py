"""Five kinds of model for the fault bench, small, with module names that say nothing.

An attribution that guesses from names (``head``, ``fc2``) would look good on models with telling ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, WORDS, LENGTH, BATCH = 16, 12, 6, 4


class Namer:
    """Random names, each once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.given: set[str] = set()

    def __call__(self) -> str:
        while True:
            name = "".join(self.random.choices("abcdefghijklmnopqrstuvwxyz", k=5))
            if name not in self.given and not hasattr(nn.Module, name):
                self.given.add(name)
                return name


class Named(nn.Module):
    """A module whose children are known to it by role, and to everybody else by a random name."""

    def __init__(self, namer: Namer) -> None:
        super().__init__()
        self.namer = namer
        self.roles: dict[str, str] = {}

    def put(self, **children: nn.Module) -> None:
        for role, child in children.items():
            self.roles[role] = self.namer()
            self.add_module(self.roles[role], child)

    def at(self, role: str) -> Any:
        return self._modules[self.roles[role]]


class ConvNet(Named):
    """Convolutions with batch norm and in-place ReLU."""

    def __init__(self, namer: Namer) -> None:
        super().__init__(namer)
        sizes = [3, 8, 8, 8]
        for i in range(3):
            self.put(**{f"conv{i}": nn.Conv2d(sizes[i], sizes[i + 1], 3, padding=1), f"norm{i}": nn.BatchNorm2d(8)})
            self.put(**{f"relu{i}": nn.ReLU(inplace=True)})
        self.put(head=nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = self.at(f"relu{i}")(self.at(f"norm{i}")(self.at(f"conv{i}")(x)))
        return self.at("head")(x.mean((2, 3)))  # type: ignore[no-any-return]


class Attention(Named):
    def __init__(self, namer: Namer, causal: bool) -> None:
        super().__init__(namer)
        self.causal = causal
        self.put(**{role: nn.Linear(WIDTH, WIDTH) for role in ("query", "key", "value", "out")})

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        memory = x if memory is None else memory
        query, key, value = self.at("query")(x), self.at("key")(memory), self.at("value")(memory)
        scores = query @ key.transpose(-1, -2) / WIDTH**0.5
        if self.causal:
            hidden = torch.triu(torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device), 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return self.at("out")(scores.softmax(-1) @ value)  # type: ignore[no-any-return]


class Block(Named):
    """A transformer layer; with `gated`, T5's feed-forward, else GPT's."""

    def __init__(self, namer: Namer, causal: bool, cross: bool, gated: bool) -> None:
        super().__init__(namer)
        self.cross, self.gated = cross, gated
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.put(norm0=norm(WIDTH), attention=Attention(namer, causal), norm1=norm(WIDTH))
        if cross:
            self.put(norm2=norm(WIDTH), reading=Attention(namer, False))
        self.put(up=nn.Linear(WIDTH, 2 * WIDTH), down=nn.Linear(2 * WIDTH, WIDTH))
        if gated:
            self.put(gate=nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.at("attention")(self.at("norm0")(x))
        if self.cross:
            x = x + self.at("reading")(self.at("norm2")(x), memory)
        y = self.at("norm1")(x)
        h = functional.gelu(self.at("up")(y))
        if self.gated:
            h = h * self.at("gate")(y)
        return x + self.at("down")(h)  # type: ignore[no-any-return]


class GPT(Named):
    def __init__(self, namer: Namer) -> None:
        super().__init__(namer)
        self.put(words=nn.Embedding(WORDS, WIDTH), norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, WORDS))
        self.put(**{f"block{i}": Block(namer, True, False, False) for i in range(2)})

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.at("words")(words)
        for i in range(2):
            x = self.at(f"block{i}")(x)
        return {"logits": self.at("head")(self.at("norm")(x))}


class EncoderDecoder(Named):
    """T5-like."""

    def __init__(self, namer: Namer) -> None:
        super().__init__(namer)
        self.put(words=nn.Embedding(WORDS, WIDTH), between=nn.RMSNorm(WIDTH), norm=nn.RMSNorm(WIDTH))
        self.put(encoder=Block(namer, False, False, True), decoder=Block(namer, True, True, True))
        self.put(head=nn.Linear(WIDTH, WORDS))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.at("between")(self.at("encoder")(self.at("words")(source)))
        return self.at("head")(self.at("norm")(self.at("decoder")(self.at("words")(target), memory)))  # type: ignore[no-any-return]


class Recurrent(Named):
    def __init__(self, namer: Namer) -> None:
        super().__init__(namer)
        self.put(into=nn.Linear(5, WIDTH), lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True), drop=nn.Dropout(0.1))
        self.put(again=nn.LSTM(WIDTH, WIDTH, batch_first=True), head=nn.Linear(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.at("lstm")(torch.tanh(self.at("into")(x)).float())
        x, _ = self.at("again")(self.at("drop")(x).float())
        return self.at("head")(x[:, -1])  # type: ignore[no-any-return]


class UNet(Named):
    def __init__(self, namer: Namer) -> None:
        super().__init__(namer)
        self.put(down0=nn.Conv2d(3, 8, 3, padding=1), norm0=nn.GroupNorm(2, 8), down1=nn.Conv2d(8, 8, 3, 2, 1))
        self.put(norm1=nn.GroupNorm(2, 8), middle=nn.Conv2d(8, 8, 3, padding=1), act=nn.SiLU())
        self.put(up=nn.ConvTranspose2d(8, 8, 2, 2), join=nn.Conv2d(16, 8, 3, padding=1), head=nn.Conv2d(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = self.at("act")(self.at("norm0")(self.at("down0")(x)))
        low = self.at("act")(self.at("norm1")(self.at("down1")(top)))
        low = self.at("up")(self.at("act")(self.at("middle")(low)))
        return self.at("head")(self.at("act")(self.at("join")(torch.cat([top, low], 1))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Kind:
    """A kind of model: how to make it, its batches, and its loss."""

    name: str
    make: Callable[[Namer], nn.Module]
    batch: Callable[[torch.Generator], tuple[tuple[torch.Tensor, ...], torch.Tensor]]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]


def _words(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)


def _likelihood(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output["logits"] if isinstance(output, dict) else output
    return functional.cross_entropy(logits.float().flatten(0, -2), target.flatten())


def _distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output.float(), target)


def _images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(BATCH, 3, 8, 8, generator=generator)


def _labelled(generator: torch.Generator) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    x = _images(generator)
    return (x,), (x.mean((2, 3)).argmax(1))


def _sentence(generator: torch.Generator) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    words = _words(generator)
    return (words,), words.roll(-1, 1)


def _pairs(generator: torch.Generator) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    words = _words(generator)
    return (words, words.flip(1)), words.flip(1)


def _series(generator: torch.Generator) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    x = torch.randn(BATCH, LENGTH, 5, generator=generator)
    return (x,), x.mean(1)[:, :2]


def _segments(generator: torch.Generator) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    x = _images(generator)
    return (x,), x.mean(1, keepdim=True)


KINDS = (
    Kind("convnet", ConvNet, _labelled, _likelihood),
    Kind("gpt", GPT, _sentence, _likelihood),
    Kind("t5", EncoderDecoder, _pairs, _likelihood),
    Kind("lstm", Recurrent, _series, _distance),
    Kind("unet", UNet, _segments, _distance),
)
