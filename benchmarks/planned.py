"""Planned models against fp32 and against the preset, op by op: time of a step, error, casts, bytes saved for backward.

    python benchmarks/planned.py [--seconds 5] [--policy auto]

All arms run in turn in one process, with fixed allocator thresholds; medians. On a machine without 16-bit arithmetic
`auto` plans fp32, and what is measured is what planning costs there: nothing is to be gained.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._timing import alternate, fix_allocator, table
from tests.torch.plan_models import GPT, ConvNet, Encoder, Recurrent

from castwise.torch import Amp, apply
from castwise.torch.planning import prepare, verified


def models() -> dict[str, tuple[torch.nn.Module, Any]]:
    """Name -> model and example inputs."""
    torch.manual_seed(0)
    return {
        "GPT 256x4, 4x64 tokens": (GPT(256, 4, 1000), (torch.randint(1000, (4, 64)),)),
        "convnet 64, 16x3x32x32": (ConvNet(64), (torch.randn(16, 3, 32, 32),)),
        "encoder 128, 8x32": (Encoder(128), (torch.randint(40, (8, 32)), torch.ones(8, 32, dtype=torch.bool))),
        "LSTM 128, 8x32": (Recurrent(128), (torch.randint(30, (8, 32)),)),
    }


def loss_of(outputs: Any) -> torch.Tensor:
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return sum(F.mse_loss(y.float(), torch.zeros_like(y, dtype=torch.float32)) for y in leaves)  # type: ignore[return-value]


def saved_bytes(run: Any, model: torch.nn.Module) -> int:
    """Bytes of distinct storages that a forward keeps for backward, without those of parameters."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in owned:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = run()
    del outputs
    return sum(seen.values())


def measure(name: str, model: torch.nn.Module, inputs: Any, policy: str, seconds: float) -> list[str]:
    started = time.perf_counter()
    ready = prepare(model, inputs, policy=policy)
    plan = verified(ready, ready.solve())
    planning = time.perf_counter() - started
    planned = apply(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    amp = Amp(model, optimizer, policy=policy)

    def step(call: Any) -> Any:
        def run() -> None:
            loss_of(call(*inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    def preset() -> None:
        with amp:
            loss = loss_of(model(*inputs))
        amp.step(loss)

    times = alternate({"fp32": step(model), "preset": preset, "planned": step(planned)}, seconds=seconds)
    summary = plan.summary()
    fp32_bytes, our_bytes = (saved_bytes(lambda m=m: m(*inputs), model) for m in (model, planned))
    return [
        name,
        f"{1e3 * times['fp32']:.2f}",
        f"{times['preset'] / times['fp32']:.2f}",
        f"{times['planned'] / times['fp32']:.2f}",
        f"{summary.ops[plan.fmt]} of {sum(summary.ops.values())}",
        f"{our_bytes / fp32_bytes:.2f}",
        "-" if plan.verification is None else f"{plan.verification.ratio:.2f}",
        f"{planning:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--policy", default="auto")
    args = parser.parse_args()
    fix_allocator()
    logging.disable(logging.INFO)
    header = ["model", "fp32 ms", "preset/fp32", "planned/fp32", "low ops", "saved/fp32", "error/predicted", "plan s"]
    print(table(header, [measure(n, m, x, args.policy, args.seconds) for n, (m, x) in models().items()]))


if __name__ == "__main__":
    main()
