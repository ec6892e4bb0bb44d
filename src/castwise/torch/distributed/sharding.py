"""A policy over `fully_shard` (FSDP2): which parameters travel in 16 bits, so that the numbers stay the policy's.

FSDP2 decides formats per group of modules, a policy per op. Gathering a whole block in bfloat16, as is the habit,
rounds weights that the policy reads in float32: of norms, of embeddings (and with them the residual stream), of layers
that a rule keeps wide. So modules are grouped by what reads their parameters. Those of products that the policy
computes in 16 bits are gathered in that format, which halves what travels and what backward keeps; all others as they
are stored. Casts of activations stay with the region of `Amp`, op by op.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from castwise import _globs
from castwise.errors import PolicyError
from castwise.policy import Policy, Rule

from .._ranks import ranks_of
from .._rules import rules_for
from ..devices import resolve
from .communication import compress

__all__ = ["gathered_dtype", "shard"]

log = logging.getLogger("castwise.torch.distributed")

# The one function of torch that reads the parameters of a module. Exact types: a subclass may read them elsewhere.
_READERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: F.linear,
    nn.Bilinear: F.bilinear,
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}
_SENT = (torch.bfloat16, torch.float16)


def gathered_dtype(policy: Policy | str, module: nn.Module, path: str, device_type: str) -> torch.dtype | None:
    """The 16-bit dtype in which a module's own parameters may be gathered without another result; None for none.

    Args:
        policy: what the model trains by.
        module: a module of the model, and `path` its path there, which layer rules are matched against.
        device_type: "cpu", "cuda", ...
    """
    resolved = resolve(Policy.coerce(policy), device_type)
    reader = _READERS.get(type(module))
    call = rules_for(resolved, device_type, path).seen.get(reader) if reader is not None else None
    if call is None or call.rule is not Rule.LOW or call.arithmetic is None or call.arithmetic.narrow:
        return None
    dtype: torch.dtype = call.arithmetic.dtype
    return dtype if dtype in _SENT else None


def shard(
    model: nn.Module,
    policy: Policy | str,
    *,
    mesh: Any = None,
    blocks: Sequence[str] | None = None,
    wide_sums: bool = True,
    **options: Any,
) -> nn.Module:
    """Call `fully_shard` on a model's blocks and on itself, with what the policy means for each group of parameters.

    Make the optimizer and `Amp` after it, with the same policy, and run the model in regions of that `Amp`, for
    evaluation too (`amp.region()`): it is they that bring inputs to the format of what was gathered. Parameters stay
    float32 in their shards. Where there is no process group, the model stays as it is.

    Args:
        model: on the CPU, the mesh's device or the meta device. It is changed and returned.
        policy: see `castwise.Policy`. Its `communication` is the format of the gradients' reduce-scatter.
        mesh: a DeviceMesh of one or two dimensions (two: replicas of shards); default: one of all ranks.
        blocks: globs of module paths that are gathered one at a time; default: all members of ModuleLists.
        wide_sums: see `compress`.
        options: others of `torch.distributed.fsdp.fully_shard`: `reshard_after_forward`, `offload_policy`, …

    Raises:
        PolicyError: the policy, or a glob in `blocks`, does not fit the model.
    """
    if "mp_policy" in options:
        raise PolicyError("shard: mp_policy follows from the policy. Write layer rules, or call fully_shard yourself.")
    if not dist.is_available() or not dist.is_initialized():
        log.warning(
            "shard: there is no process group, and the model stays whole. Start by torchrun, and call "
            "castwise.torch.distributed.start() first."
        )
        return model
    device_type = mesh.device_type if mesh is not None else _accelerator()
    resolved = resolve(Policy.coerce(policy), device_type)
    modules = dict(model.named_modules())
    dtypes = _dtypes(modules, resolved, device_type)
    chosen = _blocks(modules, blocks)
    for path in sorted(chosen, key=lambda p: -p.count(".")):  # inner blocks first
        _shard_unit(path, modules, dtypes, chosen - {path}, mesh, options)
    _shard_unit("", modules, dtypes, chosen, mesh, options)
    if resolved.communication is not None and ranks_of(model) is not None:
        compress(model, resolved.communication, wide_sums=wide_sums)
    return model


def _accelerator() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"


def _dtypes(modules: dict[str, nn.Module], policy: Policy, device_type: str) -> dict[str, torch.dtype | None]:
    """What to gather each module's own parameters in, for modules that have some. Shared ones: what suits all users."""
    policy.match_layers(modules)
    found: dict[str, torch.dtype | None] = {}
    of_parameter: dict[nn.Parameter, set[torch.dtype | None]] = {}
    for path, module in modules.items():
        own = list(module.parameters(recurse=False))
        if own:
            found[path] = gathered_dtype(policy, module, path, device_type)
            for p in own:
                of_parameter.setdefault(p, set()).add(found[path])
    for path in found:
        asked = {dtype for p in modules[path].parameters(recurse=False) for dtype in of_parameter[p]}
        if len(asked) > 1:
            found[path] = None
    return found


def _blocks(modules: dict[str, nn.Module], globs: Sequence[str] | None) -> set[str]:
    if globs is None:
        lists = {path for path, module in modules.items() if isinstance(module, nn.ModuleList)}
        filled = {path for path, module in modules.items() if any(True for _ in module.parameters())}
        return {path for path in filled if path and path.rpartition(".")[0] in lists}
    found: set[str] = set()
    for glob in globs:
        _globs.check(glob)
        covered = {path for path in modules if path and _globs.covers(glob, path)}
        matched = {path for path in covered if path.rpartition(".")[0] not in covered}
        if not matched:
            near = ", ".join(map(repr, _globs.suggest(glob, tuple(modules)))) or "none"
            raise PolicyError(f"shard: blocks: {glob!r} matches no module. Nearest: {near}.")
        found |= matched
    return found


def _shard_unit(
    unit: str,
    modules: dict[str, nn.Module],
    dtypes: dict[str, torch.dtype | None],
    others: Iterable[str],
    mesh: Any,
    options: dict[str, Any],
) -> None:
    """Group one block (or what is outside of blocks): what deviates from the most common dtype apart, the rest."""
    inside = [p for p in dtypes if _within(p, unit) and not any(_within(p, o) for o in others if _within(o, unit))]
    main = dtypes.get(unit, _most(inside, modules, dtypes))
    apart: dict[torch.dtype | None, list[str]] = {}
    outer: list[str] = []
    for path in inside:
        around = [p for p in inside if p != path and _within(path, p)]
        if path == unit or dtypes[path] == (dtypes[max(around, key=len)] if around else main):
            continue
        if any(p != path and _within(p, path) for p in inside):
            outer.append(path)
        else:
            apart.setdefault(dtypes[path], []).append(path)
    for dtype, paths in apart.items():
        _fully_shard([modules[p] for p in paths], dtype, mesh, options)
    for path in sorted(outer, key=lambda p: -p.count(".")):
        _fully_shard([modules[path]], dtypes[path], mesh, options)
    log.debug("%s: gathered as %s, but for %s", unit or "the model", main or "stored", apart or "nothing")
    _fully_shard([modules[unit]], main, mesh, options)


def _fully_shard(modules: list[nn.Module], dtype: torch.dtype | None, mesh: Any, options: dict[str, Any]) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Sums of gradients are float32's; `compress` narrows what travels. Inputs are cast by the region, op by op.
    policy = MixedPrecisionPolicy(dtype, torch.float32, None, cast_forward_inputs=False)
    chosen: Any = modules if len(modules) > 1 else modules[0]
    fully_shard(chosen, mesh=mesh, mp_policy=policy, **options)


def _within(path: str, unit: str) -> bool:
    return not unit or path == unit or path.startswith(f"{unit}.")


def _most(paths: list[str], modules: dict[str, nn.Module], dtypes: dict[str, torch.dtype | None]) -> torch.dtype | None:
    """The dtype of most values."""
    counts: Counter[torch.dtype | None] = Counter()
    for path in paths:
        counts[dtypes[path]] += sum(p.numel() for p in modules[path].parameters(recurse=False))
    return counts.most_common(1)[0][0] if counts else None
