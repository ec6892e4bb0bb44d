"""A policy's decisions for every torch callable on one type of device, worked out once and shared by all regions."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from castwise import _globs
from castwise.catalogue import Mixed, OpClass, OpEntry
from castwise.formats import FP32, parse_format
from castwise.policy import Policy, Rule, decide

from ._calls import Call
from ._functions import FunctionInfo, describe, known_functions
from ._recurrent import stepwise
from ._registry import registered_rule
from ._traced import at_trace_time
from .emulation import Arithmetic, arithmetic, dtype_of

Function = Callable[..., Any]

# What neither computes nor joins formats: a region does not look at such calls at all.
_IGNORED = frozenset(
    {OpClass.VIEW, OpClass.CAST, OpClass.INTEGER, OpClass.QUERY, OpClass.CONTROL, OpClass.COMMUNICATION}
)
# Products, and the place of the argument whose last dimension they sum over. Of length 1 there is nothing to sum and
# nothing to gain, and what is rounded is often a position or a time step (rotary embeddings, regression inputs).
_CONTRACTS = {"matmul": 0, "bmm": 0, "mm": 0, "linear": 0, "addmm": 1, "addbmm": 1, "baddbmm": 1, "einsum": 0}
# Operands that are added, which may be masks of constants beyond the format.
_ADDS = dict.fromkeys(("addmm", "addbmm", "baddbmm", "addmv", "addr"), (0, "input"))
_ADDS |= {"scaled_dot_product_attention": (3, "attn_mask"), "add": (1, "other"), "sub": (1, "other")}


class Rules:
    """The decisions of one policy (resolved), for one device type and one layer path.

    `seen` maps callables to their `Call`, and to None what is known to need nothing. It knows torch's own functions
    from the start; others are learnt when they are first seen. `traced` holds the calls that compilers have asked for,
    as attributes: a tracer can follow a name to an object, and looks at no more than it follows.
    """

    def __init__(self, policy: Policy, device_type: str, layer: str) -> None:
        self.policy = policy
        self.device_type = device_type
        self.layer = layer
        self.seen: dict[Function, Call | None] = {}
        self.traced = types.SimpleNamespace()
        for function, info in known_functions().items():
            call = self._call(function, info)
            if call is not None:
                self.seen[function] = call

    def __reduce__(self) -> tuple[Callable[..., Rules], tuple[Any, ...]]:
        """Copies and pickles are the same decisions again: the tables name callables that cannot be pickled."""
        return rules_for, (self.policy, self.device_type, *([self.layer] if self.layer else []))  # as `autocast` asks

    def under(self, policy: Policy) -> Rules:
        """The same decisions, as those of a policy that differs only in what is not for this layer."""
        twin = object.__new__(Rules)
        twin.__dict__ |= self.__dict__ | {"policy": policy, "seen": dict(self.seen), "traced": types.SimpleNamespace()}
        return twin

    @functools.cached_property
    def emulated(self) -> bool:
        """Whether products in the policy's format are emulated on this type of device."""
        return arithmetic(self.device_type, self.policy.low_format).emulated

    def learn(self, function: Function) -> Call | None:
        """Decide for a callable that was not known when the table was made (custom ops, overloads, getters)."""
        call = None
        if not _is_getter(function):
            call = self._call(function, describe(function))
        self.seen[function] = call
        return call

    @at_trace_time
    def name_of(self, function: Function) -> str:
        """The name in `traced` of the decision for a callable."""
        call = self.seen[function] if function in self.seen else self.learn(function)
        name = f"call_{id(call)}"
        setattr(self.traced, name, call)
        return name

    def _call(self, function: Function, info: FunctionInfo) -> Call | None:
        if isinstance(function, HigherOrderOperator):
            return Call(info.name, Rule.WIDEST, bodies=True, reason="runs functions: their calls are decided")
        own = registered_rule(function)
        if own is not None:
            return self.registered_call(info.name, own, info.writes_first)
        if info.writes_others:
            return None
        if info.descend is not None:
            return Call(
                info.name, Rule.WIDEST, descend=info.descend, reason="a Python composite: its own calls are decided"
            )
        if _writes_untold(function):
            return Call(info.name, Rule.WIDEST, untold=True, reason="an optimizer's update: kept casts get old by it")
        if _beside_quantized_weights(function, info.name):
            return Call(info.name, Rule.HIGH, reason="kernels of quantized weights take float32 inputs alone")
        entry = info.entry
        if isinstance(function, types.FunctionType) and entry is None:
            return None
        gaps = _kernel_gaps(entry, self.device_type)
        if entry is not None and entry.op_class in _IGNORED and not gaps:
            return None
        decision = decide(self.policy, entry, layer=self.layer, name=info.name)
        low = arithmetic(self.device_type, decision.fmt) if decision.rule is Rule.LOW and decision.fmt else None
        rule = decision.rule
        if low is not None and not low.emulated and low.dtype in gaps:
            rule = Rule.HIGH
        # What is compared with a constant may hold that constant: both have to saturate alike.
        constant = entry is not None and (entry.stores_constant or entry.op_class is OpClass.COMPARE)
        follows = rule is Rule.WIDEST and not gaps and _torch_follows(entry)
        if follows and not constant:
            return None
        wide = dtype_of(decision.fmt or FP32) if rule is Rule.HIGH and decision.rule is Rule.HIGH else torch.float32
        return Call(
            info.name,
            rule,
            arithmetic=low,
            wide=wide,
            writes_first=info.writes_first,
            stores_constant=constant,
            only_constants=constant and follows and not (info.writes_first and info.name in _ADDS),
            contracts=_CONTRACTS.get(info.name),
            added=_ADDS.get(info.name),
            wide_parameters=entry is not None and entry.op_class is OpClass.NORM and entry.mixed is Mixed.KEEP,
            no_kernel=gaps,
            emulate_as=stepwise(info.name, low) if low is not None and low.emulated else None,
            reason=decision.reason,
        )

    def registered_call(self, name: str, setting: str, writes_first: bool = False) -> Call | None:
        """The call of an op that was given to `register_op`."""
        reason = f"registered as {setting!r}"
        if setting == "keep":
            return None
        if setting == Rule.WIDEST:
            return Call(name, Rule.WIDEST, writes_first=writes_first, reason=reason)
        if setting == Rule.HIGH:
            return Call(
                name, Rule.HIGH, wide=dtype_of(self.policy.high_format), writes_first=writes_first, reason=reason
            )
        fmt = self.policy.low_format if setting == Rule.LOW else parse_format(setting)
        if fmt.holds(FP32):
            return Call(name, Rule.HIGH, wide=dtype_of(fmt), writes_first=writes_first, reason=reason)
        carrier = arithmetic(self.device_type, fmt).dtype
        own_kernel = Arithmetic(fmt, carrier, emulated=False)  # the kernel is the user's: it gets tensors of that dtype
        return Call(name, Rule.LOW, arithmetic=own_kernel, writes_first=writes_first, reason=reason)


def _is_getter(function: Function) -> bool:
    return getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__")


def _writes_untold(function: Function) -> bool:
    """Whether this is one of torch's fused optimizer updates, which write weights behind the version counter."""
    name = getattr(function, "__name__", "").partition(".")[0]  # an overload's name ends in ".default"
    return name.startswith("_fused_") and name.endswith("_")


def _beside_quantized_weights(function: Function, name: str) -> bool:
    """Whether this is an op on packed integer weights, whose floating inputs have to be float32."""
    if isinstance(function, torch._ops.OpOverload):
        return function.namespace == "quantized"
    module = getattr(function, "__module__", "")
    return name.startswith(("quantized_", "fbgemm_linear_")) or module == "torch._ops.quantized"


def _torch_follows(entry: OpEntry | None) -> bool:
    """Whether torch's own kernel already does what WIDEST says, so that the call can be left alone."""
    if entry is None or entry.mixed is Mixed.WIDEST:
        return False
    return entry.mixed is Mixed.NATIVE or entry.op_class is not OpClass.NORM


def _kernel_gaps(entry: OpEntry | None, device_type: str) -> frozenset[torch.dtype]:
    if entry is None:
        return frozenset()
    return frozenset(dtype_of(parse_format(name)) for name in entry.no_kernel.get(device_type, ()))


@functools.lru_cache(maxsize=256)
def rules_for(policy: Policy, device_type: str, layer: str = "") -> Rules:
    """The rules of a resolved policy, made once per process for each device type and layer.

    Layer rules that come after the last one for this layer change nothing here: a policy that got one more, as a guard
    adds them while training runs, shares the decisions of the policy before.
    """
    covering = [place for place, rule in enumerate(policy.layers, 1) if _globs.covers(rule.match, layer)]
    before = policy.layers[: max(covering, default=0)]
    if len(before) < len(policy.layers):
        return rules_for(dataclasses.replace(policy, layers=before), device_type, layer).under(policy)
    return Rules(policy, device_type, layer)
