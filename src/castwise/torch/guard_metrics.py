"""Metrics of layers: their gradients, what 16-bit formats lose of them, and how their weights began."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from castwise.formats import NumberFormat

from ._gradients import values_of
from ._paths import named_layers
from .look import Look

__all__ = ["gradient_metrics", "initial_hazard", "look_metrics", "spoilt_statistics"]

_LOW_BITS = 16
_NAMES = {"forward": "activation_", "backward": ""}
_SHARES = ("overflow", "underflow", "subnormal")
_DRIFT = 1e4  # between layers' outputs at the first step; He et al., arXiv:1502.01852, keep it near 1
_STATISTICS = ("running_mean", "running_var")


def gradient_metrics(model: nn.Module, fmt: NumberFormat, scale: float) -> dict[str, float]:
    """Per layer with weights: the true gradient norm, and the shares of its gradient's values beyond a format's range.

    Args:
        model: whose `.grad` are there, multiplied by `scale`.
        fmt: the format that gradients pass through. Its own limits count: what float16 loses, bfloat16 keeps.
        scale: the loss scale.
    """
    found: dict[str, float] = {}
    for path, module in named_layers(model):
        values = values_of(p for p in module.parameters(recurse=False))
        if not values:
            continue
        flat = torch.cat([v.detach().reshape(-1).double() for v in values]).abs()
        layer = path or "model"
        found[f"grad_norm/{layer}"] = float(flat.norm()) / scale
        if fmt.bits > _LOW_BITS:
            continue
        nonzero = max(int((flat > 0).sum()), 1)
        smallest = fmt.smallest_subnormal / 2
        found[f"overflow/{layer}"] = float((flat > fmt.max).sum()) / nonzero
        found[f"underflow/{layer}"] = float(((flat > 0) & (flat < smallest)).sum()) / nonzero
        found[f"subnormal/{layer}"] = float(((flat >= smallest) & (flat < fmt.smallest_normal)).sum()) / nonzero
    return found


def look_metrics(look: Look) -> dict[str, float]:
    """Per layer, the shares of its 16-bit values that were lost, counted while the step ran.

    ``overflow/LAYER``, ``underflow/LAYER`` and ``subnormal/LAYER`` are the backward's, with ``activation_`` before
    them the forward's.
    """
    found: dict[str, float] = {"numerics/casts": float(look.casts.total())}
    for (phase, layer), shares in look.shares.items():
        for name in _SHARES if shares.values else ():
            found[f"{_NAMES[phase]}{name}/{layer or 'model'}"] = shares.share(name)
    return found


def spoilt_statistics(model: nn.Module) -> str:
    """Evidence of running statistics that are not finite, or are kept in 16 bits; "" where all are well."""
    for name, b in model.named_buffers():
        if name.rpartition(".")[2] not in _STATISTICS:
            continue
        if not bool(b.isfinite().all()):
            return f"{name} is infinite or NaN"
        if b.dtype in (torch.float16, torch.bfloat16):
            return f"{name} is kept in {str(b.dtype).removeprefix('torch.')}"
    return ""


def initial_hazard(model: nn.Module, outputs: Mapping[str, float]) -> str:
    """Evidence of a poor initialisation in a first step; "" where there is none.

    Args:
        model: with its gradients.
        outputs: how far each layer's outputs differ within a batch, as a root mean square.
    """
    for name, p in model.named_parameters():
        if p.dim() >= 2 and p.shape[0] > 1 and p.grad is not None and p.grad.layout is torch.strided:
            alike = bool((p == p[:1]).all()) and bool((p.grad == p.grad[:1]).all())
            if alike and bool((p != 0).any() | (p.grad != 0).any()):
                return f"all rows of {name} and of its gradient are the same, and will stay so"
    if len(outputs) < 2:
        return ""
    broken = next((layer for layer, size in outputs.items() if not math.isfinite(size)), "")
    sizes = {layer: size for layer, size in outputs.items() if math.isfinite(size)}
    if not sizes:
        return ""
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    # Where something became infinite, half of the way there has to be growth from layer to layer.
    if sizes[large] < (math.sqrt(_DRIFT) if broken else _DRIFT) * sizes[small] or sizes[large] == 0.0:
        return ""
    ends = f"{sizes[small]:.3g} in {small or 'the model'} and {sizes[large]:.3g} in {large or 'the model'}"
    return f"outputs of one batch differ by {ends}" + (f", and are infinite in {broken}" if broken else "")
