"""What the guard finds where a model is spread over ranks: a job for the ranks of this room's tests."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from castwise.errors import NonFiniteError
from castwise.policy import Policy
from castwise.torch import Amp, distributed


class Gain(nn.Module):
    """Squares its input, which float16 does not hold from 256 on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * x) / 64.0


class Steep(torch.autograd.Function):
    """Passes values; gradients it multiplies by `factor`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Turned(nn.Linear):
    """A layer whose gradients leave float16 on the way back once it is `steep`."""

    steep = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return Steep.apply(Steep.apply(y, 1 / self.steep), self.steep) if self.steep != 1.0 else y


def guarded(rank: int, ranks: int, engine: str, fault: str) -> dict[str, Any]:
    """What the guard of a model in shards finds and does where something breaks in step 2, on rank 1 where it can."""
    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    gain = nn.Sequential(Gain(), nn.ReLU(inplace=True))
    model: Any = nn.Sequential(nn.Linear(4, 4), gain, Turned(4, 4), nn.Linear(4, 1))
    policy = Policy.from_dict({"format": "float16", "guard": {"patience": 0, "stop_after": 3, "give_back_after": 3}})
    if engine == "shard":
        distributed.shard(model, policy, blocks=["0", "1", "2"])
    elif engine in ("parallel", "rows"):
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh, given = init_device_mesh("cpu", (ranks,)), Shard(0) if engine == "rows" else Replicate()
        parallelize_module(model, mesh, {"0": ColwiseParallel(input_layouts=given, output_layouts=Replicate())})
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        formats = MixedPrecisionPolicy(param_dtype=torch.float16) if engine == "formats" else MixedPrecisionPolicy()
        fully_shard([model[0], model[1]], mp_policy=formats, reshard_after_forward=engine != "kept")
        fully_shard(model, mp_policy=formats)
    amp = Amp(model, torch.optim.SGD(model.parameters(), 1e-3), policy)
    data = torch.Generator().manual_seed(rank if engine != "parallel" else 0)
    stopped = ""
    try:
        for step in range(8):
            x = torch.randn(8, 4, generator=data)
            broken = step == 2 and (rank == 1 or engine == "parallel")
            if broken and fault == "data":
                x[0, 0] = torch.nan
            if broken and fault == "forward":
                x = x * 1200.0
            model[2].steep = 2.0**20 if broken and fault == "backward" else 1.0
            if step == 2 and fault == "weight":
                with torch.no_grad():
                    next(iter(_local(p) for p in model[2].parameters())).fill_(torch.nan)
            with amp:
                loss = model(x).float().square().mean() / 16.0
            amp.step(loss)
    except NonFiniteError as error:
        stopped = str(error)
    return {
        "events": [(e.step, e.name, e.message, dict(e.data)) for e in amp.events],
        "layers": [rule.match for rule in amp.policy.layers],
        "stopped": stopped,
        "skipped": amp.scale_state.skipped,
        "sharded": all(hasattr(p, "placements") for p in model.parameters()),
        "total": sum(float(_whole(p).double().sum()) for p in model.parameters()),
    }


def _local(p: Any) -> torch.Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


def _whole(p: Any) -> torch.Tensor:
    found: torch.Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p
    return found.detach()
