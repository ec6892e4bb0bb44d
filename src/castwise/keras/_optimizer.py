"""The optimizer of a prepared model: the loss is scaled wherever the policy computes in a format of small range."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from castwise.scaling import ScaleState, ScalingConfig, initial_state

from ._internals import keras, strategy_scope, unlocked
from .scaling import LossScaleOptimizer

__all__ = ["follow", "forget_compiled", "release", "settle", "unwrap", "wrap_with"]

log = logging.getLogger("castwise.keras")

_MARK = "_castwise_method"


def follow(model: Any, root: Any) -> None:
    """Wrap the optimizer that the model has, and those it will be compiled with; let ``fit`` stop a run that is stuck.

    ``compile(auto_scale_loss=False)`` is obeyed, and said.
    """
    compile_, fit = model.compile, model.fit

    @functools.wraps(compile_)
    def compile_and_wrap(*args: Any, **kwargs: Any) -> Any:
        result = compile_(*args, **kwargs)
        settle(model, root.policy, kwargs)
        return result

    @functools.wraps(fit)
    def fit_and_check(*args: Any, **kwargs: Any) -> Any:
        from .callbacks import with_check

        args, kwargs = _by_name(fit, args, kwargs)
        return fit(*args, **with_check(model, args, kwargs))

    _set(model, "compile", compile_and_wrap)
    _set(model, "fit", fit_and_check)
    if getattr(model, "optimizer", None) is not None:
        wrap(model, root.policy) if root.policy.uses_scaling else unwrap(model)


def _by_name(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments, each under its name; as they are where the function leaves names open, or will refuse them."""
    parameters = list(inspect.signature(function).parameters.values())[: len(args)]
    named = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)}
    plain = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    if not plain or len(parameters) < len(args) or named.keys() & kwargs.keys():
        return args, kwargs
    return (), {**named, **kwargs}


def settle(model: Any, policy: Any, arguments: Mapping[str, Any]) -> None:
    """After a compilation: wrap the optimizer, or not, as the policy and the arguments of ``compile`` say."""
    if policy.uses_scaling and arguments.get("auto_scale_loss", True):
        wrap(model, policy)
    elif policy.uses_scaling:
        log.warning("%s: the policy scales the loss, and auto_scale_loss=False keeps it from that.", model.name)
    elif isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        unwrap(model)


def wrap(model: Any, policy: Any) -> None:
    """Scale the loss of the model's optimizer as a policy says, going on from the state that it has."""
    wrap_with(model, policy.effective_scaling)


def wrap_with(model: Any, config: ScalingConfig) -> None:
    """Put a ``LossScaleOptimizer`` with these knobs around the model's optimizer, in place of one that is there."""
    optimizer = model.optimizer
    if optimizer is None:
        return
    state = _state_of(optimizer, config)
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    with strategy_scope(model):
        wrapped = LossScaleOptimizer(inner, config)
        if inner.built:
            wrapped.build(model.trainable_variables)
            if state is not None:
                wrapped.restore(state)
    _replace(model, wrapped)


def unwrap(model: Any) -> None:
    """Give the model back the optimizer without loss scaling."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _replace(model, optimizer.inner_optimizer)
    else:
        forget_compiled(model)


def forget_compiled(model: Any) -> None:
    """Let the functions that Keras has compiled for the model be made again, at the next use."""
    for name in ("train_function", "test_function", "predict_function"):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def release(model: Any) -> None:
    """Give the model back its own ``compile`` and ``fit``, and forget what was compiled under another policy."""
    forget_compiled(model)
    for name in ("compile", "fit"):
        method = vars(model).get(name)
        if method is not None and hasattr(method, _MARK):
            with unlocked(model):
                object.__delattr__(model, name)


def _set(model: Any, name: str, method: Callable[..., Any]) -> None:
    setattr(method, _MARK, True)
    with unlocked(model):
        setattr(model, name, method)


def _replace(model: Any, optimizer: Any) -> None:
    with unlocked(model):
        model.optimizer = optimizer
    compiled = getattr(model, "_compile_config", None)
    if compiled is not None:  # what a file says the model was compiled with
        compiled.config["optimizer"] = optimizer
    forget_compiled(model)


def _state_of(optimizer: Any, config: Any) -> ScaleState | None:
    """The state of a loss scale that is being taken over; None where there is none."""
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer.state
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or not optimizer.built:
        return None
    steps, skipped, good, scale = (float(keras.ops.convert_to_numpy(v.value)) for v in optimizer.variables[:4])
    if not config.min_scale <= scale <= config.max_scale:
        log.warning("The loss scale that was loaded is %g: starting from %g.", scale, config.init_scale)
        return None
    first = initial_state(config)
    return ScaleState(scale, max(int(good), 0), first.hysteresis_left, 0, int(steps), int(skipped))
