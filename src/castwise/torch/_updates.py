"""The updates of the optimizers that Castwise steps by itself, on pieces of parameters.

Each update reads float32 weights, gradients and state and writes weights and state. Names and meaning of state and
options are those of `torch.optim`, so that a state dict fits either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

from .lion import Lion

State = dict[str, Any]
Options = Mapping[str, Any]


@dataclass(slots=True)
class Piece:
    """Parts of some parameters of one group, of equal device, to be updated together.

    Gradients are still to be divided by `divisor`, if it is there: only updates that say so get one.
    `states` holds, for each name of per-weight state, one tensor for each weight. All are float32. `first` says that
    the state was made for this step.
    """

    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: dict[str, list[torch.Tensor]]
    whole: list[State]
    options: Options
    divisor: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    first: bool = False


def nothing(_p: torch.Tensor, _state: State, _options: Options) -> None:
    """There is no state to begin."""


@dataclass(frozen=True, slots=True)
class Update:
    """How one kind of optimizer is stepped.

    Attributes:
        run: the update itself.
        names: of its state that has the weight's shape, for the options of a group.
        begin: makes what else the state of a parameter needs, once.
        count: called once per parameter and step, before its pieces are updated.
        nearest: names of state that is rounded to nearest where it is kept in fewer bits; the rest is at random.
        positive: names of state that is never negative.
        elementwise: whether parts of a weight may be updated apart.
        divides: whether the update divides gradients by a divisor as it reads them.
        skips: whether `found_inf` on the device makes the update do nothing.
        supports: whether a group's options are ones that this update has.
    """

    run: Callable[[Piece], None]
    names: Callable[[Options], tuple[str, ...]]
    begin: Callable[[torch.Tensor, State, Options], None] = nothing
    count: Callable[[State, torch.Tensor | None], None] = field(default=lambda _state, _found_inf: None)
    nearest: frozenset[str] = frozenset()
    positive: frozenset[str] = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
    elementwise: bool = True
    divides: bool = False
    skips: bool = True
    supports: Callable[[Options], bool] = lambda _options: True


# ---- SGD -------------------------------------------------------------------------------------------------------------


def _sgd(piece: Piece) -> None:
    o = piece.options
    torch._fused_sgd_(
        piece.weights,
        piece.gradients,
        piece.states.get("momentum_buffer", []),
        weight_decay=o["weight_decay"],
        momentum=o["momentum"],
        lr=o["lr"],
        dampening=o["dampening"],
        nesterov=o["nesterov"],
        maximize=o["maximize"],
        is_first_step=piece.first,
        grad_scale=piece.divisor,
        found_inf=piece.found_inf,
    )


# ---- Adam and AdamW --------------------------------------------------------------------------------------------------


def _adam(piece: Piece) -> None:
    o = piece.options
    update = torch._fused_adamw_ if o.get("decoupled_weight_decay") else torch._fused_adam_
    update(
        piece.weights,
        piece.gradients,
        piece.states["exp_avg"],
        piece.states["exp_avg_sq"],
        piece.states.get("max_exp_avg_sq", []),
        [state["step"] for state in piece.whole],
        lr=o["lr"],
        beta1=o["betas"][0],
        beta2=o["betas"][1],
        weight_decay=o["weight_decay"],
        eps=o["eps"],
        amsgrad=o["amsgrad"],
        maximize=o["maximize"],
        grad_scale=piece.divisor,
        found_inf=piece.found_inf,
    )


def _adam_names(o: Options) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if o["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _begin_count(p: torch.Tensor, state: State, _options: Options) -> None:
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)


def _count(state: State, found_inf: torch.Tensor | None) -> None:
    state["step"] += 1 if found_inf is None else 1 - found_inf


# ---- Lion ------------------------------------------------------------------------------------------------------------


def _lion(piece: Piece) -> None:
    o = piece.options
    for w, g, average in zip(piece.weights, piece.gradients, piece.states["exp_avg"], strict=True):
        Lion.update(w, g, average, o["lr"], o["betas"], o["weight_decay"])


# ---- Adafactor and Muon, which look at whole matrices ----------------------------------------------------------------


def _adafactor(piece: Piece) -> None:
    o = piece.options
    torch.optim._adafactor.adafactor(
        piece.weights,
        piece.gradients,
        [state.get("row_var") for state in piece.whole],
        [state.get("col_var") for state in piece.whole],
        [state.get("variance") for state in piece.whole],
        [state["step"] for state in piece.whole],
        foreach=False,
        d=o["d"],
        lr=o["lr"],
        beta2_decay=o["beta2_decay"],
        weight_decay=o["weight_decay"],
        eps1=o["eps"][0],
        eps2=o["eps"][1],
        maximize=o["maximize"],
    )


def _begin_adafactor(p: torch.Tensor, state: State, options: Options) -> None:
    if "step" in state:
        return
    state["step"] = torch.zeros((), dtype=torch.float32)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=p.device)

    if p.dim() > 1:
        state["row_var"] = zeros(*p.shape[:-1], 1)
        state["col_var"] = zeros(*p.shape[:-2], 1, p.shape[-1])
    else:
        state["variance"] = zeros(*p.shape)


def _muon(piece: Piece) -> None:
    o = piece.options
    torch.optim._muon.muon(
        piece.weights,
        piece.gradients,
        piece.states["momentum_buffer"],
        foreach=False,
        lr=o["lr"],
        weight_decay=o["weight_decay"],
        momentum=o["momentum"],
        nesterov=o["nesterov"],
        ns_coefficients=o["ns_coefficients"],
        ns_steps=o["ns_steps"],
        eps=o["eps"],
        adjust_lr_fn=o["adjust_lr_fn"],
        has_complex=False,
    )


def _plain(o: Options) -> bool:
    """Neither differentiable nor capturable, and not asked for another implementation."""
    return not (o.get("differentiable") or o.get("capturable") or o.get("foreach")) and o.get("fused") is not False


_ADAM = Update(
    _adam, _adam_names, _begin_count, _count, nearest=frozenset({"max_exp_avg_sq"}), divides=True, supports=_plain
)

#: The exact types that are stepped so. A subclass may mean something else by `step`.
UPDATES: dict[type[Optimizer], Update] = {
    SGD: Update(_sgd, lambda o: ("momentum_buffer",) if o["momentum"] else (), divides=True, supports=_plain),
    Adam: _ADAM,
    AdamW: _ADAM,
    Lion: Update(_lion, lambda _o: ("exp_avg",), skips=False),
    Adafactor: Update(_adafactor, lambda _o: (), _begin_adafactor, elementwise=False, skips=False, supports=_plain),
    Muon: Update(_muon, lambda _o: ("momentum_buffer",), elementwise=False, skips=False),
}
