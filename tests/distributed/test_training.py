"""Ranks that train one model together: the same losses as one process, and one mind about every step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from castwise.policy import LayerRule, Policy

RULES = [LayerRule("h.1.down", format="float32")]
Losses = list[tuple[float, float, bool]]


def policy(fmt: str, communication: str | None = None) -> Policy:
    return Policy(format=fmt, layers=() if fmt == "float32" else RULES, communication=communication)


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Any:
    """The losses of a single process, by policy."""
    known: dict[str, Losses] = {}

    def losses(fmt: str, **options: Any) -> Losses:
        key = f"{fmt} {options}"
        if key not in known:
            known[key] = ranks(1, "curve", "one", policy(fmt), **options)[0]
        return known[key]

    return losses


def furthest(found: Losses, expected: Losses) -> float:
    """The largest difference of losses, relative."""
    assert len(found) == len(expected) and all(step for _, _, step in found)
    return max(abs(a[0] / b[0] - 1) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("engine", "size"), [("ddp", 2), ("fsdp", 2), ("tp", 2), ("ddp", 4), ("fsdp", 4), ("hsdp", 4), ("grid", 4)]
)
def test_ranks_follow_one_process_to_float32s_rounding(ranks: Any, alone: Any, engine: str, size: int) -> None:
    found = ranks(size, "curve", engine, policy("float32"))
    assert furthest(found[0], alone("float32")) < 2e-6
    assert all(one == found[0] for one in found)  # norms and steps, and so the weights, are the same on every rank


@pytest.mark.parametrize(
    ("fmt", "engine", "size"),
    [
        ("bfloat16", "ddp", 2),
        ("bfloat16", "fsdp", 2),
        ("bfloat16", "tp", 2),
        ("bfloat16", "ddp", 4),
        ("bfloat16", "fsdp", 4),
        ("float16", "ddp", 2),
        ("float16", "fsdp", 2),
    ],
)
def test_ranks_with_layer_rules_follow_one_process_to_the_formats_rounding(
    ranks: Any, alone: Any, engine: str, size: int, fmt: str
) -> None:
    found = ranks(size, "curve", engine, policy(fmt))
    assert furthest(found[0], alone(fmt)) < {"bfloat16": 1e-3, "float16": 2e-4}[fmt]


def test_sharding_changes_no_bit_of_what_the_policy_computes(ranks: Any) -> None:
    sharded, whole = (ranks(2, "curve", engine, policy("bfloat16"))[0] for engine in ("fsdp", "ddp"))
    # Norms are sums in another order, so later steps may clip by another last bit.
    assert sharded[0][0] == whole[0][0] and furthest(sharded, whole) < 1e-6


@pytest.mark.parametrize(("engine", "size"), [("fsdp", 2), ("tp", 2), ("hsdp", 4), ("grid", 4)])
def test_adafactor_steps_shards_as_one_process_steps_the_whole(ranks: Any, alone: Any, engine: str, size: int) -> None:
    found = ranks(size, "curve", engine, policy("float32"), optimizer="Adafactor")
    assert furthest(found[0], alone("float32", optimizer="Adafactor")) < 5e-6


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_micro_batches_add_up_before_they_are_sent(ranks: Any, alone: Any, engine: str) -> None:
    found = ranks(2, "curve", engine, policy("float32"), accumulate=2)
    assert furthest(found[0], alone("float32")) < 2e-6


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_gradients_stay_on_their_rank_until_they_are_all_there(ranks: Any, engine: str) -> None:
    expected = ranks(2, "curve", "ddp", policy("float32"), count=1)[0][0][1]
    assert all(math.isclose(norm, expected, rel_tol=1e-5) for norm in ranks(2, "unsynchronised", engine))


@pytest.mark.parametrize("mode", ["master", "split", "kahan", "stochastic"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_16_bit_parameters_are_kept_on_ranks_as_on_one(ranks: Any, alone: Any, engine: str, mode: str) -> None:
    import torch

    options = {"dtype": torch.bfloat16, "weights": mode, "count": 4}
    found = ranks(2, "curve", engine, policy("bfloat16"), **options)[0]
    assert furthest(found, alone("bfloat16", **options)) < 5e-3


def test_parameters_are_gathered_in_16_bits_where_the_policy_reads_them_so_and_nowhere_else(ranks: Any) -> None:
    found = ranks(2, "groups")[0]
    low = {name for name, dtype in found.items() if dtype == "torch.bfloat16"}
    assert {f"h.{i}.{layer}.weight" for i in (0, 1) for layer in ("qkv", "out", "up")} | {"h.0.down.weight"} <= low
    assert {"head.weight"} <= low and len(found) == 2 * 12 + 5
    assert not {"h.1.down.weight", "tokens.weight", "places.weight", "norm.weight", "h.0.norm1.weight"} & low


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_step_takes_one_collective(ranks: Any, engine: str) -> None:
    seen = ranks(2, "collectives", engine, policy("float16"))[0]
    assert seen == ["c10d::allreduce_"]


@pytest.mark.parametrize(("engine", "size"), [("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4)])
def test_all_ranks_skip_together_when_one_overflows(ranks: Any, engine: str, size: int) -> None:
    found = ranks(size, "overflow", engine, size - 1)
    steps = found[0][0]
    assert [step for step, _, _ in steps] == [True, True, False, True, True, True]
    assert all(one == found[0] for one in found)  # reasons, scales, weights and what the guard did
    assert math.isfinite(found[0][1])


def test_the_guard_of_shards_stops_all_ranks_with_the_same_words(ranks: Any) -> None:
    first, second = ranks(2, "broken")
    assert first == second and "the loss, outside of the model" in first[0]
    assert "on rank 1, float16" in first[0] and "100.00% NaN" in first[0]


def test_a_grad_scaler_skips_on_all_ranks_when_one_shard_overflows(ranks: Any) -> None:
    found = ranks(2, "shared_scaler")
    assert found[0] == found[1] == [(True, 8.0), (False, 4.0), (True, 4.0)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("float8 by gloo", "the gloo backend cannot add torch.float8_e4m3fn"),
        ("two hooks", "a communication hook of its own"),
        ("other policies", "The policy differs between ranks"),
        ("no such block", "matches no module. Nearest: "),
        ("nothing to send", "no part of the model sends gradients"),
        ("half a step", "Save after a step"),
        ("16-bit sums", "adds micro-batches of 16-bit parameters in 16 bits"),
    ],
)
def test_what_cannot_work_on_ranks_says_why_and_what_to_do(ranks: Any, case: str, words: str) -> None:
    assert all(words in message for message in ranks(2, "refused", case))
