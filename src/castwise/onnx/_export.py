"""From a planned torch model to ONNX with the same formats, checked op by op.

The applied module is a graph of ATen calls with the plan's casts in it; torch's exporter turns that into ONNX. Each
call carries the id of the plan's op through the exporter, so that every ONNX node can be asked which op it is part of
and in which type it computes. The result is then run with its roundings and compared with what torch computes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from castwise import _extras, _files
from castwise.catalogue import load_catalogue
from castwise.errors import PlanError
from castwise.formats import parse_format
from castwise.onnx._assemble import LIMIT
from castwise.onnx._emulate import emulated
from castwise.onnx._errors import ConversionError
from castwise.onnx._evaluate import infer
from castwise.onnx._normalise import check
from castwise.onnx._run import Runner
from castwise.onnx._slots import ELEMENT
from castwise.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from castwise.torch.apply import Applied

__all__ = ["Exported", "export"]

log = logging.getLogger("castwise.onnx")

_MARK = "castwise_op"
_FIRST_OPSET = {"fp16": 18, "bf16": 22}
"""The exporter writes opset 18; ONNX let convolutions and normalisations compute in bfloat16 as late as opset 22."""
_ANY_SIZE = 1 << 40
_SLACK = 4.0
"""How many times torch's own error the ONNX model may be off: its kernels round in other places inside one op."""


@dataclass(frozen=True)
class Exported:
    """An ONNX model that was made from a plan."""

    path: Path
    formats: Mapping[str, str]
    """By op of the plan, the format that its ONNX nodes compute in. Ops without a node of their own are absent."""
    casts: int
    error: float
    """Of the ONNX model against fp32: max |difference| / max(1, max |fp32 value|) over all outputs."""
    torch_error: float
    """The same of the planned torch model."""


def export(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    plan: Plan | None = None,
    opset: int | None = None,
    tolerance: float | None = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    dynamic_shapes: Any = None,
) -> Exported:
    """Write a planned torch model as ONNX with the formats of its plan.

    Args:
        model: what ``castwise.torch.apply`` returned, or any model together with its ``plan``. It is exported in
            evaluation mode, and not changed.
        example_inputs: a tensor, a tuple of positional arguments or a mapping of keyword arguments.
        path: where to write it; weights go beside it where they do not fit into one file.
        opset: of ONNX; by default 18 for float16 and 22 for bfloat16.
        tolerance: the largest error of any output against fp32. By default four times that of the torch model, or as
            much as one rounding of the output makes.
        input_names, output_names, dynamic_shapes: as for ``torch.onnx.export``.

    Raises:
        ConversionError: the exporter cannot write the model, a format is not the plan's, or the outputs are off; or
            the plan is of several graphs with Python between them. Nothing is written then.
    """
    _extras.require("torch", extra="torch")
    _extras.require("onnxscript", extra="onnx")
    from castwise.torch.apply import Applied
    from castwise.torch.capture import as_call
    from castwise.torch.inference import evaluating

    if isinstance(model, Applied):
        original, used = model.castwise_model, plan or model.castwise_plan
    elif plan is not None:
        original, used = model, plan
    else:
        raise PlanError("There is no plan to export. Give plan=castwise.torch.plan(...), or the applied model.")
    args, kwargs = as_call(example_inputs)
    name = type(original).__name__
    _refuse_breaks(used, name)
    with evaluating(original):
        applied = Applied(original, used, emulate=False)
        program = _exported(
            applied, args, kwargs, name,
            opset_version=opset or _FIRST_OPSET[used.fmt], input_names=input_names, output_names=output_names,
            dynamic_shapes=dynamic_shapes,
        )  # fmt: skip
        proto = program.model_proto
        check(proto, name)
        ops = _ops_of_calls(program.exported_program)
        formats = _formats(proto, ops, used.fmt)
        _compare_formats(formats, applied.formats(*args, **kwargs), name)
        wanted = _arrays(original(*args, **kwargs))
        torch_error = _distance(wanted, _arrays(Applied(original, used)(*args, **kwargs)))
    error = _distance(wanted, _run(proto, program, args, kwargs))
    allowed = tolerance if tolerance is not None else max(_SLACK * torch_error, 2 * parse_format(used.fmt).eps)
    if not error <= allowed:
        raise ConversionError(
            f"{name}: the ONNX model is off by {error:.3g} where torch is off by {torch_error:.3g}; {allowed:.3g} is "
            "allowed. Give a tolerance, or keep more in fp32 with rules of the policy."
        )
    written = _save(proto, program, Path(path))
    casts = sum(node.op_type == "Cast" for node in proto.graph.node)
    log.info("%s: %d ops in the plan's formats, %d casts, error %.3g", name, len(formats), casts, error)
    return Exported(written, formats, casts, error, torch_error)


def _refuse_breaks(plan: Plan, name: str) -> None:
    graph = plan.problem.graph
    if graph.parts:
        raise ConversionError(
            f"{name} is planned as {len(graph.parts)} graphs, and an ONNX model is one. Between them Python runs: "
            f"{'; '.join(graph.eager) or 'code that no graph can hold'}. Write branches and loops that depend on data "
            "with torch.where or torch.cond and plan again, or plan and export the submodules between them one by one."
        )


def _exported(applied: Applied, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, **settings: Any) -> Any:
    """The exporter's program, whose calls carry the plan's ops."""
    import torch

    module = applied.graph_for(args, kwargs).module
    for node in module.graph.nodes:
        if (op := node.meta.get(_MARK)) is not None:
            node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: op}
    noisy = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = noisy.level
    noisy.setLevel(logging.ERROR)  # it warns of every operator of torchvision where that is not installed
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module, args, kwargs=kwargs, dynamo=True, verbose=False, optimize=False, **settings
            )
    except Exception as error:  # the exporter raises classes of its own
        reason = " ".join(str(error).split())[:400]
        raise ConversionError(
            f"{name}: torch's exporter cannot write it: {reason} Export the fp32 model another way, and convert that "
            "with castwise.onnx.convert."
        ) from error
    finally:
        noisy.setLevel(level)
    assert program is not None
    _tidy(program.model)
    return program


def _tidy(model: Any) -> None:
    """Fold what depends on constants alone, such as the casts of weights, and drop what nobody reads.

    The exporter's own optimizer would also fuse normalisations into convolutions, in types of its own.
    """
    import onnx_ir.passes.common as passes
    import onnxscript.optimizer

    onnxscript.optimizer.inline(model)
    onnxscript.optimizer.fold_constants(model, input_size_limit=_ANY_SIZE, output_size_limit=_ANY_SIZE)
    passes.IdentityEliminationPass()(model)
    onnxscript.optimizer.remove_unused_nodes(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=False)(model)


def _ops_of_calls(program: Any) -> dict[str, str]:
    """The plan's op of each call of the exported program, by the call's name."""
    found = {}
    for node in program.graph.nodes:
        op = (node.meta.get("custom") or {}).get(_MARK)
        if op is not None:
            found[node.name] = str(op)
    return found


def _formats(model: onnx.ModelProto, ops: Mapping[str, str], fmt: str) -> dict[str, str]:
    """In which format each op of the plan is computed: what its last node writes, and for products what they read."""
    inferred = infer(model)
    graph = inferred.graph
    types = {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
    types |= {i.name: int(i.type.tensor_type.elem_type) for i in [*graph.input, *graph.value_info, *graph.output]}
    names = {int(ELEMENT["fp32"]): "fp32", int(ELEMENT[fmt]): fmt}
    found: dict[str, str] = {}
    products: set[str] = set()
    for node in graph.node:
        op = ops.get(_call_of(node))
        if op is None or node.op_type in ("Cast", "Constant"):
            continue
        entry = load_catalogue().lookup("onnx", node.op_type)
        product = entry is not None and entry.product
        if op in products and not product:
            continue  # a product counts by what it multiplies, not by how its result is put in shape
        looked_at = list(node.input[:2]) if product else list(node.output)
        formats = [names[types[name]] for name in looked_at if types.get(name) in names]
        if formats:
            found[op] = formats[0] if len(set(formats)) == 1 else "fp32"
        products |= {op} if product else set()
    return found


def _call_of(node: onnx.NodeProto) -> str:
    written = next((prop.value for prop in node.metadata_props if prop.key == "pkg.torch.onnx.fx_node"), "")
    match = re.match(r"%(\w+)", written)
    return match.group(1) if match else ""


def _compare_formats(found: Mapping[str, str], planned: Mapping[str, str], name: str) -> None:
    wrong = {op: fmt for op, fmt in found.items() if op in planned and planned[op] != fmt}
    if wrong:
        listed = ", ".join(f"{op} in {fmt}" for op, fmt in list(wrong.items())[:8])
        raise ConversionError(
            f"{name}: {len(wrong)} ops are not in the plan's format in ONNX: {listed}. Export the fp32 model, and "
            "convert that with castwise.onnx.convert."
        )


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _run(model: onnx.ModelProto, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The ONNX model's outputs, every 16-bit rounding included."""
    import torch

    flat = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    held = {tensor.name for tensor in model.graph.initializer}
    names = [info.name for info in model.graph.input if info.name not in held]
    if len(names) != len(flat):
        raise ConversionError(
            f"The ONNX model has the inputs {', '.join(names)}; the example has {len(flat)} tensors. Give an example "
            "in which every tensor is used."
        )
    feed = dict(zip(names, _arrays(flat), strict=True))
    try:
        return Runner(emulated(infer(model)), {}).run(feed)
    except RuntimeError as error:
        raise ConversionError(f"The ONNX model does not run: {error} Export it to another opset.") from error


def _arrays(outputs: Any) -> list[np.ndarray[Any, Any]]:
    import torch

    arrays = []
    for x in torch.utils._pytree.tree_leaves(outputs):
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu()
            arrays.append((x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy())
    return arrays


def _distance(wanted: list[Any], got: list[Any]) -> float:
    from castwise.onnx._evaluate import compare

    return compare((str(i) for i in range(len(wanted))), wanted, got).error


# ---- files -----------------------------------------------------------------------------------------------------------


def _save(model: onnx.ModelProto, program: Any, path: Path) -> Path:
    if model.ByteSize() < LIMIT:
        return _files.write_bytes(path, model.SerializeToString())
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".castwise-") as folder:
        program.save(Path(folder) / path.name, external_data=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(Path(folder) / f"{path.name}.data", path.with_name(f"{path.name}.data"))
        os.replace(Path(folder) / path.name, path)
    return path
