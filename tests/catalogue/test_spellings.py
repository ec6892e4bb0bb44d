"""No op that a framework can hand over is unknown, and no spelling is of an op that does not exist."""

from __future__ import annotations

import gc
import re
import types

import jax.extend.core.primitives
import jax.numpy
import jax.random
import onnx.defs
import pytest
import torch
from jax.extend.core import Primitive
from torch.overrides import get_testing_overrides, resolve_name

from castwise.catalogue import OpClass, load_catalogue, torch_base_name

CATALOGUE = load_catalogue()
# Helpers that torch.nn.functional imports beside its ops.
NOT_OPS = {"assert_int_or_pair", "boolean_dispatch", "handle_torch_function"}
# Ops of torch's own tests and debugging.
TORCH_INTERNAL = re.compile(r"^(_test_|_debug_|_foobar)")
# Primitives under names of earlier JAX releases.
EARLIER_JAX = {"pjit", "core_call", "xla_call", "checkpoint", "custom_vjp_call_jaxpr"}


def spellings(framework: str) -> set[str]:
    return {spelling for entry in CATALOGUE.entries.values() for spelling in entry.names.get(framework, ())}


def aten_ops() -> set[str]:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    return {name for name in map(torch_base_name, names) if not TORCH_INTERNAL.match(name)}


def overridable() -> set[str]:
    """What a torch-function mode can be handed, by base name."""
    names = {resolve_name(function) for function in get_testing_overrides()} - {None}
    return {torch_base_name(name.removesuffix(".__get__")) for name in names}


def test_every_aten_op_has_an_entry():
    names = aten_ops()
    assert len(names) > 1000
    assert [name for name in sorted(names) if CATALOGUE.lookup("torch", name) is None] == []


def test_everything_a_torch_function_mode_sees_has_an_entry():
    names = overridable()
    assert len(names) > 800
    assert [name for name in sorted(names) if CATALOGUE.lookup("torch", name) is None] == []


def test_every_op_of_torchs_op_database_has_an_entry(op_db):
    assert sorted({op.name for op in op_db if CATALOGUE.lookup("torch", op.name) is None}) == []


@pytest.mark.parametrize("module", [torch.nn.functional, torch.linalg, torch.fft, torch.special])
def test_every_public_function_of_torchs_namespaces_has_an_entry(module):
    public = (getattr(module, name) for name in dir(module) if not name.startswith("_"))
    kinds = (types.FunctionType, types.BuiltinFunctionType)
    names = {f.__name__ for f in public if isinstance(f, kinds) and not f.__name__.startswith("_")} - NOT_OPS
    assert len(names) > 15
    assert [name for name in sorted(names) if CATALOGUE.lookup("torch", name) is None] == []


def test_no_torch_spelling_is_of_an_op_that_torch_lacks(op_db):
    from torch.testing._internal.common_methods_invocations import op_db as all_ops  # with torch.masked and jiterator

    known = aten_ops() | overridable() | {torch_base_name(op.name) for op in all_ops} | set(dir(torch.nn.functional))
    known |= {"tensor", "as_tensor", "new_tensor"}  # which make tensors of data, and are no ops of aten
    communication = {s for e in CATALOGUE.of_class(OpClass.COMMUNICATION) for s in e.names.get("torch", ())}
    assert sorted(spellings("torch") - known - communication) == []
    assert communication <= set(dir(torch.distributed))


def test_jax_primitives_and_spellings_are_the_same_set():
    """JAX keeps no list of its primitives: they are found among the objects that importing it makes."""
    primitives = {obj.name for obj in gc.get_objects() if isinstance(obj, Primitive)}
    named = {getattr(jax.extend.core.primitives, n).name for n in dir(jax.extend.core.primitives) if n.endswith("_p")}
    assert len(named) > 150 and named <= primitives
    assert sorted(named - spellings("jax")) == []
    assert sorted(spellings("jax") - primitives - EARLIER_JAX) == []


def test_onnx_op_types_and_spellings_are_the_same_set():
    op_types = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert len(op_types) > 190
    assert sorted(op_types ^ spellings("onnx")) == []
