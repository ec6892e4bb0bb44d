"""Break five kinds of model in every layer, and see whether the guard says what broke.

    python benchmarks/faults.py                        # every layer and fault; 100 healthy steps per kind and format
    python benchmarks/faults.py --healthy 1000 --kinds gpt,t5
    python benchmarks/faults.py --sample               # each fault once in each kind, in another layer each
    python benchmarks/faults.py --sample --compiled aot_eager   # through torch.compile; inductor rounds as written
    python benchmarks/faults.py --sample --planned              # through a plan that computes all it may in float16

Faults enter through data, weights, or an operation put into a layer's own forward; never through a hook of Castwise.
A plan fixes a model's operations, so there the operation stands in every layer, and a buffer turns it on.
Each case trains two healthy steps, then breaks. An attribution is right when layer, phase and kind are all right; of a
plan's operations the line too, since what runs is no line of the program. A fault is recovered when the guard let
training go on as it should: layers raised or the scale lowered so that the next step is taken, a bad batch passed over,
a buffer put back as it was, or the run stopped with the reason where nothing can help.
"""

from __future__ import annotations

import argparse
import collections
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config
from _fault_models import KINDS, Kind, Namer
from _faults import FAULTS, SWITCHED, Fault, Search, Switches, put_into
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.cost import roofline
from castwise.errors import CastwiseError
from castwise.guard import Kind as Cause
from castwise.hardware import get_device
from castwise.plan import Plan
from castwise.policy import Policy
from castwise.risk import Risks
from castwise.torch import Amp
from castwise.torch.capture import capture
from castwise.torch.planning import Prepared

STOP_AFTER = 3


# ---- one case --------------------------------------------------------------------------------------------------------


class Run:
    """A model of one kind in training: as it is, "planned", or compiled by a backend."""

    def __init__(self, kind: Kind, fmt: str, seed: int, *, how: str = "", guard: bool = True) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.model = kind.make(Namer(seed))
        self.prefix = ""
        if how == "planned":
            add_switches(self.model)
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.called: Any = self.model
        plan = None
        if how == "planned":
            plan = plan_of(kind, fmt, seed)
        elif how:
            # Else a fused kernel keeps what is between its first and last value in float32, where nothing overflows.
            torch._inductor.config.emulate_precision_casts = True
            self.prefix, self.called = "_orig_mod.", torch.compile(self.model, backend=how)
        options = {"enabled": guard, "patience": 0, "stop_after": STOP_AFTER}
        self.amp = Amp(self.called, optimizer, Policy.from_dict({"format": fmt, "guard": options}), plan=plan)
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

    def broken(self, fault: Fault, layer: str, compiled: bool) -> tuple[str, str]:
        """Break it from the next step on. Where that is then: layer, and what was bad from the start."""
        module = self.model.get_submodule(layer)
        if fault.where == "operation":
            put_into(module, fault.change() if fault.change is Search else fault.change)
            if compiled:
                torch._dynamo.reset()
            return layer, ""
        if fault.where == "switch":
            name, value = fault.change
            module.get_buffer(f"switches.{name}").fill_(value)
            return f"{layer}.switches", "" if value == value else f"buffer {layer}.switches.{name}"
        if fault.where == "weight":
            name, weight = next(iter(module.named_parameters()))
            with torch.no_grad():
                fault.change(weight)
            return layer, f"parameter {self.prefix}{layer}.{name}"
        self.break_data = fault.change
        return "", "input 0"


def leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that compute."""
    return [(p, m) for p, m in model.named_modules() if p and not any(True for _ in m.children())]


def add_switches(model: nn.Module) -> None:
    for _, module in leaves(model):
        switches = Switches()
        module.add_module("switches", switches)
        put_into(module, switches)


@functools.cache
def plan_of(kind: Kind, fmt: str, seed: int) -> Plan:
    """A plan that computes in 16 bits whatever may be, as if that gained much and casts cost nothing."""
    model = kind.make(Namer(seed))
    add_switches(model)
    batch = kind.batch(torch.Generator().manual_seed(0))[0]
    captured = capture(model, batch, training=True)
    policy, device = Policy.preset(fmt), get_device("t4" if fmt == "float16" else "h100")
    assert device is not None
    narrow = policy.low_format.name
    costs = roofline(captured.graph, device, narrow)
    costs = replace(costs, high=costs.high + 1.0, down=costs.down * 0.0, up=costs.up * 0.0)
    risks = Risks.unmeasured(captured.graph, narrow)
    return Prepared(captured, costs, risks, policy, (batch,), (), "cpu").solve()


@functools.cache
def layers_of(kind: Kind, seed: int, how: str) -> list[tuple[str, bool]]:
    """Paths of the layers that compute, and whether what each gives is 16 bits wide."""
    if how == "planned":
        plan = plan_of(kind, "float16", seed)
        narrow = {op.layer for op in plan.problem.graph.ops if op.name == "mul" and plan.formats[op.id] == "fp16"}
        return [(path, f"{path}.switches" in narrow) for path, _ in leaves(kind.make(Namer(seed)))]
    run = Run(kind, "float16", seed, guard=False)
    found: dict[str, bool] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            found[path] = y.dtype is torch.float16

        return hook

    for path, module in leaves(run.model):
        module.register_forward_hook(note(path))
    run.step()
    return list(found.items())


def cases(kind: Kind, seed: int, how: str = "") -> Iterator[tuple[Fault, str]]:
    """Every fault that makes sense in every layer."""
    model = kind.make(Namer(seed))
    generator = torch.Generator().manual_seed(0)
    for fault in SWITCHED if how == "planned" else FAULTS:
        if fault.where == "data":
            if kind.batch(generator)[0][0].is_floating_point():
                yield fault, ""
            continue
        for path, narrow in layers_of(kind, seed, how):
            if fault.narrow_only and not narrow:
                continue
            if fault.where == "weight" and not any(True for _ in model.get_submodule(path).parameters()):
                continue
            yield fault, path


def each_in_another_layer(found: list[tuple[Fault, str]]) -> list[tuple[Fault, str]]:
    """Each fault once, the first in the first layer that it can be in, the next in the next."""
    layers: dict[str, list[tuple[Fault, str]]] = collections.defaultdict(list)
    for fault, layer in found:
        layers[fault.name].append((fault, layer))
    return [places[(3 * i) % len(places)] for i, places in enumerate(layers.values())]


def attempt(kind: Kind, fault: Fault, layer: str, seed: int, how: str = "") -> tuple[str, bool, str]:
    """("right", "wrong" or "missed"; recovered; what was said)."""
    run = Run(kind, "float16", seed, how=how)
    for _ in range(2):
        if not run.step():
            return "wrong", False, f"broke before the fault: {run.amp.finding}"
    layer, source = run.broken(fault, layer, bool(how))
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
    right = said == (fault.cause.value, fault.phase, f"{run.prefix}{layer}" if layer else "", source)
    if fault.where == "switch" and not source:
        right &= "_faults.py" in found.data["line"] and "in forward" in found.data["line"]
    mended = any(e.name == "heal" and source == f"buffer {e.data['buffer']}" for e in run.amp.events)
    helpless = fault.cause is Cause.BROKEN and not mended
    recovered = stopped if helpless else all(taken[-2:]) and not stopped
    return "right" if right else "wrong", recovered, str(found.message)


# ---- healthy runs ----------------------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels, and those that make the host wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: collections.Counter[str] = collections.Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs as it does without

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


def counted(kind: Kind, fmt: str, guard: bool, how: str) -> collections.Counter[str]:
    """Kernels and waits of the third step."""
    run = Run(kind, fmt, 0, how=how, guard=guard)
    run.step()
    run.step()
    ops = Ops()
    with ops:
        run.step()
    return ops.counts


def healthy(kind: Kind, fmt: str, steps: int, how: str) -> int:
    """Alarms in healthy steps."""
    run = Run(kind, fmt, 0, how=how)
    for _ in range(steps):
        run.step()
    return sum(event.alarm for event in run.amp.events)


# ---- the table -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(kind.name for kind in KINDS), help="comma-separated")
    parser.add_argument("--sample", action="store_true", help="each fault once in each kind, in another layer each")
    parser.add_argument("--every", type=int, default=1, help="break only every n-th case")
    parser.add_argument("--healthy", type=int, default=100, help="healthy steps of each kind and format")
    parser.add_argument("--seed", type=int, default=0, help="of the module names and the data")
    parser.add_argument("--compiled", default="", metavar="BACKEND", help="through torch.compile")
    parser.add_argument("--planned", action="store_true", help="through a plan")
    args = parser.parse_args()
    logging.getLogger("castwise").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    wanted = args.kinds.split(",")
    how = "planned" if args.planned else args.compiled
    bad = 0
    print(f"{'kind':8} {'cases':>6} {'right':>6} {'wrong':>6} {'missed':>6} {'recovered':>9} "
          f"{'false alarms':>20} {'ops added':>9} {'syncs added':>11} {'seconds':>8}")  # fmt: skip
    for kind in KINDS:
        if kind.name not in wanted:
            continue
        start = time.perf_counter()
        tally: collections.Counter[str] = collections.Counter()
        wrong: list[str] = []
        chosen = list(cases(kind, args.seed, how))
        chosen = (each_in_another_layer(chosen) if args.sample else chosen)[:: args.every]
        for fault, layer in chosen:
            verdict, recovered, said = attempt(kind, fault, layer, args.seed, how)
            tally[verdict] += 1
            tally["recovered"] += recovered
            if verdict != "right" or not recovered:
                wrong.append(f"    {verdict}, {'' if recovered else 'not '}recovered: {fault.name} in {layer}: {said}")
        alarms = {fmt: healthy(kind, fmt, args.healthy, how) for fmt in ("bfloat16", "float16")}
        added = counted(kind, "float16", True, how)
        added.subtract(counted(kind, "float16", False, how))
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
