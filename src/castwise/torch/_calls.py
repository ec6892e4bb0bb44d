"""How one call is cast: the decision of the policy, turned into a walk over the arguments.

A `Call` is what a region holds for each torch callable. It is decided before the op runs, from the catalogue and the
policy, and from the formats of the arguments where the rule is to follow them; nothing is tried and retried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from castwise.policy import Rule

from ._arguments import (
    CASTABLE,
    LOW,
    PLAIN,
    TENSORS,
    WIDTH,
    fitted,
    has_large_constant,
    is_mask,
    is_outer_product,
    is_shape,
    leads_low,
    low_beside_wide,
    says_formats,
    shared_format,
    sums_nothing,
    updates_statistics,
    widened,
    with_mask_in,
)
from ._casts import CastCache, to_saturated
from ._told import TOLD, tell
from ._traced import traced_by_dynamo
from .emulation import Arithmetic

Function = Callable[..., Any]

_DENSE = frozenset({torch.strided, torch.jagged})
_STRIDED = torch.strided

# For a first look at a call's arguments: one bit per format that a region casts, one for every other floating one.
_BITS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 4}
_BITS |= {dtype: 8 for dtype in WIDTH if dtype not in _BITS}
_OTHER_BIT = 8
_UNUSUAL = -1
_TO = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16, torch.float32: Tensor.float}
_IS_ON = {kind: getattr(torch.Tensor, f"is_{kind}").__get__ for kind in ("cpu", "cuda", "xpu", "mps")}


@dataclass(frozen=True, slots=True)
class Call:
    """The decision for one callable, ready to apply.

    Attributes:
        name: canonical name of the op.
        rule: LOW, HIGH or WIDEST.
        arithmetic: for LOW, how the op is computed.
        wide: for HIGH, the dtype it is computed in.
        writes_first: the first argument is the destination; its format is not ours to change.
        only_constants: torch's own kernel does what the rule says but for constants outside the format.
        stores_constant: a Python constant lands in the result (masked_fill, full_like): it saturates to the result's
            range.
        contracts: a product of activations: the place of the argument whose last dimension is summed over.
        added: an operand that is added to what the op computes, a mask for example: its place and its name.
        wide_parameters: the first argument leads, and float32 parameters beside a 16-bit one are right as they are.
        no_kernel: 16-bit dtypes for which this device has no kernel.
        descend: the body of a Python composite, to be entered instead of cast as one op.
        emulate_as: what to run instead of an op that, emulated as one call, would not round between its steps.
        untold: a fused optimizer's update: it writes weights without telling the version counter, and is not cast.
        bodies: a higher-order op: what the functions among its arguments call is cast, not the op.
        reason: what decided.
    """

    name: str
    rule: Rule
    arithmetic: Arithmetic | None = None
    wide: torch.dtype = torch.float32
    writes_first: bool = False
    stores_constant: bool = False
    only_constants: bool = False
    contracts: int | None = None
    added: tuple[int, str] | None = None
    wide_parameters: bool = False
    no_kernel: frozenset[torch.dtype] = frozenset()
    descend: Function | None = None
    emulate_as: Function | None = None
    untold: bool = False
    bodies: bool = False
    reason: str = ""


class Casting:
    """Applies calls on one type of device, with kept casts of weights."""

    __slots__ = ("_is_here", "cache", "device_type")

    def __init__(self, device_type: str, cache: CastCache) -> None:
        self.device_type = device_type
        self.cache = cache
        self._is_here: Callable[[torch.Tensor], bool] = _IS_ON.get(device_type, self._is_on_device)

    def _is_on_device(self, x: torch.Tensor) -> bool:
        return x.device.type == self.device_type

    # ---- most calls ----
    #
    # `run`, in one look at the arguments where they are what they mostly are: plain dense tensors of the three formats,
    # and numbers. An op on small tensors takes a few microseconds, so this is written to the metal: one loop, no
    # closures, and no call that is not needed.

    def quick(self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast and run: what `run` does, sooner."""
        if call.stores_constant:
            if has_large_constant(args, kwargs):
                return self.run(call, function, args, kwargs)
            if call.only_constants:
                return function(*args, **kwargs)
        if kwargs and says_formats(kwargs):
            return self.run(call, function, args, kwargs)
        rule, follows = call.rule, call.writes_first
        if not follows:
            if rule is Rule.LOW:
                return self._quick_low(call, function, args, kwargs)
            if rule is Rule.HIGH and call.wide is torch.float32:
                return self._quick_high(call, function, args, kwargs)
            follows = rule is Rule.WIDEST
        seen = self._seen(args)
        if seen >= 0 and kwargs:
            named = self._seen(kwargs.values())
            seen = seen | named if named >= 0 else _UNUSUAL
        if seen < 0 or seen & _OTHER_BIT:
            return self.run(call, function, args, kwargs)
        if not seen or (
            follows
            and not call.no_kernel
            and (not seen & (seen - 1) or (call.wide_parameters and leads_low(args, kwargs)))
        ):
            return function(*args, **kwargs)  # one format, or none; or a norm of 16-bit values, its parameters wide
        return self.run(call, function, args, kwargs)

    def _quick_low(self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arithmetic = call.arithmetic
        assert arithmetic is not None
        place = call.contracts
        if place is not None and (len(args) <= place or type(args[place]) not in TENSORS or sums_nothing(args[place])):
            return self.run(call, function, args, kwargs)
        if call.added is not None and is_mask(call.added, args, kwargs):
            return self.run(call, function, args, kwargs)
        dtype, emulated = arithmetic.dtype, arithmetic.emulated
        enter, key = (arithmetic.enter, arithmetic.fmt.name) if emulated else (_TO[dtype], dtype)
        low: list[Any] = []
        is_here, cache = self._is_here, self.cache
        for x in (*args, *kwargs.values()) if kwargs else args:
            kind = type(x)
            if kind is Parameter or kind is Tensor:
                of = x.dtype
                if of in CASTABLE:
                    if x.layout is not _STRIDED or not is_here(x):
                        return self.run(call, function, args, kwargs)
                    if of is not dtype or emulated:
                        if kind is Tensor and x._base is None and not (x.requires_grad and x.is_leaf):
                            x = enter(x)
                        else:
                            x = cache.get(x, key, enter)
                elif of in WIDTH:
                    return self.run(call, function, args, kwargs)
            elif kind not in PLAIN and not is_shape(x, kind):
                return self.run(call, function, args, kwargs)
            low.append(x)
        if kwargs:
            kwargs = dict(zip(kwargs, low[len(args) :], strict=True))
            low = low[: len(args)]
        if not emulated:
            return function(*low, **kwargs)
        result = (call.emulate_as or function)(*low, **kwargs)
        if type(result) is Tensor and result.dtype is torch.float32:
            return arithmetic.leave(result)
        return self._mapped(result, arithmetic.leave, CASTABLE)

    def _quick_high(self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        narrow = False
        for x in (*args, *kwargs.values()) if kwargs else args:
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                of = x.dtype
                if of is not torch.float32 and of in WIDTH:
                    if of not in LOW or x.layout is not _STRIDED or not self._is_here(x):
                        return self.run(call, function, args, kwargs)
                    narrow = True
            elif kind not in PLAIN and not is_shape(x, kind):
                return self.run(call, function, args, kwargs)
        if narrow:
            if call.name in TOLD:
                tell(call.name, args)
            args = tuple([widened(x) for x in args])
            if kwargs:
                kwargs = {name: widened(x) for name, x in kwargs.items()}
        return function(*args, **kwargs)

    def _seen(self, args: Iterable[Any]) -> int:
        """The formats of the tensors among flat arguments, as bits; `_UNUSUAL` for what needs a closer look."""
        seen, is_here = 0, self._is_here
        for x in args:
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                bit = _BITS.get(x.dtype)
                if bit is not None:
                    if x.layout is not _STRIDED or not is_here(x):
                        return _UNUSUAL
                    seen |= bit
            elif kind not in PLAIN and not is_shape(x, kind):
                return _UNUSUAL
        return seen

    # ---- every call ----

    def run(self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast the arguments as decided and run the op."""
        if call.only_constants and not has_large_constant(args, kwargs):
            return function(*args, **kwargs)
        floats = self._floats(args, [])
        if kwargs:
            self._floats(kwargs.values(), floats)
        if call.rule is Rule.WIDEST or call.writes_first or (kwargs and kwargs.get("out") is not None):
            return self._follow(call, function, args, kwargs, floats)
        if call.rule is Rule.LOW:
            return self._low(call, function, args, kwargs, floats)
        return self._high(call, function, args, kwargs, floats)

    # ---- the three rules ----

    def _low(
        self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], floats: list[torch.Tensor]
    ) -> Any:
        arithmetic = call.arithmetic
        assert arithmetic is not None
        traced = traced_by_dynamo()  # which refuses to read layouts in a backward, and has no sparse tensors
        for x in floats:
            if x.dtype not in CASTABLE or (not traced and x.layout not in _DENSE):
                # float64, complex, sparse: not ours to round
                return self._follow(call, function, args, kwargs, floats)
        if call.contracts is not None and floats and is_outer_product(call.contracts, args, kwargs, floats):
            return self._follow(call, function, args, kwargs, floats)  # nothing to gain by rounding
        dtype = arithmetic.dtype
        if not arithmetic.emulated and all(x.dtype is dtype for x in floats):
            return function(*args, **kwargs)
        cache, enter = self.cache, arithmetic.enter
        keeps = not torch.compiler.is_compiling()  # a compiler merges equal casts by itself
        key = arithmetic.fmt.name if arithmetic.emulated else dtype

        def cast(x: torch.Tensor) -> torch.Tensor:
            return cache.get(x, key, enter) if keeps else enter(x)

        if call.added is not None and is_mask(call.added, args, kwargs):
            args, kwargs = with_mask_in(dtype, call.added, args, kwargs)
        if kwargs:
            kwargs = {k: self._mapped(v, cast, CASTABLE) for k, v in kwargs.items()}
        function = call.emulate_as or function
        result = function(*[self._mapped(a, cast, CASTABLE) for a in args], **kwargs)
        return self._mapped(result, arithmetic.leave, CASTABLE) if arithmetic.emulated else result

    def _high(
        self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], floats: list[torch.Tensor]
    ) -> Any:
        wide = call.wide
        asked = kwargs.get("dtype")
        if asked in LOW:  # the result is asked for in a low format: compute wide, round once
            result = self._high(call, function, args, {**kwargs, "dtype": wide}, floats)
            return self._mapped(result, lambda y: y.to(asked), frozenset({wide}))
        narrower = frozenset({x.dtype for x in floats if WIDTH[x.dtype] < WIDTH[wide]})
        if any(WIDTH[x.dtype] > WIDTH[wide] for x in floats):
            return self._follow(call, function, args, kwargs, floats)
        if not narrower:
            return function(*args, **kwargs)

        def cast(x: torch.Tensor) -> torch.Tensor:
            return x.to(wide)

        return self._with(function, args, kwargs, cast, narrower)

    def _follow(
        self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], floats: list[torch.Tensor]
    ) -> Any:
        """The format of the destination, else the widest among the arguments."""
        if call.wide_parameters and low_beside_wide(floats):
            target: torch.dtype | None = floats[0].dtype
            if target not in call.no_kernel:
                return function(*args, **kwargs)
        target = shared_format(args, kwargs, floats, writes_first=call.writes_first, constant=call.stores_constant)
        if target is None:
            return function(*args, **kwargs)
        keep: object = args[0] if call.writes_first else kwargs.get("out")
        if target in call.no_kernel:
            if call.writes_first:
                return self._through_wide(function, args, kwargs)
            if keep is None:
                target = torch.float32
        if call.writes_first and call.added is not None and target not in LOW:
            return function(*args, **kwargs)  # torch's own kernel adds to what is wider than the mask
        if call.stores_constant and target in LOW:
            args, kwargs = fitted(call.name, args, kwargs, target, keep)
        others = frozenset({x.dtype for x in floats} - {target})
        if not others:
            return function(*args, **kwargs)

        def cast(x: torch.Tensor) -> torch.Tensor:
            if x is keep:
                return x
            if call.stores_constant and not x.dim():
                return to_saturated(x, target)
            if call.writes_first and call.added is not None:
                return to_saturated(x, target, 1 if call.name == "sub" else -1)
            made.append((x, x.to(target)))
            return made[-1][1]

        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        result = self._with(function, args, kwargs, cast, others & CASTABLE)
        if call.wide_parameters and updates_statistics(call.name, args, kwargs):
            for x, y in made:  # the running mean and variance: 16-bit buffers
                if x.dim() == 1 and not x.requires_grad and not isinstance(x, Parameter):
                    x.copy_(y)
        return result

    def _through_wide(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An in-place op without a low kernel: on a wide copy of its destination, which is then written back."""
        wide = args[0].to(torch.float32)

        def widen(x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float32)

        self._with(function, (wide, *args[1:]), kwargs, widen, LOW)
        return args[0].copy_(wide)

    # ---- arguments ----

    def _with(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cast: Callable[[torch.Tensor], torch.Tensor],
        dtypes: frozenset[torch.dtype],
    ) -> Any:
        args = tuple([self._mapped(a, cast, dtypes) for a in args])
        if kwargs:
            kwargs = {k: v if k == "out" else self._mapped(v, cast, dtypes) for k, v in kwargs.items()}
        return function(*args, **kwargs)

    def _floats(self, args: Iterable[Any], found: list[torch.Tensor]) -> list[torch.Tensor]:
        """The floating and complex tensors on the region's device in a tree of lists, tuples and mappings."""
        for a in args:
            if isinstance(a, torch.Tensor):
                if a.dtype in WIDTH and a.device.type == self.device_type:
                    found.append(a)
            elif isinstance(a, list | tuple):
                self._floats(a, found)
            elif isinstance(a, Mapping):
                self._floats(a.values(), found)
        return found

    def _mapped(self, tree: Any, cast: Callable[[torch.Tensor], torch.Tensor], dtypes: frozenset[torch.dtype]) -> Any:
        """The same tree with `cast` applied to every tensor of one of `dtypes` on the region's device."""
        if isinstance(tree, torch.Tensor):
            return cast(tree) if tree.dtype in dtypes and tree.device.type == self.device_type else tree
        if type(tree) is tuple:
            return tuple([self._mapped(a, cast, dtypes) for a in tree])
        if type(tree) is list:
            return [self._mapped(a, cast, dtypes) for a in tree]
        if isinstance(tree, tuple) and not isinstance(tree, torch.Size):  # named tuples and torch.return_types
            fields = [self._mapped(a, cast, dtypes) for a in tree]
            return type(tree)(*fields) if hasattr(tree, "_fields") else type(tree)(fields)
        if type(tree) is dict:
            return {k: self._mapped(v, cast, dtypes) for k, v in tree.items()}
        return tree
