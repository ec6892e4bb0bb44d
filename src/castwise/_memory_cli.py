"""``castwise memory``: what a training step of a torch model takes, by precision, and what fits a device."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from castwise._load import is_object_spec, load_object
from castwise._model_spec import add_model, example_inputs
from castwise._units import show_bytes
from castwise.errors import CastwiseError, PolicyError
from castwise.hardware import Device, detect, get_device
from castwise.policy import WEIGHTS

if TYPE_CHECKING:
    from castwise.torch.memory import MemoryUse, Workload

__all__ = ["add_arguments", "main"]

_PRECISIONS = "fp32,fp16,bf16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``castwise memory``."""
    add_model(parser, "; its output's `loss` is trained where there is one")
    parser.add_argument("--batch", type=int, required=True, help="samples of a step")
    parser.add_argument("--seq", type=int, help="positions of a sample (default: as the inputs have them)")
    parser.add_argument("--precisions", default=_PRECISIONS, help=f"presets to compare (default: {_PRECISIONS})")
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="auto",
        help="store parameters in the 16-bit format and keep them so (default: auto, as the model stores them)",
    )
    parser.add_argument(
        "--optimizer-state", choices=("float32", "bfloat16", "8bit"), default="float32", help="its format"
    )
    parser.add_argument("--largest", choices=("batch", "seq"), help="also find the largest that fits the device")


def main(args: argparse.Namespace) -> int:
    """Predict and print."""
    for name in ("batch", "seq"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise PolicyError(f"--{name}: {value} must be 1 or more")
    device = detect() if args.device is None else get_device(args.device)
    work = workload(args.model)
    rows, refused = [], []
    for precision in args.precisions.split(","):
        run = functools.partial(_predict, work, precision.strip(), args, device)
        try:
            use = run(batch=args.batch, seq=args.seq)
        except PolicyError as error:  # "split" has no float16, for example
            refused.append(f"{precision}: {error}")
            continue
        rows.append([precision, *_cells(use), *_fitting(run, args, device)])
    if not rows:
        raise PolicyError(refused[0])
    positions = f", {args.seq} positions each" if args.seq else ""
    print(f"{args.model} on {device.name}: {args.batch} samples{positions}, weights {args.weights}\n")
    header = ["", "parameters", "kept beside", "gradients", "optimizer", "activations", "peak", "in"]
    print(_aligned([header + ([f"largest {args.largest}"] if args.largest else []), *rows]))
    for reason in refused:
        print(f"\n{reason}")
    if device.memory is not None:
        print(f"\n{device.name} has {show_bytes(device.memory)}.")
    return 0


def _predict(
    work: Workload, precision: str, args: argparse.Namespace, device: Device, *, batch: int, seq: int | None
) -> MemoryUse:
    from castwise.torch.memory import predict

    return predict(
        work,
        precision,
        batch=batch,
        seq=seq,
        weights=args.weights,
        native=device.native(precision),
        optimizer_state=args.optimizer_state,
    )


def _cells(use: MemoryUse) -> list[str]:
    sizes = (use.parameters, use.kept, use.gradients, use.optimizer, use.activations, use.peak)
    return [*(show_bytes(size) if size else "–" for size in sizes), use.phase]


def _fitting(run: Callable[..., MemoryUse], args: argparse.Namespace, device: Device) -> list[str]:
    if not args.largest:
        return []
    from castwise.torch.memory import largest

    if device.memory is None:
        raise CastwiseError(f"memory: how much memory {device.name} has is not known, so leave out --largest")
    sizes = {"batch": args.batch, "seq": args.seq}
    return [str(largest(lambda n: run(**{**sizes, args.largest: n}).peak, device.memory) or "not even 1")]


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


# ---- what is trained -------------------------------------------------------------------------------------------------


def workload(spec: str) -> Workload:
    """The workload of a study task, or of a module's class or factory in a file."""
    made: Any = load_object(spec) if is_object_spec(spec) else None
    if made is None or (hasattr(made, "batches") and hasattr(made, "evaluate")):
        return _of_task(spec)
    return _of_module(made, spec)


def _of_task(spec: str) -> Workload:
    from castwise.study.protocol import load_task
    from castwise.torch.memory import Workload

    task = load_task(spec)
    example = next(iter(itertools.islice(task.batches(0), 1)))
    return Workload(lambda: task.model(0), lambda b, s: _resized(example, b, s), task.loss, task.optimizer)


def _of_module(made: Any, spec: str) -> Workload:
    import torch

    from castwise.torch.memory import Workload

    latest: list[torch.nn.Module] = []

    def build() -> torch.nn.Module:
        model = made() if not isinstance(made, torch.nn.Module) else made
        latest[:] = [model]
        return model

    def batch(samples: int, positions: int | None) -> Any:
        return _resized(example_inputs(latest[0], spec, CastwiseError), samples, positions)

    def loss(model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        if isinstance(inputs, dict):
            out = model(**inputs)
        else:
            out = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
        found = getattr(out, "loss", None)
        if isinstance(found, torch.Tensor):
            return found
        leaves = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        return torch.stack([x.float().mean() for x in leaves if x.requires_grad]).sum()

    return Workload(build, batch, loss, lambda model: torch.optim.AdamW(model.parameters(), fused=True))


def _resized(example: Any, samples: int, positions: int | None) -> Any:
    """Empty tensors like those of an example batch, with other numbers of samples and of positions.

    The first dimension counts samples; positions are the second dimension of whole numbers, and of what has three
    dimensions. What is as long as all positions of all samples together stays so.

    Raises:
        CastwiseError: there is no tensor, or positions were asked for and no tensor has any.
    """
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    first = next((x for x in tree_leaves(example) if isinstance(x, torch.Tensor) and x.dim()), None)
    if first is None:
        raise CastwiseError("memory: the example batch has no tensor, so its size cannot be changed")
    old_samples, old_positions = first.shape[0], first.shape[1] if first.dim() > 1 else 1

    has_positions = False

    def resized(x: Any) -> Any:
        nonlocal has_positions
        if not isinstance(x, torch.Tensor) or not x.dim():
            return x
        shape = list(x.shape)
        if shape[0] == old_samples:
            shape[0] = samples
            along = len(shape) == 3 or (len(shape) == 2 and not x.is_floating_point())
            if positions is not None and along and shape[1] == old_positions:
                shape[1], has_positions = positions, True
        elif shape[0] == old_samples * old_positions:
            shape[0] = samples * (positions or old_positions)
        return torch.empty(shape, dtype=x.dtype)

    given = tree_map(resized, example)
    if positions is not None and not has_positions:
        raise CastwiseError(
            f"memory: the example batch, whose first tensor is of shape {tuple(first.shape)}, has no dimension of "
            "positions. Leave out --seq and --largest seq: they are for sequences."
        )
    return given
