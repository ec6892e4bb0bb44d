"""Run every op of torch's own op database inside a region: does it raise where plain float32 does not, and is it right?

`python tests/torch/op_sweep.py` prints the table; `test_op_sweep.py` asserts it.
"""

from __future__ import annotations

import collections
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal import common_utils
from torch.utils._pytree import tree_flatten, tree_map

from castwise.torch import autocast

SAMPLES = 3  # per op: the first ones cover the usual call forms
KINDS = ("fp32", "low", "mixed")
# Products of ill-conditioned matrices: rounding them is legitimate, and the answer then differs by any amount.
ILL_CONDITIONED = {"linalg.pinv.singular", "pinv_singular", "linalg_pinv_singular"}
# Random, uninitialised or environment-dependent results, which have no value to compare.
NO_VALUE = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "rand_like", "randn"),
    *("randn_like", "randint_like", "randint", "uniform", "normal", "normal.number_mean", "cauchy", "exponential"),
    *("geometric", "log_normal", "bernoulli", "multinomial", "nn.functional.dropout", "nn.functional.dropout2d"),
    *("nn.functional.dropout3d", "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout"),
    "nn.functional.rrelu",
    *("nn.functional.feature_alpha_dropout.with_train", "nn.functional.feature_alpha_dropout.without_train"),
    *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "rand_like", "pca_lowrank"),
    *("svd_lowrank", "nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"),
}  # fmt: skip


@dataclass
class Result:
    """What became of one (op, kind of input)."""

    op: str
    kind: str
    raised: str = ""
    worst: float = 0.0  # error in units of the format's tolerance
    rules: collections.Counter[str] = field(default_factory=collections.Counter)


def op_infos() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes]


def _low(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype is torch.float32 else x, tree)


def _mixed(tree: Any, dtype: torch.dtype) -> Any:
    turn = itertools.count()

    def alternate(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype is torch.float32:
            return x.to(dtype) if next(turn) % 2 else x
        return x

    return tree_map(alternate, tree)


def _floats(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor) and x.dtype is torch.float32]


def _fresh(tree: Any) -> Any:
    return tree_map(
        lambda x: x.detach().clone() if isinstance(x, torch.Tensor) and x.layout is torch.strided else x, tree
    )


def _call(op: Any, tree: Any) -> Any:
    torch.default_generator.manual_seed(0)
    first, args, kwargs = tree
    return op.op(first, *args, **kwargs)


# Inputs ask for the name of the running test, which is looked for in the source of each frame of the stack: under
# pytest that takes longer than all ops.
common_utils.extract_test_fn = lambda: None


def sweep(op: Any, dtype: torch.dtype) -> Iterator[Result]:
    """The results of one op for each kind of input in `dtype`."""
    try:
        samples = list(itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), SAMPLES))
    except Exception:  # a generator that needs a library or a device that is not here
        return
    kinds: dict[str, Callable[[Any], Any]] = {
        "fp32": lambda t: t,
        "low": lambda t: _low(t, dtype),
        "mixed": lambda t: _mixed(t, dtype),
    }
    for kind, convert in kinds.items():
        result = Result(op.formatted_name, kind)
        ran = False
        for sample in samples:
            tree = (sample.input, tuple(sample.args), dict(sample.kwargs))
            if kind == "mixed" and len(_floats(tree)) < 2:
                continue
            given = convert(tree)
            rounded = tree_map(
                lambda x: x.to(torch.float32) if isinstance(x, torch.Tensor) and x.dtype is dtype else x, given
            )
            try:
                want = _call(op, _fresh(rounded))
            except Exception:  # plain float32 cannot do it on these values either
                continue
            ran = True
            log: list[Any] = []
            try:
                with autocast("cpu", dtype=dtype, log=log):
                    got = _call(op, _fresh(given))
            except Exception as error:
                result.raised = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                break
            result.rules.update(event.rule for event in log)
            if op.name not in NO_VALUE and op.formatted_name not in ILL_CONDITIONED:
                result.worst = max(result.worst, _distance(got, want, dtype))
        if ran:
            yield result


def _distance(got: Any, want: Any, dtype: torch.dtype) -> float:
    """Largest error of any floating output, in units of 8 ulp of the format relative to the output's largest value."""
    worst = 0.0
    unit = 8 * torch.finfo(dtype).eps
    for a, b in zip(tree_flatten(got)[0], tree_flatten(want)[0], strict=True):
        if (
            not isinstance(a, torch.Tensor)
            or not a.is_floating_point()
            or a.layout is not torch.strided
            or not a.numel()
        ):
            continue
        if a.shape != b.shape:
            return float("inf")
        a, b = a.detach().double(), b.detach().double()
        same = (a == b) | (a.isnan() & b.isnan())
        beyond = b.abs() > torch.finfo(dtype).max
        ok = same | (beyond & ((a.sign() == b.sign()) | a.isnan()))
        finite = b[b.isfinite() & ~beyond]
        size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        error = torch.where(ok, 0.0, (a - b).abs() / (unit * size))
        worst = max(worst, float(torch.nan_to_num(error, nan=1e9, posinf=1e9).max()))
    return worst


def main() -> None:
    torch.set_num_threads(1)
    total: collections.Counter[str] = collections.Counter()
    for dtype in (torch.bfloat16, torch.float16):
        for op in op_infos():
            for r in sweep(op, dtype):
                total[f"{dtype} pairs"] += 1
                if r.raised:
                    total[f"{dtype} raised"] += 1
                    print(f"{dtype} {r.kind:5} {r.op}: {r.raised}")
                elif r.worst > 1:
                    total[f"{dtype} off"] += 1
                    print(f"{dtype} {r.kind:5} {r.op}: off by {r.worst:.3g} tolerances")
                for rule in r.rules:
                    total[f"{dtype} ran {rule}"] += 1
    for key, count in sorted(total.items()):
        print(f"{key:32} {count}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
