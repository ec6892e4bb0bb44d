"""The region: a torch-function mode that casts the arguments of the calls made while it is active.

Why a torch-function mode, and what it costs, is measured in `docs/decisions`. This module keeps its traps away from
users:

- *Interleaved contexts.* Generators and coroutines leave contexts in any order. A region takes itself off the mode
  stack wherever it stands, and others stay.
- *Other tasks on the thread.* A coroutine that did not enter the region is not in it: regions are listed in a context
  variable, which belongs to the task.
- *Other people's autocast.* The innermost region wins: a plain `torch.autocast` entered inside ours decides for its
  body, and ours suspends one that it is entered in.
- *Activation checkpointing.* The recomputation runs long after the region was left; the function to recompute is
  made to enter an equal region again, on that one checkpoint object.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode, redispatch_function

from castwise.policy import Rule

from ._calls import Call, Casting
from ._casts import CastCache, run_and_tell
from ._functions import trace_as
from ._rules import Rules
from ._traced import (
    FILES,
    as_is,
    as_is_inside,
    at_trace_time,
    call_inside,
    in_compiled_graph,
    may_be_compiled,
    traced_by_dynamo,
)
from .record import event

Function = Callable[..., Any]

_ACTIVE: contextvars.ContextVar[tuple[Region, ...]] = contextvars.ContextVar("castwise_regions", default=())
_hooks_on_top: Callable[[bool], tuple[Function, Function] | None] = torch._C._autograd._top_saved_tensors_default_hooks
_pop, _push = torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack
_count, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_grad_enabled = torch.is_grad_enabled
_deeper, _shallower = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_frame, _known = sys._getframe, FILES.get
_NEW: Any = object()  # not None: that is the answer for a callable that is known to need nothing


class Region(TorchFunctionMode):
    """One activation of a policy on one type of device, on one thread. Entered once; `autocast` makes a new one
    per entry.
    """

    def __init__(self, rules: Rules, cache: CastCache, *, enabled: bool = True, log: list[Any] | None = None) -> None:
        super().__init__()
        self.rules = rules
        self.cache = cache
        self.enabled = enabled
        self.log = log
        self.casting = Casting(rules.device_type, cache)
        self.owner: object = None  # who has to leave it, where that is not the one who holds it
        self.covered = False  # an inner region for the same type of device has the calls; kept for tracers alone
        self._depth = 0
        self._suspended: Any = None
        self._displaced: list[Any] = []
        self.grad_at_entry = True
        self.hooks_at_entry: Function | None = None

    # ---- entering and leaving ----

    @as_is
    def enter(self) -> None:
        """Become the innermost region of this thread and task."""
        device = self.rules.device_type
        if traced_by_dynamo():
            self._enter_traced(device)
            return
        self.seen = self.rules.seen
        self._depth = _autocast_depth()
        self.grad_at_entry = torch.is_grad_enabled()
        hooks = _hooks_on_top(False)
        self.hooks_at_entry = hooks[0] if hooks is not None else None
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self._suspended = True
            torch.set_autocast_enabled(device, False)
        _ACTIVE.set((*_ACTIVE.get(), self))
        _push(self)
        _settle()

    @as_is
    def leave(self) -> None:
        """Take this region off the stack, wherever it stands, and put back what it suspended."""
        if traced_by_dynamo():
            self._leave_traced()
            return
        above = []
        while _count():
            mode = _pop()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _push(mode)
        _ACTIVE.set(tuple([r for r in _ACTIVE.get() if r is not self]))
        _settle()
        if self._suspended:
            self._suspended = None
            torch.set_autocast_enabled(self.rules.device_type, True)

    def _enter_traced(self, device: str) -> None:
        """Traced code is well nested, so outer regions leave the stack meanwhile; nothing that was there before the
        region is written, as bodies of higher-order ops must not.
        """
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            self._suspended = _their_island(device)
            next(self._suspended)
        self._depth = _autocast_depth()
        stack = []
        while _count():
            stack.append(_pop())
        stack.reverse()
        self._displaced = stack
        for mode in stack:
            if not (isinstance(mode, Region) and mode.rules.device_type == device):
                _push(mode)
        _push(self)

    def _leave_traced(self) -> None:
        while _count():
            _pop()
        for mode in self._displaced:
            _push(mode)
        if self._suspended is not None:
            next(self._suspended, None)

    # ---- one call ----

    @as_is
    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if traced_by_dynamo():
            return self._traced(func, args, kwargs or {})
        # Every call of a program passes here: what is known to need nothing costs one look-up.
        call = self.seen.get(func, _NEW)
        if call is _NEW:
            call = self.rules.learn(func)
        if call is None:
            if not kwargs:
                return func(*args)
            if not _writes_out(func, kwargs):
                return func(*args, **kwargs)
            call = _INTO
        kwargs = kwargs or {}
        if call.untold:  # whoever steps it, and in whatever context: the weights are the same
            return run_and_tell(func, args, kwargs)
        if not self._covers_this_call() or not self.enabled:
            return func(*args, **kwargs)
        if call.descend is not None:
            with self:
                return call.descend(*args, **kwargs)
        if call.bodies:
            with self:
                return redispatch_function(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if self.log is not None:
            return self._logged(call, func, args, kwargs)
        return self.casting.quick(call, func, args, kwargs)

    def _traced(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call under a compiler, which follows neither context variables nor checkpoints' internals."""
        if self.covered:
            return func(*args, **kwargs)
        call = getattr(self.rules.traced, self.rules.name_of(func))
        if call is None:
            if not _writes_out(func, kwargs):
                return trace_as(func)(*args, **kwargs)
            call = _INTO
        if call.bodies:
            return call_inside(self, call.name, func, args, kwargs)
        if call.untold or not self.enabled or _autocast_depth() > self._depth:
            return func(*args, **kwargs)
        if call.descend is not None:
            with self:
                return call.descend(*args, **kwargs)
        return self.casting.run(call, func, args, kwargs)

    def _covers_this_call(self) -> bool:
        """Not another task's call, nor one inside a region or a plain torch.autocast entered after us; and
        checkpoints follow us.
        """
        regions = _ACTIVE.get()
        if not (regions and regions[-1] is self) and _innermost(regions, self.rules.device_type) is not self:
            return False
        _deeper()  # there is no call that only reads it
        if _shallower() > self._depth:
            return False
        caller = _frame(2)
        generated = _known(caller.f_code.co_filename)
        if generated is None:
            generated = may_be_compiled(caller)
        if generated and in_compiled_graph(caller):
            return False  # its casts were decided when it was traced
        hooks = _hooks_on_top(False)
        if hooks is not None:
            _recompute_inside(hooks[0])
        elif self.grad_at_entry and not _grad_enabled():
            _reentrant_recompute_inside()
        return True

    def _logged(self, call: Call, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.log is not None
        result = self.casting.run(call, func, args, kwargs)
        self.log.append(event(call, self.rules, args, result))
        return result

    def again(self) -> Region:
        """An equal region, to be entered anew."""
        return Region(self.rules, self.cache, enabled=self.enabled, log=self.log)


# Ops that need nothing otherwise, sort and gather for example, refuse `out=` of another format than their input's.
_INTO = Call("out", Rule.WIDEST, reason="follows the format of what it is written to")


def _writes_out(function: Function, kwargs: dict[str, Any]) -> bool:
    return kwargs.get("out") is not None and isinstance(function, types.BuiltinFunctionType)


def _innermost(regions: tuple[Region, ...], device_type: str) -> Region | None:
    for region in reversed(regions):
        if region.rules.device_type == device_type:
            return region
    return None


def current_region(device_type: str | None = None) -> Region | None:
    """The innermost region that covers this thread and task (for one type of device, if given), or None."""
    for position in range(_count() - 1, -1, -1):
        mode = _mode_at(position)
        if not isinstance(mode, Region) or device_type not in (None, mode.rules.device_type):
            continue
        if traced_by_dynamo() or mode in _ACTIVE.get():
            return mode
    return None


def _their_island(device: str) -> Iterator[None]:
    """Two steps, in and out: a tracer enters torch's contexts in `with` statements only."""
    with torch.autocast(device, enabled=False):
        yield


def _settle() -> None:
    """What follows from the regions on this thread's stack: which of them are covered, and what torch is told."""
    inner = set()
    for position in range(_count() - 1, -1, -1):
        mode = _mode_at(position)
        if isinstance(mode, Region):
            mode.covered = mode.rules.device_type in inner
            inner.add(mode.rules.device_type)
    if bool(inner) != _told.inside:
        _tell_torch(bool(inner))


class _Told(threading.local):
    inside = False


_told = _Told()
# torch's recurrent modules refuse an input whose format is not that of their weights, unless autocast is enabled for
# any type of device. A type without tensors says so and casts nothing.
_NO_DEVICE = "ipu"


def _tell_torch(inside: bool) -> None:
    _told.inside = inside
    torch.set_autocast_enabled(_NO_DEVICE, inside)


@at_trace_time
def _autocast_depth() -> int:
    depth = _deeper() - 1  # there is no call that only reads it
    _shallower()
    return int(depth)


# ---- activation checkpointing --------------------------------------------------------------------------------------


def _inside(regions: list[Region], function: Function, contexts: int = 0) -> Function:
    """`function`, run inside regions equal to `regions`; it enters `contexts` autocast contexts of torch's by
    itself.
    """

    @as_is_inside
    def run(*args: Any, **kwargs: Any) -> Any:
        entered = [region.again() for region in regions]
        for region in entered:
            region.enter()
            region._depth += contexts
        try:
            return function(*args, **kwargs)
        finally:
            for region in reversed(entered):
                region.leave()

    run.castwise_regions = regions  # type: ignore[attr-defined]
    return run


# torch re-enters the autocast state of the checkpointed device and of the CPU around what it recomputes.
_RECOMPUTE_CONTEXTS = 2


def _recompute_inside(pack_hook: Function) -> None:
    """Non-reentrant checkpointing packs saved tensors with a hook that closes over its frame; wrap that frame's
    recompute.
    """
    if not getattr(pack_hook, "__qualname__", "").startswith("_checkpoint_hook."):
        return
    for cell in pack_hook.__closure__ or ():
        frame = cell.cell_contents
        recompute = getattr(frame, "recompute_fn", None)
        if recompute is not None and not hasattr(recompute, "castwise_regions"):
            before = [r for r in _ACTIVE.get() if r.hooks_at_entry is not pack_hook]
            frame.recompute_fn = _inside(before, recompute, _RECOMPUTE_CONTEXTS)


_REENTRANT_CODE = torch.utils.checkpoint.CheckpointFunction.forward.__code__


def _reentrant_recompute_inside() -> None:
    """Reentrant checkpointing runs the function without gradients inside its own forward; wrap what it will run
    again.
    """
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _REENTRANT_CODE:
            context = frame.f_locals["ctx"]
            if not hasattr(context.run_function, "castwise_regions"):
                before = [r for r in _ACTIVE.get() if r.grad_at_entry]
                context.run_function = _inside(before, context.run_function)
            return
        frame = frame.f_back
