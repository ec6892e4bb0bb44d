"""A rewritten graph as one plain function of tensors: what runs at each call of a planned model.

The module that `fx` makes of a graph looks up each parameter by its path, flattens its arguments and builds its outputs
by the general rules for nested structures. For a small model that costs as much as its kernels. Here parameters are
arguments, read at each call from the dictionaries in which the model itself keeps them: a parameter that was moved or
replaced is found without a search. And ops are called through torch's own Python functions, which take half the time of
calling them by schema.

Casts of parameters are arguments too: where somebody keeps them from step to step (an `Amp`, whose optimizer step
writes them anew), they are those that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from . import _aten
from ._caches import Returned, caches_of
from ._casts import CastCache
from ._narrow import NarrowGradients
from ._rewrite import CAST
from ._trees import builder

__all__ = ["FlatRun", "KeptCasts"]

# Where torch keeps the functions and methods that it generates from the schemas of ops.
_HOMES = (
    (torch._C._VariableFunctions, BuiltinFunctionType),
    (torch._C._nn, BuiltinFunctionType),
    (torch._C.TensorBase, MethodDescriptorType),
)

_Place = tuple[dict[str, Any], str]
_NOTHING: Mapping[str, Any] = {}


class KeptCasts:
    """Where casts of parameters are kept now, and gradients in their format, if anywhere."""

    def __init__(self) -> None:
        self.cache: CastCache | None = None
        self.gradients: NarrowGradients | None = None

    def of(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The parameter in a 16-bit format."""
        cache = self.cache
        return self._cast(weight, dtype) if cache is None else cache.get(weight, dtype, lambda x: self._cast(x, dtype))

    def _cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return weight.to(dtype) if self.gradients is None else self.gradients.cast(weight, dtype)


class FlatRun:
    """Runs a graph on its flat inputs. Parameters and buffers are those of `model` where it has them."""

    def __init__(
        self,
        module: fx.GraphModule,
        model: nn.Module | None,
        returned: Returned | None = None,
        casts: KeptCasts | None = None,
    ) -> None:
        self._model = model
        self._returned = returned if returned is not None and returned.caches else None
        self._out_spec = module._out_spec if hasattr(module, "_out_spec") else None
        self._build = None if self._out_spec is None else builder(self._out_spec)
        self._casts = KeptCasts() if casts is None else casts
        graph, self._paths, self._low = _without_attributes(module)
        self._source = module
        self._run: Callable[..., Any] = fx.GraphModule(module, graph).forward
        self._find()

    def __call__(self, flat: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NOTHING) -> Any:
        outputs = self.values(flat)
        if self._returned is not None:
            return self._returned.restored(outputs, caches_of(args, kwargs))
        if self._build is not None:
            return self._build(iter(outputs))
        return outputs if self._out_spec is None else pytree.tree_unflatten(outputs, self._out_spec)

    def values(self, flat: Sequence[Any]) -> Any:
        """The graph's results, flat."""
        for children, name, child in self._owners:
            if children.get(name) is not child:
                self._find()  # a submodule was replaced
                break
        given = [held[name] for held, name in self._places]
        low = [self._casts.of(given[position], dtype) for position, dtype in self._low]
        return self._run(*flat, *given, *low)

    def _find(self) -> None:
        """Look up where each parameter and buffer is kept, and by which submodules that was found."""
        owners: dict[str, tuple[dict[str, nn.Module | None], str, nn.Module]] = {}
        self._places: list[_Place] = []
        for path in self._paths:
            *parents, name = path.split(".")
            held = self._in_model(parents, name, owners)
            self._places.append(held if held is not None else ({name: _aten.attribute(self._source, path)}, name))
        self._owners = list(owners.values())

    def _in_model(self, parents: list[str], name: str, owners: dict[str, Any]) -> _Place | None:
        owner = self._model
        passed = {}
        for depth, parent in enumerate(parents):
            child = None if owner is None else owner._modules.get(parent)
            if owner is None or child is None:
                return None
            passed[".".join(parents[: depth + 1])] = (owner._modules, parent, child)
            owner = child
        if owner is None:
            return None
        kinds: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for held in kinds:
            if held.get(name) is not None:
                owners.update(passed)
                return held, name
        return None


def _without_attributes(module: fx.GraphModule) -> tuple[fx.Graph, list[str], list[tuple[int, torch.dtype]]]:
    """The graph with arguments in place of attributes and of casts of parameters, after its own arguments.

    Also what these stand for: paths of attributes, and of each cast which of these it is of, and its format.
    """
    graph, flat = module.graph, fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    paths: dict[str, fx.Node] = {}
    low: dict[tuple[str, torch.dtype], fx.Node] = {}
    casts = [node for node in graph.nodes if _casts_parameter(module, node)]
    for node in graph.nodes:
        if node.op == "placeholder":
            new[node] = flat.placeholder(str(node.target))
    for node in graph.nodes:
        if node.op == "get_attr" and node.users:
            path = str(node.target)
            if path not in paths:
                paths[path] = flat.placeholder(f"castwise_given_{len(paths)}")
            new[node] = paths[path]
    for node in casts:
        cast = (str(node.args[0].target), node.args[1])
        if cast not in low:
            low[cast] = flat.placeholder(f"castwise_low_{len(low)}")
        new[node] = low[cast]
    for node in graph.nodes:
        if node not in new and not (node.op == "get_attr" and not node.users):
            new[node] = flat.node_copy(node, new.__getitem__)
            new[node].target = _direct(node.target)
    order = list(paths)
    return flat, order, [(order.index(path), dtype) for path, dtype in low]


def _casts_parameter(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is a cast of the plan, of a parameter that is not written in the graph."""
    if node.target is not CAST or "castwise_op" in node.meta or len(node.args) != 2:
        return False
    source, dtype = node.args
    if not isinstance(source, fx.Node) or source.op != "get_attr" or dtype not in (torch.bfloat16, torch.float16):
        return False
    parameter = isinstance(_aten.attribute(module, str(source.target)), nn.Parameter)
    return parameter and not any(_aten.mutated(user) for user in source.users)


def _direct(target: Any) -> Any:
    """The function or method of torch that calls the same op, where there is one; `target` itself where not."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target
    schema = target._schema
    takes_tensor = bool(schema.arguments) and str(schema.arguments[0].type) == "Tensor"
    name = schema.name.partition("::")[2]
    if schema.is_mutable or not takes_tensor or name.startswith("_"):  # `fx` cannot write calls of `torch.__and__`
        return target
    for home, kind in _HOMES:
        found = getattr(home, name, None)
        if isinstance(found, kind):
            return found
    return target
