"""`for_inference` and `compile`: a planned model that is ready to run.

For inference the graph is flattened: no module is entered, no hook looked for, no weight cast. What depends on weights
alone (their casts, transposes, folded constants, and oneDNN's own layout of them where that is faster) is computed once
and kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from castwise.hardware import Device
from castwise.plan import Plan as NeutralPlan
from castwise.policy import Policy

from . import _aten
from ._caches import Returned
from ._cold import weights_are_cold
from ._flat import FlatRun
from ._kernels import with_packed_weights
from .apply import Applied, Run, _Graph
from .autocast import autocast
from .capture import CaptureError, flat_inputs
from .planning import Loss, plan

__all__ = ["Inference", "compile", "for_inference"]

log = logging.getLogger("castwise.torch.inference")

_NEVER_KEPT = ("rand", "dropout", "bernoulli", "normal", "multinomial", "uniform", "empty")


class Inference(Applied):
    """See `for_inference`. Runs without gradients and in evaluation mode, whatever mode the model is in."""

    def __init__(self, model: nn.Module, plan: NeutralPlan, *, emulate: bool | None = None) -> None:
        super().__init__(model, plan, emulate=emulate)
        self._example: Sequence[Any] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if self._in_parts is None:
                return super().forward(*args, **kwargs)
            with evaluating(self.castwise_model):  # also what runs between the graphs
                return super().forward(*args, **kwargs)

    def made_for(self, model: nn.Module) -> Applied:
        """The plan applied to another model, nothing of which is known yet."""
        return Inference(model, self.castwise_plan, emulate=self._emulate)

    def mode(self) -> bool:
        """Evaluation mode, always."""
        return False

    def add_graph(self, call: tuple[tuple[Any, ...], dict[str, Any]], key: tuple[Any, ...]) -> _Graph:
        """Capture the model in evaluation mode."""
        self._example = flat_inputs(*call)
        try:
            with evaluating(self.castwise_model):
                return super().add_graph(call, key)
        finally:
            self._example = ()

    def runner(self, module: fx.GraphModule, returned: Returned) -> Run:
        """What runs a graph on weights as they were when it was made."""
        cold = weights_are_cold(self.castwise_plan.problem.graph, "cpu")
        packed = with_packed_weights(with_kept_constants(module), self._example, self._chosen, cold=cold)
        return FlatRun(packed, None, returned)


def for_inference(
    model: nn.Module,
    example_inputs: Any,
    policy: Policy | str = "auto",
    tolerance: float | None = None,
    *,
    device: Device | str | None = None,
) -> nn.Module:
    """`model` as a module for inference: flattened, planned, with 16-bit weights cast once and kept.

    Args:
        model: is not changed, nor is its mode. The result keeps what it made of the weights: call this again after they
            change.
        example_inputs: a tensor, a tuple of positional arguments or a mapping of keyword arguments.
        policy: as for `castwise.torch.plan`.
        tolerance: relative root-mean-square error of the outputs that 16-bit formats may cause. Default: as much as the
            policy's own op-by-op rules would.
        device: plan for a device of Castwise's table instead of this machine's.

    Of a model whose control flow depends on data, what does stays as it is, and a warning says so. One of which nothing
    can be captured runs under the policy's preset.
    """
    with evaluating(model):
        try:
            found = plan(model, example_inputs, policy=policy, budget=tolerance, device=device)
        except CaptureError as error:
            log.warning("%s", error)
            return _Eager(model, policy, gradients=False)
    return Inference(model, found)


def compile(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    loss: Loss | None = None,
    policy: Policy | str = "auto",
    plan: NeutralPlan | None = None,
    backend: str | None = None,
) -> nn.Module:
    """`model` in its planned formats, compiled by torch.compile.

    Args:
        model: the module; the result shares its parameters.
        example_inputs: what to plan for, where `plan` is not given.
        loss: see `castwise.torch.plan`.
        policy: see `castwise.torch.plan`.
        plan: a plan for this model.
        backend: of torch.compile. Default: "inductor", and "aot_eager" (no code is generated, the graph is flattened)
            where a CPU model would need a C++ compiler and there is none.

    Of a model whose control flow depends on data, what does stays as it is, and a warning says so. One of which nothing
    can be captured is compiled as it is, under the policy's preset.
    """
    chosen = backend or _backend(model)
    if plan is None:
        try:
            plan = _plan(model, example_inputs, loss=loss, policy=policy, target="compiled")
        except CaptureError as error:
            log.warning("%s", error)
            return _Eager(torch.compile(model, backend=chosen), policy, gradients=True)  # type: ignore[arg-type]

    def compiled(module: fx.GraphModule) -> Callable[..., Any]:
        return torch.compile(module, backend=chosen, dynamic=None)

    return Applied(model, plan, wrap=compiled)


_plan = plan


def _backend(model: nn.Module) -> str:
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    if not on_cpu or any(name and shutil.which(name) for name in names):
        return "inductor"
    log.warning("no C++ compiler was found: the planned graph runs flattened, but no kernels are generated for it")
    return "aot_eager"


class _Eager(nn.Module):
    """A model that could not be captured, under its policy's preset."""

    def __init__(self, model: nn.Module, policy: Policy | str, *, gradients: bool) -> None:
        super().__init__()
        self.model, self.policy, self.gradients = model, policy, gradients

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device_type = next((p.device.type for p in self.model.parameters()), "cpu")
        with contextlib.ExitStack() as stack:
            stack.enter_context(autocast(device_type, policy=self.policy))
            if not self.gradients:
                stack.enter_context(torch.no_grad())
                stack.enter_context(evaluating(self.model))
            return self.model(*args, **kwargs)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards each of its modules is in the mode that it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def with_kept_constants(module: fx.GraphModule) -> fx.GraphModule:
    """Compute what depends on parameters and buffers alone, once, and keep it in the module."""
    constant: dict[fx.Node, Any] = {}
    used: dict[fx.Node, None] = {}
    with torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "get_attr":
                value = _aten.attribute(module, str(node.target))
                if isinstance(value, torch.Tensor) and not any(_aten.mutated(user) for user in node.users):
                    constant[node] = value.detach()
            elif _can_be_kept(node, constant):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: constant[n])
                value = node.target(*args, **kwargs)
                if isinstance(value, torch.Tensor) and value.numel() <= sum(
                    constant[n].numel() for n in node.all_input_nodes
                ):
                    constant[node] = value
            else:
                used.update(dict.fromkeys(n for n in node.all_input_nodes if n in constant))
    for number, node in enumerate(n for n in used if n.op != "get_attr"):
        name = f"castwise_kept_{number}"
        module.register_buffer(name, constant[node].contiguous(), persistent=False)
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(name))
    for node in reversed(module.graph.nodes):
        if not node.users and (node in constant or node.op == "get_attr"):
            module.graph.erase_node(node)
    module.recompile()
    return module


def _can_be_kept(node: fx.Node, constant: dict[fx.Node, Any]) -> bool:
    inputs = node.all_input_nodes
    if node.op != "call_function" or not inputs or not isinstance(node.target, torch._ops.OpOverload):
        return False
    random = any(word in str(node.target) for word in _NEVER_KEPT)
    return not random and not node.target._schema.is_mutable and all(n in constant for n in inputs)
