"""How long the planner takes, and how that grows with the size of the graph.

    python benchmarks/solver.py                     # the table
    python benchmarks/solver.py --sizes 1000 10000  # other sizes
    python benchmarks/solver.py --profile           # where the time of the largest plan goes

The graphs look like the training graph of a transformer: blocks of normalisations, projections, attention, a
feed-forward and residual additions, with shared weights read as they are, tensors saved for backward by several ops,
and random noise over six orders of magnitude. Costs are the roofline of an A100. "plan" builds the energy and the
network, cuts once and certifies; "front" is a Pareto front of 16 plans. Building the Graph itself (a front end's work)
is timed apart.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Sequence

import numpy as np

from castwise.cost import Costs, roofline
from castwise.graph import Graph, GraphBuilder
from castwise.hardware import get_device
from castwise.plan import Plan, pareto, solve
from castwise.policy import Policy
from castwise.risk import Risks

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
FRONT_SIZES = (1_000, 3_000, 10_000, 30_000)
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
        return build.op(f"{path}.{name}", op, inputs, [(f"{path}.{name}.out", (TOKENS, width))], layer=layer, saves=saves)

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


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def prepared(ops: int) -> tuple[Graph, Costs, Risks, float]:
    started = time.perf_counter()
    graph = transformer(ops)
    build = time.perf_counter() - started
    return graph, roofline(graph, get_device("a100"), "bf16"), random_risks(graph), build


def budgets(graph: Graph, costs: Costs, risks: Risks) -> float:
    """A noise budget that neither forces everything to fp32 nor leaves it out: a tenth of what all LOW would make."""
    return 0.1 * float(risks.op_noise.sum())


def table(sizes: Sequence[int]) -> None:
    policy = Policy.preset("bfloat16")
    print(f"{'ops':>8} {'graph':>9} {'plan':>9} {'µs/op':>7} {'budget':>9} {'front':>9} {'plans':>6} {'gap':>9}")
    for size in sizes:
        graph, costs, risks, build = prepared(size)
        lam = float(costs.high.sum() / risks.op_noise.sum())
        plans: list[Plan] = []
        plan = seconds(lambda: plans.append(solve(graph, costs, risks, policy, lam=lam)))
        budget = seconds(lambda: solve(graph, costs, risks, policy, budget=budgets(graph, costs, risks)))
        front = float("nan")
        points: list[Plan] = []
        if size <= max(FRONT_SIZES):
            front = seconds(lambda: points.extend(pareto(graph, costs, risks, policy, points=FRONT_POINTS)))
        print(
            f"{len(graph):>8} {build:>8.2f}s {plan:>8.2f}s {1e6 * plan / len(graph):>7.1f} {budget:>8.2f}s "
            f"{front:>8.2f}s {len(points):>6} {plans[0].gap / plans[0].energy:>9.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--profile", action="store_true", help="profile one plan of the largest size")
    arguments = parser.parse_args()
    if not arguments.profile:
        table(arguments.sizes)
        return
    graph, costs, risks, _ = prepared(max(arguments.sizes))
    lam = float(costs.high.sum() / risks.op_noise.sum())
    profile = cProfile.Profile()
    profile.runcall(solve, graph, costs, risks, Policy.preset("bfloat16"), lam=lam)
    pstats.Stats(profile).sort_stats("cumulative").print_stats(25)


if __name__ == "__main__":
    main()
