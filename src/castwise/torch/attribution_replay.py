"""Running a recorded step again: the same inputs, random numbers and buffers, and everything put back afterwards."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ._gathered import fits, gathered
from ._ranks import Ranks
from .attribution_capture import Call, generators, restore_generators
from .attribution_planned import PartsTrace, run_planned
from .attribution_ranks import Stop, common_repeat
from .attribution_trace import Made, Source, Trace
from .attribution_trees import mapped, tensors_in

log = logging.getLogger("castwise.torch.guard")

Context = Callable[[], AbstractContextManager[Any]]

_REENTRANT = "use_reentrant=True"  # what torch's reentrant checkpoint says where it meets autograd.grad


@dataclass(frozen=True, slots=True)
class Repeat:
    """What one repetition of a call showed.

    Attributes:
        root: where the fault began, if there was one.
        bytes: per layer, what its forward wrote.
        feeds: per layer, the layers that made what it was given.
    """

    root: Made | Source | None
    bytes: dict[str, int]
    feeds: dict[str, list[str]]

    def plain(self) -> Repeat:
        """Without what cannot leave this process: tensors."""
        root = self.root
        return replace(self, root=replace(root, causes=(), alone=None) if isinstance(root, Made) else root)


class Replay:
    """Repeats calls of a model.

    Args:
        model: the model they are calls of, or of parts of it.
        planned: the applied plan that runs in its place, if any.
        ranks: that train the model together. Each of them makes each repetition, and all are told the same of it.
    """

    def __init__(self, model: nn.Module, planned: Any = None, ranks: Ranks | None = None) -> None:
        self.model = model
        self.planned = planned
        self.ranks = ranks
        self._told = False
        self.written: set[str] = set()  # buffers that the last repetition wrote, such as running statistics

    def traced(self, call: Call, context: Context, factor: float = 1.0) -> Repeat:
        """Forward and backward of one call under a trace.

        Args:
            call: what to repeat.
            context: gives the region to repeat it in.
            factor: the gradients of its outputs are multiplied by it; a power of two changes nothing else.
        """
        if self.ranks is None:
            return self._traced(call, context, factor, Stop(None))
        with self.whole():
            return common_repeat(self.ranks, lambda stop: self._traced(call, context, factor, stop))

    def whole(self) -> AbstractContextManager[None]:
        """Around several repetitions: what ranks have shards of is gathered once for all of them."""
        return gathered(self.ranks.shards if self.ranks is not None else ())

    def fits(self) -> bool:
        """Whether every rank has memory to repeat a step of a model under `fully_shard`, which takes all of it."""
        if self.ranks is None or not self.ranks.shards or fits(self.ranks):
            return True
        if not self._told:
            self._told = True
            log.warning(
                "a step of this model is not repeated, as its parameters and their gradients do not fit one device as "
                "a whole: the guard skips, lowers the scale and stops on all ranks, but looks for no layer. Fewer "
                "layers of the same kind, or a larger device, may show it."
            )
        return False

    def _traced(self, call: Call, context: Context, factor: float, stop: Stop) -> Repeat:
        with self.undisturbed(call):
            args, kwargs, cut = _fresh(call)
            inputs = [("input", name, x) for name, x in [*tensors_in(args), *tensors_in(kwargs)]]
            trace = self.new_trace([*self.weights(), *inputs])
            with trace:
                outputs = self._run(call, args, kwargs, context, trace)
                root = trace.root(outputs)
                if not stop(root is not None) and call.gradients:
                    root = self._backward(call, outputs, cut, trace, factor)
        return Repeat(root, trace.bytes, trace.feeds)

    def new_trace(self, sources: Iterable[tuple[str, str, torch.Tensor]]) -> Trace:
        """A trace that suits the way in which the model runs."""
        in_parts = self.planned is not None and self.planned.has_breaks
        return (PartsTrace if in_parts else Trace)(self.model, sources)

    def layer_seconds(self, call: Call, context: Context, layer: str) -> float:
        """Seconds that the forward of one layer takes in a repetition without a trace; the better of two."""
        spent: list[float] = []
        started: list[float] = []
        # In a plan's graph no layer is called: there, it is the time of the whole model.
        module = self.model.get_submodule(layer) if self.planned is None else self.model
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))

        def now() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter()

        handles = [
            module.register_forward_pre_hook(lambda *_: started.append(now())),
            module.register_forward_hook(lambda *_: spent.append(now() - started.pop())),
        ]
        try:
            totals = []
            for _ in range(2):
                spent.clear()
                with self.undisturbed(call), torch.no_grad():
                    args, kwargs, _ = _fresh(call)
                    self._run(call, args, kwargs, context, None)
                totals.append(sum(spent))
        finally:
            for handle in handles:
                handle.remove()
        return min(totals)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _run(self, call: Call, args: Any, kwargs: Any, context: Context, trace: Trace | None) -> list[torch.Tensor]:
        module = _unwrapped(call.module)
        with context():
            if self.planned is not None and module is self.planned.castwise_model and trace is not None:
                output = run_planned(self.planned, args, kwargs, trace)
            else:
                output = module(*args, **kwargs)
        return [y for _, y in tensors_in(output)]

    def _backward(
        self, call: Call, outputs: list[torch.Tensor], cut: list[torch.Tensor], trace: Trace, factor: float
    ) -> Made | Source | None:
        pairs = []
        for position, gradient in call.gradients.items():
            if position >= len(outputs) or outputs[position].grad_fn is None:
                continue
            y = outputs[position]
            gradient = gradient.detach().to(y.dtype) if factor == 1.0 else (gradient.detach() * factor).to(y.dtype)
            trace.add_source("gradient", f"of output {position}", gradient)
            pairs.append((y, gradient))
        leaves = [*(p for p in self.model.parameters() if p.requires_grad), *cut]
        if not pairs or not leaves:
            return None
        with torch.autograd.set_multithreading_enabled(False):  # so that recomputation is seen on this thread
            gradients = _gradients([y for y, _ in pairs], [g for _, g in pairs], leaves)
        return trace.root(g for g in gradients if g is not None)

    def weights(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The model's parameters and buffers, as sources of a trace."""
        for name, p in self.model.named_parameters():
            yield "parameter", name, p
        for name, b in self.model.named_buffers():
            yield "buffer", name, b

    @contextlib.contextmanager
    def undisturbed(self, call: Call) -> Iterator[None]:
        """Inside, the step's random numbers and buffers; afterwards all is as it was, compiled code included."""
        states = generators()
        buffers = {name: (b, b.detach().clone()) for name, b in self.model.named_buffers()}
        compiled = [m for m in self.model.modules() if m.__dict__.get("_compiled_call_impl") is not None]
        kept = [m.__dict__.pop("_compiled_call_impl") for m in compiled]
        try:
            with torch.no_grad():
                for name, before in (call.buffers or {}).items():
                    if name in buffers:
                        buffers[name][0].copy_(before)
            restore_generators(call.generators)
            with torch.compiler.set_stance("force_eager"), torch.enable_grad():
                yield
        finally:
            for module, implementation in zip(compiled, kept, strict=True):
                module.__dict__["_compiled_call_impl"] = implementation
            self.written = {name for name, (b, before) in buffers.items() if not torch.equal(b, before)}
            with torch.no_grad():
                for b, before in buffers.values():
                    b.copy_(before)
            restore_generators(states)


def _fresh(call: Call) -> tuple[Any, Any, list[torch.Tensor]]:
    """The inputs cut off from whatever made them and safe from in-place operations, and those that want gradients."""
    leaves: list[torch.Tensor] = []

    def cut(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, nn.Parameter) or x.layout is not torch.strided:
            return x
        leaf = x.detach().clone()
        if not x.requires_grad:
            return leaf
        leaves.append(leaf.requires_grad_())
        return leaf.view_as(leaf)  # a leaf may not be written in place, what is made of it may

    args, kwargs = mapped((call.args, call.kwargs), cut)
    return args, kwargs, leaves


def _unwrapped(module: nn.Module) -> nn.Module:
    """A module without the wrapper that talks to other processes."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner: nn.Module = module.module
        return inner
    return module


def _gradients(
    outputs: list[torch.Tensor], gradients: list[torch.Tensor], leaves: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of leaves, without touching their `.grad` where that can be had."""
    try:
        return list(torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, retain_graph=True))
    except RuntimeError as error:
        if _REENTRANT not in str(error):
            raise
    kept = [(p, p.grad, p._post_accumulate_grad_hooks) for p in leaves]
    try:
        for p in leaves:
            p.grad = None
            p._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        torch.autograd.backward(outputs, gradients)
        return [p.grad for p in leaves]
    finally:
        for p, gradient, hooks in kept:
            p.grad, p._post_accumulate_grad_hooks = gradient, hooks
