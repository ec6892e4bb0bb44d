"""Break five kinds of model in every layer, and see whether the guard says what broke.

    python benchmarks/faults.py                # every layer, every fault, and 100 healthy steps of each kind and format
    python benchmarks/faults.py --healthy 1000 --kinds gpt,t5
    python benchmarks/faults.py --compiled     # one layer of each kind, through torch.compile

Faults enter through data, weights, or an operation put into a layer's own forward; never through a hook of Castwise.
Each case trains two healthy steps, then breaks. An attribution is right when layer, phase and kind are all right. A
fault is recovered when the guard let training go on as it should: layers raised or the scale lowered so that the next
step is taken, a bad batch passed over, or the run stopped with the reason where nothing can help.
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _fault_models import KINDS, Kind, Namer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.errors import CastwiseError
from castwise.guard import Kind as Cause
from castwise.policy import Policy
from castwise.torch import Amp

NAN, INF = float("nan"), float("inf")
STOP_AFTER = 3


# ---- faults ----------------------------------------------------------------------------------------------------------


class Steep(torch.autograd.Function):
    """Passes values on, and multiplies gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


def too_large(y: torch.Tensor) -> torch.Tensor:
    """The same values, by way of ones of up to 1e6. What is left of an infinity there is NaN, which nothing hides."""
    large = y * (1e6 / float(y.detach().abs().amax().float().clamp_min(1e-6)))
    return y + (large - large)


def too_small(y: torch.Tensor) -> torch.Tensor:
    """The same values, by way of a divisor of 1e-9."""
    large = y / (y.detach().abs() * 0.0 + 1e-9)
    return y + (large - large)


def steep(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gradients times a factor and then divided by it again; values pass."""
    return lambda y: Steep.apply(Steep.apply(y, 1.0 / factor), factor)  # type: ignore[no-untyped-call,no-any-return]


class Search:
    """Gradients times what takes them to 2**20 at the loss scale of the first step, and divided by it again."""

    def __init__(self) -> None:
        self.factor = 0.0

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        y = Searched.apply(y, self, False)  # type: ignore[no-untyped-call]
        return Searched.apply(y, self, True)  # type: ignore[no-untyped-call,no-any-return]


class Searched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, search: Search, up: bool) -> torch.Tensor:
        ctx.search, ctx.up = search, up
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        search, gradient = ctx.search, grads[0]
        if not search.factor:
            search.factor = 2.0**20 / float(gradient.abs().amax().float().clamp_min(1e-6))
        return gradient * (search.factor if ctx.up else 1.0 / search.factor), None, None


@dataclass(frozen=True)
class Fault:
    """One way to break a layer, and what should be said of it."""

    name: str
    where: str  # "operation", "weight" or "data"
    cause: Cause
    phase: str
    change: Any  # a function of the layer's output, its weight or the batch
    narrow_only: bool = False  # breaks only what is computed in 16 bits


FAULTS = (
    Fault("forward overflow", "operation", Cause.RANGE, "forward", too_large, narrow_only=True),
    Fault("underflow", "operation", Cause.RANGE, "forward", too_small, narrow_only=True),
    Fault("forward NaN", "operation", Cause.BROKEN, "forward", lambda y: y * NAN),
    Fault("backward overflow", "operation", Cause.RANGE, "backward", steep(1e14), narrow_only=True),
    Fault("scale too high", "operation", Cause.SCALE, "backward", Search, narrow_only=True),
    Fault("backward NaN", "operation", Cause.BROKEN, "backward", steep(NAN)),
    Fault("NaN weight", "weight", Cause.BROKEN, "forward", lambda w: w.fill_(NAN)),
    Fault("inf weight", "weight", Cause.BROKEN, "forward", lambda w: w.fill_(INF)),
    Fault("NaN input", "data", Cause.DATA, "forward", lambda x: x.view(-1)[:1].fill_(NAN)),
    Fault("inf input", "data", Cause.DATA, "forward", lambda x: x.view(-1)[:1].fill_(INF)),
)


def put_into(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make a layer's own forward do one thing more."""
    forward = module.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.forward = changed  # type: ignore[method-assign]


# ---- one case --------------------------------------------------------------------------------------------------------


class Run:
    """A model of one kind in training."""

    def __init__(self, kind: Kind, fmt: str, seed: int, *, compiled: bool = False, guard: bool = True) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.model = kind.make(Namer(seed))
        options = {"enabled": guard, "patience": 0, "stop_after": STOP_AFTER}
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.called = torch.compile(self.model, backend="aot_eager") if compiled else self.model
        self.amp = Amp(self.called, optimizer, Policy.from_dict({"format": fmt, "guard": options}))
        self.data = torch.Generator().manual_seed(seed)
        self.break_data: Callable[[torch.Tensor], torch.Tensor] | None = None

    def step(self) -> bool:
        """Whether the step was taken."""
        inputs, target = self.kind.batch(self.data)
        if self.break_data is not None:
            self.break_data(inputs[0])
        with self.amp:
            loss = self.kind.loss(self.called(*inputs), target)
        return self.amp.step(loss, clip_norm=1.0).stepped


def layers_of(kind: Kind, seed: int) -> list[tuple[str, bool]]:
    """Paths of the layers that compute, and whether what each gives is 16 bits wide."""
    run = Run(kind, "float16", seed, guard=False)
    found: dict[str, bool] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            found[path] = y.dtype is torch.float16

        return hook

    for path, module in run.model.named_modules():
        if path and not any(True for _ in module.children()):
            module.register_forward_hook(note(path))
    run.step()
    return list(found.items())


def cases(kind: Kind, seed: int) -> Iterator[tuple[Fault, str]]:
    """Every fault that makes sense in every layer."""
    model = kind.make(Namer(seed))
    generator = torch.Generator().manual_seed(0)
    for fault in FAULTS:
        if fault.where == "data":
            if kind.batch(generator)[0][0].is_floating_point():
                yield fault, ""
            continue
        for path, narrow in layers_of(kind, seed):
            if fault.narrow_only and not narrow:
                continue
            if fault.where == "weight" and not any(True for _ in model.get_submodule(path).parameters()):
                continue
            yield fault, path


def attempt(kind: Kind, fault: Fault, layer: str, seed: int, compiled: bool) -> tuple[str, bool, str]:
    """("right", "wrong" or "missed"; recovered; what was said)."""
    run = Run(kind, "float16", seed, compiled=compiled)
    source = ""
    for _ in range(2):
        if not run.step():
            return "wrong", False, f"broke before the fault: {run.amp.finding}"
    prefix = "_orig_mod." if compiled else ""
    if fault.where == "operation":
        change: Any = fault.change() if fault.change is Search else fault.change  # type: ignore[call-arg]
        put_into(run.model.get_submodule(layer), change)
        if compiled:
            torch._dynamo.reset()
    elif fault.where == "weight":
        name, weight = next(iter(run.model.get_submodule(layer).named_parameters()))
        source = f"parameter {prefix}{layer}.{name}"
        with torch.no_grad():
            fault.change(weight)
    else:
        run.break_data, source = fault.change, "input 0"
    taken, stopped = [], False
    try:
        for _ in range(STOP_AFTER + 3):
            taken.append(run.step())
            if fault.where == "data":
                run.break_data = None
    except CastwiseError:
        stopped = True
    found = next((e for e in run.amp.events if e.name in ("finding", "overflow")), None)
    if found is None:
        return "missed", False, "nothing"
    said = (found.data["kind"], found.data["phase"], found.data["layer"], found.data["source"])
    wanted = (fault.cause.value, fault.phase, f"{prefix}{layer}" if layer else "", source)
    recovered = stopped if fault.cause is Cause.BROKEN else all(taken[-2:]) and not stopped
    return ("right" if said == wanted else "wrong"), recovered, str(found.message)


# ---- healthy runs ----------------------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels, and those that make the host wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts["ops"] += 1
        self.counts["syncs"] += str(func) in ("aten._local_scalar_dense.default", "aten.is_nonzero.default")
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Ops:
        fetch = self.fetch = torch.Tensor.tolist

        def fetched(x: torch.Tensor) -> Any:  # on this device it is no kernel, on others a wait
            self.counts["syncs"] += 1
            return fetch(x)

        torch.Tensor.tolist = fetched  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.Tensor.tolist = self.fetch  # type: ignore[method-assign]


def counted(kind: Kind, fmt: str, guard: bool) -> collections.Counter[str]:
    """Kernels and waits of the third step."""
    run = Run(kind, fmt, 0, guard=guard)
    run.step()
    run.step()
    ops = Ops()
    with ops:
        run.step()
    return ops.counts


def healthy(kind: Kind, fmt: str, steps: int) -> int:
    """Alarms in healthy steps."""
    run = Run(kind, fmt, 0)
    for _ in range(steps):
        run.step()
    return sum(event.alarm for event in run.amp.events)


# ---- the table -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(kind.name for kind in KINDS), help="comma-separated")
    parser.add_argument("--every", type=int, default=1, help="break only every n-th case")
    parser.add_argument("--healthy", type=int, default=100, help="healthy steps of each kind and format")
    parser.add_argument("--seed", type=int, default=0, help="of the module names and the data")
    parser.add_argument("--compiled", action="store_true", help="one layer per fault, through torch.compile")
    args = parser.parse_args()
    logging.getLogger("castwise").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    wanted = args.kinds.split(",")
    bad = 0
    print(f"{'kind':8} {'cases':>6} {'right':>6} {'wrong':>6} {'missed':>6} {'recovered':>9} "
          f"{'false alarms':>20} {'ops added':>9} {'syncs added':>11} {'seconds':>8}")  # fmt: skip
    for kind in KINDS:
        if kind.name not in wanted:
            continue
        start = time.perf_counter()
        tally: collections.Counter[str] = collections.Counter()
        wrong: list[str] = []
        chosen = list(cases(kind, args.seed))[:: args.every]
        if args.compiled:
            chosen = list({fault.name: (fault, layer) for fault, layer in chosen}.values())
        for fault, layer in chosen:
            verdict, recovered, said = attempt(kind, fault, layer, args.seed, args.compiled)
            tally[verdict] += 1
            tally["recovered"] += recovered
            if verdict != "right" or not recovered:
                wrong.append(f"    {verdict}, {'' if recovered else 'not '}recovered: {fault.name} in {layer}: {said}")
        alarms = {fmt: healthy(kind, fmt, args.healthy) for fmt in ("bfloat16", "float16")}
        added = collections.Counter(counted(kind, "float16", True))
        added.subtract(counted(kind, "float16", False))
        spent = time.perf_counter() - start
        told = f"{sum(alarms.values())} in {2 * args.healthy} steps"
        print(f"{kind.name:8} {len(chosen):6d} {tally['right']:6d} {tally['wrong']:6d} {tally['missed']:6d} "
              f"{tally['recovered']:9d} {told:>20} {added['ops']:9d} {added['syncs']:11d} {spent:8.1f}")  # fmt: skip
        for line in wrong:
            print(line)
        sys.stdout.flush()
        bad += len(wrong) + sum(alarms.values()) + abs(added["ops"]) + abs(added["syncs"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
