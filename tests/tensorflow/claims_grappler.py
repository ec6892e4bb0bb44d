"""Where Grappler's lists cast too much or round too much, counted in what TensorFlow ran, with values against fp64.

The plans are for a device that computes bfloat16, by its data sheet, so that they are the same on every machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys

import graphs
import pytest
import tensorflow as tf
import weak_cases

from castwise.tensorflow import autocast, plan

DEVICE = "a100"


@contextlib.contextmanager
def grappler():
    """TensorFlow's own rewrite to bfloat16, for functions that are traced meanwhile.

    It needs oneDNN, which TensorFlow enables by itself only on CPUs with AVX-512; the process in which these claims are
    tried asks for it. Where a build has none, the claims are about Castwise alone.
    """
    options = {"auto_mixed_precision_onednn_bfloat16": True}
    tf.config.optimizer.set_experimental_options(options)
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(dict.fromkeys(options, False))


def by_grappler(case):
    """Error and casts of a function that Grappler rewrites."""
    with grappler():
        fn = tf.function(case.function)
        return case.error(fn(*case.inputs)), len(graphs.float_casts(graphs.executed(fn, *case.inputs)))


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64") or os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "1",
    reason="this build of TensorFlow has no oneDNN, or it is not enabled: Grappler rewrites nothing",
)
def test_grappler_rewrites_what_castwise_is_compared_with():
    for make in weak_cases.CASES.values():
        assert by_grappler(make())[1] >= 3


def planned(case, **options):
    """Error, casts and nodes of a function that Castwise plans."""
    fn = tf.function(case.function)
    fast = autocast(fn, plan=plan(fn, *case.inputs, policy="bfloat16", device=DEVICE, **options))
    nodes = graphs.executed(fast, *case.inputs)
    return case.error(fast(*case.inputs)), len(graphs.float_casts(nodes)), nodes


def rounded(tensor):
    return tf.cast(tf.cast(tensor, tf.bfloat16), tf.float32)


def test_a_tiny_product_between_exponentials_is_not_cast():
    case = weak_cases.tiny_product()
    error, casts, _ = planned(case)
    assert casts == 0 and error < 1e-6
    theirs, their_casts = by_grappler(case)
    assert not their_casts or theirs > 1e-4


def test_a_side_input_makes_no_round_trip():
    case = weak_cases.side_input()
    error, casts, nodes = planned(case)
    # The weights are constants, which are cast beforehand. What is left: down before a product, up after it.
    assert graphs.in_16_bits(nodes, "MatMul") >= 1 and casts <= 2
    assert not any(round_trips(nodes)) and error < 0.01
    theirs, their_casts = by_grappler(case)
    assert not their_casts or (casts < their_casts and error < 1.05 * theirs)


def round_trips(nodes):
    """Casts down of a sum of what was cast up."""
    readers = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name.partition(":")[0], []).append(node)
    for node in nodes:
        if node.op == "Cast" and node.attr["SrcT"].type in graphs.NARROW:
            after = readers.get(node.name, [])
            if after and all(one.op in ("AddV2", "Add") for one in after):
                yield from (end for one in after for end in readers.get(one.name, []) if end.op == "Cast")


def test_what_a_loop_carries_is_not_rounded_in_each_iteration():
    case = weak_cases.loop_carry()
    preset = autocast(tf.function(case.function), "bfloat16")
    assert graphs.in_16_bits(graphs.executed(preset, *case.inputs), "MatMul") == 1
    assert case.error(preset(*case.inputs)) < 1e-3  # each step's increment is rounded, not the sum
    assert planned(case, trips=weak_cases.STEPS)[0] < 1e-4
    theirs, their_casts = by_grappler(case)
    assert not their_casts or theirs > 0.05


def test_logits_are_not_rounded_before_cross_entropy():
    case = weak_cases.logits()
    fast = autocast(tf.function(case.function), "bfloat16")
    nodes = graphs.executed(fast, *case.inputs)
    casts = len(graphs.float_casts(nodes))
    assert graphs.in_16_bits(nodes, "MatMul") == 1 and casts <= 2  # x down, the hidden layer up
    out, _ = fast(*case.inputs)
    assert not (out.numpy() == rounded(out).numpy()).all()
    theirs, their_casts = by_grappler(case)
    assert not their_casts or (casts < their_casts and case.error(fast(*case.inputs)) < theirs)
