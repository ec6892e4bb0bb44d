"""The process group of processes that `torchrun` has started, again after a restart too."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

__all__ = ["start"]

_TIMEOUT = timedelta(minutes=30)  # torch's own for gloo


def start(backend: str | None = None, timeout: timedelta = _TIMEOUT) -> bool:
    """Join the process group of all ranks that `torchrun` has started; alone, do nothing.

    As `torch.distributed.init_process_group()`, and it takes this rank's own device. Ranks that `torchrun` starts again
    after one of them has died meet anew: torch keeps the store in which the dead ones have left their addresses, and
    gloo calls those in vain.

    Args:
        backend: default: NCCL for CUDA devices and gloo for the CPU.
        timeout: how long a rank waits for the others.

    Returns:
        Whether there is a process group.
    """
    if dist.is_initialized():
        return True
    if not dist.is_torchelastic_launched():
        return False
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = backend or "cpu:gloo,cuda:nccl"
    kept_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not kept_by_agent,
        timeout=timeout,
        multi_tenant=True,
    )
    ours = PrefixStore(f"castwise-start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend or "gloo", store=ours, rank=rank, world_size=size, timeout=timeout)
    return True
