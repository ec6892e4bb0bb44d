"""What can be wrong with the parts that an `Amp` is made of, told before anything is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from castwise.errors import PolicyError
from castwise.policy import WEIGHTS

# What torch says of operands whose dtypes differ, in products, sums in place and checks of a Function's gradients.
_TWO_FORMATS = (
    "to have the same dtype",
    "must have the same dtype",
    "expected scalar type",
    "and weight type",
    "Found dtype",
)


def check(
    model: object, optimizer: object, scheduler: Any, accumulate: object, weights: str, narrow_gradients: bool
) -> None:
    """Raise `PolicyError` where an argument of `Amp` is not what it has to be."""
    _check_objects(model, optimizer, scheduler)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise PolicyError(f"accumulate: {accumulate!r} must be a whole number of micro-batches, 1 or more")
    if weights not in WEIGHTS:
        raise PolicyError(f"weights: {weights!r} is not one of {', '.join(WEIGHTS)}")
    if narrow_gradients and accumulate > 1:
        raise PolicyError("narrow_gradients: micro-batches do not add up in 16 bits. Leave it out, or accumulate=1.")


def _check_objects(model: object, optimizer: object, scheduler: object) -> None:
    if not callable(getattr(model, "named_modules", None)):
        raise PolicyError(
            f"Amp: the model is a {type(model).__name__}. Give a torch.nn.Module first, and then its optimizer."
        )
    if not hasattr(optimizer, "param_groups"):
        raise PolicyError(
            f"Amp: the optimizer is a {type(optimizer).__name__}. Give a torch.optim.Optimizer after the model."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PolicyError(
            "Amp: LBFGS calls a closure several times per step, which a skipped or accumulated step cannot do. Use "
            "castwise.torch.autocast in the closure, in bfloat16 or float32."
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise PolicyError(
            "Amp: ReduceLROnPlateau is stepped with a metric, which Amp does not have. Leave it out here, and call its "
            "step(metric) after each evaluation."
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise PolicyError(f"Amp: the scheduler is {scheduler!r}. Give a learning-rate scheduler, or None.")


def check_loss(loss: object, method: str) -> None:
    """Raise `PolicyError` where what is to be differentiated is not a loss."""
    if not isinstance(loss, torch.Tensor):
        raise PolicyError(
            f"Amp.{method}: loss is {_shown(loss)}, and only a tensor has gradients. Give the loss itself, not its "
            "value: without .item(), .tolist() or .numpy()."
        )
    if loss.numel() != 1:
        raise PolicyError(
            f"Amp.{method}: loss has the shape {tuple(loss.shape)}, and a loss is one number. Give its mean or sum."
        )
    if not loss.requires_grad:
        raise PolicyError(
            f"Amp.{method}: loss needs no gradient: it was computed under no_grad, detached, or depends on nothing "
            "that is trained. Compute it with gradients enabled."
        )


def explain_backward(error: BaseException) -> None:
    """Add to an error of backward what to do about it, where torch's own words do not say."""
    words = str(error)
    if not isinstance(error, RuntimeError):
        return
    if "backward through the graph a second time" in words:
        error.add_note(
            "Amp.step(loss) and Amp.backward(loss) run backward themselves: leave out loss.backward(), and give a loss "
            "to one of the two alone. For losses that share a graph: Amp.backward(loss, retain_graph=True) for all but "
            "the last."
        )
    elif any(part in words for part in _TWO_FORMATS):
        error.add_note(
            "A backward met tensors of two formats. If it is that of a torch.autograd.Function of your own, decorate "
            "its forward with castwise.torch.custom_fwd and its backward with castwise.torch.custom_bwd: both then "
            "compute in the region's formats, or with custom_fwd(cast_inputs=torch.float32) in float32."
        )


def check_clip_norm(clip_norm: object) -> None:
    """Raise `PolicyError` where a limit for the gradients' norm is none."""
    number = isinstance(clip_norm, int | float | torch.Tensor | np.number) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (number and _positive(clip_norm)):
        raise PolicyError(f"clip_norm: {_shown(clip_norm)} must be a positive number, or None to leave gradients alone")


def _positive(number: Any) -> bool:
    try:
        return float(number) > 0.0
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers
        return False


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
