"""JAX training steps: fp32, boundary casting, bfloat16 by hand, and Castwise's preset and plan.

    python benchmarks/jax_autocast.py                     # all models
    python benchmarks/jax_autocast.py --model gpt --seconds 20
    python benchmarks/jax_autocast.py --products          # what this backend takes for single products
    python benchmarks/jax_autocast.py --quick             # small sizes, few rounds: does it run?

Arms:

    fp32            the model as it is written
    boundary        parameters and inputs cast to bfloat16 at the function's boundary, results cast back, as jmp does
    hand            each product casts its operands to bfloat16; results are bfloat16 and come back to fp32
    hand wide       the same with a float32 result (``preferred_element_type``)
    preset          ``autocast(step, "bfloat16")``
    planned         ``autocast(step, plan=plan(step, ...))``

Trace and compile times are those of one fresh ``jit``; steps run in turn, medians. The error is that of the gradients
relative to fp32's. Where a backend has no 16-bit arithmetic, 16-bit arms are slow and the plan is to leave fp32 alone:
``--products`` shows what there is to gain, the time of a product in fp32 and in 16 bits with either result.
"""

from __future__ import annotations

import argparse
import collections
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import alternate, fix_allocator
from jax import lax

from castwise.jax import Plan, autocast, plan

Product = Callable[..., jax.Array]
Low = jnp.bfloat16


def plain(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def by_hand(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a.astype(Low) @ b.astype(Low)).astype(jnp.float32)


def by_hand_wide(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a.astype(Low), b.astype(Low), preferred_element_type=jnp.float32)


def norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def mlp(size: int) -> tuple[Callable[..., jax.Array], Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    widths = [(size, 2 * size), (2 * size, 2 * size), (2 * size, size)]
    params = [jax.random.normal(k, w) * w[0] ** -0.5 for k, w in zip(keys, widths, strict=True)]

    def loss(product: Product, params: Any, x: jax.Array) -> jax.Array:
        for at, w in enumerate(params):
            x = product(x, w)
            x = jax.nn.gelu(x) if at + 1 < len(params) else x
        return jnp.square(x).mean()

    return loss, params, jax.random.normal(keys[0], (size, size))


def convnet(size: int) -> tuple[Callable[..., jax.Array], Any, jax.Array]:
    channels = [3, max(8, size // 16), max(16, size // 8)]
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "conv": [jax.random.normal(keys[i], (3, 3, channels[i], channels[i + 1])) * 0.1 for i in range(2)],
        "head": jax.random.normal(keys[2], (channels[2], 10)) * 0.1,
    }

    def conv(product: Product, x: jax.Array, w: jax.Array) -> jax.Array:
        # As a product of patches, so that every arm casts it in its own way.
        height, width, low, high = w.shape
        patches = lax.conv_general_dilated_patches(
            x, (height, width), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return product(patches, w.transpose(2, 0, 1, 3).reshape(height * width * low, high))

    def loss(product: Product, params: Any, x: jax.Array) -> jax.Array:
        for w in params["conv"]:
            x = jax.nn.relu(norm(conv(product, x, w)))
        return jnp.square(product(x.mean((1, 2)), params["head"])).mean()

    return loss, params, jax.random.normal(keys[0], (8, 16, 16, 3))


def gpt(size: int) -> tuple[Callable[..., jax.Array], Any, jax.Array]:
    layers, heads, length = 4, 4, 64
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes = {"qkv": (size, 3 * size), "out": (size, size), "up": (size, 4 * size), "down": (4 * size, size)}
    params = {n: jax.random.normal(next(keys), (layers, *s)) * s[0] ** -0.5 for n, s in shapes.items()}
    mask = jnp.tril(jnp.ones((length, length), bool))

    def loss(product: Product, params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            qkv = product(norm(h), p["qkv"]).reshape(*h.shape[:2], 3, heads, -1)
            q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
            scores = product(q, k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5
            mixed = product(jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)
            h = h + product(mixed.transpose(0, 2, 1, 3).reshape(h.shape), p["out"])
            return h + product(jax.nn.gelu(product(norm(h), p["up"])), p["down"]), None

        return jnp.square(lax.scan(layer, x, params)[0]).mean()

    return loss, params, jax.random.normal(next(keys), (4, length, size))


MODELS = {"mlp": mlp, "convnet": convnet, "gpt": gpt}


def arms(
    loss: Callable[..., jax.Array], params: Any, x: jax.Array, seconds: float, kept: Path | None
) -> dict[str, Callable[..., Any]]:
    """A training step's gradients, in each arm; ``kept`` is where the plan is, or is to be."""

    def step(product: Product) -> Callable[..., Any]:
        return jax.value_and_grad(lambda p, x: loss(product, p, x))

    def low(tree: Any) -> Any:
        return jax.tree.map(lambda a: a.astype(Low), tree)

    def boundary(params: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(lambda p: loss(plain, low(p), x.astype(Low)).astype(jnp.float32))(params)

    if kept is not None and kept.exists():
        decided = Plan.load(kept)
    else:
        decided = plan(step(plain), params, x, policy="bfloat16", seconds=seconds)
    if kept is not None:
        decided.save(kept)
    lowered = int(decided.labels.sum())
    print(f"  plan: {lowered} of {len(decided.labels)} operations low; times tried: {dict(decided.seconds) or 'none'}")
    return {
        "fp32": step(plain),
        "boundary": boundary,
        "hand": step(by_hand),
        "hand wide": step(by_hand_wide),
        "preset": autocast(step(plain), "bfloat16"),
        "planned": autocast(step(plain), plan=decided),
    }


def casts(jaxpr: Any) -> int:
    """Conversions between floating formats in a jaxpr, those of inner jaxprs counted once."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            kinds = {jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (eqn.invars[0], eqn.outvars[0])}
            count += kinds == {True} and eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype
        for held in eqn.params.values():
            for one in held if isinstance(held, tuple | list) else (held,):
                inner = getattr(one, "jaxpr", one)
                count += casts(inner) if hasattr(inner, "eqns") else 0
    return count


def instructions(compiled: Any) -> collections.Counter[tuple[str, str]]:
    """What a compiled program consists of: shapes and opcodes, with how often each is there."""
    return collections.Counter(re.findall(r"= (\S+) ([a-z\-]+)\(", compiled.as_text()))


def off(tree: Any, exact: Any) -> float:
    """Relative error of all gradients together."""
    ours, theirs = (
        np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(t)]) for t in (tree, exact)
    )
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def compare(name: str, size: int, seconds: float, plan_seconds: float, plans: Path | None = None) -> None:
    """Print the table of one model."""
    print(f"\n{name}, size {size}, {jax.default_backend()}")
    loss, params, x = MODELS[name](size)
    rows, compiled, results = {}, {}, {}
    kept = None if plans is None else plans / f"{name}-{size}.json"
    for arm, step in arms(loss, params, x, plan_seconds, kept).items():
        start = time.perf_counter()
        traced = jax.jit(step).trace(params, x)
        middle = time.perf_counter()
        compiled[arm] = traced.lower().compile()
        rows[arm] = (middle - start, time.perf_counter() - middle, casts(traced.jaxpr.jaxpr))
        results[arm] = compiled[arm](params, x)[1]
    wait: Any = jax.block_until_ready
    times = alternate({arm: lambda run=run: wait(run(params, x)) for arm, run in compiled.items()}, seconds=seconds)
    print(f"  {'':10} {'step':>10} {'vs fp32':>8} {'trace':>9} {'compile':>9} {'casts':>6} {'error':>9}")
    for arm, (trace, built, count) in rows.items():
        speed = times["fp32"] / times[arm]
        print(
            f"  {arm:10} {times[arm] * 1e3:8.2f}ms {speed:7.2f}× {trace * 1e3:7.0f}ms {built * 1e3:7.0f}ms {count:6d} "
            f"{off(results[arm], results['fp32']):9.1e}"
        )

    best = min(("boundary", "hand", "hand wide"), key=times.__getitem__)
    print(
        f"  planned takes {times['planned'] / times['fp32']:.3f} of fp32's time, "
        f"{times['planned'] / times[best]:.3f} of that of the best by hand ({best})"
    )
    if instructions(compiled["planned"]) == instructions(compiled["fp32"]):
        print("  planned and fp32 are the same program, instruction for instruction: their times differ by chance")


def products(size: int, seconds: float) -> None:
    """Print what products of the models' kinds take alone, operands already in their format."""
    rows = {"square": (size, size), "wide": (size, 4 * size), "tall": (4 * size, size)}
    print(f"\n{'product of':>24}  {'fp32':>10} {'bf16→bf16':>10} {'bf16→fp32':>10} {'fp16→fp16':>10}")
    wait: Any = jax.block_until_ready
    for low, high in rows.values():
        a, b = jnp.ones((size, low)), jnp.ones((low, high))
        forms: dict[str, Any] = {
            "fp32": (jnp.float32, jnp.float32),
            "bf16→bf16": (Low, Low),
            "bf16→fp32": (Low, jnp.float32),
            "fp16→fp16": (jnp.float16, jnp.float16),
        }
        runs = {}
        for name, (operands, result) in forms.items():
            run = jax.jit(lambda x, y, result=result: jnp.matmul(x, y, preferred_element_type=result))
            given = a.astype(operands), b.astype(operands)
            runs[name] = lambda run=run, given=given: wait(run(*given))
        times = alternate(runs, seconds=seconds / len(rows))
        shown = " ".join(f"{times[name] * 1e3:8.3f}ms" for name in forms)
        print(f"{f'{size}×{low} and {low}×{high}':>24}  {shown}")


if __name__ == "__main__":
    fix_allocator()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0, help="of steps, per model")
    parser.add_argument("--plan-seconds", type=float, default=20.0, help="for timing operations, per plan")
    parser.add_argument("--plans", type=Path, help="a folder to keep plans in: a second run need not make them")
    parser.add_argument("--products", action="store_true", help="time single products, and no model")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.products:
        products(given.size, given.seconds)
        raise SystemExit
    for chosen in given.model:
        if given.quick:
            compare(chosen, 32, 0.5, 3.0)
        else:
            compare(chosen, given.size, given.seconds, given.plan_seconds, given.plans)
