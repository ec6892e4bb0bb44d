"""Training one model on many processes: DistributedDataParallel, `fully_shard` and tensor parallelism, by `torchrun`.

The same program runs on one device and on many:

    distributed.start()                                  # alone, it does nothing
    model = distributed.shard(GPT(), policy)             # or DistributedDataParallel(GPT())
    amp = Amp(model, AdamW(model.parameters()), policy)  # ranks skip and scale together
    distributed.load(amp, "checkpoints")                 # on as many ranks as there are now
"""

from __future__ import annotations

from .._ranks import no_sync
from .checkpoint import load, save
from .communication import compress
from .launch import start
from .sharding import gathered_dtype, shard

__all__ = ["compress", "gathered_dtype", "load", "no_sync", "save", "shard", "start"]
