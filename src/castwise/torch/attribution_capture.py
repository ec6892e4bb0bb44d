"""What a replay needs of a step, kept by reference while the step runs: no operation, no wait for the device.

While a region of an `Amp` is entered, the model (or, where a program calls parts of it one by one, each part) has a
pre-hook that keeps its arguments and torch's random state, and a hook that keeps the gradients its outputs receive.
All of it is let go when the step ends. A version counter tells whether an argument was overwritten since. Once the
model itself was called, its parts are left without hooks, which cost time in each of their calls, until a region ends
in which nothing was kept.

After a failure that could not be repeated, the next steps are recorded *carefully*: inputs and buffers are copied, and
the random states of Python and NumPy kept too.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ._hooks import Pair
from .attribution_trees import mapped, tensors_in

_CALLS_KEPT = 32  # of the model in one step: micro-batches, or parts called one by one


@dataclass(slots=True, eq=False)
class Call:
    """One call of the model, or of a part of it.

    Attributes:
        module, path: what was called; the path is "" for the model itself.
        args, kwargs: what it was given.
        versions: the version counters of those tensors.
        generators: random states before the call.
        buffers: copies of the model's buffers before the call; only of careful recording.
        step: a number that the owner gives; calls of one step have the same.
        differentiable: whether its outputs could receive gradients.
        gradients: of its floating outputs, by position, as the step's own backward computed them.
    """

    module: nn.Module
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: tuple[int, ...]
    generators: dict[str, Any]
    buffers: dict[str, torch.Tensor] | None
    step: int
    differentiable: bool = False
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def overwritten(self) -> bool:
        """Whether an input was written in place since the call began."""
        return self.versions != _versions(self.args, self.kwargs)


class Memory:
    """The memory of a tensor without its graph, which must not outlive the step. Taking hold of it is no operation."""

    def __init__(self, x: torch.Tensor) -> None:
        plain = type(x) in (torch.Tensor, nn.Parameter)
        self._kept = (x.untyped_storage(), x.dtype, x.storage_offset(), x.shape, x.stride()) if plain else x.detach()

    def tensor(self) -> torch.Tensor:
        """A tensor on that memory."""
        if isinstance(self._kept, torch.Tensor):
            return self._kept
        storage, dtype, offset, shape, stride = self._kept
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


class Recorder:
    """Keeps the calls of a model that are made while it listens, until they are forgotten."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: deque[Call] = deque(maxlen=_CALLS_KEPT)
        self.step = 0
        self.careful = False
        self.on_call: Callable[[Call], Any] | None = None
        self._local = threading.local()
        self._listening = 0
        # The program calls the model, not parts of it. A model that `torch.compile` gave is called from outside of its
        # code; hooks on the module in it would be part of that code.
        self._whole = _is_compiled(model)
        self._kept = 0
        self._hooked: list[Pair] = []
        self._pairs: dict[tuple[str, int], Pair] = {}
        self._compiled: Any = None

    # ---- listening ----

    def listen(self) -> None:
        """Hook the model; may be nested."""
        self._listening += 1
        if self._listening > 1:
            return
        self._kept = 0
        before, self._pairs = self._pairs, dict(self._pairs) if self._whole else {}
        for path, module in [("", self.model)] if self._whole else _entrances(self.model):
            pair = before.get((path, id(module)))
            if pair is None:
                hook = _Hook(self, path)
                pair = Pair(module, hook.before, hook.after)
            else:
                pair.on()
            self._pairs[path, id(module)] = pair  # which keeps the module, so that its id stays its own
            self._hooked.append(pair)
        compiled = getattr(self.model, "_compiled_call_impl", None)
        if compiled is not None:  # `model.compile()`: hooks would be traced into the graph
            self._compiled = compiled
            self.model._compiled_call_impl = self._around(compiled)

    def leave(self) -> None:
        """Take the hooks off when the outermost listener leaves."""
        self._listening -= 1
        if self._listening:
            return
        for pair in self._hooked:
            pair.off()
        self._hooked.clear()
        if self._kept:
            self._whole = self.calls[-1].module is self.model if self.calls else self._whole
        elif torch.is_grad_enabled():
            self._whole = False
        if self._compiled is not None:
            self.model._compiled_call_impl, self._compiled = self._compiled, None

    def used(self) -> list[Call]:
        """The calls that the loss was made of: not those whose outputs wait for gradients while others got theirs."""
        served = {call.step for call in self.calls if call.gradients}
        return [c for c in self.calls if c.gradients or not c.differentiable or c.step not in served]

    def state(self) -> list[dict[str, Any]] | None:
        """What is kept of the step that is under way, for a checkpoint between its micro-batches.

        None where a call was given what no checkpoint that can be loaded safely holds.
        """
        calls = self.used()
        if not all(_plain((call.args, call.kwargs)) and not call.overwritten for call in calls):
            return None
        kept = ("path", "args", "kwargs", "generators", "buffers", "step", "differentiable", "gradients")
        return [mapped({name: getattr(call, name) for name in kept}, lambda x: x.detach().clone()) for call in calls]

    def load_state(self, state: list[dict[str, Any]] | None) -> None:
        """Go on with what `state` gave."""
        self.calls.clear()
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        for kept in state or ():
            given = mapped((kept["args"], kept["kwargs"]), lambda x: x.to(device))
            gradients = {place: g.to(device) for place, g in kept["gradients"].items()}
            versions = _versions(*given)
            rest = {name: kept[name] for name in ("path", "generators", "buffers", "step", "differentiable")}
            module = self.model.get_submodule(kept["path"])
            self.calls.append(
                Call(module=module, args=given[0], kwargs=given[1], versions=versions, gradients=gradients, **rest)
            )

    def fade(self, before: int) -> None:
        """Let go of the calls of steps before a number, and of the gradients that the others' outputs received."""
        while self.calls and self.calls[0].step < before:
            self.calls.popleft()
        for call in self.calls:
            call.gradients.clear()

    # ---- one call ----

    def begin(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a call, unless it is made inside one that is kept, or outside of training."""
        depth = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        if depth or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        if _transformed():  # what a call of `torch.vmap` or `torch.func.grad` is given is gone when it returns
            return
        buffers = None
        if self.careful:
            args, kwargs = mapped((args, kwargs), _copied)
            buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        versions = _versions(args, kwargs)
        call = Call(module, path, args, kwargs, versions, generators(self.careful), buffers, self.step)
        self._local.call = call
        self.calls.append(call)
        self._kept += 1
        if self.on_call is not None:
            self.on_call(call)

    def end(self, output: Any) -> None:
        """Ask the outputs of the call that ends for the gradients they will receive."""
        self._local.depth = max(0, getattr(self._local, "depth", 0) - 1)
        if self._local.depth:
            return
        call: Call | None = getattr(self._local, "call", None)
        self._local.call = None
        if call is None:
            return
        if output is None:  # the forward raised, or gave nothing
            self.calls.remove(call)
            return
        for position, (_, y) in enumerate(tensors_in(output)):
            call.differentiable |= y.grad_fn is not None
            if y.grad_fn is not None:  # a leaf, such as a weight that is handed out, would keep the hook for ever
                y.register_hook(_Keep(call, position))  # type: ignore[no-untyped-call]

    def _around(self, compiled: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.begin("", self.model, args, kwargs)
            output = None
            try:
                output = compiled(*args, **kwargs)
            finally:
                self.end(output)
            return output

        return torch.compiler.disable(run, recursive=False)  # type: ignore[no-untyped-call]


class _Keep:
    """A tensor hook that keeps the gradient it sees. Several backwards add up, as they do in the weights."""

    def __init__(self, call: Call, position: int) -> None:
        self.call = call
        self.position = position

    def __call__(self, gradient: torch.Tensor) -> None:
        before = self.call.gradients.get(self.position)
        self.call.gradients[self.position] = gradient if before is None else before + gradient


class _Hook:
    """The hooks of one entrance. Copies and pickles of the model made meanwhile get hooks that do nothing."""

    def __init__(self, recorder: Recorder | None, path: str = "") -> None:
        self.recorder = recorder
        self.path = path

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.recorder is not None and not torch.compiler.is_compiling():
            self.recorder.begin(self.path, module, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.recorder is not None and not torch.compiler.is_compiling():
            self.recorder.end(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None,)


def _entrances(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model and what a program may call in its place: its children, and those of its lists and dicts of modules."""
    found: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop(0)
        if id(module) in found:
            continue
        container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if not container and module.__dict__.get("_compiled_call_impl") is None:
            found[id(module)] = (path, module)
        if module is model or container:
            waiting += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    return list(found.values())


def _is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` made a module, which runs its code where it is called. Nothing is loaded to find out."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(model, frames.OptimizedModule)


_transformed = torch._C._functorch.peek_interpreter_stack


def _plain(tree: Any) -> bool:
    """Whether a tree is made of tensors and of what Python itself has: what loads without running code."""
    if isinstance(tree, dict):
        return type(tree) is dict and all(map(_plain, tree)) and all(map(_plain, tree.values()))
    if isinstance(tree, list | tuple):
        return type(tree) in (list, tuple) and all(map(_plain, tree))
    return tree is None or type(tree) in (torch.Tensor, nn.Parameter, bool, int, float, complex, str, bytes)


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if x.requires_grad and not x.is_leaf else x.detach().clone().requires_grad_(x.requires_grad)


def _versions(*trees: Any) -> tuple[int, ...]:
    return tuple([x._version for _, x in tensors_in(trees) if not x.is_inference()])


# ---- random states ---------------------------------------------------------------------------------------------------


def generators(everything: bool = True) -> dict[str, Any]:
    """The states of torch's random generators, and with `everything` those of Python and of NumPy (if it is loaded).

    Nothing is fetched from a device: torch keeps these states on the host.
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()
        states["cuda"] = {device: torch.cuda.get_rng_state(device)}
    if everything:
        version, numbers, gauss = random.getstate()
        states["python"] = [version, list(numbers), gauss]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            states["numpy"] = [name, [int(k) for k in keys], int(position), int(has_gauss), float(cached)]
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Put back what `generators` gave."""
    torch.set_rng_state(states["torch"].cpu())
    if "cuda" in states and torch.cuda.is_available():
        for index, state in states["cuda"].items():
            if index < torch.cuda.device_count():
                torch.cuda.set_rng_state(state.cpu(), index)
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states:
        import numpy as np

        name, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((name, np.asarray(keys, np.uint32), position, has_gauss, cached))
