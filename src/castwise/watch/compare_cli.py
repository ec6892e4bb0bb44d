"""``castwise compare file.py:Task``: a task's first training step in float32 beside other precisions."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from castwise._files import write_text
from castwise.errors import CastwiseError, PolicyError

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("task", help="a study task: digits, text, or file.py:Task")
    parser.add_argument(
        "--precisions", default="fp32,fp16,bf16", help="comma-separated; float32 is what the others are compared with"
    )
    parser.add_argument("--sort", default="order", help="column to sort by (default: order of the forward)")
    parser.add_argument(
        "--scale", type=float, help="loss scale of fp16's gradients (default: the one that training settles at)"
    )
    parser.add_argument("--html", type=Path, metavar="FOLDER", help="also write a sortable page per precision there")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from castwise.policy import Policy
    from castwise.torch.compare import compare_step

    names = [name.strip() for name in args.precisions.split(",") if name.strip()]
    policies = {name: Policy.preset(name) for name in names}
    others = {name: policy for name, policy in policies.items() if policy.format != "float32"}
    if not others:
        raise PolicyError("--precisions: name at least one beside fp32, such as fp16.")
    model, step = _first_step(args.task)
    for name, policy in others.items():
        found = compare_step(model, step, policy, scale=args.scale if policy.uses_scaling else None)
        print(found.table(args.sort))
        if args.html is not None:
            print(f"written: {write_text(args.html / f'compare-{name}.html', found.page())}")
    return 0


def _first_step(spec: str) -> tuple[Any, Callable[[], Any]]:
    """The model of a study task, and what gives its loss on the first training batch."""
    from torch import nn

    from castwise.study.protocol import load_task

    try:
        task = load_task(spec)
    except CastwiseError as error:
        raise type(error)(f"{error} Name a study task: digits, text, or file.py:Task.") from None
    model = task.model(0)
    if not isinstance(model, nn.Module):
        raise CastwiseError(
            f"The model of {spec!r} is a {type(model).__name__}, and only the layers of a torch.nn.Module are compared "
            f"one by one. `castwise study {spec}` compares whole runs, also of JAX and Keras."
        )
    batches: Iterable[Any] = task.batches(0)
    batch = next(iter(itertools.islice(batches, 1)), None)
    if batch is None:
        raise PolicyError(f"The task {spec!r} gives no batch, so there is no step to compare.")
    return model, lambda: task.loss(model, batch)
