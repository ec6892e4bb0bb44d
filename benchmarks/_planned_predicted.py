"""The part of `planned.py` that compares the step times that plans predict with those that the clock shows."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from _models import GPT, Task
from _planned_inference import Step
from _timing import rounds_of, table
from torch import nn
from torch.nn import functional as F

from castwise.torch import apply, for_inference, plan
from castwise.torch.planning import Plan

_POLICY = {"bf16": "bfloat16", "fp16": "float16"}


def predicted_beside_measured(tasks: list[Task], args: argparse.Namespace) -> None:
    """Forward and backward of a training step, and one forward of 1 and of 64 tokens, in fp32 and as planned."""
    rows = []
    for task in tasks:
        torch.manual_seed(0)
        model = task.build()
        x, y = task.batch()
        decided = plan(model, (x,), loss=lambda out, y=y: F.cross_entropy(out.float(), y), policy=_POLICY[args.low])
        arms = {
            "fp32": _passes(model, model, x, y),
            "planned": _passes(model, apply(model, decided), x, y),
        }
        rows += _compared(f"{task.name}, training", decided, arms, args)
    width = 512 if args.size == "full" else 64
    for tokens in (1, 64):
        torch.manual_seed(0)
        made = GPT(width).eval()
        x = torch.randint(0, 256, (1, tokens))
        module = for_inference(made, (x,), policy=_POLICY[args.low])
        runs: dict[str, Step] = {
            "fp32": lambda made=made, x=x: made(x),
            "planned": lambda module=module, x=x: module(x),
        }
        with torch.inference_mode():
            rows += _compared(f"GPT 4x{width}, {tokens} tokens, inference", module.castwise_plan, runs, args)
    print(table(["predicted step", "arm", f"ops in {args.low}", "predicted ms", "measured ms", "off by"], rows))


def _compared(name: str, decided: Plan, arms: dict[str, Step], args: argparse.Namespace) -> list[list[str]]:
    times, _ = rounds_of(arms, args.rounds, seconds=args.seconds)
    predicted = {"fp32": decided.fp32.seconds, "planned": decided.score.seconds}
    return [
        [
            name,
            arm,
            str(int(decided.labels.sum())) if arm == "planned" else "0",
            f"{1e3 * predicted[arm]:.2f}",
            f"{1e3 * timing.seconds:.2f}",
            f"{predicted[arm] / timing.seconds - 1:+.0%}",
        ]
        for arm, timing in times.items()
    ]


def _passes(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Step:
    def both() -> None:
        F.cross_entropy(run(x).float(), y).backward()
        model.zero_grad()

    return both
