"""``apply``: a Keras model that computes in the formats of a policy, on every backend, with float32 weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from castwise._decide import is_wide
from castwise.errors import PolicyError
from castwise.formats import FP32, parse_format
from castwise.policy import LayerRule, Policy

from . import _optimizer
from ._device import resolve
from ._dtypes import RegionPolicy, keras_name
from ._internals import backend_name, keras, replace_variable, set_dtype_policy
from ._measure import faster_than_float32, risky_layers
from ._outputs import output_layers
from ._paths import escaped, layer_paths
from ._region import Root, root_of, uninstall
from .record import record

__all__ = ["apply"]

log = logging.getLogger("castwise.keras")

_BACKENDS = ("tensorflow", "jax", "torch")
_UNKNOWN_SIZE = 2  # of a dimension that the model leaves open


def apply(model: Any, policy: Policy | str | Any = "auto", example_inputs: Any = None) -> Any:
    """Let a model compute in the formats of a policy. The model is changed in place, and returned.

    Args:
        model: any Keras model: functional, sequential or subclassed, fresh, trained or loaded, whatever dtype policies
            it was made with.
        policy: a ``castwise.Policy``, a preset or format by name, one of Keras' own names (``"mixed_bfloat16"``), or
            the path of a policy file. ``"auto"`` is the 16-bit format that the device computes natively, if any, and
            with example inputs only where that is faster than float32. Globs of layer rules are matched with dotted
            paths of layer names.
        example_inputs: what the model is called with (an array, or a list or dict as the model takes them). With them,
            subclassed models are built and their output layers found, and layers whose values leave the format, or
            lose most of its digits, are measured and kept in float32.

    Returns:
        ``model``. Its layers' dtype policies are Keras' own names for what was decided; its weights are float32; what
        comes out of it is float32. ``compile``, ``fit``, ``evaluate``, ``predict`` and custom training steps go on as
        before, with the loss scaled where float16 is in use. ``apply(model, "float32")`` takes all of it back.

    Raises:
        PolicyError: the policy makes no sense, the backend cannot compute in its formats, or the model is quantized.
    """
    if backend_name() not in _BACKENDS:
        raise PolicyError(
            f"apply: Keras runs on {backend_name()!r}. Castwise prepares models on {', '.join(_BACKENDS)}: set "
            "KERAS_BACKEND to one of them before Keras is imported."
        )
    asked = coerce(policy)
    resolved = resolve(asked)
    _release(model)
    if example_inputs is not None:
        _call(model, example_inputs)
    paths = layer_paths(model)
    _check(paths)
    _float32_weights(model)
    built = all(layer.built for layer in paths.values())
    if built:
        resolved = _known_rules(resolved, paths)
    if not _narrows(resolved):
        return _as_keras_runs_it(model, paths)
    outputs = output_layers(model, paths, example_inputs) if built else []
    prepared = _with_output_rules(resolved, outputs)
    root = _install(model, asked, prepared, paths)
    if example_inputs is not None:
        root = _measured(root, example_inputs)
        if asked.format == "auto" and not faster_than_float32(root, example_inputs):
            _release(model)
            log.info("%s: %s is no faster than float32 here: it stays float32.", model.name, resolved.format)
            return _as_keras_runs_it(model, paths)
    if built:
        _name_policies(root, example_inputs)
    else:
        root.complete = lambda: _complete(root, resolved)
    _optimizer.follow(model, root)
    return model


def _complete(root: Root, resolved: Policy) -> None:
    """What could not be done before the model was built: layers that layers have made, and the output layers."""
    for layer in root.paths.values():
        uninstall(layer)
    root.paths = layer_paths(root.model)
    for path, layer in root.paths.items():
        set_dtype_policy(layer, RegionPolicy(keras_name(resolved.low_format), root=path == ""))
    known = _known_rules(resolved, root.paths)
    root.changed(_with_output_rules(known, output_layers(root.model, root.paths, None)))
    root.install()
    _name_policies(root, None)


def coerce(policy: Any) -> Policy:
    """The policy that a value means, Keras' own names and dtype policies included."""
    if isinstance(policy, keras.DTypePolicy):
        policy = policy.name
    if isinstance(policy, str) and policy.startswith("mixed_"):
        policy = policy.removeprefix("mixed_")
    return Policy.coerce(policy)


def _narrows(policy: Policy) -> bool:
    """Whether anything at all computes in fewer bits than float32."""
    wider = sorted(str(fmt) for fmt in policy.formats_in_use if fmt.bits > FP32.bits)
    if wider:
        raise PolicyError(
            f"apply: the policy computes in {wider[0]}, and a model with float32 weights has nothing to gain there. "
            "For float64 throughout, call keras.config.set_floatx('float64') before the model is made."
        )
    return any(not is_wide(fmt) for fmt in policy.formats_in_use)


def _check(paths: dict[str, Any]) -> None:
    for path, layer in paths.items():
        if getattr(layer, "quantization_mode", None) is not None:
            raise PolicyError(
                f"apply: layer {path or layer.name!r} is quantized ({layer.quantization_mode}); its arithmetic is not "
                "Castwise's to change. Apply the policy to the model before it is quantized."
            )


def _known_rules(policy: Policy, paths: dict[str, Any]) -> Policy:
    """The policy without layer rules that match nothing here; each is reported."""
    covered = policy.match_layers(paths)
    kept = tuple(rule for rule, found in zip(policy.layers, covered, strict=True) if found)
    return replace(policy, layers=kept) if len(kept) < len(policy.layers) else policy


def _with_output_rules(policy: Policy, outputs: Sequence[str]) -> Policy:
    """The policy with the layers that give the outputs in float32, unless a rule of the user's says otherwise."""
    rules = tuple(LayerRule(escaped(path), format="float32") for path in outputs if path)
    return replace(policy, layers=(*rules, *policy.layers))


def _install(model: Any, asked: Policy, policy: Policy, paths: dict[str, Any]) -> Root:
    root = Root(model, asked, policy, paths)
    for path, layer in paths.items():
        set_dtype_policy(layer, RegionPolicy(keras_name(policy.low_format), root=path == ""))
    root.install()
    return root


def _measured(root: Root, example_inputs: Any) -> Root:
    risky = risky_layers(root, example_inputs)
    if risky:
        rules = tuple(LayerRule(escaped(path), format="float32") for path in risky)
        root.changed(replace(root.policy, layers=(*rules, *root.policy.layers)))
        for path, why in risky.items():
            log.info("%s: layer %r stays float32: %s", root.model.name, path, why)
    return root


def _name_policies(root: Root, example_inputs: Any) -> None:
    """Give each layer Keras' name for what it mostly computes in: what a file says, and what runs without Castwise.

    A layer with a narrow product is mixed. One whose arithmetic is all wide (norms, softmax) is float32. One that only
    follows its inputs goes with the policy's format.
    """
    formats: dict[str, set[str]] = {path: {"float32"} for path in _wide_by_rule(root)}
    for op in _recorded(root, example_inputs):
        if op.rule in ("low", "high"):
            formats.setdefault(op.layer, set()).add(op.format)
    for path, layer in root.paths.items():
        found = formats.get(path, set())
        narrow = sorted(found - {"float32", "float64"})
        if narrow:
            name = keras_name(parse_format(narrow[0]))
        else:
            name = "float32" if found or is_wide(root.policy.low_format) else keras_name(root.policy.low_format)
        set_dtype_policy(layer, RegionPolicy(name, root=path == ""))


def _wide_by_rule(root: Root) -> Iterable[str]:
    for rule, covered in zip(root.policy.layers, root.policy.match_layers(root.paths), strict=True):
        if rule.format is not None and is_wide(parse_format(rule.format)):
            yield from covered


def _recorded(root: Root, example_inputs: Any) -> Iterable[Any]:
    """The operations of one call: of the example inputs, or of zeros where the model says what it takes."""
    if example_inputs is None:
        try:
            example_inputs = _zeros(root.model)
        except (AttributeError, ValueError):  # a subclassed model says nothing
            return ()
    args, kwargs = arguments(root.model, example_inputs)
    return record(root.model, *args, **kwargs)


def _zeros(model: Any) -> Any:
    def zeros(spec: Any) -> Any:
        return np.zeros([_UNKNOWN_SIZE if size is None else size for size in spec.shape], spec.dtype)

    return keras.tree.map_structure(zeros, model.input)


def arguments(model: Any, example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as the arguments of a call: a tuple is several, all else is one."""
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    return tuple(keras.tree.map_structure(keras.ops.convert_to_tensor, arg) for arg in args), {}


def _call(model: Any, example_inputs: Any) -> Any:
    args, kwargs = arguments(model, example_inputs)
    return model(*args, **kwargs)


def _float32_weights(model: Any) -> None:
    """Weights that were made in 16 bits (Keras' pure ``"bfloat16"``) become float32; the values are the same."""
    narrow = [v for v in model.weights if v.dtype in ("float16", "bfloat16")]
    for variable in narrow:
        replace_variable(variable, "float32")
    if narrow:
        log.info("%s: %d weights of 16 bits are kept in float32 from here on.", model.name, len(narrow))


def _release(model: Any) -> None:
    """Take back what an earlier ``apply`` did to this model and its layers."""
    for layer in layer_paths(model).values():
        if root_of(layer) is not None:
            uninstall(layer)
    _optimizer.release(model)


def _as_keras_runs_it(model: Any, paths: dict[str, Any]) -> Any:
    """All float32: plain Keras, with nothing of Castwise in the way."""
    for layer in paths.values():
        set_dtype_policy(layer, keras.DTypePolicy("float32"))
    _optimizer.unwrap(model)
    return model
