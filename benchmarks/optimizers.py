"""The step after backward: Castwise's one pass over memory against torch's unscale, clip, fused AdamW and casts.

    python benchmarks/optimizers.py                     # 50M parameters, the whole table
    python benchmarks/optimizers.py --millions 5
    python benchmarks/optimizers.py --long-runs         # 5,000 steps of each optimizer and mode against float64

Both sides do the same work on the same gradients: multiply by 1/scale, check that all are finite, clip to a norm that
does clip, step AdamW, and make the bfloat16 weights that the next forward reads. Gradients are put back before each
step, outside the clock. "bytes" counts what has to be moved between memory and processor per weight, at the least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _timing import fix_allocator, table
from torch import nn

from castwise.torch import Lion
from castwise.torch._casts import CastCache
from castwise.torch._gradients import norm, values_of
from castwise.torch._stepping import Stepper

_SCALE = 1024.0
_CLIP = 1.0
_LAYER = 2048  # rows and columns of the matrices: 12 of them are 50M weights
Step = Callable[[], object]


@dataclass
class Side:
    """One way of stepping: what is timed, and how its gradients are put back."""

    step: Step
    reset: Step
    moved: int  # bytes per weight


def _weights(millions: float, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    count = max(1, round(millions * 1e6 / _LAYER**2))
    return [nn.Parameter((torch.randn(_LAYER, _LAYER) * 0.02).to(dtype)) for _ in range(count)]


def _gradients(weights: list[nn.Parameter]) -> list[torch.Tensor]:
    return [torch.randn_like(p, dtype=torch.float32) * _SCALE for p in weights]


def torch_side(millions: float) -> Side:
    """GradScaler, clip_grad_norm_, fused AdamW, and the casts that autocast makes in the next forward."""
    weights = _weights(millions)
    given = _gradients(weights)
    optimizer = torch.optim.AdamW(weights, 1e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=10**9)
    scaler.scale(torch.zeros(()))
    for p in weights:
        p.grad = torch.empty_like(p)
    low = [torch.empty_like(p, dtype=torch.bfloat16) for p in weights]

    def reset() -> None:
        for p, g in zip(weights, given, strict=True):
            p.grad.copy_(g)

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, _CLIP)
        scaler.step(optimizer)
        scaler.update()
        for p, cast in zip(weights, low, strict=True):
            cast.copy_(p.detach())

    # unscale 8, norm 4, clip 8, AdamW: gradient 4, weight and moments 24, casts 4 + 2
    return Side(step, reset, 54)


def castwise_side(
    millions: float, mode: str = "fp32", state: str = "float32", narrow: bool = False, moved: int = 0
) -> Side:
    """What `Amp.step` does after backward."""
    weights = _weights(millions, torch.float32 if mode == "fp32" else torch.bfloat16)
    given = _gradients(weights)
    if narrow:
        given = [g.to(torch.bfloat16) for g in given]
    cache = CastCache()
    optimizer = torch.optim.AdamW(weights, 1e-4, fused=True)
    stepper = Stepper(
        optimizer, "auto" if mode == "fp32" else mode, cache, optimizer_state=state, narrow_gradients=narrow
    )
    if mode == "fp32":  # the forward's casts, as a machine that computes bfloat16 natively keeps them
        for p in weights:
            cache.get(p, torch.bfloat16, lambda x: x.to(torch.bfloat16))
    for p, g in zip(weights, given, strict=True):
        p.grad = g.clone()

    def reset() -> None:
        for p, g in zip(weights, given, strict=True):
            if p.grad is None:
                p.grad = g.clone()

    def step() -> None:
        size = float(norm(values_of(stepper.wide.parameters()))) / _SCALE
        assert size < float("inf")
        stepper.step(_SCALE / min(1.0, _CLIP / (size + 1e-6)))

    return Side(step, reset, moved)


def measure(sides: dict[str, Side], seconds: float) -> dict[str, float]:
    """Median seconds of each side, in turn, its gradients reset before each step."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 4 or time.perf_counter() < end:
        for name, side in sides.items():
            side.reset()
            start = time.perf_counter()
            side.step()
            if rounds:  # the first makes the optimizer's state
                times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def speed(millions: float, seconds: float) -> None:
    """The table of times. Sides are measured in pairs with torch's, so that memory suffices."""
    kinds: dict[str, dict[str, object]] = {
        # norm 4; gradient 4 + 4, weight and moments 24, casts 4 + 2; pieces stay in the cache where there are any
        "fp32 weights, casts refreshed": {"mode": "fp32", "moved": 42},
        "fp32 weights, bf16 state": {"mode": "fp32", "state": "bfloat16", "moved": 26},
        "bf16 master": {"mode": "master", "moved": 34},
        "bf16 split": {"mode": "split", "moved": 32},
        "bf16 split, narrow gradients": {"mode": "split", "narrow": True, "moved": 28},
        "bf16 kahan": {"mode": "kahan", "moved": 32},
        "bf16 stochastic": {"mode": "stochastic", "moved": 28},
        "bf16 stochastic, bf16 state": {"mode": "stochastic", "state": "bfloat16", "moved": 20},
    }
    rows = []
    for name, options in kinds.items():
        sides = {"torch": torch_side(millions), name: castwise_side(millions, **options)}  # type: ignore[arg-type]
        times = measure(sides, seconds)
        count = max(1, round(millions * 1e6 / _LAYER**2)) * _LAYER**2
        rows.append(
            [
                name,
                f"{sides[name].moved} / {sides['torch'].moved}",
                f"{times[name] / count * 1e9:.2f}",
                f"{times['torch'] / count * 1e9:.2f}",
                f"{times[name] / times['torch']:.2f}",
            ]
        )
        print(f"{name}: {times[name]:.3f} s, torch {times['torch']:.3f} s", flush=True)
    print(table(["step", "bytes (of torch's)", "ns per weight", "torch's", "time over torch's"], rows))


# ---- long runs -------------------------------------------------------------------------------------------------------

_MAKE = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-4, weight_decay=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, 1e-4, momentum=0.9, weight_decay=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-4, weight_decay=0.1),
    "Lion": lambda p: Lion(p, 1e-5, weight_decay=0.1),
}


def _run(name: str, dtype: torch.dtype, mode: str, steps: int) -> torch.Tensor:
    p = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = _MAKE[name]([p])
    plain = dtype is torch.float64 or mode == "plain"
    stepper = None if plain else Stepper(optimizer, mode, CastCache())
    noise = torch.randn(64, 64, 64, generator=torch.Generator().manual_seed(2)).mul_(0.1).add_(0.3)
    for i in range(steps):
        p.grad = noise[i % 64].to(dtype if plain else torch.float32)
        optimizer.step() if stepper is None else stepper.step(1.0)
    return p.detach().double()


def long_runs(steps: int = 5000) -> None:
    """How far each mode ends from float64, for 4,096 weights that begin at 1."""
    rows = []
    for name in _MAKE:
        exact = _run(name, torch.float64, "", steps)
        for mode in ("plain", "master", "split", "kahan", "stochastic"):
            got = _run(name, torch.bfloat16, mode, steps)
            mean = abs((got.mean() - exact.mean()).item())
            rows.append([f"{name}, {mode}", f"{(got - exact).abs().max():.4f}", f"{mean:.5f}", f"{exact.mean():.3f}"])
    print(table([f"{steps} steps", "largest error", "error of the mean", "float64 ends at"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=50.0, help="weights, in millions")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each line of the table")
    parser.add_argument("--long-runs", action="store_true")
    args = parser.parse_args()
    fix_allocator()
    long_runs() if args.long_runs else speed(args.millions, args.seconds)


if __name__ == "__main__":
    main()
