"""What tests of TensorFlow graphs share: two virtual devices, casts counted in what runs, and numbers."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

NARROW = (tf.bfloat16.as_datatype_enum, tf.float16.as_datatype_enum)


def two_devices() -> None:
    """Two virtual CPUs, if TensorFlow has not started yet."""
    [cpu] = tf.config.list_physical_devices("CPU")
    if tf.config.get_logical_device_configuration(cpu) is None:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


# A graph keeps the functions that its nodes call beside them.
functions_of = operator.attrgetter("library.function")


def executed(fn: Any, *args: Any) -> list[Any]:
    """The nodes of a function after TensorFlow's own optimisers, those of functions that it calls included."""
    fresh = tf.function(lambda *args: fn(*args), autograph=False)  # what ran before is not optimised again
    context.enable_run_metadata()
    try:
        context.export_run_metadata()  # what ran before
        tf.nest.map_structure(lambda tensor: tensor.numpy(), fresh(*args))  # waits for all of it
        metadata = context.export_run_metadata()
    finally:
        context.disable_run_metadata()
    assert metadata.function_graphs
    nodes = []
    for one in metadata.function_graphs:
        graph = one.post_optimization_graph
        nodes += list(graph.node)
        used = {str(value.func.name) for node in graph.node for value in node.attr.values() if value.HasField("func")}
        nodes += [
            node for function in functions_of(graph) if function.signature.name in used for node in function.node_def
        ]
    return nodes


def float_casts(nodes: list[Any]) -> list[str]:
    """Names of the casts between float32 and a 16-bit format."""
    wide = tf.float32.as_datatype_enum
    found = []
    for node in nodes:
        if node.op == "Cast":
            pair = {node.attr["SrcT"].type, node.attr["DstT"].type}
            if wide in pair and pair & set(NARROW):
                found.append(node.name)
    return found


def in_16_bits(nodes: list[Any], op: str) -> int:
    """How many nodes of a kind compute in 16 bits."""
    return sum(node.op == op and node.attr["T"].type in NARROW for node in nodes)


def weights(*shape: int, seed: int = 0, scale: float | None = None) -> Any:
    """Random numbers of the size that weights have."""
    size = scale if scale is not None else 1 / np.sqrt(shape[0])
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32)
