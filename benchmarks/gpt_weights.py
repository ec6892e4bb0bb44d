"""A GPT whose weights are stored in bfloat16 learns what float32 learns, in every mode; rounded plainly it does not.

    python benchmarks/gpt_weights.py                        # 4 seeds of 300 steps: minutes
    python benchmarks/gpt_weights.py --seeds 2 --steps 100

The GPT of `castwise study text` on the source of Python's standard library, AdamW at a rate that small models bear and
large ones have to be content with less than, decayed to zero. Every arm sees the same weights and batches as float32
does with the same seed. An arm is as good as float32 where the mean of its paired differences is no larger than
float32's own spread from seed to seed; plain rounding has to be worse than that, and by two standard errors at least.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from itertools import islice

import torch
from _timing import table
from torch import nn

from castwise.study.tasks.text import Text
from castwise.torch import Amp, autocast

_RATE = 1e-3
_ARMS: dict[str, dict[str, str]] = {
    "fp32": {},
    "master": {"weights": "master"},
    "split": {"weights": "split"},
    "kahan": {"weights": "kahan"},
    "stochastic": {"weights": "stochastic"},
    "split, bf16 state": {"weights": "split", "optimizer_state": "bfloat16"},
    "stochastic, 8-bit state": {"weights": "stochastic", "optimizer_state": "8bit"},
    "plain bf16": {},
}


def train(arm: str, seed: int, steps: int) -> float:
    """Train one arm and return its held-out loss in bits per character."""
    task = Text()
    torch.manual_seed(seed)
    model = task.model(seed)
    if arm != "fp32":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / (0.05 * steps), 0.5 + 0.5 * math.cos(math.pi * min(1.0, i / steps)))
    )
    batches = islice(task.batches(seed), steps)
    if arm == "plain bf16":
        _train_plainly(task, model, optimizer, scheduler, batches)
    else:
        policy = "float32" if arm == "fp32" else "bfloat16"
        amp = Amp(model, optimizer, policy, scheduler=scheduler, **_ARMS[arm])
        for batch in batches:
            with amp:
                loss = task.loss(model, batch)
            amp.step(loss, clip_norm=1.0)
    return evaluated(task, model, "float32" if arm == "fp32" else "bfloat16")


def _train_plainly(task: Text, model: nn.Module, optimizer, scheduler, batches) -> None:  # type: ignore[no-untyped-def]
    """The same arithmetic, and torch's own optimizer on the bfloat16 weights."""
    for batch in batches:
        with autocast("cpu", policy="bfloat16"):
            loss = task.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def evaluated(task: Text, model: nn.Module, policy: str) -> float:
    """Held-out bits per character."""
    with torch.no_grad(), autocast("cpu", policy=policy):
        return task.evaluate(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--arms", default=",".join(_ARMS).replace(", ", "/"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    arms = [name.replace("/", ", ") for name in args.arms.split(",")]
    ends: dict[str, list[float]] = {arm: [] for arm in arms}
    for seed in range(args.seeds):
        for arm in arms:
            start = time.perf_counter()
            ends[arm].append(train(arm, seed, args.steps))
            print(f"seed {seed}, {arm}: {ends[arm][-1]:.4f} ({time.perf_counter() - start:.0f} s)", flush=True)
    spread = statistics.stdev(ends["fp32"])
    rows = []
    holds = True
    for arm in arms:
        differences = [a - b for a, b in zip(ends[arm], ends["fp32"], strict=True)]
        mean = statistics.mean(differences)
        error = statistics.stdev(differences) / len(differences) ** 0.5
        inside = abs(mean) <= spread
        worse = mean > spread and mean > 2.0 * error
        verdict = ("worse" if worse else "not told apart") if arm == "plain bf16" else ("as fp32" if inside else "OFF")
        holds &= worse if arm == "plain bf16" else inside
        rows.append([arm, f"{statistics.mean(ends[arm]):.4f}", f"{mean:+.4f}", f"{error:.4f}", verdict])
    print(table(["weights", "bits per character", "less fp32's", "standard error", ""], rows))
    print(f"\nfloat32 from seed to seed: standard deviation {spread:.4f} bits")
    raise SystemExit(not holds)


if __name__ == "__main__":
    main()
