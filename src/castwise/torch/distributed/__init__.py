"""Training one model on many processes: DistributedDataParallel, `fully_shard` and tensor parallelism, by `torchrun`.

dist.init_process_group()
model = distributed.shard(GPT(), policy)              # or DistributedDataParallel(GPT())
amp = Amp(model, AdamW(model.parameters()), policy)   # as on one device; ranks skip and scale together
distributed.load(amp, "checkpoints")                  # on as many ranks as there are now
"""

from __future__ import annotations

from .._ranks import no_sync
from .checkpoint import load, save
from .communication import compress
from .sharding import gathered_dtype, shard

__all__ = ["compress", "gathered_dtype", "load", "no_sync", "save", "shard"]
