"""Looking at a model without disturbing its training: gradients in two precisions, memory, and layers at fault.

Every probe leaves weights, gradients, buffers (batch norm's running statistics) and random streams as it found them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from castwise.study._interval import cosine

__all__ = ["agreement", "batch_size", "gradients", "saved_bytes", "state_bytes", "to_device", "undisturbed"]


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put the buffers back that the body changes, and the gradients that it writes."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def gradients(loss: Tensor, model: nn.Module, *, scale: float = 1.0) -> list[Tensor]:
    """The gradient of ``loss`` for every trainable parameter, as float32, unscaled; zeros where it does not depend
    on it.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss.float() * scale, parameters, allow_unused=True)
    dense = (
        torch.zeros_like(parameter) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient
        for gradient, parameter in zip(found, parameters, strict=True)
    )
    return [gradient.detach().float() / scale for gradient in dense]


def agreement(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The cosine of the angle between two gradients, -1 to 1; NaN where either is zero or not finite."""
    dot = sum(_dot(a, b) for a, b in zip(ours, theirs, strict=True))
    return cosine(dot, sum(_dot(a, a) for a in ours) * sum(_dot(b, b) for b in theirs))


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.flatten().double(), b.flatten().double()))


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Bytes that ``forward`` keeps for the backward pass, weights not counted; a buffer kept twice counts once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[Tensor, int]] = {}

    def note(tensor: Tensor) -> Tensor:
        with contextlib.suppress(NotImplementedError, RuntimeError):  # sparse and functional tensors have no storage
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                # The tensor is kept too, so that its address is not given to another one meanwhile.
                kept[storage.data_ptr()] = (tensor.detach(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(size for _, size in kept.values())


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of weights, gradients (as many, while a step is taken) and optimizer state."""
    weights = sum(_bytes(parameter) for parameter in model.parameters())
    trained = sum(_bytes(parameter) for parameter in model.parameters() if parameter.requires_grad)
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return {"weights": weights, "gradients": trained, "optimizer": sum(map(_bytes, states))}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it (in lists, tuples, mappings) moved to ``device``."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, Mapping):
        moved = {key: to_device(item, device) for key, item in value.items()}
        return moved if type(value) is dict else _like(value, moved)
    return value


def _like(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type (a tokenizer's BatchEncoding), or a dict where it cannot be made from one."""
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def batch_size(batch: Any) -> int:
    """The first dimension of the first tensor in ``batch``; 0 where there is none."""
    for tensor in _tensors(batch):
        return int(tensor.shape[0]) if tensor.dim() else 0
    return 0


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
