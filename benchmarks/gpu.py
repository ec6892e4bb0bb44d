"""Everything that needs a CUDA device, in one run of under 8 minutes: checks first, then tables against torch.amp.

    python benchmarks/gpu.py

Ends with 0 if every check holds, 1 if one does not, 2 where there is no CUDA device. Most checks take a device, and
`--device cpu` runs them there: that is how they are tried out where no GPU is.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable

from _timing import alternate, fix_allocator, table

fix_allocator()

import torch  # noqa: E402
from _models import amp_step, plain_step, tasks  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from castwise.policy import LayerRule, Policy  # noqa: E402
from castwise.torch import Amp, GradScaler, autocast  # noqa: E402

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def check_rules(device: str) -> None:
    """Products run low, hazardous ops wide, mixed formats promote, in both formats."""
    x = torch.randn(64, 64, device=device)
    for dtype in DTYPES.values():
        with autocast(device, dtype=dtype):
            y = x @ x
            assert y.dtype is dtype
            assert torch.softmax(y, -1).dtype is torch.float32
            z = torch.zeros(64, 64, device=device)
            z[0] = y[0]
            assert z.scatter_add(0, torch.zeros(1, 64, dtype=torch.long, device=device), y[:1]).dtype is torch.float32
        assert (x @ x).dtype is torch.float32


def check_values(device: str) -> None:
    """Native products are those of exact arithmetic on rounded inputs, but for rounding once."""
    torch.manual_seed(0)
    for dtype in DTYPES.values():
        x, w = torch.randn(256, 512, device=device), torch.randn(128, 512, device=device)
        with autocast(device, dtype=dtype):
            y = nn.functional.linear(x, w)
        exact = x.to(dtype).double() @ w.to(dtype).double().T
        assert (y.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


def check_training(device: str) -> None:
    """Every task trains in every format, with plain, foreach and fused optimizers."""
    torch.manual_seed(0)
    for policy in ("float32", *DTYPES):
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
            amp = Amp(model, torch.optim.AdamW(model.parameters(), 1e-2, **options), policy)
            x = torch.randn(64, 32, device=device)
            losses = []
            for _ in range(30):
                with amp:
                    loss = (model(x) - 1).float().square().mean()
                amp.step(loss, clip_norm=1.0)
                losses.append(loss.detach())
            assert losses[-1] < 0.5 * losses[0], (policy, options)


def check_skips(device: str) -> None:
    """A bad step is skipped, told and recovered from, whether the host or the device decides."""
    for fused in (False, True):
        model = nn.Linear(4, 1).to(device)
        before = model.weight.detach().clone()
        amp = Amp(model, torch.optim.AdamW(model.parameters(), 0.1, fused=fused), "float16")
        for factor, stepped in ((float("inf"), False), (1.0, True)):
            with amp:
                loss = model(torch.ones(2, 4, device=device)).float().mean() * factor
            assert amp.step(loss).stepped is stepped
            assert torch.equal(model.weight, before) is not stepped
        assert amp.loss_scale == 2.0**15 and amp.scale_state.skipped == 1


def check_no_waiting(device: str) -> None:
    """A fused step never makes the host wait for the device."""
    model = nn.Linear(64, 64).to(device)
    amp = Amp(model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), "float16")
    x = torch.randn(8, 64, device=device)

    def step() -> None:
        with amp:
            loss = model(x).float().square().mean()
        amp.step(loss, clip_norm=1.0)

    for _ in range(3):
        step()
    if device != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_scaler(device: str) -> None:
    """The usual FP16 snippet, with only the import changed."""
    model = nn.Linear(8, 1).to(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler(device, init_scale=1024.0)
    for _ in range(3):
        optimizer.zero_grad()
        with autocast(device_type=device, dtype=torch.float16):
            loss = model(torch.ones(4, 8, device=device)).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.stepped


def check_layers_and_checkpoints(device: str) -> None:
    """Layer rules hold, also where activations are recomputed."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    policy = Policy(format="bfloat16", layers=[LayerRule("1", format="float32")])
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), policy)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    for reentrant in (True, False):
        with amp:
            y = checkpoint(model, x, use_reentrant=reentrant)
            assert y.dtype is torch.float32
            loss = y.square().sum()
        assert amp.step(loss).stepped


def check_weights(device: str) -> None:
    """16-bit weights lose no small updates."""
    for mode in ("master", "split", "kahan", "stochastic"):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False).to(device, torch.bfloat16)
        nn.init.constant_(model.weight, 1.0)
        amp = Amp(model, torch.optim.SGD(model.parameters(), 1e-4), "bfloat16", weights=mode)
        x = torch.ones(1, 64, device=device, dtype=torch.bfloat16)
        for _ in range(300):
            with amp:
                loss = model(x).float().sum()
            amp.step(loss)
        assert abs(model.weight.float().mean().item() - 0.97) < 0.003, mode


def check_compile(device: str) -> None:
    """A compiled forward runs in the region's formats, in one graph."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    compiled = torch.compile(model, fullgraph=True)
    with autocast(device, dtype=torch.bfloat16):
        y = compiled(torch.randn(8, 16, device=device))
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()


CHECKS: list[Callable[[str], None]] = [
    check_rules,
    check_values,
    check_training,
    check_skips,
    check_no_waiting,
    check_scaler,
    check_layers_and_checkpoints,
    check_weights,
    check_compile,
]


def run_checks(device: str) -> int:
    """Run every check, print one line each; the number that failed."""
    failed = 0
    for check in CHECKS:
        try:
            check(device)
        except Exception:  # one failure must not hide the others
            failed += 1
            print(f"FAILED  {check.__name__}: {check.__doc__}\n{traceback.format_exc(limit=4)}", flush=True)
        else:
            print(f"holds   {check.__name__}: {check.__doc__}", flush=True)
    return failed


def step_table(device: str, full: bool, seconds: float) -> str:
    """Milliseconds of a full training step (clip, fused AdamW) against torch.amp."""
    rows = []
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for task in tasks(full):
        for name, dtype in DTYPES.items():
            found = alternate(
                {
                    "fp32": plain_step(task, device),
                    "torch": plain_step(task, device, dtype),
                    "ours": amp_step(task, name, device),
                },
                seconds=seconds,
                synchronize=wait,
                warm_up=3,
            )
            ms = [f"{found[k] * 1e3:.2f}" for k in ("fp32", "torch", "ours")]
            rows.append([task.name, name, *ms, f"{found['ours'] / found['torch']:.2f}"])
            print(".", end="", flush=True, file=sys.stderr)
    return table(["ms per step", "format", "fp32", "torch.amp", "Amp", "Amp/torch.amp"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here: nothing was checked or measured. Try the checks with --device cpu.")
        return 2
    print(torch.cuda.get_device_name() if device == "cuda" else "CPU: the checks alone", torch.__version__, "\n")
    failed = run_checks(device)
    if device == "cuda":
        print("\n" + step_table(device, full=True, seconds=15.0))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
