"""Module paths as the user wrote them: what compiles, checkpoints or distributes a module adds no level to them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["named_layers", "paths_of"]

# What torch.compile, checkpoint wrappers and FullyShardedDataParallel call the module inside them.
_INSIDE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def paths_of(model: nn.Module) -> dict[str, str]:
    """Per path of `named_modules` (several for a module in several places), the one that the user wrote."""
    modules = dict(model.named_modules(remove_duplicate=False))
    written: dict[str, str] = {}
    for path in modules:  # from the outside in
        above, _, name = path.rpartition(".")
        outer = written.get(above, above)
        owner = modules.get(above)
        inside = name in _INSIDE or (name == "module" and isinstance(owner, DistributedDataParallel))
        written[path] = outer if inside or not path else f"{outer}.{name}".lstrip(".")
    return written


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module once, by the path that the user wrote; a wrapper and what it wraps have the same."""
    written = paths_of(model)
    return ((written[path], module) for path, module in model.named_modules())
