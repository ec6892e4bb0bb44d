"""What interception costs in eager PyTorch: per op and per training step, against torch.amp and hand-written casts.

    python benchmarks/eager.py [--full] [--seconds 10] [--only LSTM]

Where the CPU has no bfloat16 arithmetic, torch.amp's own kernels are scalar code, so shapes are small unless `--full`
asks for the usual ones, and a second table has Castwise run those same kernels instead of emulating, so that it shows
interception alone. One thread, alternating runs, medians, fixed allocator settings.
"""

from __future__ import annotations

from collections.abc import Callable

from _timing import alternate, fix_allocator, per_call, table

fix_allocator()

import argparse  # noqa: E402

import torch  # noqa: E402
from _models import Step, Task, amp_step, longer_tasks, plain_step, tasks  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from castwise.formats import BF16  # noqa: E402
from castwise.hardware import detect  # noqa: E402
from castwise.torch import autocast, emulation  # noqa: E402
from castwise.torch._rules import rules_for  # noqa: E402

LOW = torch.bfloat16


def same_kernels(same: bool, known: Callable[..., bool] = emulation.computes_natively) -> None:
    """Let Castwise run the 16-bit kernels that torch.amp runs, or what suits this machine."""
    emulation.computes_natively = (lambda device_type, fmt: True) if same else known
    emulation.arithmetic.cache_clear()
    rules_for.cache_clear()


def per_op() -> str:
    """Microseconds per call on tensors of 4 x 4, inside a region that stays open; no gradients."""
    x, w, low = torch.randn(4, 4), torch.nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4).to(LOW)
    ops: dict[str, tuple[Step, Step]] = {
        "linear (weights cast once)": (lambda: F.linear(x, w), lambda: F.linear(x.to(LOW), low)),
        "softmax of a 16-bit tensor": (lambda: torch.softmax(low, -1), lambda: torch.softmax(low.float(), -1)),
        "add, 16-bit + fp32": (lambda: low + x, lambda: low + x),
        "relu": (lambda: torch.relu(low), lambda: torch.relu(low)),
        "reshape": (lambda: low.reshape(16), lambda: low.reshape(16)),
    }
    rows = []
    with torch.no_grad():
        for name, (op, by_hand) in ops.items():

            def inside(context: object, op: Step = op) -> Step:
                def run() -> None:
                    with context:  # type: ignore[attr-defined]
                        for _ in range(100):
                            op()

                return run

            def bare(op: Step = by_hand) -> None:
                for _ in range(100):
                    op()

            found = per_call(
                {
                    "hand": bare,
                    "torch": inside(torch.autocast("cpu", dtype=LOW)),
                    "ours": inside(autocast("cpu", dtype=LOW)),
                    "off": inside(autocast("cpu", enabled=False)),
                    "fp32": inside(autocast("cpu", dtype=torch.float32)),
                },
                calls=3,
            )
            rows.append([name, *(f"{found[k] * 1e4:.1f}" for k in ("hand", "torch", "ours", "off", "fp32"))])
    return table(["µs per op", "by hand", "torch.amp", "castwise", "enabled=False", "float32"], rows)


def without_onednn(step: Step) -> Step:
    def run() -> None:
        with torch.backends.mkldnn.flags(enabled=False):
            step()

    return run


def per_step(tasks: list[Task], seconds: float) -> str:
    """Milliseconds of a full training step: forward, backward, clip, fused AdamW."""
    rows = []
    for task in tasks:
        torch.manual_seed(0)
        steps = {
            "fp32": plain_step(task),
            "torch": plain_step(task, dtype=LOW),
            "ours": amp_step(task, "bfloat16"),
            "ours32": amp_step(task, "float32"),
        }
        without = ""
        try:
            steps["torch"]()
        except RuntimeError:  # oneDNN's recurrent layers need instructions that not every CPU has
            steps["torch"], without = without_onednn(steps["torch"]), " *"
        found = alternate(steps, seconds=seconds)
        ms = {side: f"{found[side] * 1e3:.2f}" for side in steps}
        ms["torch"] += without
        ratios = found["ours"] / found["torch"], found["ours32"] / found["fp32"]
        rows.append([task.name, *ms.values(), *(f"{ratio:.2f}" for ratio in ratios)])
    head = ["ms per step", "fp32", "torch.amp bf16", "Amp bf16", "Amp fp32", "Amp/torch.amp", "Amp fp32/fp32"]
    return table(head, rows) + "\n* raises as torch.amp runs it; timed with oneDNN off, which a user would have to do"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the usual shapes, also without bfloat16 arithmetic")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each task (at least 3 rounds are run)")
    parser.add_argument("--only", default="", help="tasks whose name has this in it, and no table of ops")
    options = parser.parse_args()
    torch.set_num_threads(1)
    native = detect("cpu").native(BF16)
    print(f"bfloat16 on this CPU: {'native' if native else 'not native; Castwise emulates it, torch.amp does not'}\n")
    chosen = [task for task in tasks(native or options.full) if options.only in task.name]
    if not options.full:
        same_kernels(True)
        if not options.only:
            print(per_op(), "\n")
        if not native:
            print("The same 16-bit kernels on both sides, small models and longer steps:\n")
            with torch.backends.mkldnn.flags(enabled=False):  # its LSTM needs instructions that not every CPU has
                both = [task for task in (*tasks(False), *longer_tasks()) if options.only in task.name]
                print(per_step(both, options.seconds), "\n")
            print("As Castwise runs here:\n")
        same_kernels(False)
    print(per_step(chosen, options.seconds))


if __name__ == "__main__":
    main()
