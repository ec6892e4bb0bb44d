"""The parts of `planned.py` that run models without gradients."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping

import torch
from _models import GPT, Past, Speaker
from _planned_counts import amp_forward, low_forward
from _timing import rounds_of, table
from torch import nn
from torch.nn import functional as F

from castwise.torch import compile, for_inference

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
Step = Callable[[], object]


def that_run(arms: Mapping[str, Step], name: str) -> dict[str, Step]:
    """The arms that this machine can run at all; torch has no LSTM in bf16 on some, for one."""
    able = {}
    for arm, run in arms.items():
        try:
            run()
        except Exception as failure:  # of whatever kind: it is told, and the others are measured
            print(f"{name}: {arm} does not run here: {str(failure).splitlines()[0][:90]}")
        else:
            able[arm] = run
    return able


def section_infer(args: argparse.Namespace) -> None:
    rows = []
    low, width = LOW[args.low], 512 if args.size == "full" else 64
    for tokens in (1, 64):
        torch.manual_seed(0)
        model = GPT(width).eval()
        x = torch.randint(0, 256, (1, tokens))
        _, in_low = low_forward(model, low)
        arms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "fp32": model,
            "torch.amp": amp_forward(model, "cpu", low),
            "torch.compile+amp": torch.compile(amp_forward(model, "cpu", low)),
            "all 16 bits": in_low,
            "planned": for_inference(model, (x,), policy=args.policy),
        }
        if "planned, compiled" in args.arms:
            arms["planned, compiled"] = compile(model, (x,), policy=args.policy)
        with torch.inference_mode():
            runs = {arm: (lambda run=run, x=x: run(x)) for arm, run in arms.items() if arm in args.arms}
            runs = that_run(runs, f"{tokens} tokens") | {
                f"linear layers alone, {args.low}": layers_of(model, tokens, low)
            }
            times, rounds = rounds_of(runs, args.rounds, seconds=args.seconds)
            errors = {arm: output_error(model, arms[arm], args.batches, tokens) for arm in runs if arm in arms}
        for arm, timing in times.items():
            against = [
                f"{timing.seconds / times[base].seconds:.2f}" if base in times else "-"
                for base in ("fp32", "torch.amp", "all 16 bits")
            ]
            error = f"{errors[arm]:.1e}" if arm in errors else "-"
            rows.append(
                [
                    f"{tokens} tokens",
                    arm,
                    f"{1e3 * timing.seconds:.2f}",
                    *against,
                    error,
                    f"{timing.faults:.0f}",
                    str(rounds),
                ]
            )
    header = [f"GPT 4x{width}", "arm", "ms", "/ fp32", "/ torch.amp", "/ all 16 bits", "error", "page faults", "rounds"]
    print(table(header, rows))


def layers_of(model: nn.Module, tokens: int, low: torch.dtype) -> Step:
    """The linear layers of a model in 16 bits and nothing else: less time than they take has no arm that runs them."""
    layers = [
        (torch.randn(1, tokens, layer.in_features).to(low), copy.deepcopy(layer).to(low))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]

    def run() -> None:
        for x, layer in layers:
            F.linear(x, layer.weight, layer.bias)

    return run


def output_error(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], batches: int, tokens: int) -> float:
    """Relative distance of outputs from those of the model in fp64, over several inputs."""
    exact, off, size = copy.deepcopy(model).double(), 0.0, 0.0
    draw = torch.Generator().manual_seed(1)
    for _ in range(batches):
        x = torch.randint(0, 256, (1, tokens), generator=draw)
        want = exact(x)
        off += float((run(x).double() - want).square().sum())
        size += float(want.square().sum())
    return (off / size) ** 0.5


def section_generate(args: argparse.Namespace) -> None:
    low, width = LOW[args.low], 512 if args.size == "full" else 64
    torch.manual_seed(0)
    model = Speaker(width).eval()
    past, token = model.past(16), torch.randint(0, 256, (1, 1))
    copied = Speaker(width).eval().to(low)
    count = 16 if args.quick else 64

    def spoken(run: Callable[[torch.Tensor, Past], tuple[torch.Tensor, Past]], past: Past) -> Step:
        def speak() -> None:
            x, kept = token, past
            for _ in range(count):
                logits, kept = run(x, kept)
                x = logits.argmax(-1, keepdim=True)

        return speak

    arms = {
        "fp32": spoken(model, past),
        "torch.amp": spoken(amp_forward(model, "cpu", low), past),
        "all 16 bits": spoken(copied, tuple((k.to(low), v.to(low)) for k, v in past)),
        "planned": spoken(for_inference(model, (token, past), policy=args.policy), past),
    }
    with torch.inference_mode():
        runs = {arm: run for arm, run in arms.items() if arm in args.arms}
        times, rounds = rounds_of(runs, args.rounds, seconds=args.seconds)
    rows = [[arm, f"{count / timing.seconds:.0f}", str(rounds)] for arm, timing in times.items()]
    print(table([f"generate, GPT 4x{width}", "tokens/s", "rounds"], rows))
