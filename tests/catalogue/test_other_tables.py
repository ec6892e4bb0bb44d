"""The catalogue against what torch's autocast and TensorFlow's Grappler decide.

Every op on their lists has an entry, and each decision agrees with theirs or is listed in differences.toml with its
reason. torch's tables are read from the running torch: which ops are registered from its dispatcher, what is done with
them by running torch's own autocast.
"""

from __future__ import annotations

import collections
import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from castwise.catalogue import OpEntry, Rule, default_rule, load_catalogue, torch_base_name

HERE = Path(__file__).parent
CATALOGUE = load_catalogue()
FORMATS = ("fp16", "bf16")
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
AUTOCAST = tomllib.loads((HERE / "torch_autocast.toml").read_text())
GRAPPLER = tomllib.loads((HERE / "grappler_lists.toml").read_text())
DIFFERENCES = tomllib.loads((HERE / "differences.toml").read_text())["difference"]
# What each list of theirs means in the catalogue's terms. Grappler's inferred ops follow their inputs; torch's refusal
# has no counterpart, so it is always a difference.
MEANS = {
    "low": Rule.LOW,
    "high": Rule.HIGH,
    "promote": Rule.WIDEST,
    "refused": None,
    "allow": Rule.LOW,
    "infer": Rule.WIDEST,
    "deny": Rule.HIGH,
    "clear": Rule.WIDEST,
}

Difference = tuple[str, str, str, str, str]  # source, op, format, their list, our rule


def found(framework: str, name: str) -> OpEntry:
    entry = CATALOGUE.lookup(framework, name)
    assert entry is not None, f"{framework} {name} has no entry"
    return entry


def torch_differences(device: str) -> set[Difference]:
    differences: set[Difference] = set()
    for theirs, names in AUTOCAST[device].items():
        for name in names.split():
            for fmt in FORMATS:
                entry = found("torch", name)
                ours = Rule.HIGH if entry.lacks_kernel(fmt, device) else default_rule(entry, fmt)
                if ours != MEANS[theirs]:
                    differences.add((f"torch {device}", name, fmt, theirs, ours.value))
    return differences


def grappler_differences() -> set[Difference]:
    differences: set[Difference] = set()
    for fmt in FORMATS:
        for theirs in ("allow", "infer", "deny", "clear"):
            for name in GRAPPLER["common"][theirs].split() + GRAPPLER[fmt][theirs].split():
                ours = default_rule(found("tensorflow", name), fmt)
                if ours != MEANS[theirs]:
                    differences.add(("grappler", name, fmt, theirs, ours.value))
    return differences


def explained(source: str) -> set[Difference]:
    return {
        (source, name, fmt, d["theirs"], d["ours"])
        for d in DIFFERENCES
        if d["source"] == source
        for name in d["ops"].split()
        for fmt in d["formats"].split()
    }


# ---- torch -----------------------------------------------------------------------------------------------------------


def registered(device: str) -> set[str]:
    """The ops in the running torch's autocast table, without namespace and overload."""
    return {torch_base_name(name) for name in torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[device])}


@pytest.mark.parametrize("device", KEYS)
def test_every_op_of_torchs_autocast_tables_has_an_entry(device):
    names = registered(device)
    assert len(names) > 100
    assert [name for name in sorted(names) if CATALOGUE.lookup("torch", name) is None] == []


@pytest.mark.parametrize("device", KEYS)
def test_the_lists_kept_here_are_those_of_the_running_torch(device):
    listed = [name for names in AUTOCAST[device].values() for name in names.split()]
    assert len(listed) == len(set(listed))
    assert set(listed) == registered(device)


@pytest.mark.parametrize("device", KEYS)
def test_decisions_agree_with_torch_or_say_why_not(device):
    assert torch_differences(device) == explained(f"torch {device}")


def _under_autocast(op: Any, sample: Any, device: str, dtype: torch.dtype) -> set[torch.dtype]:
    """The floating dtypes that op gives in torch's own bf16 region for inputs of `dtype`; on CUDA with fake tensors."""

    def convert(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        x = x.detach().to(dtype) if x.dtype is torch.float32 else x.detach()
        return x if device == "cpu" else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    inputs, args, kwargs = tree_map(convert, (sample.input, sample.args, sample.kwargs))
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        outputs = tree_leaves(op(inputs, *args, **kwargs))
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()
    return {x.dtype for x in outputs if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())}


def _observed(op: Any, device: str) -> tuple[set[torch.dtype], set[torch.dtype]] | None:
    """What torch's region makes of fp32 and of bf16 inputs, by the op's first usable sample."""
    samples = op.sample_inputs_func(op, "cpu", torch.float32, False)
    plain = (sample for sample in samples if not sample.kwargs.get("return_indices"))  # that is another op
    for sample in itertools.islice(plain, 2):
        try:
            if device == "cpu":
                return tuple(_under_autocast(op, sample, device, dtype) for dtype in (torch.float32, torch.bfloat16))
            with FakeTensorMode(allow_non_fake_inputs=True):
                return tuple(_under_autocast(op, sample, device, dtype) for dtype in (torch.float32, torch.bfloat16))
        except Exception:  # no such kernel for fake tensors or for this mix of dtypes: another sample may do
            continue
    return None


@pytest.mark.parametrize("device", KEYS)
def test_the_lists_kept_here_are_what_torch_does(device, op_db):
    """Low: fp32 comes out bf16. High: bf16 does not come out bf16. Promote: each comes out as it went in."""
    first = {torch_base_name(op.name): op for op in reversed(op_db)}
    wrong, seen = [], collections.Counter()
    for policy in ("low", "high", "promote"):
        for name in AUTOCAST[device][policy].split():
            observed = _observed(first[name], device) if name in first else None
            if observed is None:
                continue
            from_wide, from_low = observed
            as_listed = {
                "low": from_wide == {torch.bfloat16},
                "high": torch.bfloat16 not in from_low,
                "promote": from_wide == {torch.float32} and from_low == {torch.bfloat16},
            }
            seen[policy] += 1
            if not as_listed[policy]:
                wrong.append((name, policy, observed))
    assert wrong == []
    # Most of each list is in torch's op database; the rest (cudnn_convolution, recurrent cells, ...) is not.
    assert seen["low"] >= 12 and seen["high"] >= 50 and seen["promote"] >= 3


# ---- Grappler --------------------------------------------------------------------------------------------------------


def test_every_op_of_grapplers_lists_has_an_entry():
    names = {name for part in GRAPPLER.values() for names in part.values() for name in names.split()}
    assert len(names) > 200
    assert [name for name in sorted(names) if CATALOGUE.lookup("tensorflow", name) is None] == []


@pytest.mark.parametrize("fmt", FORMATS)
def test_an_op_is_on_one_of_grapplers_lists(fmt):
    count = collections.Counter(
        name
        for theirs in ("allow", "infer", "deny", "clear")
        for name in GRAPPLER["common"][theirs].split() + GRAPPLER[fmt][theirs].split()
    )
    assert max(count.values()) == 1


def test_decisions_agree_with_grappler_or_say_why_not():
    assert grappler_differences() == explained("grappler")


def test_every_difference_has_a_reason_and_is_listed_once():
    listed = [
        (d["source"], name, fmt) for d in DIFFERENCES for name in d["ops"].split() for fmt in d["formats"].split()
    ]
    assert len(listed) == len(set(listed))
    assert all(len(d["why"]) > 40 for d in DIFFERENCES)
