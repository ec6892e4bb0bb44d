"""What ranks do in the tests of this room. A job gets its rank, the number of ranks, and plain values."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from guarded import guarded as guarded  # a job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from castwise.errors import NonFiniteError
from castwise.policy import LayerRule, Policy
from castwise.torch import Amp, GradScaler, distributed

VOCABULARY, LENGTH, WIDTH = 48, 12, 16
RULES = [LayerRule("h.1.down", format="float32")]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Its blocks are a ModuleList, which `shard` takes for units; `benchmarks/distributed.py` trains a larger one."""

    def __init__(
        self, width: int = WIDTH, layers: int = 2, heads: int = 2, vocabulary: int = VOCABULARY, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


def gpt(dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)
    return GPT().to(dtype)


def batches(count: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (8, LENGTH + 1), generator=draws) for _ in range(count)]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def spread(engine: str, policy: Policy, dtype: torch.dtype = torch.float32, wide_sums: bool = True) -> nn.Module:
    """The same GPT on every rank, by one of the engines."""
    model = gpt(dtype)
    if engine == "one":
        return model
    if engine == "ddp":
        wrapped = DistributedDataParallel(model)
        if policy.communication is not None:
            distributed.compress(wrapped, policy.communication, wide_sums=wide_sums)
        return wrapped
    if engine == "fsdp":
        return distributed.shard(model, policy, wide_sums=wide_sums)
    if engine == "hsdp":
        return distributed.shard(
            model, policy, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        )
    if engine == "grid":  # rows of shards, columns of tensor parallelism
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "columns"))
        return distributed.shard(tensor_parallel(model, mesh["columns"]), policy, mesh=mesh["shards"])
    return tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.h:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def policy_of(fmt: str, communication: str | None = None) -> Policy:
    return Policy(format=fmt, layers=() if fmt == "float32" else RULES, communication=communication)


def amp_of(model: nn.Module, policy: Policy, optimizer: str = "AdamW", **options: Any) -> Amp:
    return Amp(model, getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2), policy, **options)


def steps(amp: Amp, model: nn.Module, data: list[torch.Tensor], rank: int, ranks: int, micro: int = 1) -> list[Any]:
    """Mean loss over the ranks, gradient norm and whether a step was taken, for each step."""
    found = []
    for batch in data:
        losses = []
        for part in batch.chunk(ranks)[rank].chunk(micro):
            with amp:
                loss = loss_of(model, part)
            result = amp.step(loss, clip_norm=1.0)
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        if ranks > 1:
            dist.all_reduce(mean)
        found.append((float(mean) / ranks, result.grad_norm, result.stepped))
    return found


def curve(rank: int, ranks: int, engine: str, policy: Policy, count: int = 6, **options: Any) -> list[Any]:
    """Train for some steps, each rank on its part of every batch (tensor parallel: on all of it)."""
    dtype, micro = options.pop("dtype", torch.float32), options.get("accumulate", 1)
    wide_sums = options.pop("wide_sums", True)
    model = spread(engine, policy, dtype, wide_sums)
    amp = amp_of(model, policy, **options)
    if engine == "grid":
        found = steps(amp, model, batches(count), rank // 2, 2, micro)
        return [(loss / 2, norm, stepped) for loss, norm, stepped in found]  # four ranks' losses, two of them twice
    if engine in ("one", "tp"):
        return steps(amp, model, batches(count), 0, 1, micro)
    return steps(amp, model, batches(count), rank, ranks, micro)


def collectives(rank: int, ranks: int, engine: str, policy: Policy) -> list[str]:
    """The collectives of `Amp.step` after backward, in the fourth step."""
    from torch.profiler import profile

    model = spread(engine, policy)
    amp = amp_of(model, policy)
    for batch in batches(4):
        with amp:
            loss = loss_of(model, batch.chunk(ranks)[rank])
        amp.backward(loss)
        with profile() as seen:
            amp.step(clip_norm=1.0)
    return [e.name for e in seen.events() if e.name.startswith("c10d::")]


def overflow(rank: int, ranks: int, engine: str, guilty: int) -> list[Any]:
    """Skips, scales and a hash of the weights, where one rank's gradients overflow in the third of six steps."""
    logging.disable(logging.CRITICAL)
    policy = Policy(format="float16", layers=RULES)
    model = spread(engine, policy)
    amp = amp_of(model, policy)
    found: list[Any] = []
    for number, batch in enumerate(batches(6)):
        with amp:
            loss = loss_of(model, batch.chunk(ranks)[rank])
            if number == 2 and rank == guilty:
                loss = loss * 1e36
        result = amp.step(loss)
        found.append((result.stepped, result.reason.partition(";")[0], amp.loss_scale))
    total = sum(float(_whole(p).double().sum()) for p in model.parameters())
    return [found, total, [(e.step, e.name) for e in amp.events]]


def broken(rank: int, ranks: int) -> tuple[str, list[Any]]:
    """What the guard of a sharded model does and says where one rank's loss is NaN from the third step on."""
    logging.disable(logging.CRITICAL)
    policy = Policy.from_dict({"format": "float16", "guard": {"stop_after": 2}})
    model = spread("fsdp", policy)
    amp = amp_of(model, policy)
    message = ""
    try:
        for number, batch in enumerate(batches(6)):
            with amp:
                loss = loss_of(model, batch.chunk(ranks)[rank])
                if number >= 2 and rank == 1:
                    loss = loss * torch.nan
            amp.step(loss)
    except NonFiniteError as error:
        message = str(error)
    return message, [(e.step, e.name, e.message) for e in amp.events]


def unsynchronised(rank: int, ranks: int, engine: str) -> float:
    """The norm of the gradients of two half batches that were added up by hand before they were sent."""
    model = spread(engine, policy_of("float32"))
    amp = amp_of(model, policy_of("float32"))
    first, second = batches(1)[0].chunk(ranks)[rank].chunk(2)
    with distributed.no_sync(model):
        with amp:
            loss = loss_of(model, first) / 2
        amp.backward(loss)
    with amp:
        loss = loss_of(model, second) / 2
    return amp.step(loss).grad_norm


def _whole(x: Any) -> torch.Tensor:
    found = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found.detach().float()


def shared_scaler(rank: int, ranks: int) -> list[Any]:
    """A GradScaler over shards, one rank of which overflows."""
    model = spread("fsdp", policy_of("float32"))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=8.0)
    found = []
    for number, batch in enumerate(batches(3)):
        loss = loss_of(model, batch.chunk(ranks)[rank])
        scaler.scale(loss).backward()
        if number == 1 and rank == 1:
            next(p for p in model.parameters() if p.to_local().numel()).grad.to_local().view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.stepped, scaler.get_scale()))
    return found


def refused(rank: int, ranks: int, case: str) -> str:
    """The message of what is refused."""
    from castwise.errors import CastwiseError

    try:
        if case == "float8 by gloo":
            distributed.compress(DistributedDataParallel(gpt()), "float8_e4m3fn", wide_sums=False)
        elif case == "two hooks":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model = DistributedDataParallel(gpt())
            model.register_comm_hook(None, fp16_compress_hook)
            amp_of(model, policy_of("float32", "bfloat16"))
        elif case == "other policies":
            amp_of(DistributedDataParallel(gpt()), policy_of("float32" if rank else "bfloat16"))
        elif case == "no such block":
            distributed.shard(gpt(), policy_of("bfloat16"), blocks=["layers.*"])
        elif case == "nothing to send":
            distributed.compress(gpt(), "bfloat16")
        elif case == "half a step":
            model = spread("fsdp", policy_of("float32"))
            amp = amp_of(model, policy_of("float32"), accumulate=2)
            with amp:
                loss = loss_of(model, batches(1)[0])
            amp.step(loss)
            distributed.save(amp, "never")
        elif case == "16-bit sums":
            amp_of(DistributedDataParallel(gpt(torch.bfloat16)), policy_of("bfloat16"), accumulate=2)
    except CastwiseError as error:
        return str(error)
    return ""


def groups(rank: int, ranks: int) -> dict[str, str | None]:
    """What each parameter of the GPT is gathered in."""
    model = spread("fsdp", policy_of("bfloat16"))
    with amp_of(model, policy_of("bfloat16")):
        loss_of(model, batches(1)[0])  # only then are parameters named
    found: dict[str, str | None] = {}
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        for group in state._fsdp_param_groups if state is not None else []:
            for p in group.fsdp_params:
                found[p._param_fqn] = str(group.mp_policy.param_dtype)
    return found


# ---- gradients between ranks -----------------------------------------------------------------------------------------


class Given(nn.Module):
    """A model whose gradients are what it is given."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum(((w * g).sum() for w, g in zip(self.weights, gradients, strict=True)), torch.zeros(()))


def averaged(rank: int, ranks: int, engine: str, fmt: str, wide_sums: bool, given: list[list[torch.Tensor]]) -> Any:
    """The gradients that each rank has after backward, of those that all ranks were given."""
    model: nn.Module = Given(*[g.numel() for g in given[0]])
    if engine == "ddp":
        model = DistributedDataParallel(model)
        distributed.compress(model, fmt, wide_sums=wide_sums)
    else:
        distributed.shard(model, Policy(format="float32", communication=fmt), wide_sums=wide_sums)
    model(given[rank]).backward()
    return [_whole(p.grad) for p in model.parameters()]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved(rank: int, ranks: int, engine: str, folder: str, options: dict[str, Any]) -> list[Any]:
    """Three steps, a checkpoint of either kind, three more steps."""
    policy = policy_of("float16")
    dtype = options.pop("dtype", torch.float32)
    model = spread(engine, policy, dtype)
    amp = amp_of(model, policy, **options)
    data = batches(6)
    steps(amp, model, data[:3], rank, ranks)
    distributed.save(amp, f"{folder}/shards", {"position": 3})
    amp.save(f"{folder}/whole.pt", {"position": 3})
    return steps(amp, model, data[3:], rank, ranks)


def resumed(rank: int, ranks: int, engine: str, folder: str, kind: str, options: dict[str, Any]) -> list[Any]:
    """The last three steps of the same, on however many ranks there are."""
    policy = policy_of("float16")
    dtype = options.pop("dtype", torch.float32)
    model = spread(engine, policy, dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    amp = amp_of(model, policy, **options)
    extra = distributed.load(amp, f"{folder}/shards") if kind == "shards" else amp.load(f"{folder}/whole.pt")
    return steps(amp, model, batches(6)[extra["position"] :], rank, ranks)


def nothing_to_resume(rank: int, ranks: int, folder: str) -> Any:
    """What `load` says of an empty folder, and whether it left the weights alone."""
    model = spread("ddp", policy_of("float32"))
    before = copy.deepcopy(model.state_dict())
    extra = distributed.load(amp_of(model, policy_of("float32")), folder)
    return extra, all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
