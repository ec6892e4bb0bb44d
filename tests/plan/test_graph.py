"""What a graph holds, and what the builder simplifies on the way."""

from __future__ import annotations

import pytest

from castwise.errors import PlanError
from castwise.graph import Graph, GraphBuilder, Kind, Op, Tensor


def names(graph: Graph, tensors: tuple[int, ...]) -> list[str]:
    return [graph.tensors[tensor].name for tensor in tensors]


def test_reading_a_view_of_a_view_is_reading_the_tensor() -> None:
    build = GraphBuilder()
    build.tensor("x", (4, 4), kind="input")
    build.view("flat", "x")
    build.view("half", "flat")
    build.op("a", "relu", ["half"], [("y", (4,))], saves=["flat"])
    graph = build.build()
    assert names(graph, graph.ops[0].inputs) == ["x"]
    assert names(graph, graph.ops[0].saves) == ["x"]
    assert graph.tensor("half") == graph.tensor("x") == 0


def test_a_mutation_makes_a_version_that_later_readers_get_and_earlier_ones_do_not() -> None:
    build = GraphBuilder()
    build.tensor("x", (4,), kind="input")
    build.op("make", "mul", ["x"], [("t", (4,))])
    build.view("v", "t")
    build.op("before", "relu", ["t"], [("a", (4,))])
    build.op("write", "add", ["v", "x"], [], mutates=["v"])
    build.op("after", "relu", ["t"], [("b", (4,))])
    build.op("after_view", "relu", ["v"], [("c", (4,))])
    graph = build.build()
    write, after, after_view = (graph.ops[graph.positions[name]] for name in ("write", "after", "after_view"))
    old, new = graph.ops[0].outputs[0], write.outputs[0]
    assert graph.ops[1].inputs == (old,)
    assert write.inputs[0] == old
    assert after.inputs == after_view.inputs == (new,)
    assert set(graph.mutated) == {old, new}


def test_selection_and_promotion_default_to_the_catalogue() -> None:
    build = GraphBuilder(framework="torch")
    build.tensor("x", (4,), kind="input")
    build.op("pick", "relu", ["x"], [("y", (4,))])
    build.op("sum", "add", ["x", "y"], [("z", (4,))])
    build.op("product", "matmul", ["x", "z"], [("w", ())])
    graph = build.build()
    assert graph.ops[0].selects and not graph.ops[2].selects
    assert graph.ops[1].promotes == (0, 1), "torch's add promotes mixed inputs by itself"
    assert graph.ops[2].promotes == (), "a product needs equal formats"


def test_an_op_that_writes_only_integers_reads_what_it_is_given() -> None:
    build = GraphBuilder()
    build.tensor("x", (4,), kind="input")
    build.tensor("index", (), format="int64")
    build.op("best", "argmax", ["x"], ["index"])
    assert build.build().ops[0].promotes == (0,)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([Op("a", "add", (0,), (1,)), Op("a", "add", (0,), (2,))], "Two ops are called 'a'"),
        ([Op("a", "add", (1,), (2,)), Op("b", "add", (0,), (1,))], "reads tensor 1 before it is written"),
        ([Op("a", "add", (0,), (1,)), Op("b", "add", (0,), (1, 2))], "which exists already"),
        ([Op("a", "add", (0,), (1, 2, 3))], "does not have"),
        ([Op("a", "add", (0,), (1, 2), saves=(0,)), Op("b", "add", (1,), (), saves=(0,))], "neither reads nor writes"),
        ([Op("a", "add", (0,), (1, 2), promotes=(1,))], "an input that it does not have"),
        ([Op("a", "add", (0,), (1,))], "No op writes tensor 't2'"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(ops: list[Op], message: str) -> None:
    tensors = (Tensor("t0", (2,), Kind.INPUT), Tensor("t1", (2,)), Tensor("t2", (2,)))
    with pytest.raises(PlanError, match=message):
        Graph(tuple(ops), tensors)


def test_unknown_tensors_are_told_with_the_nearest_name() -> None:
    build = GraphBuilder()
    build.tensor("hidden", (2,), kind="input")
    with pytest.raises(PlanError, match="Did you mean 'hidden'"):
        build.op("a", "relu", ["hiden"], [("y", (2,))])
    with pytest.raises(PlanError, match="exists already"):
        build.tensor("hidden", (2,))


def test_the_digest_follows_structure_and_not_source_lines() -> None:
    def graph(width: int, source: str) -> Graph:
        build = GraphBuilder()
        build.tensor("x", (width,), kind="input")
        build.op("a", "relu", ["x"], [("y", (width,))], source=source)
        return build.build()

    assert graph(4, "model.py:1").digest == graph(4, "model.py:99").digest
    assert graph(4, "model.py:1").digest != graph(5, "model.py:1").digest


def test_the_index_lists_each_reader_once_and_promotes_only_if_all_operands_do() -> None:
    tensors = (Tensor("x", (2,), Kind.INPUT), Tensor("y", (2,)), Tensor("z", (2,)))
    ops = (Op("square", "mul", (0, 0), (1,), promotes=(0,)), Op("twice", "add", (0, 0), (2,), promotes=(0, 1)))
    index = Graph(ops, tensors).index
    assert index.reads.tensor.tolist() == [0, 0]
    assert index.reads.op.tolist() == [0, 1]
    assert index.promoted.tolist() == [False, True]
