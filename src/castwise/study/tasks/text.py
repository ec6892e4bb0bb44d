"""A character-level GPT on the source of Python's standard library: the small sibling of what most people train.

The text is on every machine that runs Python. It differs a little between Python versions, which changes the numbers
of a study but not what it compares: every arm reads the same text.
"""

from __future__ import annotations

import functools
import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.errors import StudyError

__all__ = ["GPT", "Text"]

_MODULES = (
    "argparse", "ast", "bdb", "calendar", "cmd", "codecs", "configparser", "copy", "csv", "dataclasses",
    "datetime", "difflib", "dis", "doctest", "enum", "fractions", "ftplib", "functools", "gettext", "heapq",
    "inspect", "ipaddress", "locale", "mailbox", "optparse", "os", "pathlib", "pdb", "pickle", "platform",
    "pprint", "random", "shutil", "smtplib", "socket", "ssl", "statistics", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "tokenize", "trace", "traceback", "turtle", "typing", "uuid", "weakref", "zipfile",
)  # fmt: skip
_HELD_OUT = 0.1  # the last tenth of every file
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # printable ASCII; tabs become spaces, the rest is dropped
Batch = tuple[Tensor, Tensor]


@functools.cache
def _data() -> tuple[Tensor, Tensor]:
    """(training text, held-out text) as int64 character numbers."""
    library = Path(sysconfig.get_paths()["stdlib"])
    number = {character: index for index, character in enumerate(_CHARACTERS)}
    train: list[int] = []
    held: list[int] = []
    for name in _MODULES:
        # A module may be a package in other versions of Python; then it is left out.
        path = library / f"{name}.py"
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore").expandtabs(4)
        codes = [number[character] for character in text if character in number]
        cut = int(len(codes) * (1.0 - _HELD_OUT))
        train += codes[:cut]
        held += codes[cut:]
    if len(held) < 10_000:
        raise StudyError(
            f"The standard library's source is not at {library}, so there is no text to train on. "
            f"Install it, or study 'digits'."
        )
    return torch.tensor(train), torch.tensor(held)


class Block(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            self.qkv(self.attention_norm(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder of a few layers with learned positions; its head is not tied to the embedding."""

    def __init__(self, characters: int, context: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        """Scores (n, length, characters) of the character after each of ``codes`` (n, length)."""
        places = torch.arange(codes.shape[1], device=codes.device)
        x = self.embedding(codes) + self.position(places)
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class Text:
    """Predict the next character of Python's standard library with a GPT of a few layers."""

    metric, direction, unit = "bits per character", "lower", "bits"
    margin = 0.03
    steps, seeds, threads = 300, 4, 1
    clip_norm = 1.0

    _context = 64
    _batch_size = 16
    _peak_rate = 6e-3
    _validation_batches = 8

    def model(self, seed: int = 0) -> nn.Module:
        return GPT(len(_CHARACTERS), self._context)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self._peak_rate, betas=(0.9, 0.98), weight_decay=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self._peak_rate, total_steps=steps + 1, pct_start=0.1
        )

    def batches(self, seed: int = 0) -> Iterator[Batch]:
        """Endless: pieces of the text from random places."""
        train, _ = _data()
        places = torch.Generator().manual_seed(seed)
        while True:
            yield self._pieces(
                train, torch.randint(len(train) - self._context - 1, (self._batch_size,), generator=places)
            )

    def _pieces(self, text: Tensor, starts: Tensor) -> Batch:
        piece = text[starts[:, None] + torch.arange(self._context + 1)]
        return piece[:, :-1], piece[:, 1:]

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        codes, following = batch
        return functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())

    def validation(self) -> list[Batch]:
        """Pieces of the held-out text, evenly spread over it."""
        _, held = _data()
        count = self._validation_batches * 2 * self._batch_size
        starts = torch.linspace(0, len(held) - self._context - 2, count).long()
        return [self._pieces(held, part) for part in starts.chunk(self._validation_batches)]

    def evaluate(self, model: nn.Module) -> float:
        """Cross-entropy on the held-out text, in bits."""
        device = next(model.parameters()).device
        losses = [float(self.loss(model, [tensor.to(device) for tensor in batch])) for batch in self.validation()]
        return math.fsum(losses) / len(losses) / math.log(2.0)
