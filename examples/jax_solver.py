"""A steady heat equation, solved with its factorization in float32 and its residual in float64: found by a plan.

    python examples/jax_solver.py

The function below is ordinary float64: it factors a matrix, solves, and refines the solution twice by the residual.
Which of its operations bear float32 is not obvious: the factorization, all of the work, does, because refinement
corrects what it does wrong; the residual does not, because nothing corrects that. ``castwise.jax.plan`` measures it.
"""

from __future__ import annotations

import argparse

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.scipy.linalg import lu_factor, lu_solve  # noqa: E402

from castwise.jax import autocast, plan  # noqa: E402


def heat_matrix(side: int) -> np.ndarray:
    """The five-point Laplacian on a square of ``side`` points, with a conductivity that varies in space."""
    count = side * side
    rows, columns = np.divmod(np.arange(count), side)
    conductivity = 1.5 + np.sin(6.0 * rows / side) * np.cos(4.0 * columns / side)
    matrix = np.zeros((count, count))
    for step, inside in ((1, columns < side - 1), (side, rows < side - 1)):
        at = np.flatnonzero(inside)
        between = 0.5 * (conductivity[at] + conductivity[at + step])
        matrix[at, at + step] = matrix[at + step, at] = -between
        matrix[at, at] += between
        matrix[at + step, at + step] += between
    matrix[np.arange(count), np.arange(count)] += 0.05  # heat lost to the surroundings
    return matrix


def temperature(matrix: jax.Array, heating: jax.Array) -> jax.Array:
    """The steady temperature under some heating: a direct solution, refined twice."""
    factors, pivots = lu_factor(matrix)

    def refine(_: int, x: jax.Array) -> jax.Array:
        residual = heating - matrix @ x
        return x + lu_solve((factors, pivots), residual)

    return jax.lax.fori_loop(0, 2, refine, lu_solve((factors, pivots), heating))


def main(side: int = 30, budget: float = 1e-10, seconds: float = 20.0) -> dict[str, float]:
    """Plan, compare with float64 and with all of it in float32, and print; returns relative errors and times."""
    matrix = jnp.asarray(heat_matrix(side))
    heating = jnp.asarray(np.random.default_rng(0).random((side * side, 4)))
    decided = plan(temperature, matrix, heating, policy="float32", budget=budget, seconds=seconds)
    exact = jax.jit(temperature)(matrix, heating)
    planned = jax.jit(autocast(temperature, plan=decided))(matrix, heating)
    single = jax.jit(temperature)(matrix.astype(jnp.float32), heating.astype(jnp.float32))

    def off(x: jax.Array) -> float:
        return float(jnp.linalg.norm(x.astype(jnp.float64) - exact) / jnp.linalg.norm(exact))

    print(decided.summary())
    for op in decided.problem.graph.ops:
        if op.name in ("matmul", "linalg_lu", "linalg_solve_triangular", "lu", "triangular_solve"):
            print(f"  {decided.explain(op.id)}")
    print(f"relative error: planned {off(planned):.1e}, all in float32 {off(single):.1e}, allowed {budget:.1e}")
    times = {name: f"{value * 1e3:.2f} ms" for name, value in decided.seconds.items()}
    print(f"time of a call: {times or 'nothing was lowered'}")
    return {"planned": off(planned), "float32": off(single), **decided.seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=30, help="points along one edge of the square")
    parser.add_argument("--budget", type=float, default=1e-10, help="relative error that is allowed")
    given = parser.parse_args()
    main(given.side, given.budget)
