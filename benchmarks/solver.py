"""How long the planner takes, and how that grows with the size of the graph.

    python benchmarks/solver.py                     # the table
    python benchmarks/solver.py --sizes 1000 10000  # other sizes
    python benchmarks/solver.py --profile           # where the time of the largest plan goes

The graphs look like the training graph of a transformer: blocks of normalisations, projections, attention, a
feed-forward and residual additions, with shared weights read as they are, tensors saved for backward by several ops,
and random noise over six orders of magnitude. Costs are the roofline of an A100.

"plan" is one plan at a price of noise, from the graph to the certificate; "gap" is how far from the optimum it can be,
relative to its energy. "budget" is one plan within a noise budget, "front" a Pareto front of 16 plans. "graph" is the
time to build the Graph, which is a front end's work and not part of the others.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from castwise.cost import Costs, roofline
from castwise.graph import Graph, GraphBuilder
from castwise.hardware import get_device
from castwise.plan import pareto, solve
from castwise.policy import Policy
from castwise.risk import Risks

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
LARGEST_FRONT = 30_000
FRONT_POINTS = 16
TOKENS, WIDTH = 2048, 1024


def transformer(ops: int) -> Graph:
    """A training graph of ``ops`` operations, or a few more to finish the last block."""
    build = GraphBuilder("transformer", framework="torch")
    stream = build.tensor("x", (TOKENS, WIDTH), kind="input")
    block = 0
    while len(build) < ops:
        stream = _block(build, stream, f"blocks.{block}")
        block += 1
    return build.build(training=True)


def _block(build: GraphBuilder, stream: str, path: str) -> str:
    def product(name: str, x: str, inner: int, outer: int, layer: str) -> str:
        weight = build.tensor(f"{path}.{name}.weight", (inner, outer), kind="weight")
        flops = 2.0 * TOKENS * inner * outer
        return build.op(
            f"{path}.{name}", "matmul", [x, weight], [(f"{path}.{name}.out", (TOKENS, outer))],
            layer=layer, flops=flops, saves=[x, weight],
        )  # fmt: skip

    def simple(name: str, op: str, inputs: Sequence[str], width: int, layer: str, *, saves: Sequence[str] = ()) -> str:
        return build.op(
            f"{path}.{name}", op, inputs, [(f"{path}.{name}.out", (TOKENS, width))], layer=layer, saves=saves
        )

    attention, feed_forward = f"{path}.attn", f"{path}.mlp"
    normed = simple("norm1", "layer_norm", [stream], WIDTH, f"{path}.norm1", saves=[stream])
    query, key, value = (product(name, normed, WIDTH, WIDTH, attention) for name in ("q", "k", "v"))
    scores = simple("scores", "matmul", [query, key], WIDTH, attention, saves=[query, key])
    scaled = simple("scale", "mul", [scores], WIDTH, attention)
    weights = simple("softmax", "softmax", [scaled], WIDTH, attention, saves=[f"{path}.softmax.out"])
    mixed = simple("mix", "matmul", [weights, value], WIDTH, attention, saves=[weights, value])
    projected = product("proj", mixed, WIDTH, WIDTH, attention)
    stream = simple("add1", "add", [stream, projected], WIDTH, path)
    normed = simple("norm2", "layer_norm", [stream], WIDTH, f"{path}.norm2", saves=[stream])
    hidden = product("up", normed, WIDTH, 4 * WIDTH, feed_forward)
    active = simple("gelu", "gelu", [hidden], 4 * WIDTH, feed_forward, saves=[hidden])
    return simple("add2", "add", [stream, product("down", active, 4 * WIDTH, WIDTH, feed_forward)], WIDTH, path)


def random_risks(graph: Graph, seed: int = 0) -> Risks:
    rng = np.random.default_rng(seed)
    return Risks.from_sensitivities(graph, "bf16", 10.0 ** rng.uniform(-12, -6, len(graph.tensors)))


Result = TypeVar("Result")


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def prepared(ops: int) -> tuple[Graph, Costs, Risks, float]:
    graph, build = timed(lambda: transformer(ops))
    return graph, roofline(graph, get_device("a100"), "bf16"), random_risks(graph), build


def fair_price(costs: Costs, risks: Risks) -> float:
    """A price of noise at which neither time nor noise decides alone."""
    return float(costs.high.sum() / risks.op_noise.sum())


def row(size: int) -> str:
    policy = Policy.preset("bfloat16")
    graph, costs, risks, build = prepared(size)
    lam, budget = fair_price(costs, risks), 0.1 * float(risks.op_noise.sum())
    plan, plan_time = timed(lambda: solve(graph, costs, risks, policy, lam=lam))
    _, budget_time = timed(lambda: solve(graph, costs, risks, policy, budget=budget))
    front_column = f"{'-':>10} {'-':>6}"
    if size <= LARGEST_FRONT:
        plans, front_time = timed(lambda: pareto(graph, costs, risks, policy, points=FRONT_POINTS))
        front_column = f"{front_time:>9.2f}s {len(plans):>6}"
    return (
        f"{len(graph):>8} {build:>8.2f}s {plan_time:>8.2f}s {1e6 * plan_time / len(graph):>7.1f} "
        f"{plan.gap / plan.energy:>9.1e} {budget_time:>8.2f}s {front_column}"
    )


def table(sizes: Sequence[int]) -> None:
    prepared(100)  # imports and caches
    row(100)
    print(f"{'ops':>8} {'graph':>9} {'plan':>9} {'µs/op':>7} {'gap':>9} {'budget':>9} {'front':>10} {'plans':>6}")
    for size in sizes:
        print(row(size), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--profile", action="store_true", help="profile one plan of the largest size")
    arguments = parser.parse_args()
    if not arguments.profile:
        table(arguments.sizes)
        return
    graph, costs, risks, _ = prepared(max(arguments.sizes))
    profile = cProfile.Profile()
    profile.runcall(solve, graph, costs, risks, Policy.preset("bfloat16"), lam=fair_price(costs, risks))
    pstats.Stats(profile).sort_stats("cumulative").print_stats(25)


if __name__ == "__main__":
    main()
