"""Every op of torch's op database, inside a region: fp32, low and mixed inputs, in both 16-bit formats."""

from __future__ import annotations

import collections
import warnings

import pytest
import torch

from . import op_sweep


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_op_raises_where_plain_float32_does_not_and_all_values_are_right(dtype, capsys):
    pairs: collections.Counter[str] = collections.Counter()
    raised, off = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_sweep.op_infos():
            for result in op_sweep.sweep(op, dtype):
                pairs["pairs"] += 1
                pairs.update(f"ran {rule}" for rule in result.rules)
                if result.raised:
                    raised.append(f"{result.op} ({result.kind}): {result.raised}")
                elif result.worst > 1:
                    off.append(f"{result.op} ({result.kind}): {result.worst:.3g} tolerances")
    with capsys.disabled():
        print(f"\n{dtype}: " + ", ".join(f"{count} {what}" for what, count in sorted(pairs.items())))
    assert raised == []
    assert off == []
    assert pairs["pairs"] > 1400  # the sweep itself ran
    assert pairs["ran low"] > 80
