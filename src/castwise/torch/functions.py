"""`custom_fwd` and `custom_bwd` for custom autograd Functions, with torch.amp's signatures.

    class Scale(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cuda")
        def forward(ctx, x, weight): ...

        @staticmethod
        @custom_bwd(device_type="cuda")
        def backward(ctx, gradient): ...

The backward runs in the region that its forward ran in, wherever and on whichever thread `loss.backward()` is called.
Where a plain `torch.autocast` is the innermost context, torch's own decorators decide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from castwise.errors import CastwiseError, PolicyError
from castwise.policy import Policy

from ._region import Region, current_region
from ._region import _autocast_depth as autocast_depth
from ._traced import as_is_inside, traced_by_dynamo
from .autocast import autocast, default_device_type

Function = Callable[..., Any]

_CAST = frozenset({torch.float16, torch.bfloat16, torch.float32})
_NOTE = "_castwise_forward"


@dataclass(frozen=True, slots=True)
class _Forward:
    """What the backward has to know: the region to enter again, None for "no casting"; or torch's own context."""

    device_type: str
    region: Region | None
    torch_decides: bool = False


def custom_fwd(
    fwd: Function | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
    policy: Policy | str | None = None,
) -> Any:
    """Decorate the `forward` (or the `setup_context`) of a custom autograd Function.

    Args:
        fwd: the function, when used without arguments.
        device_type: the type of device whose region counts. Default: that of the innermost region.
        cast_inputs: inside a region, cast the floating inputs on that device to this dtype (float64 stays) and run the
            forward with casting off. Outside regions it does nothing.
        policy: inside a region, run forward and backward under this policy instead of the region's.

    A forward without `ctx` has nowhere to leave its region for the backward: decorate `setup_context` too, with the
    same arguments.

    Raises:
        PolicyError: both `cast_inputs` and `policy` are given.
    """
    if cast_inputs is not None and policy is not None:
        raise PolicyError("custom_fwd: cast_inputs= turns casting off and policy= asks for it; give one of the two")
    if device_type is not None and not isinstance(device_type, str):
        raise ValueError(f"custom_fwd: device_type must be a string such as 'cuda', not {device_type!r}")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs, policy=policy)

    @functools.wraps(fwd)
    @as_is_inside
    def forward(*args: Any, **kwargs: Any) -> Any:
        note = _forward_note(device_type)
        if note.region is None:
            _leave_note(args, note)
            if note.torch_decides:
                theirs = torch.amp.custom_fwd(fwd, device_type=note.device_type, cast_inputs=cast_inputs)
                return theirs(*args, **kwargs)
            return fwd(*args, **kwargs)
        if cast_inputs is not None:
            _leave_note(args, _Forward(note.device_type, None))
            mapped = functools.partial(note.region.casting._mapped, cast=_to(cast_inputs), dtypes=_CAST - {cast_inputs})
            with autocast(note.device_type, enabled=False):
                return fwd(*mapped(args), **mapped(kwargs))
        if policy is not None:
            with autocast(note.device_type, policy=policy):
                _leave_note(args, _forward_note(note.device_type))
                return fwd(*args, **kwargs)
        _leave_note(args, note)
        return fwd(*args, **kwargs)

    return forward


def custom_bwd(
    bwd: Function | None = None, *, device_type: str | None = None, policy: Policy | str | None = None
) -> Any:
    """Decorate the `backward` of a custom autograd Function whose forward has `custom_fwd`.

    Args:
        bwd: the function, when used without arguments.
        device_type: accepted as in torch.amp; the forward's device decides.
        policy: where the forward ran in a region, run the backward under this policy instead.

    Raises:
        CastwiseError: when the backward runs and the forward left no note on `ctx`.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type, policy=policy)

    @functools.wraps(bwd)
    @as_is_inside
    def backward(*args: Any, **kwargs: Any) -> Any:
        note = getattr(args[0], _NOTE, None)
        if note is None:
            raise CastwiseError(
                f"custom_bwd: the forward of {bwd.__qualname__} left no region on ctx. Decorate its forward with "
                "custom_fwd; where forward takes no ctx, decorate setup_context with custom_fwd as well."
            )
        if note.torch_decides:
            return torch.amp.custom_bwd(bwd, device_type=note.device_type)(*args, **kwargs)
        with _again(note, policy):
            return bwd(*args, **kwargs)

    return backward


def _forward_note(device_type: str | None) -> _Forward:
    region = current_region(device_type)
    device = device_type or (region.rules.device_type if region is not None else default_device_type())
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return _Forward(device, None, torch_decides=True)
    if region is None or not region.enabled or autocast_depth() > region._depth:
        return _Forward(device, None)
    return _Forward(device, region)


def _leave_note(args: tuple[Any, ...], note: _Forward) -> None:
    """Write the note on ctx, if there is one: a forward that goes with `setup_context` has none."""
    if traced_by_dynamo() and note.region is not None:
        with note.region:  # a traced backward may change the stack only if it was changed before
            pass
    if args and hasattr(args[0], "save_for_backward"):
        setattr(args[0], _NOTE, note)


def _to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype)


@contextmanager
def _again(note: _Forward, policy: Policy | str | None) -> Iterator[None]:
    if note.region is None:
        with autocast(note.device_type, enabled=False):
            yield
        return
    if policy is not None:
        with autocast(note.device_type, policy=policy):
            yield
        return
    region = note.region.again()
    region.enter()
    try:
        yield
    finally:
        region.leave()
