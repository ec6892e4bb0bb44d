"""A close look at one training step while it runs: what 16-bit values lose, layer by layer, and what looks unhealthy.

A dispatch mode sees every kernel of the forward and of the backward. A kernel with a 16-bit result is made again in
float32, or, where it is a cast, compared with what it was given: so what overflows, underflows or becomes subnormal is
counted exactly, not guessed from what is left. Random kernels are not made again, and nothing that the step computes
changes. Compiled code runs as it was written meanwhile. Such a step takes several times as long as others; it is meant
for one in many.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._hooks import after_forward, before_forward
from ._paths import named_layers
from .attribution_lines import line_of_program
from .attribution_trace import Trace
from .attribution_trees import mapped, tensors_in
from .look_causes import Kernel, Loops, hazards_of, input_hazard

__all__ = ["LOW", "Look", "Shares"]

LOW = (torch.float16, torch.bfloat16)
_NOTHING = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}
)


@dataclass(slots=True)
class Shares:
    """How many 16-bit values a layer computed, those aside that are zero in float32 too, and what became of them."""

    values: int = 0
    overflow: int = 0
    underflow: int = 0
    subnormal: int = 0

    def add(self, low: torch.Tensor, wide: torch.Tensor) -> None:
        """Count 16-bit results beside the float32 ones that they stand for. Infinities that float32 has too are none
        of the format's."""
        finite = wide.isfinite()
        there = (wide != 0) & finite
        self.values += int(there.sum())
        self.overflow += int((there & ~low.isfinite()).sum())
        self.underflow += int((there & (low == 0)).sum())
        tiny = torch.finfo(low.dtype).smallest_normal
        self.subnormal += int((there & (low != 0) & (low.abs() < tiny)).sum())

    def share(self, name: str) -> float:
        """One of the counts as a share of all values."""
        return float(getattr(self, name)) / max(self.values, 1)


class Look(Trace):
    """Watches the kernels of one step while it is entered; may be entered several times.

    Attributes:
        shares: by phase ("forward" or "backward") and layer path, "" for the model itself and what is around it.
        casts: between floating formats.
        outputs: how far the outputs of each layer with weights differ within the batch (root mean square), in order.
        hazards: cause and evidence, the first of each cause.

    Args:
        model: whose layers are told apart.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.shares: dict[tuple[str, str], Shares] = {}
        self.casts: Counter[str] = Counter()
        self.outputs: dict[str, float] = {}
        self.hazards: dict[str, str] = {}
        self._loops = Loops()
        self._eager: Any = None

    def __enter__(self) -> Look:
        for path, module in named_layers(self.model):
            enter = before_forward(module, _Enter(self, path), prepend=True)
            self._handles += [enter, after_forward(module, _Leave(self, path), always_call=True)]
        if "torch._dynamo" in sys.modules:  # compiled code shows no kernels, and a full graph refuses to be watched
            self._eager = torch.compiler.set_stance("force_eager")
            self._eager.__enter__()
        super(Trace, self).__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None

    def hazard(self, cause: str, evidence: str) -> None:
        """Note something unhealthy; the first of each cause is kept."""
        self.hazards.setdefault(cause, evidence)

    def given(self, args: Any) -> None:
        """What the model is given."""
        for name, x in tensors_in(args):
            found = input_hazard(name, x)
            if found is not None:
                self.hazard(*found)

    def gave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """What a layer gave. Layers that begin as zero on purpose, and those that are given the same throughout the
        batch, tell nothing of how signals pass."""
        own = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
        if not own or path in self.outputs or not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return
        given = next((x for _, x in tensors_in(args) if x.is_floating_point()), None)
        if bool((own[0] != 0).any()) and (given is None or _spread(given) != 0.0):
            self.outputs[path] = _spread(output)

    # ---- kernels -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        backward = node is not None and not self._stack
        if not backward:
            self._mark()
        name = func._schema.name.partition("::")[2]
        if not backward:
            self._note_loop(name, args)
        result = func(*args, **kwargs)
        if func.is_view or name in _NOTHING:
            return result
        mark = self._of_node(node) if backward else None
        layer = (mark.layer if mark is not None else None) if backward else self.layer
        self._measure(func, name, args, kwargs, result, "backward" if backward else "forward", layer or "")
        return result

    def _note_loop(self, name: str, args: Any) -> None:
        if name in ("add", "add_") and all(isinstance(x, torch.Tensor) and x.dtype in LOW for x in args[:2]):
            self._loops.before(args[0], args[1], line_of_program())

    def _measure(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, phase: str, layer: str) -> None:
        if name == "_to_copy" and args[0].is_floating_point() and result.is_floating_point():
            self.casts[phase] += args[0].dtype != result.dtype
        lows = [y for _, y in tensors_in(result) if y.dtype in LOW and y.layout is torch.strided]
        wides = self._wide(func, name, args, kwargs, result) if lows else []
        shares = self.shares.setdefault((phase, layer), Shares()) if lows else None
        for low, wide in zip(lows, wides, strict=False):
            if shares is not None and low.shape == wide.shape:
                shares.add(low.detach(), wide)
        if phase == "forward":
            kernel = Kernel(name, args, kwargs, result, wides[0] if wides else None, layer, line_of_program())
            for cause, evidence in hazards_of(kernel):
                self.hazard(cause, f"{evidence}, in {layer or 'the model itself or around it'} ({kernel.line})")
            for cause, evidence in self._loops.after(name, result):
                self.hazard(cause, evidence)

    def _wide(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> list[torch.Tensor]:
        """The 16-bit results as float32 has them; empty where that cannot be had."""
        if name == "_to_copy":
            return [args[0].detach()] if args[0].is_floating_point() and args[0].dtype not in LOW else []
        given = [x for _, x in tensors_in((args, kwargs)) if x.dtype in LOW]
        if not given or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return []
        wide_args, wide_kwargs = mapped((args, kwargs), _widened)
        if wide_kwargs.get("dtype") in LOW:
            wide_kwargs["dtype"] = torch.float32
        try:
            with torch.no_grad():
                wide = func(*wide_args, **wide_kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):  # a kernel of 16-bit values alone
            return []
        return [y for (_, y), (_, low) in zip(tensors_in(wide), tensors_in(result), strict=False) if low.dtype in LOW]


def _spread(x: torch.Tensor) -> float:
    """How far the rows of a batch differ (root mean square): what biases alone make is no signal."""
    rows = x.detach().double()
    if rows.dim() > 1 and rows.shape[0] > 1:
        rows = rows - rows.mean(0)
    return float(rows.square().mean().sqrt())


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to(torch.float32) if x.dtype in LOW else x.detach()


class _Enter:
    def __init__(self, look: Look, path: str) -> None:
        self.look, self.path = look, path

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.look.enter_layer(self.path)
        if not self.path:
            self.look.given(args)


class _Leave(_Enter):
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if torch.compiler.is_compiling():
            return
        self.look.leave_layer()
        self.look.gave(self.path, module, args, output)
