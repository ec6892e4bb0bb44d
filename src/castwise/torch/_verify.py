"""Trying a plan: its outputs and gradients against fp32's, on the same inputs and the same random numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import fx

from castwise._joined import in_part

from ._rewrite import rewrite
from ._run import StudyRun, floating, random_state_kept
from .capture import Captured
from .parts import CapturedParts, part_formats

__all__ = ["Result", "Verification", "Verifier"]

_SEED = 7


@dataclass(frozen=True, slots=True)
class Result:
    """One trial of a plan."""

    output_error: float
    """Relative root-mean-square error of the outputs."""
    gradient_error: float
    """Of the gradients of all parameters, of a random projection of the outputs; NaN for inference."""
    finite: bool
    """Whether outputs are finite wherever fp32's are."""


@dataclass(frozen=True, slots=True)
class Verification:
    """How a plan did when it was run."""

    output_error: float
    gradient_error: float
    predicted_error: float
    finite: bool
    batches: int
    held_out: bool
    """Whether the batches were others than those that calibrated."""
    raised: Mapping[str, str] = field(default_factory=dict)
    """Ops that the trial found to overflow and that were raised to fp32."""

    @classmethod
    def of(cls, result: Result, predicted: float, batches: int, held_out: bool, raised: Mapping[str, str]) -> Self:
        return cls(
            result.output_error, result.gradient_error, predicted, result.finite, batches, held_out, dict(raised)
        )

    @property
    def ratio(self) -> float:
        """Actual error over predicted error."""
        return self.output_error / self.predicted_error if self.predicted_error else math.nan

    def __str__(self) -> str:
        where = f"{self.batches} {'held-out' if self.held_out else 'calibration'} batch{'es' * (self.batches > 1)}"
        gradients = "" if math.isnan(self.gradient_error) else f", of gradients {self.gradient_error:.2e}"
        return f"verified on {where}: output error {self.output_error:.2e} ({self.ratio:.2f}× predicted){gradients}"


class Verifier:
    """Runs plans of one captured model on some batches. fp32's results are computed once."""

    def __init__(self, captured: Captured | CapturedParts, fmt: str, device_type: str, batches: Sequence[Any]) -> None:
        self.captured, self.fmt, self.device_type = captured, fmt, device_type
        self.batches = batches
        exact = [part.module for part in captured.parts]
        self.exact = [self._run(exact, batch) for batch in batches]

    def try_plan(self, formats: Mapping[str, str]) -> Result:
        """Outputs and gradients under a plan, against fp32's."""
        modules = self._rewritten(formats)
        outputs, gradients = _Difference(), _Difference()
        for batch, (want, want_gradients) in zip(self.batches, self.exact, strict=True):
            have, have_gradients = self._run(modules, batch)
            if [y.shape for y in have] != [y.shape for y in want]:  # another path through the model
                return Result(math.inf, math.nan, True)
            for a, b in zip(have, want, strict=True):
                outputs.add(a, b)
            for name, b in want_gradients.items():
                gradients.add(have_gradients.get(name, torch.zeros_like(b)), b)
        return Result(outputs.relative, gradients.relative if self.captured.training else math.nan, outputs.finite)

    def guilty(self, formats: Mapping[str, str]) -> list[str]:
        """Ops whose results are not finite although all that they read is, under a plan; the first of each batch."""
        modules = self._rewritten(formats)
        found: dict[str, None] = {}
        for batch in self.batches:
            guilty: list[str] = []

            def hunt(number: int, flat: list[Any], guilty: list[str] = guilty) -> Any:
                hunted = _Hunt(modules[number])
                result = hunted.run(*flat)
                if hunted.op:
                    guilty.append(self._id(number, hunted.op))
                return result

            with self.captured.kept(), random_state_kept(_SEED), torch.no_grad():
                self.captured.run(batch, hunt)
            found |= dict.fromkeys(guilty[:1])
        return list(found)

    def _rewritten(self, formats: Mapping[str, str]) -> list[fx.GraphModule]:
        return [
            rewrite(part, part_formats(self.captured, number, formats), self.fmt, self.device_type)
            for number, part in enumerate(self.captured.parts)
        ]

    def _id(self, number: int, op: str) -> str:
        return op if isinstance(self.captured, Captured) else in_part(number, op)

    def _run(self, modules: Sequence[fx.GraphModule], batch: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        training = self.captured.training
        runs: list[StudyRun] = []

        def part(number: int, flat: list[Any]) -> Any:
            runs.append(StudyRun(modules[number], gradients=training))
            return runs[-1].run(*flat)

        with self.captured.kept(), random_state_kept(_SEED), torch.set_grad_enabled(training):
            outputs = floating(self.captured.run(batch, part))
            differentiable = [y for y in outputs if y.requires_grad]
            gradients: dict[str, torch.Tensor] = {}
            if training and differentiable:
                torch.manual_seed(_SEED)
                torch.autograd.backward(differentiable, [torch.randn_like(y) for y in differentiable])
                for number, run in enumerate(runs):
                    names = {id(p): name for name, p in run.module.named_parameters()}
                    for key, leaf in run.leaves.items():
                        if leaf.grad is not None and key in names:
                            gradients[in_part(number, names[key])] = leaf.grad
        return [y.detach() for y in outputs], gradients


class _Difference:
    """Sums of squares of a difference and of what it is a difference from."""

    def __init__(self) -> None:
        self.error = self.size = 0.0
        self.finite = True

    def add(self, have: torch.Tensor, want: torch.Tensor) -> None:
        known = want.isfinite()
        self.finite &= bool(have.isfinite()[known].all())
        self.error += float(torch.where(known, have.double() - want.double(), 0.0).square().sum())
        self.size += float(torch.where(known, want.double(), 0.0).square().sum())

    @property
    def relative(self) -> float:
        return math.sqrt(self.error / self.size) if self.size else 0.0


class _Hunt(StudyRun):
    """Finds the first op whose result is not finite although all it reads is."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, gradients=False)
        self.op = ""
        self.bad: set[fx.Node] = set()
        self.makers: dict[fx.Node, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "call_function" or all(bool(x.isfinite().all()) for x in floating(result)):
            return result
        self.bad.add(n)
        if not self.op and not any(source in self.bad for source in n.all_input_nodes):
            # A cast that overflows is the fault of whoever reads it in 16 bits.
            made = n.meta.get("castwise_op") or next(
                (u.meta["castwise_op"] for u in n.users if "castwise_op" in u.meta), ""
            )
            self.op = str(made)
        return result
