"""The step after backward: Castwise's one pass over memory against torch's unscale, clip, fused AdamW and casts.

    python benchmarks/optimizers.py                     # 50M parameters, the whole table
    python benchmarks/optimizers.py --millions 5
    python benchmarks/optimizers.py --threads 1         # processor time, which a busy machine disturbs less
    python benchmarks/optimizers.py --long-runs         # 5,000 steps of each optimizer and mode against float64

All sides do the same work on the same gradients: multiply by 1/scale, check that all are finite, clip to a norm that
does clip, step AdamW, and make the bfloat16 weights that the next forward reads. Gradients are put back before each
step, outside the clock. torch's side takes part in each pair; the others' are torchao and optimi where they are
installed, on bfloat16 weights and gradients, after GradScaler and clip_grad_norm_.

"bytes" are counted: what each operation reads and writes of tensors too large for the working memory of a piece, per
weight. What torch.compile makes for torchao cannot be counted so.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _timing import fix_allocator, table
from _traffic import Traffic
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
    counts: bool = True  # whether its operations can be seen one by one


def _weights(millions: float, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    count = max(1, round(millions * 1e6 / _LAYER**2))
    return [nn.Parameter((torch.randn(_LAYER, _LAYER) * 0.02).to(dtype)) for _ in range(count)]


def _gradients(weights: list[nn.Parameter]) -> list[torch.Tensor]:
    return [torch.randn_like(p, dtype=torch.float32) * _SCALE for p in weights]


def _scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=10**9)
    scaler.scale(torch.zeros(()))
    return scaler


def _resetting(weights: list[torch.Tensor], given: list[torch.Tensor]) -> Callable[[], None]:
    """What gives the weights their gradients, in memory that stays."""
    for p in weights:
        p.grad = torch.empty_like(p)

    def reset() -> None:
        for p, g in zip(weights, given, strict=True):
            p.grad.copy_(g)

    return reset


def torch_side(millions: float) -> Side:
    """GradScaler, clip_grad_norm_, fused AdamW, and the casts that autocast makes in the next forward."""
    weights = _weights(millions)
    given = _gradients(weights)
    optimizer = torch.optim.AdamW(weights, 1e-4, fused=True)
    scaler = _scaler()
    low = [torch.empty_like(p, dtype=torch.bfloat16) for p in weights]

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, _CLIP)
        scaler.step(optimizer)
        scaler.update()
        for p, cast in zip(weights, low, strict=True):
            cast.copy_(p.detach())

    return Side(step, _resetting(weights, given))


def library_side(millions: float, name: str) -> Side:
    """GradScaler, clip_grad_norm_ and another library's optimizer on bfloat16 weights."""
    weights = _weights(millions, torch.bfloat16)
    given = [g.to(torch.bfloat16) for g in _gradients(weights)]
    if name == "optimi, kahan":
        optimizer = importlib.import_module("optimi").AdamW(weights, lr=1e-4, betas=(0.9, 0.999), kahan_sum=True)
    else:
        torchao = importlib.import_module("torchao.optim")
        kind = torchao._AdamW if name == "torchao, stochastic" else torchao.AdamW8bit
        optimizer = kind(weights, lr=1e-4, bf16_stochastic_round=True)
    scaler = _scaler()

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, _CLIP)
        scaler.step(optimizer)
        scaler.update()

    return Side(step, _resetting(weights, given), counts=name.startswith("optimi"))


def castwise_side(millions: float, mode: str = "fp32", state: str = "float32", narrow: bool = False) -> Side:
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

    return Side(step, reset)


def measure(sides: dict[str, Side], seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each side, in turn, its gradients reset before each step."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 4 or time.perf_counter() < end:
        for name, side in sides.items():
            side.reset()
            start = clock()
            side.step()
            if rounds:  # the first makes the optimizer's state
                times[name].append(clock() - start)
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def bytes_of(side: Side) -> int:
    """Bytes that the operations of one step move between memory and the working memory of pieces."""
    side.reset()
    with Traffic() as traffic:
        side.step()
    return traffic.bytes


_KINDS: dict[str, dict[str, object]] = {
    "fp32 weights, casts refreshed": {"mode": "fp32"},
    "fp32 weights, bf16 state": {"mode": "fp32", "state": "bfloat16"},
    "fp32 weights, 8-bit state": {"mode": "fp32", "state": "8bit"},
    "bf16 master": {"mode": "master"},
    "bf16 split": {"mode": "split"},
    "bf16 split, narrow gradients": {"mode": "split", "narrow": True},
    "bf16 kahan": {"mode": "kahan"},
    "bf16 stochastic": {"mode": "stochastic"},
    "bf16 stochastic, bf16 state": {"mode": "stochastic", "state": "bfloat16"},
}
_LIBRARIES = {"optimi, kahan": "optimi", "torchao, stochastic": "torchao", "torchao, 8-bit state": "torchao"}


def speed(millions: float, seconds: float, clock: Callable[[], float], only: str) -> None:
    """The table of times. Sides are measured in pairs with torch's, so that memory suffices."""
    rows = []
    count = max(1, round(millions * 1e6 / _LAYER**2)) * _LAYER**2
    for name in (*_KINDS, *_LIBRARIES):
        if only not in name:
            continue
        if name in _LIBRARIES and importlib.util.find_spec(_LIBRARIES[name]) is None:
            print(f"{name}: not installed")
            continue
        own = library_side(millions, name) if name in _LIBRARIES else castwise_side(millions, **_KINDS[name])  # type: ignore[arg-type]
        sides = {"torch": torch_side(millions), name: own}
        times = measure(sides, seconds, clock)
        moved = [f"{bytes_of(side) / count:.0f}" if side.counts else "-" for side in (own, sides["torch"])]
        rows.append(
            [
                name,
                " / ".join(moved),
                f"{times[name] / count * 1e9:.2f}",
                f"{times['torch'] / count * 1e9:.2f}",
                f"{times[name] / times['torch']:.2f}",
            ]
        )
        print(*rows[-1], sep="  ", flush=True)
    print(table(["step", "bytes (of torch's)", "ns per weight", "torch's", "time over torch's"], rows))


# ---- long runs -------------------------------------------------------------------------------------------------------

_MAKE = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-4, weight_decay=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, 1e-4, momentum=0.9, weight_decay=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-4, weight_decay=0.1),
    "Lion": lambda p: Lion(p, 1e-5, weight_decay=0.1),
}
_HALF_STEP = 2.0**-9  # how far a weight of up to 1 can be from the nearest bfloat16 number, beside its own size


def stated_error(mode: str, steps: int) -> tuple[float, float]:
    """The error that the documentation states for weights of up to 1: of any weight, and of the mean of many."""
    # In each step float32 rounds the weight and, in torch's own updates, the factor of its decay: 2**-25 each.
    wide = steps * 2.0**-24
    return {
        "fp32": (wide, wide),
        "master": (_HALF_STEP + wide, 1e-3),
        "split": (_HALF_STEP + wide, 1e-3),
        # The remainder is rounded too, by up to 2**-18 of the weight: the same way where steps are alike.
        "kahan": (_HALF_STEP + steps * 2.0**-18, _HALF_STEP + steps * 2.0**-18),
        # A walk of roundings of one step of bfloat16 each, about its mean.
        "stochastic": (2.0**-8 * steps**0.5, 4e-3),
    }[mode]


def _run(name: str, dtype: torch.dtype, mode: str, steps: int, state: str = "float32") -> torch.Tensor:
    p = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = _MAKE[name]([p])
    plain = dtype is torch.float64 or mode == "plain"
    stepper = None
    if not plain:
        stepper = Stepper(optimizer, "auto" if mode == "fp32" else mode, CastCache(), optimizer_state=state)
    noise = torch.randn(64, 64, 64, generator=torch.Generator().manual_seed(2)).mul_(0.1).add_(0.3)
    for i in range(steps):
        p.grad = noise[i % 64].to(dtype if plain else torch.float32)
        optimizer.step() if stepper is None else stepper.step(1.0)
    return p.detach().double()


def long_runs(steps: int = 5000) -> bool:
    """How far each mode ends from float64, for 4,096 weights that begin at 1; whether all are within what is stated."""
    rows, holds = [], True
    for name in _MAKE:
        exact = _run(name, torch.float64, "", steps)
        for mode in ("plain", "fp32", "master", "split", "kahan", "stochastic"):
            for state in ("float32", "bfloat16", "8bit"):
                if state != "float32" and (mode != "split" or name == "Adafactor"):
                    continue
                dtype = torch.float32 if mode == "fp32" else torch.bfloat16
                got = _run(name, dtype, mode, steps, state)
                largest, mean = (got - exact).abs().max().item(), abs((got.mean() - exact.mean()).item())
                stated = "-"
                if mode != "plain" and state == "float32":
                    limits = stated_error(mode, steps)
                    inside = largest <= limits[0] and mean <= limits[1]
                    holds &= inside
                    stated = f"{limits[0]:.4f}, {limits[1]:.4f}" + ("" if inside else " BROKEN")
                label = f"{name}, {mode}" + (f", {state} state" if state != "float32" else "")
                rows.append([label, f"{largest:.5f}", f"{mean:.5f}", stated, f"{exact.mean():.3f}"])
                print(*rows[-1], sep="  ", flush=True)
    print(table([f"{steps} steps", "largest error", "error of the mean", "stated", "float64 ends at"], rows))
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=50.0, help="weights, in millions")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each line of the table")
    parser.add_argument("--threads", type=int, help="of torch; with 1, processor time is measured")
    parser.add_argument("--only", default="", help="lines whose name has this in it")
    parser.add_argument("--long-runs", action="store_true")
    args = parser.parse_args()
    fix_allocator()
    if args.long_runs:
        raise SystemExit(not long_runs())
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")  # torchao's own, of its native extensions
    speed(args.millions, args.seconds, time.process_time if args.threads == 1 else time.perf_counter, args.only)


if __name__ == "__main__":
    main()
