"""A run under torchrun, one rank of which is killed in the middle of a step: `restarted.py FOLDER`.

The second start goes on from the newest checkpoint. Each rank leaves the losses that it has seen, by step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import amp_of, batches, loss_of, policy_of, spread

from castwise.torch import distributed

STEPS, KILLED_AT = 6, 4


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    assert distributed.start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = spread("fsdp", policy_of("float16"))
    amp = amp_of(model, policy_of("float16"))
    extra = distributed.load(amp, folder / "checkpoints")
    start = extra["position"] if extra is not None else 0
    losses = {}
    for step, batch in enumerate(batches(STEPS)):
        if step < start:
            continue
        with amp:
            loss = loss_of(model, batch.chunk(ranks)[rank])
        if first and rank == 1 and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        amp.step(loss, clip_norm=1.0)
        losses[step] = loss.item()
        if step % 2:
            distributed.save(amp, folder / "checkpoints", {"position": step + 1})
    (folder / f"losses{rank}.json").write_text(json.dumps({"start": start, "losses": losses}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
