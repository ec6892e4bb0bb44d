"""`compare`: one step in float32 and in a policy's formats, layer by layer, forward and backward.

    print(castwise.torch.compare(model, inputs, "float16"))

Each layer that computes is looked at twice: as it runs inside the whole model, and by itself on float32's own inputs.
The second tells what the layer adds; running it in float32 on inputs and weights that were rounded first tells how much
of that is due to casts. A module that has others inside is looked at where its own forward computes something after
them, and only as it runs. Gradients are compared at the loss scale that training would find, and without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from castwise.errors import PolicyError
from castwise.policy import Policy
from castwise.scaling import lower_scales
from castwise.watch.comparison import Comparison, LayerDifference

from ._casts import CastCache
from ._hooks import after_forward, before_forward
from ._layers import LayerHooks
from ._paths import named_layers
from ._region import Region
from ._rules import rules_for
from .attribution import Entering, float32_region
from .attribution_capture import Call, generators, restore_generators
from .attribution_replay import Context, Replay
from .attribution_trees import mapped, tensors_in
from .devices import resolve
from .emulation import arithmetic

__all__ = ["compare", "compare_step"]

Loss = Callable[[Any], torch.Tensor]
Step = Callable[[], torch.Tensor]


class _Seen:
    """One call of a layer: what went in and out, and the gradient that came back."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor, random: Any) -> None:
        self.module, self.args, self.kwargs, self.random = module, args, kwargs, random
        self.whole = _is_whole(module)
        self.output = output.detach().double()
        self.gradient: torch.Tensor | None = None


@dataclass
class _Pass:
    """Every call of every layer that computes, by path (``path#2`` for a second call); and how backward ended."""

    calls: dict[str, _Seen] = field(default_factory=dict)
    finite: bool = True  # the gradients of all parameters


def compare(
    model: nn.Module,
    inputs: Any,
    policy: Policy | str = "auto",
    *,
    loss: Loss | None = None,
    scale: float | None = None,
) -> Comparison:
    """The same step in float32 and under a policy.

    Args:
        model: the model; its weights, gradients, buffers and the random generators stay as they are.
        inputs: a tensor, a tuple of positional arguments, or a mapping of named ones.
        policy: a policy, preset or policy file.
        loss: a scalar of the model's output, to compare gradients by; default: the mean square of its tensors.
        scale: the loss scale of the policy's backward. Default: what training settles at where the policy scales,
            the largest of the scales that its backing off reaches at which all gradients are finite; else 1.

    Raises:
        PolicyError: the model has no layer that computes, or the scale is no positive number.
    """
    args, kwargs = _arguments(inputs)
    measure = loss or _mean_square

    def step() -> torch.Tensor:
        own_args, own_kwargs = _kept(args, kwargs)  # the model may write into its inputs
        return measure(model(*own_args, **own_kwargs))

    return compare_step(model, step, policy, scale=scale)


def compare_step(
    model: nn.Module, step: Step, policy: Policy | str = "auto", *, scale: float | None = None
) -> Comparison:
    """As `compare`, for a step that calls the model and gives its loss."""
    if scale is not None and not 0.0 < scale < math.inf:
        raise PolicyError(f"compare: scale: {scale!r} is no loss scale. Give a positive number, such as 65536.0.")
    device = next((p.device.type for p in model.parameters()), "cpu")
    resolved = resolve(Policy.coerce(policy), device)
    call = Call(model, "", (), {}, (), generators(), None, 0)
    runner = Replay(model)
    wide = _run(model, runner, call, float32_region(device), step)
    hooks = LayerHooks(model, resolved, device) if resolved.layers else None
    try:
        context = _policy_region(resolved, device)
        used, narrow = _scaled(resolved, scale, lambda by: _run(model, runner, call, context, step, by))
        plain = narrow if used == 1.0 else _run(model, runner, call, context, step)
        with runner.undisturbed(call):
            found = [
                _difference(order, seen, narrow.calls.get(key), plain.calls.get(key), key, context, resolved, device)
                for order, (key, seen) in enumerate(wide.calls.items())
                if not seen.whole or _like(narrow.calls.get(key), seen)
            ]
    finally:
        if hooks is not None:
            hooks.remove()
    if not found:
        raise PolicyError("compare: no layer of the model gives a floating tensor, so there is nothing to compare.")
    return Comparison(resolved.format, tuple(found), used)


def _scaled(policy: Policy, scale: float | None, run: Callable[[float], _Pass]) -> tuple[float, _Pass]:
    """The loss scale to compare gradients at, and the step at it."""
    config = policy.scaling
    scales = [config.init_scale, *lower_scales(config.init_scale, config)] if policy.uses_scaling else [1.0]
    for used in scales if scale is None else [scale]:
        found = run(used)
        if found.finite:
            break
    return used, found


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _policy_region(policy: Policy, device_type: str) -> Context:
    rules = rules_for(policy, device_type)
    return lambda: Entering(Region(rules, CastCache(capacity=0)))


def _run(model: nn.Module, runner: Replay, call: Call, context: Context, step: Step, scale: float = 1.0) -> _Pass:
    done = _Pass()
    seen = done.calls
    random: dict[nn.Module, Any] = {}
    given: list[tuple[torch.UntypedStorage, int]] = []  # what layers gave, and how often it was written until then

    def begin(module: nn.Module, args: Any) -> None:
        random[module] = generators(False)

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            y = next((y for _, y in tensors_in(output) if y.is_floating_point()), None)
            if y is None:
                return
            inside = _is_whole(module)
            memory = (y.untyped_storage(), y._version)
            if inside and any(memory[0]._cdata == s._cdata and memory[1] == v for s, v in given):
                return  # what it gives is what a layer inside gave
            given.append(memory)
            count = 1 + sum(key == path or key.startswith(f"{path}#") for key in seen)
            own_args, own_kwargs = ((), {}) if inside else _kept(args, kwargs)
            one = _Seen(module, own_args, own_kwargs, y, random[module])
            seen[path if count == 1 else f"{path}#{count}"] = one
            if y.requires_grad:
                y.register_hook(lambda g: setattr(one, "gradient", g.detach().double() / scale))  # type: ignore[no-untyped-call]

        return hook

    handles: list[Any] = []
    for path, module in named_layers(model):
        handles.append(before_forward(module, begin))
        handles.append(after_forward(module, note(path), with_kwargs=True))
    try:
        with runner.undisturbed(call):
            with context():
                value = step()
            parameters = [p for p in model.parameters() if p.requires_grad]
            if parameters and value.requires_grad:
                gradients = torch.autograd.grad(value.float() * scale, parameters, allow_unused=True)
                done.finite = all(bool(g.isfinite().all()) for g in gradients if g is not None)
    finally:
        for handle in handles:
            handle.remove()
    return done


def _like(narrow: _Seen | None, wide: _Seen) -> bool:
    return narrow is not None and narrow.output.shape == wide.output.shape


def _is_whole(module: nn.Module) -> bool:
    """Whether it is looked at only as it runs: it has others inside, or cannot be given other weights."""
    return isinstance(module, torch.jit.ScriptModule) or any(True for _ in module.children())


def _kept(args: Any, kwargs: Any) -> tuple[Any, Any]:
    kept: tuple[Any, Any] = mapped((args, kwargs), lambda x: x.detach().clone())
    return kept


def _mean_square(output: Any) -> torch.Tensor:
    parts = [y.float().square().mean() for _, y in tensors_in(output) if y.is_floating_point()]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def _difference(
    order: int,
    wide: _Seen,
    narrow: _Seen | None,
    plain: _Seen | None,
    key: str,
    context: Context,
    policy: Policy,
    device_type: str,
) -> LayerDifference:
    true = wide.output
    own = casts = rounding = accumulation = float("nan")
    total = narrow.output if narrow is not None and _like(narrow, wide) else None
    if not wide.whole:
        alone = _alone(wide, context)
        cast = _cast(wide, policy, device_type)
        rounded = _round(cast, policy, device_type)
        own, casts, rounding = _error(alone, true, true), _error(cast, true, true), _error(rounded, cast, true)
        accumulation = _error(alone, rounded, true) if alone.shape == rounded.shape else float("nan")
        total = alone if total is None else total
    assert total is not None
    kept = true.isfinite()
    gradient = narrow.gradient if narrow is not None else None
    both = gradient is not None and wide.gradient is not None
    return LayerDifference(
        layer=key or "the model itself",
        order=order,
        total=_error(total, true, true),
        own=own,
        casts=casts,
        rounding=rounding,
        accumulation=accumulation,
        overflow=_share(kept & ~total.isfinite()),
        underflow=_share((true != 0) & (total == 0)),
        backward=_backward_error(narrow, wide),
        vanished=_share((wide.gradient != 0) & (gradient == 0)) if both else float("nan"),  # type: ignore[arg-type]
        unscaled=_backward_error(plain, wide),
    )


def _backward_error(narrow: _Seen | None, wide: _Seen) -> float:
    if narrow is None or narrow.gradient is None or wide.gradient is None:
        return float("nan")
    return _error(narrow.gradient, wide.gradient, wide.gradient)


def _alone(seen: _Seen, context: Context) -> torch.Tensor:
    restore_generators(seen.random)  # the same dropout
    with torch.no_grad(), context():
        return _first(seen.module(*seen.args, **seen.kwargs)).double()


def _cast(seen: _Seen, policy: Policy, device_type: str) -> torch.Tensor:
    """The layer in float32, with its inputs and weights rounded to the policy's format before."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return _round(x, policy, device_type).to(x.dtype) if x.is_floating_point() else x

    weights = {name: rounded(p.detach()) for name, p in seen.module.named_parameters()}
    args, kwargs = mapped((seen.args, seen.kwargs), rounded)
    restore_generators(seen.random)
    with torch.no_grad(), float32_region(device_type)():
        return _first(torch.func.functional_call(seen.module, weights, args, kwargs)).double()


def _round(x: torch.Tensor, policy: Policy, device_type: str) -> torch.Tensor:
    return arithmetic(device_type, policy.low_format).enter(x.float()).double()


def _first(output: Any) -> torch.Tensor:
    return next(y for _, y in tensors_in(output) if y.is_floating_point())


def _error(value: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor) -> float:
    """Relative, where the reference is finite (a mask is not); infinite where the value is not finite there."""
    kept = reference.isfinite() & scale.isfinite()
    size = float(scale[kept].norm())
    off = float((value - reference)[kept].norm())
    if math.isnan(off):
        return math.inf
    return off / size if size > 0 else off


def _share(mask: torch.Tensor) -> float:
    return float(mask.double().mean()) if mask.numel() else 0.0
