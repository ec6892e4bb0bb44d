"""`autocast` with torch.amp's signature, driven by the catalogue and a policy instead of per-device op lists.

    from castwise.torch import autocast

    with autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).square().mean()

Differences from `torch.autocast` that a user can see are listed in docs/decisions. The main ones: one table for every
device, mixed formats promote instead of raising, kept casts of weights are never stale, and one context may be
entered any number of times, from any number of threads, generators and tasks.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import types
from collections.abc import AsyncIterator, Callable, Generator
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from castwise.errors import CastwiseError, FormatError, PolicyError
from castwise.formats import parse_format
from castwise.policy import Policy

from ._casts import CastCache
from ._region import Region, current_region
from ._rules import Rules, rules_for
from ._traced import as_is, at_trace_time, traced_by_dynamo

F = TypeVar("F", bound=Callable[..., Any])


log = logging.getLogger("castwise.torch.autocast")

_NOTHING_KEPT = CastCache(capacity=0)


def default_device_type() -> str:
    """The device type of a region that names none: the accelerator if there is one, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"


@functools.cache
def _known(device_type: str, enabled: bool) -> None:
    """Refuse what is no type of device, and say once that a type is not there: a region for it casts nothing."""
    try:
        torch.device(device_type)
    except RuntimeError as error:
        raise PolicyError(
            f"autocast: there is no type of device {device_type!r}. Give the device first, as in "
            'autocast("cpu", dtype=torch.bfloat16); a preset or policy goes to policy=.'
        ) from error
    module: Any = getattr(torch, device_type, None)
    if enabled and device_type != "cpu" and hasattr(module, "is_available") and not module.is_available():
        log.warning(
            "autocast: this machine has no %s, and what runs on the CPU is not cast in a region for it. Leave "
            "device_type out for a region of the device that is there.",
            device_type,
        )


def _dtype_policy(device_type: str, dtype: torch.dtype | None) -> Policy:
    if dtype is None:
        dtype = torch.get_autocast_dtype(device_type)
    try:
        fmt = parse_format(dtype)
    except FormatError:
        fmt = None
    if fmt is None or fmt.name not in ("fp16", "bf16", "fp32"):
        raise PolicyError(
            f"autocast: dtype {dtype!r} is not one to compute in; use torch.float16, torch.bfloat16 or torch.float32, "
            "or policy= for anything else"
        )
    return Policy.preset(fmt.long_name)


# Rules by name, as attributes: a compiler can follow a name to an object, but not a constant that it did not make.
_RULES = types.SimpleNamespace()


@at_trace_time
def _named_rules(device_type: str, dtype: torch.dtype | None, policy: Any, enabled: bool) -> str:
    """The name in `_RULES` of the rules of an `autocast` call. A compiler evaluates this while tracing."""
    _known(device_type, enabled)
    rules = _rules_of(device_type, dtype, policy)
    name = f"{device_type}_{id(rules)}"
    setattr(_RULES, name, rules)
    return name


def _rules_of(device_type: str, dtype: torch.dtype | None, policy: Any) -> Rules:
    if policy is None:
        return rules_for(_dtype_policy(device_type, dtype), device_type)
    from .devices import resolve

    resolved = resolve(Policy.coerce(policy), device_type)
    if dtype is not None and parse_format(dtype) != resolved.low_format:
        raise PolicyError(f"autocast: dtype={dtype} contradicts policy format {resolved.format!r}; give one of the two")
    if resolved.layers:
        raise PolicyError(
            f"autocast: the policy has layer rules (layers[0].match = {resolved.layers[0].match!r}), and a region "
            f"knows no "
            "model. Use castwise.torch.Amp(model, optimizer, policy=...), which does."
        )
    return rules_for(resolved, device_type)


class autocast:
    """Run the operations inside in the formats that the policy decides. A context manager and a decorator.

    Args:
        device_type: "cpu", "cuda", ...; without it, the accelerator of this machine, else "cpu".
        dtype: the low format, torch.float16 or torch.bfloat16. Default: torch's own for that device type.
        enabled: False makes an island in which nothing is cast.
        cache_enabled: keep casts of weights until the outermost region is left. Default True.
        policy: a `castwise.Policy`, a preset's name or the path of a policy file, instead of `dtype`.
        debug: compare every kept cast with its weight when it is served, and raise `StaleCastError` where they differ.
        log: a list that receives one `castwise.torch.record.OpEvent` for each op.

    Works around functions, methods, generators, coroutines and async generators; their bodies are inside whenever
    they run, and their callers are not.

    Raises:
        PolicyError: the policy has layer rules (they need a model: use `Amp`), or contradicts `dtype`.
    """

    @as_is
    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str | None = None,
        debug: bool = False,
        log: list[Any] | None = None,
    ) -> None:
        if device_type is None:
            device_type = default_device_type()
        elif not isinstance(device_type, str):
            raise ValueError(f"autocast: device_type must be a string such as 'cuda', not {device_type!r}")
        self.device = device_type.split(":")[0]
        self.enabled = enabled
        self.cache_enabled = True if cache_enabled is None else cache_enabled
        self.debug = debug
        self.log = log
        self.rules: Rules = getattr(
            _RULES, _named_rules(self.device, dtype if enabled else None, policy if enabled else None, enabled)
        )
        self._entered: list[tuple[int, Region]] = []
        self._traced: list[Region] = []

    @as_is
    def __enter__(self) -> autocast:
        if traced_by_dynamo():  # the tracer merges equal casts by itself
            traced = Region(self.rules, _NOTHING_KEPT, enabled=self.enabled)
            self._traced.append(traced)
            traced.enter()
            return self
        region = self._region()
        region.enter()
        self._entered.append((threading.get_ident(), region))
        return self

    @as_is
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if traced_by_dynamo():
            self._traced.pop().leave()
            return
        thread = threading.get_ident()
        index = next((i for i in reversed(range(len(self._entered))) if self._entered[i][0] == thread), None)
        if index is None:
            raise CastwiseError(
                "autocast: this context is left on a thread that has not entered it, or was left already. Enter and "
                "leave it on one thread, with `with` or one __enter__ for each __exit__."
            )
        self._entered.pop(index)[1].leave()

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: how to enter, not what was entered where."""
        return {**self.__dict__, "_entered": [], "_traced": []}

    def refresh(self) -> None:
        """Forget the kept casts of this region: call it after writing weights through `.data` or NumPy."""
        for _, region in self._entered:
            region.cache.refresh()

    def _region(self) -> Region:
        outer = current_region(self.device)
        if not self.cache_enabled:
            cache = _NOTHING_KEPT
        elif outer is not None and outer.cache.debug == self.debug:
            cache = outer.cache
        else:
            cache = CastCache(debug=self.debug)
        log = self.log if self.log is not None else outer.log if outer is not None else None
        return Region(self.rules, cache, enabled=self.enabled, log=log)

    def _again(self) -> autocast:
        """A fresh context of the same kind, so that a decorated function may run in several threads at once."""
        fresh = object.__new__(type(self))
        fresh.__dict__.update(self.__dict__)
        fresh._entered, fresh._traced = [], []
        return fresh

    def __call__(self, function: F) -> F:
        """Decorate a function, method, generator function, coroutine function or async generator function."""
        return cast(F, _decorated(self, function))


def _decorated(context: autocast, function: Any) -> Any:
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def async_generator(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            inner = function(*args, **kwargs)
            step = inner.asend(None)
            while True:
                try:
                    value = await _Stepped(context, step)
                except StopAsyncIteration:
                    return
                try:
                    step = inner.asend((yield value))
                except GeneratorExit:
                    await _Stepped(context, inner.aclose())
                    raise
                except BaseException as error:
                    step = inner.athrow(error)

        return async_generator

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _Stepped(context, function(*args, **kwargs))

        return coroutine

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            result: Any = yield from _Stepped(context, function(*args, **kwargs))
            return result

        return generator

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with context._again():
            return function(*args, **kwargs)

    return plain


class _Stepped:
    """A generator or coroutine whose every step runs inside the context, and whose suspensions are outside it."""

    def __init__(self, context: autocast, inner: Any) -> None:
        self._context = context
        self._inner = inner.__await__() if hasattr(inner, "__await__") else inner
        self._send = self._inner.send if hasattr(self._inner, "send") else lambda _: next(self._inner)

    def __await__(self) -> _Stepped:
        return self

    def __iter__(self) -> _Stepped:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        with self._context._again():
            return self._send(value)

    def throw(self, *error: Any) -> Any:
        with self._context._again():
            return self._inner.throw(*error)

    def close(self) -> None:
        with self._context._again():
            self._inner.close()


def is_autocast_enabled(device_type: str | None = None) -> bool:
    """Whether the calling code is inside an enabled region (for one type of device, if given)."""
    region = current_region(device_type)
    return region is not None and region.enabled


def refresh() -> None:
    """Forget the kept casts of the current region, after writing weights through `.data` or NumPy."""
    region = current_region()
    if region is not None:
        region.cache.refresh()
