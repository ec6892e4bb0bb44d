"""Checkpoints of several ranks: runs go on from them, on as many ranks as there are, whoever was killed when."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from castwise.policy import LayerRule, Policy

HERE = Path(__file__).parent


def furthest(found: Any, expected: Any) -> float:
    return max(abs(a[0] / b[0] - 1) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def on_four(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with checkpoints of either kind by four ranks, and the losses that follow them there."""
    folder = str(tmp_path_factory.mktemp("four"))
    return folder, ranks(4, "saved", "fsdp", folder, {})


@pytest.mark.parametrize("kind", ["shards", "whole"])
def test_the_same_ranks_go_on_bit_for_bit(ranks: Any, on_four: Any, kind: str) -> None:
    folder, expected = on_four
    assert ranks(4, "resumed", "fsdp", folder, kind, {}) == expected


@pytest.mark.parametrize("kind", ["shards", "whole"])
@pytest.mark.parametrize(("engine", "size"), [("fsdp", 2), ("ddp", 2), ("one", 1)])
def test_a_checkpoint_of_four_ranks_goes_on_on_fewer(
    ranks: Any, on_four: Any, kind: str, engine: str, size: int
) -> None:
    folder, expected = on_four
    found = ranks(size, "resumed", engine, folder, kind, {})
    assert furthest(found[0], expected[0]) < 3e-4  # float16 gradients of other parts of the batch
    assert all(step for _, _, step in found[0])


@pytest.mark.parametrize("mode", ["master", "split", "kahan"])
def test_what_is_kept_beside_16_bit_weights_is_sharded_too(ranks: Any, tmp_path: Path, mode: str) -> None:
    options = {"dtype": torch.bfloat16, "weights": mode}
    expected = ranks(2, "saved", "fsdp", str(tmp_path), options)
    for kind in ("shards", "whole"):
        assert ranks(2, "resumed", "fsdp", str(tmp_path), kind, options) == expected


def test_what_adafactor_knows_of_rows_and_columns_goes_on_too(ranks: Any, tmp_path: Path) -> None:
    options = {"optimizer": "Adafactor"}
    expected = ranks(2, "saved", "fsdp", str(tmp_path), options)
    for kind in ("shards", "whole"):
        assert ranks(2, "resumed", "fsdp", str(tmp_path), kind, options) == expected


def test_an_empty_folder_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, "nothing_to_resume", str(tmp_path)) == [(None, True)] * 2


def test_a_run_whose_rank_was_killed_goes_on_from_its_checkpoint_to_the_same_losses(ranks: Any, tmp_path: Path) -> None:
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "--max-restarts", "1", str(HERE / "restarted.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"losses{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    assert [rank["start"] for rank in found] == [4, 4]  # the second start went on where the first had saved
    policy = Policy(format="float16", layers=[LayerRule("h.1.down", format="float32")])
    never_killed = ranks(2, "curve", "fsdp", policy)[0]
    for step in (4, 5):
        mean = sum(rank["losses"][str(step)] for rank in found) / 2
        assert math.isclose(mean, never_killed[step][0], rel_tol=1e-6)
