"""Regions and torch.compile: what a tracer may look into, and what it must leave alone.

The tracer inlines a region's handler into the graph that it builds, so the casts become part of the graph. Three
things are particular to it:

- It runs the bodies of higher-order ops (checkpointed functions, branches, loops) as part of the op's call, and by then
  it has taken the region off the stack. `call_inside` puts the region around each body.
- Where it gives a function up, the function runs as usual, and the tracer tries every frame that the function calls.
  A handler, or the entering of a region, that was compiled as such a frame of its own would take itself for traced
  code and leave a region that is half there. `as_is` and `as_is_inside` forbid that.
- Its graphs run inside the region once more where the backend calls torch's functions. Those calls are recognised by
  the frames that make them, and passed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.fx

F = TypeVar("F", bound=Callable[..., Any])

_frames = torch._C._dynamo.eval_frame
_SKIP, _DEFAULT = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT

traced_by_dynamo = torch.compiler.is_dynamo_compiling


def as_is(function: F) -> F:
    """Decorate a function that is never to be compiled as a frame of its own, nor is anything that it calls. It can
    still be inlined by the tracer of a function that calls it.
    """
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(_SKIP, _SKIP))
    return function


def as_is_inside(function: F) -> F:
    """`as_is` for wrappers of users' functions, which may be compiled."""
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(_SKIP, _DEFAULT))
    return function


def at_trace_time(function: F) -> F:
    """Decorate a function that a tracer calls instead of tracing it, taking the result for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo takes seconds to import
    return function


# ---- bodies of higher-order ops --------------------------------------------------------------------------------------


class _Body:
    """A function that runs inside a mode. An object, as some ops look for constants in a function's closure."""

    def __init__(self, mode: AbstractContextManager[Any], function: Callable[..., Any]) -> None:
        self.mode = mode
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.mode:
            return self.function(*args, **kwargs)


def call_inside(
    mode: AbstractContextManager[Any], name: str, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a higher-order op so that the functions among its arguments run inside `mode`."""
    with mode:  # bodies may change the stack of modes only if it was changed before them
        if name == _REGION_COMPILED_ONCE:  # which takes plain functions alone: the body becomes part of the graph
            return args[0](*args[1:], **kwargs)
    return op(*_inside(mode, args), **kwargs)


_REGION_COMPILED_ONCE = "invoke_subgraph"  # torch.compiler.nested_compile_region


def _inside(mode: AbstractContextManager[Any], tree: Any) -> Any:
    if isinstance(tree, torch.Tensor | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return tree
    if type(tree) is tuple:
        return tuple([_inside(mode, a) for a in tree])
    if isinstance(tree, functools.partial):
        return functools.partial(_Body(mode, tree.func), *tree.args, **tree.keywords)
    return _Body(mode, tree) if callable(tree) else tree


# ---- compiled graphs -------------------------------------------------------------------------------------------------

_FRAMES_TO_COMPILER = 12  # from the code of a compiled graph up to the part of torch that called it
# Generated code calls some ops through frames of torch's: OpOverload.__call__, and the interpreter of graphs.
RELAYS = frozenset({torch._ops.__file__, torch.fx.interpreter.__file__})
_INDUCTOR = "torch._inductor."  # whose generated modules are named so, wherever their files are
#: Whether a file may be a compiled graph's; see `may_be_compiled`.
FILES: dict[str, bool] = dict.fromkeys(RELAYS, True)


def may_be_compiled(caller: types.FrameType) -> bool:
    """Whether a call was made by generated code, or through torch's frames on its behalf. `FILES` learns of files."""
    path = caller.f_code.co_filename
    if path.startswith("<"):  # each graph has another name
        return True
    found = FILES[path] = _of_inductor(caller)
    return found


def _of_inductor(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_INDUCTOR)


def in_compiled_graph(caller: types.FrameType | None) -> bool:
    """Whether a call was made by a graph that torch.compile runs: generated code, and not a user's own FX model."""
    generated = False
    while caller is not None and caller.f_code.co_filename in RELAYS:
        generated = generated or caller.f_code.co_filename != torch._ops.__file__
        caller = caller.f_back
    if caller is None:
        return False
    if _of_inductor(caller):
        return True
    if not (generated or caller.f_code.co_filename.startswith("<eval_with_key")):
        return False
    frame: types.FrameType | None = caller
    for _ in range(_FRAMES_TO_COMPILER):
        if frame is None:
            return False
        path = frame.f_code.co_filename
        if "/_dynamo/" in path or "/_functorch/" in path or "/_inductor/" in path:
            return True
        if "/torch/" not in path and not path.startswith("<"):
            return False
        frame = frame.f_back
    return False
