"""Planned models against fp32, torch.amp, torch.compile with torch.amp, and everything in 16 bits.

    python benchmarks/planned.py                          # every section and model, sizes that this machine can bear
    python benchmarks/planned.py --section step --model gpt convnet
    python benchmarks/planned.py --quick                  # small sizes, 3 rounds: does it run?

Sections:

    step      a full training step: loss, backward, clipping, fused AdamW
    counts    casts executed, bytes cast (forward and backward, and by the optimizer step), bytes saved for backward,
              error against fp64 over several batches
    infer     a forward without gradients of 1 and of 64 tokens, its error against fp64, and its linear layers alone
    generate  tokens per second, one at a time, with keys and values kept
    follow    500 steps of training in the plan's formats beside fp32 from several seeds
    predict   the times of steps that plans predict, beside those that the clock shows
    flips     the most decisive ops of a plan, each flipped: predicted, and measured where it can be

All arms of a table run in turn in one process, with fixed allocator thresholds; medians, and page faults per run.

"step", "infer" and "generate" plan for this machine (`--policy`). Where it computes no 16-bit format, `auto` plans fp32
and the rows show that planning costs nothing; how fast 16-bit plans are can only be measured where there is 16-bit
arithmetic, and torch's own 16-bit rows are then scalar code: leave them out with `--arms`, or shrink (`--size small`,
the default there). "counts", "follow" and "flips" do not depend on that: they plan for `--device` and run the formats
of that plan here.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from _timing import fix_allocator, rounds_of, table
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _models import GPT, Task, planned_tasks
from _planned_counts import amp_forward, count, error, low_forward
from _planned_inference import LOW, Step, section_generate, section_infer, that_run
from _planned_predicted import predicted_beside_measured

from castwise.hardware import detect
from castwise.plan import Verdict
from castwise.torch import Amp, apply, compile, plan
from castwise.torch.planning import Plan, Prepared, prepare, verified

ARMS = ("fp32", "torch.amp", "torch.compile+amp", "all 16 bits", "planned", "planned, Amp", "planned, compiled")


def built(task: Task) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = task.build()
    x, y = task.batch()
    return model, x, y


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.float(), y)


# ---- a full step -----------------------------------------------------------------------------------------------------


def step_of(
    model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step() -> None:
        loss_of(forward(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(task: Task, args: argparse.Namespace) -> dict[str, Step]:
    """One model per arm, from the same seed."""
    low = LOW[args.low]
    found: dict[str, Step] = {}
    for arm in args.arms:
        model, x, y = built(task)
        if arm == "fp32":
            found[arm] = step_of(model, model, x, y)
        elif arm == "torch.amp":
            found[arm] = step_of(model, amp_forward(model, "cpu", low), x, y)
        elif arm == "torch.compile+amp":
            found[arm] = step_of(model, torch.compile(amp_forward(model, "cpu", low)), x, y)
        elif arm == "all 16 bits":
            copied, forward = low_forward(model, low)
            found[arm] = step_of(copied, forward, x, y)
        else:
            target = "compiled" if "compiled" in arm else "eager"
            decided = plan(model, (x,), loss=lambda out, y=y: loss_of(out, y), policy=args.policy, target=target)
            if arm == "planned, Amp":
                found[arm] = amp_step(model, decided, x, y)
            else:
                made = apply(model, decided) if target == "eager" else compile(model, plan=decided)
                found[arm] = step_of(model, made, x, y)
    return found


def amp_step(model: nn.Module, decided: Plan, x: torch.Tensor, y: torch.Tensor) -> Step:
    """The same step by `Amp`, which watches it, and keeps low weights where the plan reads some."""
    amp = Amp(model, torch.optim.AdamW(model.parameters(), 1e-4, fused=True), plan=decided)

    def step() -> None:
        with amp:
            loss = loss_of(model(x), y)
        amp.step(loss, clip_norm=1.0)

    return step


def section_step(args: argparse.Namespace) -> None:
    for task in chosen(args):
        rows = []
        times, rounds = rounds_of(that_run(steps(task, args), task.name), args.rounds, seconds=args.seconds)
        base = times["fp32"].seconds if "fp32" in times else None
        for arm, timing in times.items():
            ratio = "-" if base is None else f"{timing.seconds / base:.2f}"
            rows.append([task.name, arm, f"{1e3 * timing.seconds:.1f}", ratio, f"{timing.faults:.0f}", str(rounds)])
        print(table(["training step", "arm", "ms", "/ fp32", "page faults", "rounds"], rows), flush=True)


# ---- counts ----------------------------------------------------------------------------------------------------------


def plan_for(
    task: Task, args: argparse.Namespace, favour: str
) -> tuple[nn.Module, Plan, list[tuple[torch.Tensor, torch.Tensor]]]:
    model, x, y = built(task)
    batches = [(x, y)] + [task.batch() for _ in range(args.batches - 1)]
    policy = {"bf16": "bfloat16", "fp16": "float16"}[args.low]
    ready = prepare(model, (x,), loss=lambda out: loss_of(out, y), policy=policy, device=args.device)
    if args.size == "small":
        ready = as_if_large(ready)
    return model, verified(ready, ready.solve(favour=favour)), batches


def as_if_large(ready: Prepared) -> Prepared:
    """With costs as if the small model were a large one: products gain, and casts cost what the bytes they move cost.

    At its own size all of it is the time to launch kernels, and the best plan is fp32.
    """
    flops, elements, costs = ready.captured.graph.index.flops, ready.captured.graph.index.elements, ready.costs
    cast = elements * 1e-9
    down = np.where(costs.kept, 0.0, cast)
    return replace(ready, costs=replace(costs, high=costs.high + flops * 1e-9, down=down, up=cast))


def section_counts(args: argparse.Namespace) -> None:
    rows = []
    low = LOW[args.low]
    for task in chosen(args):
        model, x, y = built(task)
        copied, in_low = low_forward(model, low)
        arms = {
            "fp32": (model, model, None, None),
            "torch.amp": (model, amp_forward(model, "cpu", low), None, None),
            "all 16 bits": (copied, in_low, None, None),
        }
        for favour in ("speed", "memory"):
            planned, found, batches = plan_for(task, args, favour)
            amp = Amp(planned, torch.optim.AdamW(planned.parameters(), 0.0, weight_decay=0.0, fused=True), plan=found)
            # What the format's own kernels keep and cast: emulation would add casts of its own.
            amp.planned = apply(planned, found, emulate=False)
            arms[f"planned for {favour}"] = (planned, amp.planned, found, amp)
        base = count(model, model, x, y)
        able = that_run({arm: lambda run=forward, x=x: run(x) for arm, (_, forward, _, _) in arms.items()}, task.name)
        amped = None
        for arm, (owner, forward, found, amp) in arms.items():
            if arm not in able:
                continue
            counted = count(owner, owner if amp is not None else forward, x, y, amp)
            amped = counted if arm == "torch.amp" else amped
            against = "-" if amped is None else f"{counted.cast_bytes / amped.cast_bytes:.2f}"
            errors = error(owner, forward, batches)
            ratio = "-" if found is None or found.verification is None else f"{found.verification.ratio:.2f}"
            rows.append([
                task.name, arm, str(counted.casts), f"{counted.cast_bytes / 1e6:.2f}", against,
                f"{counted.step_bytes / 1e6:.2f}",
                f"{counted.saved_bytes / 1e6:.2f}",
                f"{counted.saved_bytes / base.saved_bytes:.2f}", f"{errors[0]:.1e}", f"{errors[1]:.1e}", ratio,
            ])  # fmt: skip
    header = [
        "counts",
        "arm",
        "casts",
        "MB cast, forward and backward",
        "/ torch.amp",
        "in the optimizer step",
        "MB saved",
        "/ fp32",
        "error",
        "of gradients",
        "actual/predicted",
    ]
    print(table(header, rows))


# ---- training to the end, and flips ----------------------------------------------------------------------------------


def section_follow(args: argparse.Namespace) -> None:
    """Losses of the last fifth of a run: what the plan changes, beside what another seed changes."""
    count, seeds = (60 if args.quick else 500), range(2 if args.quick else 4)
    ends: dict[str, list[float]] = {"fp32": [], "planned": []}
    formats = {}
    for seed in seeds:
        for arm in ends:
            torch.manual_seed(seed)
            model = GPT(64, 2, 64)
            chain = torch.randint(0, 64, (64, 4), generator=torch.Generator().manual_seed(99))
            batches = [markov(chain, 8, 24) for _ in range(count)]
            ends[arm].append(
                trained(model, batches, None if arm == "fp32" else gaining(model, batches[0][0], args, formats))
            )
    mean = {arm: sum(values) / len(values) for arm, values in ends.items()}
    pairs = [abs(a - b) for a, b in zip(*ends.values(), strict=True)]
    spread = max(ends["fp32"]) - min(ends["fp32"])
    rows = [[arm, f"{mean[arm]:.4f}", " ".join(f"{value:.4f}" for value in values)] for arm, values in ends.items()]
    print(table([f"GPT 2x64, {count} steps", "mean loss at the end", "by seed"], rows))
    print(f"{formats['low']} of {formats['all']} ops in {args.low}; largest difference of a pair {max(pairs):.4f}, ")
    print(f"spread of fp32 over {len(seeds)} seeds {spread:.4f}\n")


def markov(chain: torch.Tensor, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts in which each letter is followed by one of four: next-letter loss can fall to log 4."""
    text = torch.randint(0, len(chain), (batch, 1))
    for _ in range(length):
        following = chain[text[:, -1], torch.randint(0, chain.shape[1], (batch,))]
        text = torch.cat((text, following[:, None]), 1)
    return text[:, :-1], text[:, 1:].flatten()


def gaining(model: nn.Module, x: torch.Tensor, args: argparse.Namespace, formats: dict[str, int]) -> Plan:
    """A plan in which formats are mixed."""
    ready = prepare(model, (x,), policy={"bf16": "bfloat16", "fp16": "float16"}[args.low], device=args.device)
    ready = as_if_large(ready)
    found = verified(ready, ready.solve())
    formats.update(low=int(found.labels.sum()), all=len(found.labels))
    return found


def trained(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], decided: Plan | None) -> float:
    """Mean loss over the last fifth of the batches, trained with ``decided`` or in fp32."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    amp = Amp(model, optimizer, plan=decided) if decided is not None else Amp(model, optimizer, "float32")
    losses = []
    for x, y in batches:
        with amp:
            losses.append(loss_of(model(x), y))
        amp.step(losses[-1], clip_norm=1.0)
    last = losses[-max(1, len(losses) // 5) :]
    return float(torch.stack([loss.detach() for loss in last]).mean())


def section_flips(args: argparse.Namespace) -> None:
    """The most decisive ops of a plan, each flipped alone: by predicted cost, then by the clock of this machine."""
    rows = []
    for task in chosen(args):
        _, found, _ = plan_for(task, args, "speed")
        verdicts = found.most_decisive(20)
        better = [verdict.op for verdict in verdicts if verdict.change.seconds < 0 and affords(found, verdict)]
        cheapest = min((verdict.change.seconds for verdict in verdicts), default=0.0)
        rows.append([task.name, str(len(verdicts)), str(len(better)), f"{1e6 * cheapest:+.1f}"])
    header = ["flips, predicted", "ops", "faster within the budget", "least change of a step, µs"]
    print(table(header, rows), flush=True)
    rows = []
    for task in chosen(args):
        model, x, y = built(task)
        policy = {"bf16": "bfloat16", "fp16": "float16"}[args.low]
        found = plan(model, (x,), loss=lambda out, y=y: loss_of(out, y), policy=policy)
        affordable = [verdict.op for verdict in found.most_decisive(20) if affords(found, verdict)]
        arms = {"plan": passes(model, found, x, y)}
        arms |= {op: passes(model, flipped(found, op), x, y) for op in affordable}
        times, rounds = rounds_of(arms, args.rounds, seconds=args.seconds)
        # The plan beside itself shows how far apart equal arms are measured here.
        again, _ = rounds_of({"one": arms["plan"], "other": arms["plan"]}, args.rounds, seconds=args.seconds)
        spread = abs(again["one"].seconds / again["other"].seconds - 1)
        ratios = {op: times[op].seconds / times["plan"].seconds for op in affordable}
        # The fastest of twenty equal arms looks faster than equal: each that does is measured again, beside the plan.
        faster = []
        for op in [op for op, ratio in ratios.items() if ratio < 1 - spread]:
            pair = {"plan": arms["plan"], op: arms[op], "same": arms["plan"]}
            alone, _ = rounds_of(pair, 3 * args.rounds, seconds=args.seconds)
            spread = max(spread, abs(alone["same"].seconds / alone["plan"].seconds - 1))
            ratios[op] = 2 * alone[op].seconds / (alone["plan"].seconds + alone["same"].seconds)
            if ratios[op] < 1 - spread:
                faster.append(op)
        least = min(ratios, key=lambda op: ratios[op], default="-")
        low = f"{int(found.labels.sum())} of {len(found.labels)}"
        rows.append([task.name, low, str(len(affordable)), str(len(faster)), least,
                     f"{ratios.get(least, 1.0):.3f}", f"{spread:.3f}", str(rounds)])  # fmt: skip
    header = ["flips, measured", f"in {args.low}", "ops within the budget", "faster", "fastest", "/ plan", "equal arms",
              "rounds"]  # fmt: skip
    print(table(header, rows))


def affords(found: Plan, verdict: Verdict) -> bool:
    """Whether flipping an op stays within the plan's noise budget."""
    budget = found.budget if found.budget is not None else float("inf")
    return found.score.noise + verdict.change.noise <= budget


def flipped(found: Plan, op: str) -> Plan:
    """The plan with one op in its other format."""
    labels = found.labels.copy()
    position = found.problem.graph.positions[op]
    labels[position] = not labels[position]
    return replace(found, labels=labels)


def passes(model: nn.Module, decided: Plan, x: torch.Tensor, y: torch.Tensor) -> Step:
    """Forward and backward by a plan."""
    amp = Amp(model, torch.optim.SGD(model.parameters(), 0.0), plan=decided)

    def run() -> None:
        with amp:
            loss = loss_of(model(x), y)
        loss.backward()
        model.zero_grad()

    return run


# ---- the command line ------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "step": section_step,
    "counts": section_counts,
    "infer": section_infer,
    "generate": section_generate,
    "follow": section_follow,
    "predict": lambda args: predicted_beside_measured(chosen(args), args),
    "flips": section_flips,
}


def chosen(args: argparse.Namespace) -> list[Task]:
    tasks = planned_tasks(args.size == "full")
    return [tasks[name] for name in args.model]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--model", nargs="+", choices=planned_tasks(True), default=list(planned_tasks(True)))
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all; compiled ones where there is a compiler")
    parser.add_argument("--policy", default="auto", help="what plans of this machine follow (default: auto)")
    parser.add_argument("--device", default="h100", help="what counts, follow and flips plan for (default: h100)")
    parser.add_argument("--low", choices=LOW, default="bf16", help="the 16-bit format (default: bf16)")
    parser.add_argument("--size", choices=("full", "small"), help="default: full where bf16 is native, else small")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="end a table's rounds early after this, but not before 3"
    )
    parser.add_argument(
        "--batches", type=int, default=24, help="over how many batches errors are taken: 3 of 40 values tell 10%%"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, 3 rounds, 1 batch, no compiled arms")
    args = parser.parse_args()
    native = detect("cpu").native("bf16")
    args.size = "small" if args.quick else args.size or ("full" if native else "small")
    if args.quick:
        args.rounds, args.batches = 3, 1
        args.arms = args.arms or [arm for arm in ARMS if "compile" not in arm]
    args.arms = args.arms or list(ARMS)
    fix_allocator()
    logging.disable(logging.INFO)
    print(f"{torch.get_num_threads()} threads; bf16 is {'' if native else 'not '}native here; sizes: {args.size}\n")
    for section in args.section:
        SECTIONS[section](args)
        print(flush=True)


if __name__ == "__main__":
    main()
