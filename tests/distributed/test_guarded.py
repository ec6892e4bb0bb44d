"""The guard of models spread over ranks: the layer that broke is found, raised and told alike on all of them."""

from __future__ import annotations

from typing import Any

import pytest

# Castwise's own `shard`; `fully_shard` over several modules at once; the same with float16 parameters and casts of its
# own; with parameters that stay gathered after the forward; tensor parallelism; and the same where each rank has its
# own rows of the batch, which a layer gathers.
CASES = [
    *(("shard", fault) for fault in ("data", "forward", "backward", "weight")),
    *(("plain", fault) for fault in ("forward", "weight")),
    *(("formats", fault) for fault in ("forward", "backward")),
    ("kept", "backward"),
    *(("parallel", fault) for fault in ("forward", "backward", "data")),
    ("rows", "data"),
]
FAULTS = {
    "data": ("bad input data", "forward", "", "input 0"),
    "forward": ("range too small", "forward", "1.0", ""),
    "backward": ("range too small", "backward", "2", ""),
    "weight": ("broken computation", "forward", "2", "parameter 2.weight"),
}


@pytest.mark.parametrize(("engine", "fault"), CASES)
def test_all_ranks_find_the_layer_and_do_the_same(ranks: Any, engine: str, fault: str) -> None:
    first, second = ranks(2, "guarded", engine, fault)
    assert repr(first) == repr(second)
    found = next(data for _, name, _, data in first["events"] if name in ("finding", "overflow"))
    assert (found["kind"], found["phase"], found["layer"], found["source"]) == FAULTS[fault]
    names = [name for _, name, _, _ in first["events"]]
    if fault == "weight":
        assert "parameter 2.weight" in first["stopped"]
    else:
        assert first["skipped"] == 1 and not first["stopped"]
    assert ("raise" in names) == (fault in ("forward", "backward"))
    assert ("give_back" in names) == ("raise" in names) and not first["layers"]
    assert first["sharded"] == (engine not in ("parallel", "rows"))  # each has its own part again
