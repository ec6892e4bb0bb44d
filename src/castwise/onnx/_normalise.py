"""From a model as it came to one that can be planned: checked, sorted, with its local functions opened.

A local function is a graph that several nodes share. What format its inside may have depends on who calls it, so each
call gets a body of its own, by ONNX's own inliner. A function that is written for another version of ONNX than the
model cannot be opened so; it stays a node of a domain that nobody knows, and keeps its types.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import onnx
import onnx.inliner
import onnx.version_converter

from castwise.catalogue import load_catalogue
from castwise.onnx._errors import ConversionError
from castwise.onnx._source import subgraphs

__all__ = ["check", "normalise", "raise_opset", "sort_nodes"]

log = logging.getLogger("castwise.onnx")


def normalise(model: onnx.ModelProto, name: str, notes: list[str]) -> onnx.ModelProto:
    """A valid, sorted model without local functions. Raises ConversionError where the given one is not valid."""
    newest = onnx.defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= newest:
            raise ConversionError(
                f"{name} asks for opset {entry.version}; onnx {onnx.__version__} knows opsets 1 to {newest}. Update "
                "onnx, or export the model in one of these."
            )
    if _unsorted(model.graph):
        sort_nodes(model.graph, name)
        notes.append("nodes were put in topological order")
    check(model, name)
    if model.functions:
        model = _inline(model, notes)
    return model


def check(model: onnx.ModelProto, name: str) -> None:
    """Raise ConversionError unless ONNX's full checker accepts the model."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # checker and inference raise classes of their own
        reason = " ".join(str(error).split())
        raise ConversionError(
            f"{name} is no valid ONNX model: {reason} Export it again, or repair what is named."
        ) from error


def _inline(model: onnx.ModelProto, notes: list[str]) -> onnx.ModelProto:
    versions = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    other = [
        function
        for function in model.functions
        if any(versions.get(e.domain or "ai.onnx", e.version) != e.version for e in function.opset_import)
    ]
    closed = {(function.domain, function.name) for function in other}
    try:
        if closed:
            inlined = onnx.inliner.inline_selected_functions(model, sorted(closed), exclude=True)
            names = ", ".join(sorted(f"{domain}::{name}" for domain, name in closed))
            notes.append(f"functions written for another opset keep their types: {names}")
        else:
            inlined = onnx.inliner.inline_local_functions(model)
        count = len(model.functions) - len(inlined.functions)
        onnx.checker.check_model(inlined, full_check=True)
    except Exception as error:
        log.warning("local functions could not be opened (%s); they keep their types", error)
        notes.append(f"local functions could not be opened ({error}); they keep their types")
        return model
    notes.append(f"{count} local functions were opened, so that what is inside them has formats of its own")
    return inlined


def raise_opset(model: onnx.ModelProto, type_name: str, notes: list[str]) -> onnx.ModelProto:
    """The model in the opset from which on its products take ``type_name``; as it is where that cannot be had.

    ONNX let convolutions compute in bfloat16 as late as opset 22.
    """
    current = next((int(e.version) for e in model.opset_import if e.domain in ("", "ai.onnx")), 0)
    wanted = current
    for graph in (model.graph, *subgraphs(model.graph)):
        for op_type in {node.op_type for node in graph.node if node.domain in ("", "ai.onnx")}:
            entry = load_catalogue().lookup("onnx", op_type)
            if entry is not None and entry.product:
                wanted = max(wanted, _first_opset(op_type, type_name, current))
    if wanted == current:
        return model
    try:
        raised = onnx.version_converter.convert_version(model, wanted)
        raised.ir_version = max(int(raised.ir_version), int(model.ir_version))
        onnx.checker.check_model(raised, full_check=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        notes.append(
            f"opset {current} has no {type_name} for some products, and raising it to {wanted} failed: {reason}"
        )
        return model
    notes.append(f"raised from opset {current} to {wanted}, in which products take {type_name}")
    return raised


def _first_opset(op_type: str, type_name: str, current: int) -> int:
    """The first opset from ``current`` on in which an operator takes a type; ``current`` where none does."""
    for version in range(current, onnx.defs.onnx_opset_version() + 1):
        schema = onnx.defs.get_schema(op_type, version, "")
        if any(type_name in constraint.allowed_type_strs for constraint in schema.type_constraints):
            return version
    return current


def _unsorted(graph: onnx.GraphProto) -> bool:
    made_later = {name for node in graph.node for name in node.output if name}
    for node in graph.node:
        if any(name in made_later for name in _reads(node)):
            return True
        made_later.difference_update(node.output)
    return any(_unsorted(inner) for inner in subgraphs(graph))


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Everything a node needs from its own graph, its bodies' captures included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for body in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
            inside = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
            inside |= {name for inner in body.node for name in inner.output}
            for inner in body.node:
                yield from (name for name in _reads(inner) if name not in inside)
            yield from (value.name for value in body.output if value.name not in inside)


def sort_nodes(graph: onnx.GraphProto, name: str) -> None:
    """Put the nodes of a graph and of all graphs in it in an order in which every value is made before it is read.

    Of the possible orders, the one closest to the given. Raises ConversionError where there is none.
    """
    waiting = list(graph.node)
    missing = {output for node in waiting for output in node.output if output}
    ordered: list[onnx.NodeProto] = []
    while waiting:
        rest = []
        for node in waiting:
            if any(read in missing for read in _reads(node)):
                rest.append(node)
            else:
                ordered.append(node)
                missing.difference_update(node.output)
        if len(rest) == len(waiting):
            raise ConversionError(
                f"{name}: node {rest[0].name or rest[0].op_type!r} needs its own result. Export it again."
            )
        waiting = rest
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
    del graph.node[:]
    graph.node.extend(copies)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                sort_nodes(attribute.g, name)
