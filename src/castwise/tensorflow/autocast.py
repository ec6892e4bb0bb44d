"""``autocast``: a ``tf.function`` that computes the same in other formats.

The function is traced as TensorFlow would trace it, and while the new function is traced in its place, the nodes of the
first are added one by one (``_replay.py``). What comes out is a ``tf.function`` like any other: it retraces for other
arguments, can be differentiated, compiled by XLA, called from functions and saved in a SavedModel.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from castwise._decide import is_wide
from castwise.errors import PolicyError
from castwise.policy import Policy, Rule

from ._internals import is_traced_for_xla, not_recorded, outside, watch_variables
from ._lists import TENSOR_LIST, low_lists
from ._replay import Rewriter
from ._rules import Choice, choice_for, resolve
from .capture import capture

if TYPE_CHECKING:
    from ._plan import Plan

__all__ = ["autocast", "check_function", "is_compiled", "is_polymorphic", "results_of", "traced", "with_signature"]

log = logging.getLogger("castwise.tensorflow")

Function = Any
"""A ``tf.function`` or a ``ConcreteFunction``: TensorFlow has no public type for both."""


def autocast(
    fn: Function,
    policy: Policy | str | Any = "auto",
    *,
    example_inputs: Sequence[Any] | None = None,
    plan: Plan | None = None,
) -> Function:
    """``fn`` with every operation computed in the format that the policy, or a plan, decides for it.

    Args:
        fn: a ``tf.function``, a ``ConcreteFunction``, a signature of a SavedModel, or a Python function, of which a
            ``tf.function`` is made. It may train: variables keep their dtypes, and what is assigned to them does.
        policy: a ``castwise.Policy``, a preset's or format's name, or the path of a policy file. "auto" is a plan where
            ``example_inputs`` are given, else the preset of the 16-bit format that the device computes natively, if
            any.
        example_inputs: positional arguments with real values, on which a plan is made for "auto".
        plan: of ``castwise.tensorflow.plan`` for ``fn``, in place of a policy.

    Returns:
        A ``tf.function`` where ``fn`` is one, a ``ConcreteFunction`` where it is one: of the same signature, with
        results of the same shapes and dtypes, reading the same variables. Where nothing is to be lowered, ``fn``
        itself.

    Raises:
        PolicyError: the policy makes no sense, or asks for a format that TensorFlow cannot compute in, or there are
            example inputs and a preset, which needs none.
        PlanError: the plan was made for another function, or ``fn`` has control flow of TensorFlow 1.
    """
    if plan is not None and policy != "auto":
        raise PolicyError("Both policy and plan are given. A plan has its policy's rules in it: give the plan alone.")
    check_function(fn)
    fn = with_signature(fn)
    asked = Policy.coerce(policy)
    if example_inputs is not None and (tf.is_tensor(example_inputs) or not isinstance(example_inputs, Sequence)):
        raise PolicyError(
            f"example_inputs: {type(example_inputs).__name__} is no sequence. Give the positional arguments of one "
            "call: example_inputs=[x]."
        )
    if example_inputs is not None and (plan is not None or asked.format != "auto"):
        raise PolicyError(
            "example_inputs are for policy 'auto', which is planned on them. A preset needs none; leave them out, or "
            "plan another format on them: plan=castwise.tensorflow.plan(fn, *example_inputs, policy=...)."
        )
    if plan is None and example_inputs is not None:
        from .planning import plan as make_plan

        plan = make_plan(fn, *example_inputs, policy=asked)
    if plan is not None:
        return _rewritten(fn, plan.rewriter) if plan.labels.any() or plan.adds_in_place else fn
    policy = resolve(asked)
    if policy.format != "auto" and not policy.ops and not policy.layers and is_wide(policy.low_format):
        log.info("%s: nothing is lowered", policy.format)
        return fn
    return _rewritten(fn, _ByPolicy(policy))


class _ByPolicy:
    """The rewriter of a resolved policy, for any graph."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        choice_for(policy, "MatMul", "")  # a format that TensorFlow lacks is an error now, not while tracing

    def __call__(self, concrete: Any) -> Rewriter:
        captured = capture(concrete.graph, results_of(concrete))
        if self.policy.layers:
            self.policy.match_layers(captured.layers)
        layered = bool(self.policy.layers)

        def choose(op: Any, path: str, layer: str) -> Choice:
            choice = choice_for(self.policy, op.type, layer if layered else "")
            return captured.adjusted(path, choice, self.policy)

        low = low_lists(captured, choose)

        def choose_lists(op: Any, path: str, layer: str) -> Choice:
            if path not in captured.lists:
                return choose(op, path, layer)
            dtype = low.get(captured.lists[path])
            return Choice(TENSOR_LIST, None if dtype is None else Rule.LOW, dtype)

        return Rewriter(choose_lists)


def check_function(fn: Any) -> None:
    """Raise PolicyError where ``fn`` is nothing that can be called."""
    if not callable(fn):
        raise PolicyError(
            f"{type(fn).__name__} is no function. Give a tf.function, a ConcreteFunction, or one of the signatures of "
            "a SavedModel: tf.saved_model.load(folder).signatures['serving_default']."
        )


def with_signature(fn: Any) -> Any:
    """``fn``; where it is a function of TensorFlow 1's kind (frozen, pruned), one with a signature that calls it."""
    if is_polymorphic(fn) or getattr(fn, "structured_input_signature", True) is not None:
        return fn
    given = fn.inputs[: len(fn.inputs) - len(fn.captured_inputs)]
    names = list(getattr(fn, "_arg_keywords", None) or ())
    if len(names) != len(given) or not all(name.isidentifier() for name in names):
        names = [f"input_{at}" for at in range(len(given))]

    def call(*args: Any) -> Any:
        return fn(*args)

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype, name) for tensor, name in zip(given, names, strict=True)]
    with outside():
        return tf.function(call, autograph=False).get_concrete_function(*specs)


def is_polymorphic(fn: Any) -> bool:
    """Whether ``fn`` is a ``tf.function``, which traces itself for its arguments."""
    return isinstance(fn, polymorphic_function.Function)


def traced(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The ``ConcreteFunction`` of ``fn`` for arguments like these."""
    if not hasattr(fn, "get_concrete_function"):
        return fn
    with outside():
        return fn.get_concrete_function(*specs_of(args), **specs_of(kwargs))


def specs_of(arguments: Any) -> Any:
    """The arguments with specifications in place of tensors."""

    def spec(value: Any) -> Any:
        if isinstance(value, tf.Variable) or not tf.is_tensor(value):
            return value
        found = tf.type_spec_from_value(value)
        return tf.TensorSpec(found.shape, found.dtype) if isinstance(found, tf.TensorSpec) else found

    return tf.nest.map_structure(spec, arguments)


def is_compiled(concrete: Any) -> bool:
    """Whether XLA must compile a ``ConcreteFunction``."""
    attrs = concrete.function_def.attr
    return "_XlaMustCompile" in attrs and bool(attrs["_XlaMustCompile"].b)


def results_of(concrete: Any) -> int:
    """How many tensors a function returns."""
    return len(concrete.function_type.flat_outputs)


def _rewritten(fn: Any, rewriter: Callable[[Any], Rewriter]) -> Any:
    if not is_polymorphic(fn) and not hasattr(fn, "function_type"):
        fn = tf.function(fn)
    polymorphic = is_polymorphic(fn)

    def call(*args: Any, **kwargs: Any) -> Any:
        concrete = traced(fn, args, kwargs) if polymorphic else fn
        if tf.executing_eagerly():
            log.warning("%s runs eagerly (tf.config.run_functions_eagerly): it computes as it was written", _called(fn))
            return fn(*args, **kwargs)
        bound = concrete.function_type.bind(*args, **kwargs)
        return _add(concrete, concrete.function_type.unpack_inputs(bound), rewriter(concrete))

    call.__name__ = call.__qualname__ = _called(fn)
    call.__signature__ = _signature(fn)  # type: ignore[attr-defined]
    if polymorphic:
        return tf.function(
            call,
            # One that was loaded takes any arguments, and knows those that it was saved for.
            input_signature=None if _takes_any(call.__signature__) else fn.input_signature,  # type: ignore[attr-defined]
            autograph=False,
            jit_compile=fn._jit_compile,
            reduce_retracing=fn._reduce_retracing,
        )
    compiled = fn.function_def.attr["_XlaMustCompile"].b if "_XlaMustCompile" in fn.function_def.attr else None
    args, kwargs = fn.structured_input_signature
    return tf.function(call, autograph=False, jit_compile=compiled or None).get_concrete_function(*args, **kwargs)


def _takes_any(signature: inspect.Signature) -> bool:
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values())


def _add(concrete: Any, given: Sequence[Any], rewriter: Rewriter) -> Any:
    """Add a function's nodes to the graph that is being built; returns its results in their structure."""
    watch_variables(concrete.graph.variables)
    if is_compiled(concrete) or is_traced_for_xla():
        rewriter = rewriter.for_xla()
    with not_recorded():
        results = rewriter.run(concrete.graph, [*given, *concrete.captured_inputs], results_of(concrete))
    return concrete.function_type.pack_output(results)


def _called(fn: Any) -> str:
    name = getattr(fn, "name", None) or getattr(fn, "__name__", None) or "function"
    found = name.decode() if isinstance(name, bytes) else str(name)
    return found if found.isidentifier() else "castwise_function"


def _signature(fn: Any) -> inspect.Signature:
    """The signature, without what a method is bound to."""
    if is_polymorphic(fn):
        return inspect.signature(fn.python_function)
    args, kwargs = fn.structured_input_signature
    values = dict(zip(fn.function_type.parameters, args, strict=False)) | kwargs
    return inspect.Signature(
        [
            inspect.Parameter(p.name, p.kind, default=values.get(p.name) if p.optional else inspect.Parameter.empty)
            for p in fn.function_type.parameters.values()
        ]
    )
