"""A plan put to work: a module that computes each op in its planned format and is the user's model in all else.

The applied module shares the model's parameters, buffers and submodules, not copies of them: training one trains the
other, and state dicts have the same keys. The model itself is left as it is.

Graphs are captured when they are first needed: one for training mode and one for evaluation mode, and another where
inputs come in shapes or structures that the graphs so far do not cover.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from castwise._joined import in_part
from castwise.graph import Graph
from castwise.guard import Raised
from castwise.plan import Plan

from ._apply_parts import AppliedParts, part_of, parts_of, with_raised
from ._caches import Returned, caches_of, packed_call
from ._casts import CastCache
from ._chosen import Chosen
from ._copies import InPlace, remade
from ._covering import covers, exact_kind, flattened, kind_of, shapes_of
from ._flat import FlatRun, KeptCasts
from ._kernels import channels_last_pays, on_channels_last
from ._narrow import NarrowGradients
from ._part import Part
from ._ran import Recorder
from ._rewrite import rewrite
from .capture import Captured, CaptureError, capture, flat_inputs

__all__ = ["Applied", "apply"]

log = logging.getLogger("castwise.torch.apply")

_MOST_GRAPHS = 16
"""Graphs of one model that are kept; more mean that some input is different at each call."""
_MOST_CALLS = 256
"""Kinds of call (shapes and formats of all inputs) whose graph is known without a search."""

_transform = torch._C._functorch.peek_interpreter_stack

Wrap = Callable[[fx.GraphModule], Callable[..., Any]]
Run = Callable[[list[Any], tuple[Any, ...], dict[str, Any]], Any]


def apply(model: nn.Module, plan: Plan, *, emulate: bool | None = None) -> Applied:
    """The model computing in the plan's formats, as a new module that shares its parameters.

    Args:
        model: the planned model, or one of the same structure. It is not changed.
        plan: from `castwise.torch.plan`, or loaded from a file. What is different here from where it was made is
            logged.
        emulate: emulate products in the 16-bit format (True) or not (False); by default where this machine has no
            arithmetic for it.

    Raises:
        CaptureError: at a call that takes the model along another path than the plan's, which cannot be captured.
    """
    return Applied(model, plan, emulate=emulate)


@dataclass
class _Graph:
    """One captured graph with the plan's formats, and what it was captured for."""

    key: tuple[Any, ...]
    module: fx.GraphModule
    run: Run
    """Takes a call's inputs as a flat list, and as they came."""
    formats: Mapping[str, str]
    captured: Captured
    channels_last: bool
    """Whether its convolutions run on channels-last memory."""

    @property
    def planned(self) -> Graph:
        """As the planner sees it."""
        return self.captured.graph


class Applied(nn.Module):
    """See `apply`. Attributes that are not the module's own are the model's."""

    def __init__(self, model: nn.Module, plan: Plan, *, emulate: bool | None = None, wrap: Wrap | None = None) -> None:
        super().__init__()
        # The same dictionaries: what is registered in, moved in or loaded into either is so in both.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(model, name))
        for name in ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"):
            object.__setattr__(self, name, getattr(model, name))
        object.__setattr__(self, "castwise_model", model)
        self.training = model.training
        self.castwise_plan = plan
        self._emulate = emulate
        self._wrap = wrap
        self._casts = KeptCasts()
        self._chosen = Chosen()
        self._raised: tuple[Raised, ...] = ()
        self._graphs: list[_Graph] = []
        self._known: dict[Any, _Graph] = {}
        in_parts = bool(plan.problem.graph.parts) and not isinstance(model, Part)
        self._in_parts = AppliedParts(model, plan, self.for_part) if in_parts else None

    def for_part(self, part: Part) -> Applied:
        """The plan applied to one graph of a model with graph breaks."""
        made = self.made_for(part)
        made._casts, made._raised, made._chosen = self._casts, self._raised, self._chosen
        return made

    def made_for(self, model: nn.Module) -> Applied:
        """The plan applied to another model, nothing of which is known yet."""
        return Applied(model, self.castwise_plan, emulate=self._emulate, wrap=self._wrap)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what a file of it is loaded as, applies the plan to its own model, and captures that anew."""
        more = {} if self._wrap is None else {"wrap": self._wrap}
        known = (self._raised, self._chosen)
        return remade, (type(self), self.castwise_model, self.castwise_plan, self._emulate, *known, more)

    @property
    def has_breaks(self) -> bool:
        """Whether the model is several graphs with Python between them."""
        return self._in_parts is not None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["castwise_model"], name)

    def train(self, mode: bool = True) -> Applied:
        """Set training or evaluation mode, of this module and of the model."""
        self.castwise_model.train(mode)
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_parts is not None:
            return self._in_parts.run(*args, **kwargs)
        flat, structure = flattened(args, kwargs)
        return self._graph(args, kwargs, flat, structure).run(flat, args, kwargs)

    def graph_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Graph:
        """The graph that covers a call, captured now if there is none yet."""
        return self._graph(args, kwargs, *flattened(args, kwargs))

    def _graph(self, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[Any], structure: Any) -> _Graph:
        mode = self.mode()
        call = (mode, structure, *map(exact_kind, flat))
        try:
            found = self._known.get(call)
        except TypeError:  # an input that has no hash
            return self._search(mode, structure, args, kwargs, flat)
        if found is None:
            found = self._search(mode, structure, args, kwargs, flat)
            if len(self._known) >= _MOST_CALLS:
                self._known.clear()
            self._known[call] = found
        return found

    def mode(self) -> bool:
        """Whether the next call is one in training mode."""
        self.training = self.castwise_model.training
        return bool(self.training)

    def _search(
        self, mode: bool, structure: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[Any]
    ) -> _Graph:
        key = (mode, structure, tuple(kind_of(x) for x in flat))
        found = next((g for g in self._graphs if g.key == key and covers(g.module, flat)), None)
        return self.add_graph((args, kwargs), key) if found is None else found

    def add_graph(self, call: tuple[tuple[Any, ...], dict[str, Any]], key: tuple[Any, ...]) -> _Graph:
        """Capture the model in its present mode for such a call, with the plan's formats."""
        if _transform() is not None:
            raise CaptureError(
                f"{type(self.castwise_model).__name__} cannot be captured inside a transform of torch.func, which "
                "hides what its tensors are. Call it once outside, on inputs of these sizes; those whose gradient the "
                "transform takes with requires_grad set."
            )
        if len(self._graphs) == _MOST_GRAPHS:
            log.warning(
                "%s was captured %d times and its inputs differ again: the oldest graph is dropped. Pad inputs to a "
                "few shapes if this recurs.",
                type(self.castwise_model).__name__,
                _MOST_GRAPHS,
            )
            self._graphs.pop(0)
            self._known.clear()
        captured = capture_call(self.castwise_model, *call, training=self.castwise_plan.problem.graph.training)
        device_type = next((t.device.type for t in _tensors(self.castwise_model, call)), "cpu")
        formats, module = self._rewritten(captured, device_type)
        last = False
        if self._wrap is None:  # a compiler chooses memory layouts itself
            training = captured.training and torch.is_grad_enabled()
            last = channels_last_pays(module, captured.graph, flat_inputs(*call), training, self._chosen)
        graph = _Graph(key, module, self._run_of(module, captured, last), formats, captured, last)
        self._graphs.append(graph)
        return graph

    def _rewritten(self, captured: Captured, device_type: str) -> tuple[Mapping[str, str], fx.GraphModule]:
        formats = with_raised(formats_for(captured, self.castwise_plan), captured.graph, self._raised)
        module = rewrite(captured, formats, self.castwise_plan.fmt, device_type, emulate=self._emulate)
        module.castwise_guards = getattr(captured.module, "_guards_fn", None)  # type: ignore[assignment]
        module.castwise_shapes = shapes_of(captured.module)  # type: ignore[assignment]
        return formats, module

    def raise_layers(self, raised: tuple[Raised, ...]) -> None:
        """Compute these in float32 from the next call on, whatever the plan says, and all others as it says."""
        if raised == self._raised:
            return
        self._raised = raised
        device_type = next((p.device.type for p in self.castwise_model.parameters()), "cpu")
        for graph in self._graphs:
            graph.formats, graph.module = self._rewritten(graph.captured, device_type)
            graph.run = self._run_of(graph.module, graph.captured, graph.channels_last)
        if self._in_parts is not None:
            self._in_parts.raise_layers(raised)

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        """Inside, everything is computed in float32."""
        before = self._raised
        self.raise_layers((Raised(""),))
        try:
            yield
        finally:
            self.raise_layers(before)

    def _run_of(self, module: fx.GraphModule, captured: Captured, channels_last: bool) -> Run:
        in_layout = on_channels_last(module) if channels_last else None
        return self.runner(module if in_layout is None else in_layout, captured.returned)

    def runner(self, module: fx.GraphModule, returned: Returned) -> Run:
        """What runs a rewritten graph."""
        if self._wrap is None:
            return FlatRun(module, self.castwise_model, returned, self._casts)
        wrapped = self._wrap(module)

        def run(_flat: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            _share_state(module, self.castwise_model)
            if not returned.caches:
                return wrapped(*args, **kwargs)
            packed_args, packed_kwargs = packed_call(args, kwargs)
            outputs = pytree.tree_leaves(wrapped(*packed_args, **packed_kwargs))
            return returned.restored(outputs, caches_of(args, kwargs))

        return run

    @contextlib.contextmanager
    def in_place(self, casts: CastCache | None = None, gradients: NarrowGradients | None = None) -> Iterator[None]:
        """Inside, calling the model itself runs the applied module; afterwards the model is as it was.

        Casts of parameters are kept in `casts`, and their gradients may be in `gradients`, where these are given.
        """
        model = self.castwise_model
        before, kept = model.__dict__.get("forward"), (self._casts.cache, self._casts.gradients)
        model.__dict__["forward"] = InPlace(self)
        self._casts.cache, self._casts.gradients = casts, gradients
        try:
            yield
        finally:
            self._casts.cache, self._casts.gradients = kept
            if before is None:
                model.__dict__.pop("forward", None)
            else:
                model.__dict__["forward"] = before

    # ---- what ran ----

    def formats_run(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """Run the module once and return, per op id, the format that was seen at dispatch to compute it."""
        return (
            self.recorded(*args, **kwargs)[1] if self._in_parts is None else self._in_parts.formats_run(*args, **kwargs)
        )

    def recorded(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, str]]:
        """The results of a call of a model that is one graph, and what `formats_run` gives."""
        graph = self.graph_for(args, kwargs)
        _share_state(graph.module, self.castwise_model)
        recorder = Recorder(graph.module, self.castwise_plan.fmt)
        return recorder.run(*flat_inputs(args, kwargs)), recorder.formats

    def formats(self, *args: Any, **kwargs: Any) -> Mapping[str, str]:
        """Per op id, the format decided for the graphs of such a call."""
        return (
            self.graph_for(args, kwargs).formats if self._in_parts is None else self._in_parts.formats(*args, **kwargs)
        )


def capture_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Captured:
    """Capture the model's own forward, also where an `Amp` has put an applied one in its place."""
    planned = model.__dict__.pop("forward", None)
    try:
        if args and kwargs:
            example: Any = (args, kwargs)
            return capture(model, example, training=training, separate=True)
        return capture(model, kwargs or args, training=training)
    finally:
        if planned is not None:
            model.__dict__["forward"] = planned


def formats_for(captured: Captured, plan: Plan) -> Mapping[str, str]:
    """The plan's format for each op of a graph.

    Ops are known by id where the graph is the planned one. In the model's other mode, ids shift where dropout comes or
    goes; an op is then known by its layer, its name, and its place among such ops. One that the plan never saw
    follows its inputs where the catalogue finds it safe, and is fp32 otherwise.
    """
    theirs, mine = plan.problem.graph, captured.graph
    number = part_of(mine, theirs)
    ops = parts_of(theirs)[number] if number is not None else () if theirs.parts else theirs.ops
    decided = [plan.formats[op.id] for op in ops]
    if [(op.name, op.layer) for op in ops] == [(op.name, op.layer) for op in mine.ops]:
        own = [op.id if number is None else in_part(number, op.id) for op in mine.ops]
        if own == [op.id for op in ops]:
            return dict(zip([op.id for op in mine.ops], decided, strict=True))
    known = dict(zip(_places(ops), decided, strict=True))
    formats = {op.id: known.get(place, "fp32") for op, place in zip(mine.ops, _places(mine.ops), strict=True)}
    new = [op.id for op, place in zip(mine.ops, _places(mine.ops), strict=True) if place not in known]
    if new:
        log.info("%d ops that the plan does not know compute in fp32: %s", len(new), ", ".join(new[:8]))
    return formats


def _places(ops: tuple[Any, ...]) -> list[tuple[str, str, int]]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    places = []
    for op in ops:
        counts[op.layer, op.name] += 1
        places.append((op.layer, op.name, counts[op.layer, op.name]))
    return places


def _tensors(model: nn.Module, call: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from (x for x in flat_inputs(*call) if isinstance(x, torch.Tensor))


def _share_state(graph: nn.Module, model: nn.Module) -> None:
    """Parameters and buffers that the model replaced since the capture (by moving it, say) are replaced here too."""
    for path, here in [*graph.named_parameters(), *graph.named_buffers()]:
        owner, _, name = path.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            continue
        now = module._parameters.get(name, module._buffers.get(name))
        if now is None or now is here:
            continue
        mine = graph.get_submodule(owner)
        held: dict[str, Any] = mine._parameters if name in mine._parameters else mine._buffers
        held[name] = now
