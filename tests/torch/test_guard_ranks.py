"""Ranks that train one model: what broke on one of them is known to all, and all decide alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = """
import json, sys, torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from castwise.errors import NonFiniteError
from castwise.policy import Policy
from castwise.torch import Amp

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
NAN = float("nan")


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x * x) / 64.0


def scenario(steps, change, **guard):
    '''Events, raised layers and weights of this rank; `change` sees model and step, and gives the batch's factor.'''
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Gain(), nn.BatchNorm1d(4), nn.Linear(4, 1))
    wrapped = nn.parallel.DistributedDataParallel(model)
    options = {"patience": 0, "stop_after": 3, **guard}
    optimizer = torch.optim.SGD(wrapped.parameters(), 1e-3)
    amp = Amp(wrapped, optimizer, Policy.from_dict({"format": "float16", "guard": options}))
    data = torch.Generator().manual_seed(rank)
    stopped = ""
    try:
        for step in range(steps):
            x = torch.randn(8, 4, generator=data) * change(model, step)
            with amp:
                loss = wrapped(x).float().square().mean() / 16.0
                if change is aside and rank == 1 and step == 2:
                    loss = loss + loss.detach() * NAN
            amp.step(loss)
    except NonFiniteError as error:
        stopped = str(error)
    return {
        "events": [(e.step, e.name, e.message, dict(e.data)) for e in amp.events],
        "layers": [rule.match for rule in amp.policy.layers],
        "state": amp._guard.state.to_dict(), "skipped": amp.scale_state.skipped, "scale": amp.loss_scale,
        "weights": [p.tolist() for p in model.parameters()], "stopped": stopped,
    }


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ops(guard):
    '''Names of what the third healthy step runs.'''
    torch.manual_seed(0)
    wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), Gain()))
    policy = Policy.from_dict({"format": "float16", "guard": {"enabled": guard}})
    amp = Amp(wrapped, torch.optim.SGD(wrapped.parameters(), 1e-3), policy)
    for _ in range(3):
        counted = Ops()
        with counted:
            with amp:
                loss = wrapped(torch.ones(8, 4)).float().square().mean()
            assert amp.step(loss).stepped
    return counted.names


def data(model, step):
    return NAN if rank == 1 and step == 2 else 1.0


def overflow(model, step):  # rank 1 alone sees inputs whose squares leave float16
    return 600.0 if rank == 1 and 1 <= step < 4 else 1.0


def weight(model, step):
    if step == 2:
        model[0].weight.data[0, 0] = NAN
    return 1.0


def aside(model, step):
    return 1.0


print(json.dumps({
    "data": scenario(4, data), "overflow": scenario(17, overflow, give_back_after=2),
    "weight": scenario(8, weight), "aside": scenario(4, aside), "ops": [ops(True), ops(False)],
}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has to tell of each scenario."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-c", RUN]
    started = [
        subprocess.Popen([*command, str(rank), str(folder)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        return [json.loads(process.communicate(timeout=600)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("scenario", ["data", "overflow", "weight", "aside"])
def test_ranks_tell_and_decide_the_same(ranks: list[dict[str, Any]], scenario: str) -> None:
    first, second = (rank[scenario] for rank in ranks)
    assert first["events"] and repr(first) == repr(second)


def test_bad_data_of_one_rank_is_told_on_all(ranks: list[dict[str, Any]]) -> None:
    told = ranks[0]["data"]
    found = next(data for _, name, _, data in told["events"] if name == "finding")
    assert (found["kind"], found["source"]) == ("bad input data", "input 0") and "on rank 1" in found["evidence"]
    assert told["skipped"] == 1 and not told["stopped"]


def test_a_layer_that_overflows_on_one_rank_is_raised_and_given_back_on_all(ranks: list[dict[str, Any]]) -> None:
    told = ranks[0]["overflow"]
    names = [name for _, name, _, _ in told["events"]]
    found = next(data for _, name, _, data in told["events"] if name == "finding")
    assert (found["kind"], found["layer"]) == ("range too small", "1")
    assert "on rank 1" in found["evidence"] and "raise" in names
    assert told["skipped"] == 1 and told["scale"] == 2.0**16
    assert names.index("postpone") < names.index("give_back") and not told["layers"]


def test_a_weight_that_is_nan_stops_all_with_its_name(ranks: list[dict[str, Any]]) -> None:
    assert all("parameter 0.weight" in rank["weight"]["stopped"] for rank in ranks)


def test_a_nan_that_one_ranks_loss_alone_has_is_told_on_all_and_nothing_is_skipped(ranks: list[dict[str, Any]]) -> None:
    told = ranks[0]["aside"]
    assert [(step, name) for step, name, _, _ in told["events"]] == [(2, "finding")]
    assert "the loss is nan" in told["events"][0][2] and told["skipped"] == 0


def test_a_healthy_step_of_several_ranks_gains_no_operation(ranks: list[dict[str, Any]]) -> None:
    guarded, alone = ranks[0]["ops"]
    assert guarded == alone
    assert sum("local_scalar_dense" in name for name in guarded) == 1  # whether squares have left float32's range
