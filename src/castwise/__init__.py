"""Castwise: automatic mixed precision, and proof that the result is right.

The public names of the framework-neutral core, flat, in one place. They are imported when first used, so that
``import castwise`` costs next to nothing; front ends are modules of their own: ``castwise.torch``, ``castwise.jax``, …
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from castwise.catalogue import Catalogue, OpClass, OpEntry, load_catalogue
    from castwise.cost import Costs, MeasuredCosts
    from castwise.errors import (
        CastwiseError,
        CatalogueError,
        FormatError,
        HardwareError,
        MissingExtraError,
        NonFiniteError,
        PlanError,
        PolicyError,
        ScaleStalledError,
        StudyError,
    )
    from castwise.formats import (
        FORMATS,
        NumberFormat,
        parse_format,
        range_shares,
        round_stochastic,
        round_to_nearest,
    )
    from castwise.graph import Graph, GraphBuilder
    from castwise.hardware import Device, Support, detect, devices, get_device
    from castwise.plan import Plan, Problem, pareto, solve
    from castwise.policy import Decision, GuardConfig, LayerRule, Policy, Rule, decide
    from castwise.risk import Risks
    from castwise.scaling import ScaleState, ScalingConfig, initial_state, transition

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "CastwiseError",
    "Catalogue",
    "CatalogueError",
    "Costs",
    "Decision",
    "Device",
    "FormatError",
    "Graph",
    "GraphBuilder",
    "GuardConfig",
    "HardwareError",
    "LayerRule",
    "MeasuredCosts",
    "MissingExtraError",
    "NonFiniteError",
    "NumberFormat",
    "OpClass",
    "OpEntry",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "Problem",
    "Risks",
    "Rule",
    "ScaleStalledError",
    "ScaleState",
    "ScalingConfig",
    "StudyError",
    "Support",
    "__version__",
    "decide",
    "detect",
    "devices",
    "get_device",
    "initial_state",
    "load_catalogue",
    "pareto",
    "parse_format",
    "range_shares",
    "round_stochastic",
    "round_to_nearest",
    "solve",
    "transition",
]

# Module -> the public names it gives to the package.
_ROOMS: dict[str, tuple[str, ...]] = {
    "catalogue": ("Catalogue", "OpClass", "OpEntry", "load_catalogue"),
    "cost": ("Costs", "MeasuredCosts"),
    "errors": (
        "CastwiseError",
        "CatalogueError",
        "FormatError",
        "HardwareError",
        "MissingExtraError",
        "NonFiniteError",
        "PlanError",
        "PolicyError",
        "ScaleStalledError",
        "StudyError",
    ),
    "formats": ("FORMATS", "NumberFormat", "parse_format", "range_shares", "round_stochastic", "round_to_nearest"),
    "graph": ("Graph", "GraphBuilder"),
    "hardware": ("Device", "Support", "detect", "devices", "get_device"),
    "plan": ("Plan", "Problem", "pareto", "solve"),
    "policy": ("Decision", "GuardConfig", "LayerRule", "Policy", "Rule", "decide"),
    "risk": ("Risks",),
    "scaling": ("ScaleState", "ScalingConfig", "initial_state", "transition"),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'castwise' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"castwise.{home}"), name)
    globals()[name] = value  # found once, then an ordinary attribute
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
