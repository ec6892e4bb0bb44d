"""What gradients between ranks cost: time of a step, bytes on the wire, and what the format does to the gradients.

    python benchmarks/distributed.py [--ranks 2,4] [--steps 12] [--width 256] [--layers 4]

Gloo ranks on this machine train a small GPT in float32, so that what differs between two lines is communication alone.
"torch" lines are DistributedDataParallel with torch's hooks and `fully_shard` with its own `reduce_dtype`, stepped by
clip_grad_norm_ and AdamW; "castwise" lines are stepped by Amp, which clips too. All lines take turns, step by step, so
that a busy machine slows all of them alike; times are medians, and only their ratios mean anything.

Bytes are those that a rank hands to the operating system for its sockets in one step (/proc/self/io), all collectives
included. "error" is the distance of the averaged gradients to those that float32 sends, relative, largest over the
parameters: of the gradients as they are, and of the same 1e-8 times as small and 1e6 times as large.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

from jobs import GPT

from castwise.policy import Policy
from castwise.torch import Amp, distributed

VOCABULARY, LENGTH, BATCH = 1024, 32, 4
SCALES = (1.0, 1e-8, 1e6)


def gpt(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(width, layers, 4, VOCABULARY, LENGTH)


@dataclass
class Line:
    """One way to train: how it is named, how the model is wrapped, and who steps it."""

    name: str
    wrap: Callable[[nn.Module], nn.Module]
    communication: str | None = None
    castwise: bool = False
    model: Any = None
    step: Any = None
    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)


def hooked(hook: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)

        def send(state: Any, bucket: Any) -> Any:  # under another name: torch refuses bfloat16's by name on a CPU
            return hook(state, bucket)

        send.__annotations__.clear()
        wrapped.register_comm_hook(None, send)
        return wrapped

    return wrap


def compressed(fmt: str, wide_sums: bool) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        distributed.compress(wrapped, fmt, wide_sums=wide_sums)
        return wrapped

    return wrap


def sharded(reduce_dtype: torch.dtype | None) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        for block in model.h:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    return wrap


def by_policy(fmt: str | None, wide_sums: bool) -> Callable[[nn.Module], nn.Module]:
    policy = Policy(format="float32", communication=fmt)
    return lambda model: distributed.shard(model, policy, wide_sums=wide_sums)


def lines() -> list[Line]:
    return [
        Line("torch DDP float32", DistributedDataParallel),
        Line("torch DDP fp16_compress_hook", hooked(default_hooks.fp16_compress_hook)),
        Line("torch DDP bf16_compress_hook", hooked(default_hooks.bf16_compress_hook)),
        Line("castwise DDP float32", DistributedDataParallel, castwise=True),
        Line("castwise DDP float16", compressed("float16", True), "float16", True),
        Line("castwise DDP float16, sums in it", compressed("float16", False), "float16", True),
        Line("castwise DDP bfloat16", compressed("bfloat16", True), "bfloat16", True),
        Line("castwise DDP bfloat16, sums in it", compressed("bfloat16", False), "bfloat16", True),
        Line("castwise DDP float8_e4m3fn", compressed("float8_e4m3fn", True), "float8_e4m3fn", True),
        Line("torch FSDP2 float32", sharded(None)),
        Line("torch FSDP2 reduce float16", sharded(torch.float16)),
        Line("torch FSDP2 reduce bfloat16", sharded(torch.bfloat16)),
        Line("castwise FSDP2 float16", by_policy("float16", True), "float16", True),
        Line("castwise FSDP2 bfloat16", by_policy("bfloat16", True), "bfloat16", True),
    ]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def prepare(line: Line, width: int, layers: int) -> None:
    line.model = line.wrap(gpt(width, layers))
    optimizer = torch.optim.AdamW(line.model.parameters(), lr=1e-4)
    if line.castwise:
        amp = Amp(line.model, optimizer, Policy(format="float32", communication=line.communication))

        def step(tokens: torch.Tensor) -> None:
            with amp:
                loss = loss_of(line.model, tokens)
            amp.step(loss, clip_norm=1.0)
    else:

        def step(tokens: torch.Tensor) -> None:
            loss_of(line.model, tokens).backward()
            nn.utils.clip_grad_norm_(line.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    line.step = step


def gradients(line: Line, tokens: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """The averaged gradients of a loss times `scale`, whole."""
    (loss_of(line.model, tokens) * scale).backward()
    found = []
    for p in line.model.parameters():
        assert p.grad is not None
        found.append((p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).detach().clone())
        p.grad = None
    return found


def written() -> int:
    """Bytes that this process has handed to the operating system."""
    for text in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        key, _, value = text.partition(": ")
        if key == "wchar":
            return int(value)
    raise RuntimeError("/proc/self/io has no wchar: this system does not count what processes write")


def work(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    draws = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=draws) for _ in range(args.steps + 2)]
    told = lines()
    for line in told:
        prepare(line, args.width, args.layers)
    for scale in SCALES:
        exact = [g * scale for g in gradients(told[0], tokens[0], 1.0)]
        for line in told:
            found = gradients(line, tokens[0], scale)
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True) if b.norm() > 0]
            line.errors.append(max(errors))
    for number, batch in enumerate(tokens):
        for line in told:
            dist.barrier()
            before, start = written(), time.perf_counter()
            line.step(batch)
            seconds, sent = time.perf_counter() - start, written() - before
            if number >= 2:
                line.seconds.append(seconds)
                line.sent.append(sent)
    if rank == 0:
        size = sum(p.numel() for p in gpt(args.width, args.layers).parameters())
        report(told, ranks, size)
    dist.barrier()
    dist.destroy_process_group()


def report(told: list[Line], ranks: int, size: int) -> None:
    base = statistics.median(told[0].seconds)
    print(f"\n{ranks} gloo ranks, {size:,} parameters, {len(told[0].seconds)} steps each")
    titles = f"{'step ms':>9}{'ratio':>7}{'MB sent':>9}{'bytes/value':>13}"
    print(f"{'':36}{titles}   error of gradients as they are, x 1e-8, x 1e6")
    for line in told:
        seconds, sent = statistics.median(line.seconds), statistics.median(line.sent)
        errors = "  ".join(f"{e:8.1e}" for e in line.errors)
        numbers = f"{seconds * 1e3:9.1f}{seconds / base:7.2f}{sent / 1e6:9.2f}{sent / size:13.2f}"
        print(f"{line.name:36}{numbers}   {errors}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            processes.spawn(work, (ranks, f"{folder}/store", args), ranks)


if __name__ == "__main__":
    main()
