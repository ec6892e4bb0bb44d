"""Kill a training run with SIGKILL at random points, resume it each time, and compare its losses bit for bit.

    python benchmarks/kills.py              # 50 kills in 150 steps
    python benchmarks/kills.py --kills 5 --steps 40

The run has what a resume could get wrong: dropout, batch norm, a scheduler, a loss scale that grows, micro-batches that
have been accumulated when a checkpoint is written, and a layer whose products outgrow float16, which the guard raises,
tries to give back and keeps. A checkpoint is written after every micro-batch, so kills fall into writing, too. Points
are drawn over the whole run: how many micro-batches are done, and how far into the next the kill comes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castwise.policy import Policy
from castwise.torch import Amp

MICRO = 2


class Gain(nn.Module):
    """Squares what it is given and divides it again: in float16 too much for the batches of some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * (y.abs() * 3e4) / 3e4


def trainer() -> Amp:
    torch.manual_seed(0)
    random.seed(0)  # which Python draws anew in a fork
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Gain(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    policy = Policy.from_dict({
        "format": "float16",
        "scaling": {"growth_interval": 7},
        "guard": {"patience": 1, "give_back_after": 5},
    })  # fmt: skip
    return Amp(model, optimizer, policy, scheduler=scheduler, accumulate=MICRO)


def run(folder: Path, steps: int) -> None:
    """Train from the last checkpoint on; one line per micro-batch."""
    amp = trainer()
    done = amp.load(folder / "run.pt")["done"] if (folder / "run.pt").exists() else 0
    while done < steps * MICRO:
        x = torch.randn(16, 4)
        with amp:
            loss = (amp.model(x).float() - x.sum(1, keepdim=True)).square().mean()
        amp.step(loss, clip_norm=1.0)
        done += 1
        with open(folder / "losses.txt", "a") as file:
            file.write(f"{done} {loss.item().hex()} {amp.loss_scale} {len(amp.policy.layers)}\n")
        amp.save(folder / "run.pt", {"done": done})


def forked(folder: Path, steps: int, point: float | None = None) -> bool:
    """Run in a process of its own; whether it was killed, `point` micro-batches after the start of the whole run."""
    child = os.fork()
    if not child:
        try:
            run(folder, steps)
        finally:
            os._exit(0)
    if point is not None:
        then = time.perf_counter()
        while (lines := seen(folder)) < int(point) and not os.waitpid(child, os.WNOHANG)[0]:
            then = time.perf_counter() if lines < int(point) - 1 else then
            time.sleep(0.0005)
        time.sleep((point - int(point)) * min(0.05, time.perf_counter() - then))
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            return False
    return bool(os.WIFSIGNALED(os.waitpid(child, 0)[1]))


def seen(folder: Path) -> int:
    """Micro-batches that some process has come to the end of."""
    path = folder / "losses.txt"
    return max((int(line.split()[0]) for line in path.read_text().split("\n")[:-1]), default=0) if path.exists() else 0


def curve(folder: Path) -> tuple[dict[int, str], int]:
    """What each micro-batch gave, and how many lines tell of one that was done again.

    Raises:
        SystemExit: one gave another result when it was done again.
    """
    found: dict[int, str] = {}
    again = 0
    for line in (folder / "losses.txt").read_text().splitlines():
        number, _, told = line.partition(" ")
        again += int(number) in found
        if found.setdefault(int(number), told) != told:
            raise SystemExit(f"micro-batch {number} gave {found[int(number)]}, and when it was done again {told}")
    return found, again


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two checkpoints do not hold the same, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [place for key in a for place in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [place for i, (x, y) in enumerate(zip(a, b, strict=True)) for place in differences(x, y, f"{path}.{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        return [] if alike else [path]
    return [] if type(a) is type(b) and (a == b or (a != a and b != b)) else [path]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0, help="of the points at which the run is killed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        whole, killed, warm = (Path(place) / name for name in ("whole", "killed", "warm"))
        for folder in (whole, killed, warm):
            folder.mkdir()
        run(warm, 2)  # what is imported and built on first use need not be so in each child
        forked(whole, args.steps)
        draw = random.Random(args.seed)
        points = sorted(draw.uniform(0, args.steps * MICRO - 1) for _ in range(args.kills))
        kills = sum(forked(killed, args.steps, point) for point in points)
        forked(killed, args.steps)
        (reference, _), (found, again) = curve(whole), curve(killed)
        states = [torch.load(folder / "run.pt", weights_only=True) for folder in (whole, killed)]
    raised = {told.split()[2] for told in reference.values()}
    print(f"{kills} kills in {args.steps} steps of {MICRO} micro-batches, {again} micro-batches done again")
    print(f"losses, scales and raised layers: {'bit for bit the same' if found == reference else 'different'}")
    different = differences(*states)
    print(f"of weights, optimizer, guard and random states at the end, {len(different)} values differ", *different[:3])
    print(f"numbers of raised layers seen in the run: {', '.join(sorted(raised))}; "
          f"loss scales: {len({told.split()[1] for told in reference.values()})}")  # fmt: skip
    return 0 if found == reference and not different and kills == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
