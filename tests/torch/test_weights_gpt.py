"""A GPT with 16-bit weights on real text: it learns what float32 learns, and plainly rounded weights do not."""

from __future__ import annotations

import functools
from itertools import islice

import pytest
import torch

from castwise.study.tasks.text import GPT, Text
from castwise.torch import Amp, autocast

BF16 = torch.bfloat16
# benchmarks/gpt_weights.py trains for longer, and from several seeds. Here rates are low, so that few steps tell.
_STEPS, _RATE = 40, 1e-4


@functools.cache
def learned(how: str) -> float:
    """The held-out loss, in bits, that some steps of AdamW take off. `how`: a mode of weights, "fp32" or "plain"."""
    task = Text()
    torch.manual_seed(0)
    model = GPT(96, 64, width=32, layers=1, heads=2)
    batches = list(islice(task.batches(0), _STEPS + 1))
    held_out = batches.pop()

    def now() -> float:
        with torch.no_grad(), autocast("cpu", policy="float32" if how == "fp32" else "bfloat16"):
            return float(task.loss(model, held_out)) / 0.6931

    model = model if how == "fp32" else model.to(BF16)
    before = now()
    optimizer = torch.optim.AdamW(model.parameters(), _RATE, weight_decay=0.1)
    policy, weights = ("float32", "auto") if how == "fp32" else ("bfloat16", how)
    amp = None if how == "plain" else Amp(model, optimizer, policy, weights=weights)
    for batch in batches:
        if amp is not None:
            with amp:
                loss = task.loss(model, batch)
            assert amp.step(loss, clip_norm=1.0).stepped
            continue
        with autocast("cpu", policy="bfloat16"):
            loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return before - now()


@pytest.mark.parametrize("mode", ["master", "split", "kahan", "stochastic"])
def test_a_gpt_with_16_bit_weights_learns_what_float32_learns(mode: str) -> None:
    assert learned("fp32") > 0.1
    assert learned(mode) == pytest.approx(learned("fp32"), rel=0.01)


def test_a_gpt_whose_weights_are_rounded_plainly_learns_less() -> None:
    assert learned("plain") < 0.8 * learned("fp32")
