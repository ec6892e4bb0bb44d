"""What to try for an unsafe arm, in order of what it costs, and how each is written as a policy.

    loss scaling                    costs nothing; only where the policy turned it off
    embeddings, norms, head fp32    few operations, none of them large products (but for the head)
    fp32 optimizer state            12 bytes per weight where weights are kept in 16 bits some other way
    the guilty layers fp32          measured: those that overflow, else those whose rounding reaches the loss

Each remedy keeps those before it where they were free, and is an ordinary policy: what cures the arm in the study is
what the user trains with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from castwise.formats import FP32
from castwise.policy import LayerRule, Policy
from castwise.study.arms import Arm
from castwise.study.backend import Backend, Blame

__all__ = ["guilty", "remedies_for"]

_log = logging.getLogger("castwise.study")

_SENSITIVE = ("embedding", "norm", "head")
_MOST_OF_THE_NOISE = 0.9


def remedies_for(arm: Arm, backend: Backend, last_state: Callable[[], bytes | None]) -> Iterator[Arm]:
    """The remedies for ``arm``, cheapest first, made as they are asked for (the last one measures)."""
    policy = arm.policy
    free: list[str] = []
    if policy.low_format.exponent_bits < FP32.exponent_bits and not policy.uses_scaling:
        policy = replace(policy, scaling_enabled=True, scaling=replace(policy.scaling, enabled=True))
        free = ["loss scaling"]
        yield Arm(f"{arm.name}+scaling", policy, "loss scaling on")
    sensitive = [layer for layer in backend.layers() if layer.kind in _SENSITIVE]
    if sensitive:
        kinds = [kind for kind in _SENSITIVE if any(layer.kind == kind for layer in sensitive)]
        eased = _in_fp32(policy, [layer.path for layer in sensitive])
        yield Arm(f"{arm.name}+{'-'.join(kinds)}-fp32", eased, _said(free, f"{', '.join(kinds)} layers in fp32"))
    if policy.weights not in ("auto", "master"):
        policy = replace(policy, weights="master")
        yield Arm(f"{arm.name}+masters", policy, _said(free, "fp32 master weights and optimizer state"))
    paths = guilty(_measured(Arm(arm.name, policy), backend, last_state()))
    if paths:
        yield Arm(f"{arm.name}+guilty-fp32", _in_fp32(policy, paths), _said(free, f"{_listed(paths)} in fp32"))


def guilty(blames: Sequence[Blame]) -> list[str]:
    """The layers to raise: all that overflow; where none does, the fewest that make up 90 % of the noise."""
    overflowing = [blame.path for blame in blames if blame.overflow > 0]
    if overflowing:
        return overflowing
    chosen: list[str] = []
    share = 0.0
    for blame in sorted(blames, key=lambda blame: -blame.noise):
        if share >= _MOST_OF_THE_NOISE or blame.noise <= 0:
            break
        chosen.append(blame.path)
        share += blame.noise
    return chosen


def _measured(arm: Arm, backend: Backend, state: bytes | None) -> list[Blame]:
    """Blame before training and at the last good state, the worse of the two for each layer."""
    worst: dict[str, Blame] = {}
    for at in (None,) if state is None else (None, state):
        for blame in backend.blame(arm, 0, at):
            other = worst.get(blame.path, blame)
            worst[blame.path] = Blame(blame.path, max(blame.overflow, other.overflow), max(blame.noise, other.noise))
    for blame in sorted(worst.values(), key=lambda blame: (-blame.overflow, -blame.noise))[:5]:
        _log.info("%s: overflow %.2g, share of noise %.2g", blame.path, blame.overflow, blame.noise)
    return list(worst.values())


def _in_fp32(policy: Policy, paths: Sequence[str]) -> Policy:
    return replace(policy, layers=(*policy.layers, *(LayerRule(path, format="float32") for path in paths)))


def _said(free: Sequence[str], what: str) -> str:
    return " and ".join([*free, what])


def _listed(paths: Sequence[str]) -> str:
    named = ", ".join(paths[:3])
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"{'layers' if len(paths) > 1 else 'layer'} {named}{more}"
