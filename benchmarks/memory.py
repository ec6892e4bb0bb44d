"""Memory of a training step: predicted from shapes against measured, and against float32 and torch.amp.

    python benchmarks/memory.py
    python benchmarks/memory.py --only LSTM

Peaks of the second of two whole steps (forward, backward, clip, AdamW) with everything that is there before them, by
torch's own record of each allocation: its profiler's on CPUs, `max_memory_allocated` on CUDA devices. torch.amp's step
is autocast, unscaled, clipped and stepped by fused AdamW. On a machine that emulates the format, Castwise's rows count
what emulation takes too, predicted and measured alike, but for those that say native. Those are predicted for a machine
with the format's own arithmetic: where this one has none, its 16-bit kernels take and leave other buffers, which the
table shows and the verdict leaves out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _models import Encoder, Recurrent, ResNet
from _timing import table
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from castwise.formats import BF16
from castwise.hardware import detect
from castwise.study.tasks.text import GPT
from castwise.torch import Amp
from castwise.torch.memory import Workload, predict
from castwise.torch.memory import _native as native_rules

_CHARACTERS = 97
_CONTEXT = 64
Step = Callable[[], object]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def _cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2).float(), batch[1].flatten())


def _tokens(count: int, classes: int, length: int) -> Callable[[int, int | None], Any]:
    """Batches of `length` tokens of `count` kinds, and a class for each sample."""
    return lambda b, s: (torch.randint(0, count, (b, s or length)), torch.randint(0, classes, (b,)))


def _images(size: int) -> Callable[[int, int | None], Any]:
    return lambda b, _s: (torch.randn(b, 3, size, size), torch.randint(0, 10, (b,)))


def _convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


WORKLOADS: dict[str, tuple[Workload, int, int | None]] = {
    "GPT 4x256, 8x64 characters": (
        Workload(
            lambda: GPT(_CHARACTERS, _CONTEXT, 256, 4, 4),
            lambda b, s: tuple(torch.randint(0, _CHARACTERS, (b, s or _CONTEXT)) for _ in range(2)),
            _cross_entropy,
            _adamw,
        ),
        8,
        _CONTEXT,
    ),
    "MLP 3x1024, 64 samples": (
        Workload(
            lambda: nn.Sequential(
                nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
            ),
            lambda b, _s: (torch.randn(b, 256), torch.randint(0, 10, (b,))),
            _cross_entropy,
            _adamw,
        ),
        64,
        None,
    ),
    "convnet 32-64-128, 32 images": (
        Workload(
            _convnet,
            _images(32),
            _cross_entropy,
            _adamw,
        ),
        32,
        None,
    ),
    "encoder 2x256, 8x64 tokens": (
        Workload(lambda: Encoder(256, 2), _tokens(1000, 10, 64), _cross_entropy, _adamw),
        8,
        None,
    ),
    "residual net 32, 16 images": (Workload(lambda: ResNet(32), _images(32), _cross_entropy, _adamw), 16, None),
    "LSTM 256, 16x32 steps": (
        Workload(
            lambda: Recurrent(256),
            lambda b, s: (torch.randn(b, s or 32, 64), torch.randint(0, 10, (b,))),
            _cross_entropy,
            _adamw,
        ),
        16,
        None,
    ),
}

_SMALLEST = "bf16 stochastic, bf16 state, narrow gradients"

#: Of a row: policy, weights, and further options of `Amp`.
MODES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp32": ("float32", "auto", {}),
    "bf16": ("bfloat16", "auto", {}),
    "bf16 weights, master": ("bfloat16", "master", {}),
    "bf16 weights, split": ("bfloat16", "split", {}),
    _SMALLEST: (
        "bfloat16",
        "stochastic",
        {"optimizer_state": "bfloat16", "narrow_gradients": True},
    ),
}


def measured(make: Callable[[], tuple[Step, list[torch.Tensor]]]) -> int:
    """The peak of the second of two steps; `make` makes the step, and what tensors are there from the start."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True) as records:
        step, held = make()
        step(), step()
    if cuda:
        return int(torch.cuda.max_memory_allocated())
    now = peak = sum(x.untyped_storage().nbytes() for x in held)
    events = [e for e in records.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _made(work: Workload, batch: int, seq: int | None, low: bool) -> tuple[nn.Module, Any, list[torch.Tensor]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = work.build().to(device)
    if low:
        model = model.to(torch.bfloat16)
    data = tuple(x.to(device) for x in work.batch(batch, seq))
    if low:
        data = tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in data)
    return model, data, [*model.parameters(), *model.buffers(), *data]


def castwise_peak(work: Workload, batch: int, seq: int | None, mode: str, native: bool = False) -> int:
    """Measured, of `Amp`; with the processor's own 16-bit kernels, however slow, if `native`."""
    policy, weights, options = MODES[mode]
    model, data, held = _made(work, batch, seq, weights != "auto")

    def make() -> tuple[Step, list[torch.Tensor]]:
        amp = Amp(model, work.optimizer(model), policy, weights=weights, **options)
        if native:
            amp._rules = native_rules(amp._rules)

        def step() -> None:
            with amp:
                loss = work.loss(model, data)
            amp.step(loss, clip_norm=1.0)

        return step, held

    return measured(make)


def torch_peak(work: Workload, batch: int, seq: int | None, amp: bool) -> int:
    """Measured, of torch's own step, with torch.amp or in float32."""
    model, data, held = _made(work, batch, seq, False)

    def make() -> tuple[Step, list[torch.Tensor]]:
        optimizer = work.optimizer(model)
        scaler = torch.amp.GradScaler(data[0].device.type, enabled=amp)

        def step() -> None:
            with torch.autocast(data[0].device.type, torch.bfloat16, enabled=amp):
                loss = work.loss(model, data)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step, held

    return measured(make)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="workloads whose name has this in it")
    parser.add_argument("--native", action="store_true", help="each mode with the processor's own 16-bit kernels too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, worst, native_here = [], 0.0, detect("cpu").native(BF16)
    for name, (work, batch, seq) in WORKLOADS.items():
        if args.only not in name:
            continue
        base = torch_peak(work, batch, seq, amp=False)
        rows.append([name, "torch fp32", "-", f"{base / 2**20:.1f}", "-", "1.00"])
        try:
            theirs = torch_peak(work, batch, seq, amp=True)
            rows.append([name, "torch.amp bf16", "-", f"{theirs / 2**20:.1f}", "-", f"{theirs / base:.2f}"])
        except RuntimeError as error:  # oneDNN's LSTM, on processors without AVX-512
            rows.append([name, f"torch.amp bf16 raises: {str(error)[:40]}...", "-", "-", "-", "-"])
        for mode, (policy, weights, options) in MODES.items():
            for native in (False, True) if mode == _SMALLEST or (args.native and policy != "float32") else (False,):
                expected = predict(work, policy, batch=batch, seq=seq, weights=weights, native=native, **options).peak
                seen = castwise_peak(work, batch, seq, mode, native)
                if native_here or not native:
                    worst = max(worst, abs(expected / seen - 1.0))
                cells = [f"{expected / 2**20:.1f}", f"{seen / 2**20:.1f}", f"{expected / seen - 1.0:+.1%}"]
                rows.append([name, mode + (", native" if native else ""), *cells, f"{seen / base:.2f}"])
                print(*rows[-1], sep="  ", flush=True)
    print(table(["workload", "step", "predicted MiB", "measured MiB", "off by", "of torch's fp32"], rows))
    told = "" if native_here else " (native rows left out: this CPU computes bfloat16 by other kernels)"
    print(f"\nfurthest off: {worst:.1%}{told}")
    raise SystemExit(worst > 0.05)


if __name__ == "__main__":
    main()
