"""Which layers are embeddings, norms and the head, and which of them a narrow format hurts.

Guilt is measured layer by layer, not guessed. Each layer runs once in fp32 inside the whole model, which gives its
inputs and output, and once more alone in the arm's precision on the same fp32 inputs. The difference is that layer's
own rounding, none of it inherited; its dot product with the gradient at that place is what reaches the loss, to
first order. Values that fp32 has and the narrow run has not (infinite, not a number) are counted apart, since one is
enough to ruin a step.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from castwise.formats import NumberFormat
from castwise.study.backend import Blame, Layer

__all__ = ["blame", "classify"]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
_PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear)


def classify(model: nn.Module, forward: Callable[[], object], named: Mapping[str, Sequence[str]]) -> list[Layer]:
    """The layers that hold no other layers, in the order in which ``forward`` runs them.

    Args:
        model: the model that ``forward`` calls.
        forward: one forward pass.
        named: the task's own globs by kind; where they match they decide. Else the type does: the head is the product
            layer that runs last.
    """
    order: list[str] = []
    leaves = [(path, module) for path, module in model.named_modules() if path and not any(module.children())]
    handles = [module.register_forward_hook(lambda *_, path=path: order.append(path)) for path, module in leaves]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    modules = dict(leaves)
    ran = list(dict.fromkeys(order))
    products = [path for path in ran if isinstance(modules[path], _PRODUCTS)]
    return [Layer(path, _kind(path, modules[path], path == (products or [""])[-1], named)) for path in ran]


def _kind(path: str, module: nn.Module, last_product: bool, named: Mapping[str, Sequence[str]]) -> str:
    for kind, globs in named.items():
        if any(fnmatch.fnmatchcase(path, glob) for glob in globs):
            return kind
    if isinstance(module, _EMBEDDINGS) or type(module).__name__.endswith("Embedding"):
        return "embedding"
    if isinstance(module, _NORMS) or type(module).__name__.endswith("Norm"):
        return "norm"
    return "head" if last_product and "head" not in named else "other"


@dataclass
class _Seen:
    """One call of a module in fp32: what went in, and what came out."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


def blame(
    model: nn.Module,
    forward: Callable[[], Tensor],
    region: Callable[[], AbstractContextManager[Any]],
    fmt: NumberFormat,
) -> list[Blame]:
    """Layers by what they lose in the arm's precision, the worst first.

    Args:
        model: the model, at the weights to look at.
        forward: one forward pass in fp32 that returns the loss.
        region: makes a fresh context in which ops run in the arm's precision.
        fmt: the arm's low format; outputs beyond its largest value count as overflow.
    """
    seen = _record(model, forward)
    overflow: dict[str, float] = {}
    noise: dict[str, float] = {}
    for call in seen:
        lost, power = _compare(call, region, fmt)
        overflow[call.path] = max(overflow.get(call.path, 0.0), lost)
        noise[call.path] = noise.get(call.path, 0.0) + power
    overflow, noise = _own_overflow(overflow), _own_noise(noise)
    total = math.fsum(noise.values())
    found = [Blame(path, overflow[path], noise[path] / total if total > 0 else 0.0) for path in noise]
    return sorted(found, key=lambda item: (-item.overflow, -item.noise))


def _record(model: nn.Module, forward: Callable[[], Tensor]) -> list[_Seen]:
    """Every call of every module in one fp32 pass, with the loss's gradient left in the outputs' ``grad``."""
    seen: list[_Seen] = []

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        if not output.requires_grad:  # behind frozen layers only: what rounding does there matters all the same
            output = output.detach().requires_grad_(True)
        output.retain_grad()
        seen.append(_Seen(path, module, args, kwargs, output))
        return output

    handles = [
        module.register_forward_hook(lambda m, a, k, out, path=path: note(path, m, a, k, out), with_kwargs=True)
        for path, module in model.named_modules()
        if path
    ]
    try:
        forward().backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _compare(call: _Seen, region: Callable[[], AbstractContextManager[Any]], fmt: NumberFormat) -> tuple[float, float]:
    """(share of outputs lost to the format's range, power of the rounding noise that reaches the loss)."""
    with torch.no_grad(), region():
        low = call.module(*call.args, **call.kwargs)
    wide = call.output.detach()
    low = low.detach().to(wide.dtype)
    lost = wide.isfinite() & (~low.isfinite() | (low.abs() > fmt.max))
    # An fp32 layer inside the arm keeps large values, but whatever reads them next in the format cannot.
    beyond = lost | (wide.isfinite() & (wide.abs() > fmt.max))
    gradient = call.output.grad
    if gradient is None:
        return float(beyond.double().mean()), 0.0
    error = torch.where(low.isfinite() & wide.isfinite(), low - wide, 0.0)
    return float(beyond.double().mean()), float((gradient.double() * error.double()).square().sum())


def _own_overflow(shares: Mapping[str, float]) -> dict[str, float]:
    """A block overflows by itself only where none of its parts does: what a part loses spreads through the block."""
    return {path: 0.0 if any(shares[part] > 0 for part in _parts(path, shares)) else shares[path] for path in shares}


def _own_noise(powers: Mapping[str, float]) -> dict[str, float]:
    """Take from each block the noise that its parts account for; independent roundings add in power."""
    return {path: max(0.0, powers[path] - math.fsum(powers[part] for part in _parts(path, powers))) for path in powers}


def _parts(path: str, known: Mapping[str, float]) -> list[str]:
    return [name for name in known if _parent(name, known) == path]


def _parent(path: str, known: Mapping[str, float]) -> str | None:
    """The nearest enclosing layer that was measured."""
    while "." in path:
        path = path.rpartition(".")[0]
        if path in known:
            return path
    return None
