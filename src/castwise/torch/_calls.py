"""How one call is cast: the decision of the policy, turned into a walk over the arguments.

A `Call` is what a region holds for each torch callable. It is decided before the op runs, from the catalogue and the
policy, and from the formats of the arguments where the rule is to follow them; nothing is tried and retried.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from castwise.policy import Rule

from ._casts import CastCache, fits, to_saturated
from ._traced import traced_by_dynamo
from .emulation import Arithmetic

Function = Callable[..., Any]

# float8 tensors and float64 ones are left to the user; complex ones count as wider than every real format.
_WIDTH = {
    torch.float16: 1,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.complex64: 4,
    torch.complex128: 5,
}
_CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
_LOW = frozenset({torch.float16, torch.bfloat16})
_SMALLEST_LIMIT = torch.finfo(torch.float16).max
_DENSE = frozenset({torch.strided, torch.jagged})

# For a first look at a call's arguments: one bit per format that a region casts, one for every other floating one.
_BITS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 4}
_BITS |= {dtype: 8 for dtype in _WIDTH if dtype not in _BITS}
_LOW_BITS, _WIDE_BIT, _OTHER_BIT = 1 | 2, 4, 8
_UNUSUAL = -1
# Arguments that hold no tensor. Lists and tuples count when they begin with a number: sizes, strides, dimensions.
_NUMBERS = frozenset({int, float, bool})
_PLAIN = frozenset({*_NUMBERS, type(None), str, torch.Size, torch.dtype, torch.device, torch.memory_format})
_TO = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16, torch.float32: Tensor.float}
_ASKING = frozenset({"dtype", "out", "attn_mask"})  # named arguments that say something about formats themselves
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
        contracts: a product of two activations whose contraction length is its first argument's last dimension.
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
    contracts: bool = False
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

    def quick(self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`run`, in one look at the arguments where they are what they mostly are: plain dense tensors of the three
        formats, and numbers. An op on small tensors takes a few microseconds, so this is written to the metal.
        """
        if call.only_constants and not _has_large_constant(args, kwargs):
            return function(*args, **kwargs)
        seen = self._seen(args)
        if seen < 0 or seen & _OTHER_BIT or call.stores_constant:
            return self.run(call, function, args, kwargs)
        if kwargs:
            named = self._seen(kwargs.values())
            asked = not _ASKING.isdisjoint(kwargs) and any(kwargs.get(name) is not None for name in _ASKING)
            if asked or named < 0 or named & _OTHER_BIT:
                return self.run(call, function, args, kwargs)
            seen |= named
        if seen == 0:
            return function(*args, **kwargs)
        rule = call.rule
        if rule is Rule.LOW and not call.writes_first:
            return self._quick_low(call, function, args, kwargs, seen)
        if rule is Rule.HIGH and not call.writes_first:
            if not seen & _LOW_BITS:
                return function(*args, **kwargs)
            if call.wide is torch.float32:
                if kwargs:
                    kwargs = {name: _widened(x) for name, x in kwargs.items()}
                return function(*[_widened(x) for x in args], **kwargs)
        elif not seen & (seen - 1) and not call.no_kernel:
            return function(*args, **kwargs)  # one format, or none
        return self.run(call, function, args, kwargs)

    def _quick_low(
        self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], seen: int
    ) -> Any:
        arithmetic = call.arithmetic
        assert arithmetic is not None
        dtype, emulated = arithmetic.dtype, arithmetic.emulated
        if not emulated and seen == _BITS[dtype]:
            return function(*args, **kwargs)
        if call.contracts and (not args or _sums_nothing(args[0])):
            return self.run(call, function, args, kwargs)
        enter, key = (arithmetic.enter, arithmetic.fmt.name) if emulated else (_TO[dtype], dtype)
        keep = self.cache.get

        def lowered(x: Any) -> Any:
            kind = type(x)
            if not (kind is Tensor or kind is Parameter) or x.dtype not in _BITS or (x.dtype is dtype and not emulated):
                return x
            if kind is Tensor and x._base is None and not (x.requires_grad and x.is_leaf):
                return enter(x)
            return keep(x, key, enter)

        low = [lowered(x) for x in args]
        if kwargs:
            kwargs = {name: lowered(x) for name, x in kwargs.items()}
        result = (call.emulate_as or function)(*low, **kwargs)
        if not emulated:
            return result
        return arithmetic.leave(result) if type(result) is Tensor else self._mapped(result, arithmetic.leave, _CASTABLE)

    def _seen(self, args: Iterable[Any]) -> int:
        """The formats of the tensors among flat arguments, as bits; `_UNUSUAL` for what needs a closer look."""
        seen, is_here = 0, self._is_here
        for x in args:
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                bit = _BITS.get(x.dtype)
                if bit is not None:
                    if x.layout is not torch.strided or not is_here(x):
                        return _UNUSUAL
                    seen |= bit
            elif kind not in _PLAIN and not ((kind is tuple or kind is list) and x and type(x[0]) in _NUMBERS):
                return _UNUSUAL
        return seen

    # ---- every call ----

    def run(self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cast the arguments as decided and run the op."""
        if call.only_constants and not _has_large_constant(args, kwargs):
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
            if x.dtype not in _CASTABLE or (not traced and x.layout not in _DENSE):
                # float64, complex, sparse: not ours to round
                return self._follow(call, function, args, kwargs, floats)
        first = args[0] if args else kwargs.get("input")
        if call.contracts and floats and first is floats[0] and _sums_nothing(floats[0]):
            return self._follow(call, function, args, kwargs, floats)  # an outer product: nothing to gain by rounding
        dtype = arithmetic.dtype
        if not arithmetic.emulated and all(x.dtype is dtype for x in floats):
            return function(*args, **kwargs)
        cache, enter = self.cache, arithmetic.enter
        keeps = not torch.compiler.is_compiling()  # a compiler merges equal casts by itself
        key = arithmetic.fmt.name if arithmetic.emulated else dtype

        def cast(x: torch.Tensor) -> torch.Tensor:
            return cache.get(x, key, enter) if keeps else enter(x)

        if kwargs:
            kwargs = {k: self._mapped(v, cast, _CASTABLE) for k, v in self._masks(kwargs, dtype).items()}
        function = call.emulate_as or function
        result = function(*[self._mapped(a, cast, _CASTABLE) for a in args], **kwargs)
        return self._mapped(result, arithmetic.leave, _CASTABLE) if arithmetic.emulated else result

    def _high(
        self, call: Call, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], floats: list[torch.Tensor]
    ) -> Any:
        wide = call.wide
        asked = kwargs.get("dtype")
        if asked in _LOW:  # the result is asked for in a low format: compute wide, round once
            result = self._high(call, function, args, {**kwargs, "dtype": wide}, floats)
            return self._mapped(result, lambda y: y.to(asked), frozenset({wide}))
        narrower = frozenset({x.dtype for x in floats if _WIDTH[x.dtype] < _WIDTH[wide]})
        if any(_WIDTH[x.dtype] > _WIDTH[wide] for x in floats):
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
        if call.wide_parameters and _low_beside_wide(floats):
            target: torch.dtype | None = floats[0].dtype
            if target not in call.no_kernel:
                return function(*args, **kwargs)
        target = _target(call, args, kwargs, floats)
        if target is None:
            return function(*args, **kwargs)
        keep: object = args[0] if call.writes_first else kwargs.get("out")
        if target in call.no_kernel:
            if call.writes_first:
                return self._through_wide(function, args, kwargs)
            if keep is None:
                target = torch.float32
        if call.stores_constant and target in _LOW:
            args = tuple([_fit(a, target) for a in args])
            kwargs = {k: _fit(v, target) for k, v in kwargs.items()}
        others = frozenset({x.dtype for x in floats} - {target})
        if not others:
            return function(*args, **kwargs)

        def cast(x: torch.Tensor) -> torch.Tensor:
            if x is keep:
                return x
            if call.stores_constant and not x.dim():
                return to_saturated(x, target)
            return x.to(target)

        return self._with(function, args, kwargs, cast, others & _CASTABLE)

    def _through_wide(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An in-place op without a low kernel: on a wide copy of its destination, which is then written back."""
        wide = args[0].to(torch.float32)

        def widen(x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float32)

        self._with(function, (wide, *args[1:]), kwargs, widen, _LOW)
        return args[0].copy_(wide)

    # ---- arguments ----

    def _masks(self, kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        mask = kwargs.get("attn_mask")
        if isinstance(mask, torch.Tensor) and mask.dtype in _CASTABLE and mask.dtype is not dtype:
            return {**kwargs, "attn_mask": to_saturated(mask, dtype)}
        return kwargs

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
            kwargs = {k: self._mapped(v, cast, dtypes) for k, v in kwargs.items()}
        return function(*args, **kwargs)

    def _floats(self, args: Iterable[Any], found: list[torch.Tensor]) -> list[torch.Tensor]:
        """The floating and complex tensors on the region's device in a tree of lists, tuples and mappings."""
        for a in args:
            if isinstance(a, torch.Tensor):
                if a.dtype in _WIDTH and a.device.type == self.device_type:
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


def _widened(x: Any) -> Any:
    return x.float() if getattr(x, "dtype", None) in _LOW else x


def _sums_nothing(x: torch.Tensor) -> bool:
    """Whether the last dimension has length 1. `torch.jit.trace` would warn of a decision by shape: this is one."""
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    if state is None:
        return x.dim() > 0 and x.size(-1) == 1
    tracer._set_tracing_state(None)
    try:
        return x.dim() > 0 and x.size(-1) == 1
    finally:
        tracer._set_tracing_state(state)


def _low_beside_wide(floats: list[torch.Tensor]) -> bool:
    """Whether a 16-bit tensor leads float32 ones: a norm's input, and its parameters and statistics."""
    return bool(floats) and floats[0].dtype in _LOW and all(x.dtype is torch.float32 for x in floats[1:])


def _target(
    call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], floats: list[torch.Tensor]
) -> torch.dtype | None:
    """The dtype that the arguments are to share. 0-d tensors follow the others, as in torch's own promotion."""
    if call.writes_first and args and isinstance(args[0], torch.Tensor):
        return args[0].dtype if args[0].dtype in _CASTABLE else None
    out = kwargs.get("out")
    if isinstance(out, torch.Tensor):
        return out.dtype if out.dtype in _CASTABLE else None
    asked = kwargs.get("dtype")
    if call.stores_constant and isinstance(asked, torch.dtype) and asked in _LOW:
        return asked  # torch.full(size, -1e9, dtype=scores.dtype)
    if not floats:
        return None
    dtypes = {x.dtype for x in floats if x.dim()} or {x.dtype for x in floats}
    widest = max(dtypes, key=_WIDTH.__getitem__)
    if len(dtypes) > 1 and _WIDTH[widest] == 1:
        return torch.float32  # float16 and bfloat16 meet: neither holds the other
    return torch.float32 if widest is torch.complex64 else torch.float64 if widest is torch.complex128 else widest


def _has_large_constant(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = type(a)
        if kind is Tensor or isinstance(a, Tensor):
            if not a.dim() and len(args) > 1:
                return True  # a constant in a 0-d tensor
        elif _is_number(a, kind) and not -_SMALLEST_LIMIT <= a <= _SMALLEST_LIMIT:
            return True
    return False


def _is_number(value: object, kind: type) -> bool:
    """Python's numbers and NumPy's scalars; True and False are neither."""
    return kind is float or kind is int or (kind not in _PLAIN and isinstance(value, numbers.Real))


def _fit(value: Any, dtype: torch.dtype) -> Any:
    return fits(value, dtype) if _is_number(value, type(value)) else value
