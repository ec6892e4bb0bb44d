"""What emulated formats cost: a training step of a 512-wide MLP at batch 256, on this CPU.

    python benchmarks/emulation.py

Compares castwise.torch.Amp in fp16, bf16, fp8 and tf32 (emulated where this CPU lacks them) with plain fp32 and with
torch's own CPU autocast, with one thread and with torch's default. Alternating runs, medians, fixed allocator settings.
What emulation can gain over native fp16 is bounded by the machine: it computes in fp32, so it is never faster than the
fp32 step.
"""

from __future__ import annotations

from collections.abc import Callable

from _timing import alternate, fix_allocator, table

fix_allocator()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from castwise.torch import Amp  # noqa: E402

WIDTH, BATCH, LAYERS = 512, 256, 4
_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "tf32": "tf32", "float32": "fp32"}
Step = Callable[[], object]


def mlp() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = [m for _ in range(LAYERS - 1) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    return model, optimizer, torch.randn(BATCH, WIDTH), torch.randint(0, WIDTH, (BATCH,))


def plain(dtype: torch.dtype | None) -> Step:
    model, optimizer, x, y = mlp()
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def ours(policy: str) -> tuple[Step, bool]:
    model, optimizer, x, y = mlp()
    amp = Amp(model, optimizer, policy)

    def step() -> None:
        with amp:
            loss = F.cross_entropy(model(x), y)
        amp.step(loss)

    return step, amp.emulated


def measured(threads: int, built: dict[str, tuple[Step, bool]]) -> None:
    """Measure and print all steps with that many threads."""
    torch.set_num_threads(threads)
    quick: dict[str, Step] = {"plain torch, fp32": plain(None)}
    quick |= {f"Amp, {_NAMES[p]}{' (emulated)' if emulated else ''}": step for p, (step, emulated) in built.items()}
    slow = {"torch.amp, fp16": plain(torch.float16), "torch.amp, bf16": plain(torch.bfloat16)}
    seconds = alternate(quick | slow, seconds=30.0, warm_up=1)
    base = seconds["plain torch, fp32"]
    rows = [[name, f"{1e3 * s:.1f}", f"{s / base:.2f}"] for name, s in seconds.items()]
    print(f"\n{threads} thread{'s' if threads > 1 else ''}\n")
    print(table(["", "ms", "x fp32"], rows))
    ours_fp16 = next(s for name, s in seconds.items() if name.startswith("Amp, fp16"))
    native = seconds["torch.amp, fp16"]
    print(f"\ntorch's own fp16 step takes {native / ours_fp16:.1f} times as long as Amp's, which computes in fp32.")
    print(f"The most that could be, if rounding cost nothing: {native / base:.1f} times (its own to the fp32 step).")


def main() -> None:
    default = torch.get_num_threads()
    print(f"training step, {LAYERS} layers of {WIDTH}, batch {BATCH}, fused AdamW")
    built = {policy: ours(policy) for policy in _NAMES}
    for threads in sorted({1, default}):
        measured(threads, built)


if __name__ == "__main__":
    main()
