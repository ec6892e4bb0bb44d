"""What can be wrong with the parts that an `Amp` is made of, told before anything is touched."""

from __future__ import annotations

from typing import Any

import torch

from castwise.errors import PolicyError
from castwise.policy import WEIGHTS


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
