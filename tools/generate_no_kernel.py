"""Find out which ops torch computes in fp32 but not in bf16 or fp16, and write it to ``catalogue_kernels.toml``.

Formats are decided before an op runs, so what a device cannot compute has to be known beforehand. For the CPU every
op of torch's own op database, and those of ``OTHER_SAMPLES``, is really called on small inputs, forward and backward,
in fp32 and in each 16-bit format: an op that works in fp32 and fails in 16 bits has no kernel there. For CUDA, which
this need not run on, the database's declarations count, read as for a GPU of compute capability 9.0 or later.

    python tools/generate_no_kernel.py            # measure (about a minute) and rewrite the file
    python tools/generate_no_kernel.py --check    # measure and compare; exit status 1 where the file is out of date
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.testing._internal import common_cuda
from torch.utils._pytree import tree_leaves, tree_map

from castwise._catalogue_data import MEASURED_FORMATS
from castwise._files import write_text
from castwise.catalogue import DEVICE_KINDS, Catalogue, OpClass, OpEntry, load_catalogue, torch_base_name

FILE = Path(__file__).resolve().parent.parent / "src" / "castwise" / "catalogue_kernels.toml"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLES_PER_OP = 24
SECONDS_PER_OP = 6.0  # enough for several samples of the slowest op; no op may hold up the others

# Nothing to measure: what these make or answer does not depend on the format of their inputs, or no kernel is involved.
UNMEASURED = frozenset({OpClass.CREATE, OpClass.QUERY, OpClass.CAST, OpClass.CONTROL, OpClass.COMMUNICATION})
# Of the op database: `masked.` is Python over other ops, `jiterator` compiles kernels at run time on CUDA alone.
SKIPPED = ("masked.", "jiterator")

Gaps = dict[str, dict[str, set[str]]]  # device kind -> format -> entry names
Call = Callable[..., Any]


def _x(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, requires_grad=True)


def other_samples() -> dict[str, tuple[Call, tuple[Any, ...]]]:
    """Ops that the database has no entry for: entry name -> (function, inputs in fp32)."""
    weights = [_x(16, 4), _x(16, 4), _x(16), _x(16)]
    gates = [_x(12, 4), _x(12, 4), _x(12), _x(12)]
    plain = [_x(4, 4), _x(4, 4), _x(4), _x(4)]
    flags = (True, 1, 0.0, False, False, False)
    image, volume = _x(1, 2, 6, 6), _x(1, 2, 4, 4, 4)
    spatial = {"1d": _x(1, 2, 6), "2d": image, "3d": volume}
    samples: dict[str, tuple[Call, tuple[Any, ...]]] = {
        "lstm": (torch.lstm, (_x(3, 2, 4), [_x(1, 2, 4), _x(1, 2, 4)], weights, *flags)),
        "gru": (torch.gru, (_x(3, 2, 4), _x(1, 2, 4), gates, *flags)),
        "rnn_tanh": (torch.rnn_tanh, (_x(3, 2, 4), _x(1, 2, 4), plain, *flags)),
        "rnn_relu": (torch.rnn_relu, (_x(3, 2, 4), _x(1, 2, 4), plain, *flags)),
        "lstm_cell": (torch.lstm_cell, (_x(2, 4), [_x(2, 4), _x(2, 4)], *weights)),
        "gru_cell": (torch.gru_cell, (_x(2, 4), _x(2, 4), *gates)),
        "rnn_tanh_cell": (torch.rnn_tanh_cell, (_x(2, 4), _x(2, 4), *plain)),
        "rnn_relu_cell": (torch.rnn_relu_cell, (_x(2, 4), _x(2, 4), *plain)),
        "conv_tbc": (torch.conv_tbc, (_x(5, 2, 3), _x(3, 3, 4), _x(4))),
        "chain_matmul": (torch.chain_matmul, (_x(2, 3), _x(3, 4), _x(4, 2))),
        "_addmm_activation": (torch._addmm_activation, (_x(4), _x(3, 5), _x(5, 4))),
        "col2im": (F.fold, (_x(1, 8, 9), (4, 4), (2, 2))),
        "affine_grid": (F.affine_grid, (_x(1, 2, 3), [1, 2, 4, 4])),
        "_weight_norm": (torch._weight_norm, (_x(4, 3), _x(4, 1))),
        "norm_except_dim": (torch.norm_except_dim, (_x(4, 3),)),
        "frobenius_norm": (torch.frobenius_norm, (_x(3, 3), [0, 1])),
        "nuclear_norm": (torch.nuclear_norm, (_x(3, 3),)),
        "gumbel_softmax": (F.gumbel_softmax, (_x(3, 4),)),
        "binomial": (torch.binomial, (torch.full((3,), 4.0), torch.rand(3))),
        "poisson": (torch.poisson, (torch.rand(3),)),
        "_segment_reduce": (lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([2, 3])), (_x(5, 2),)),
        "fake_quantize_per_tensor_affine": (torch.fake_quantize_per_tensor_affine, (_x(3), 0.1, 0, -8, 7)),
        "embedding_renorm": (torch.embedding_renorm_, (torch.rand(4, 3) * 9, torch.tensor([0, 2]), 1.0, 2.0)),
        "fill_diagonal": (lambda x: x.clone().fill_diagonal_(2.0), (_x(3, 3),)),
        "index_fill": (lambda x: x.index_fill(0, torch.tensor([1]), 2.0), (_x(3, 3),)),
        "lobpcg": (lambda x: torch.lobpcg(x @ x.mT, k=1), (torch.rand(6, 6),)),
        "sparse_mm": (lambda x, y: torch.sparse.mm(x.to_sparse(), y), (torch.eye(3), _x(3, 3))),
    }
    for dims, x in spatial.items():
        samples[f"lp_pool{dims}"] = (getattr(F, f"lp_pool{dims}"), (x, 2.0, 2))
        samples[f"reflection_pad{dims}" if dims != "3d" else "reflection_pad2d"] = (
            lambda x, n=int(dims[0]): F.pad(x, [1, 1] * n, mode="reflect"),
            (x,),
        )
        samples[f"replication_pad{dims}"] = (lambda x, n=int(dims[0]): F.pad(x, [1, 1] * n, mode="replicate"), (x,))
    modes = {
        "upsample_nearest": ("1d", "2d", "3d"),
        "_upsample_nearest_exact": ("1d", "2d", "3d"),
        "upsample_linear": ("1d",),
        "upsample_bilinear": ("2d",),
        "upsample_bicubic": ("2d",),
        "upsample_trilinear": ("3d",),
    }
    for op, kinds in modes.items():
        mode = op.removeprefix("_").removeprefix("upsample_").replace("_", "-")
        for dims in kinds:
            samples[op + dims] = (lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode), (spatial[dims],))
    for op in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
        mode = "bilinear" if "bilinear" in op else "bicubic"
        smooth: Call = lambda x, mode=mode: F.interpolate(x, scale_factor=0.5, mode=mode, antialias=True)  # noqa: E731
        samples[op] = (smooth, (image,))
    return samples


# ---- measuring -------------------------------------------------------------------------------------------------------


def _as_format(value: Any, dtype: torch.dtype) -> Any:
    """Fresh leaves for one call: fp32 tensors in ``dtype``, all else as it is; fp32 named as an argument likewise."""
    if value is torch.float32:
        return dtype
    if not isinstance(value, torch.Tensor):
        return value
    fresh = value.detach().to(dtype) if value.dtype is torch.float32 else value.detach().clone()
    return fresh.requires_grad_(value.requires_grad)


def _runs(call: Call, inputs: Any, keywords: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the op computes its result and, where it has one, its gradient."""
    args, kwargs = tree_map(lambda value: _as_format(value, dtype), (inputs, keywords))
    torch.default_generator.manual_seed(0)  # torch.manual_seed would note a traceback for every kind of device
    try:
        results = [r for r in tree_leaves(call(*args, **kwargs)) if isinstance(r, torch.Tensor) and r.requires_grad]
        if results:
            dense = (r if r.layout is torch.strided else r.to_dense() for r in results)
            total = torch.stack([(r.abs() if r.is_complex() else r).float().sum() for r in dense]).sum()
            torch.autograd.backward(total)
    except Exception:  # whatever a missing kernel raises: NotImplementedError, RuntimeError, ValueError, AssertionError
        return False
    return True


def _failing(calls: Iterable[tuple[Call, Any, dict[str, Any]]]) -> set[str]:
    """The formats in which some sample fails that works in fp32."""
    failing: set[str] = set()
    start = time.monotonic()
    for call, inputs, keywords in calls:
        if not _runs(call, inputs, keywords, torch.float32):
            continue
        failing |= {fmt for fmt in DTYPES if fmt not in failing and not _runs(call, inputs, keywords, DTYPES[fmt])}
        if len(failing) == len(DTYPES) or time.monotonic() - start > SECONDS_PER_OP:
            break
    return failing


def database() -> list[Any]:
    """Torch's op database, declaring for CUDA what a GPU of compute capability 9.0 or later has."""
    for name in dir(common_cuda):
        if name.startswith("SM") and name.endswith("OrLater"):
            setattr(common_cuda, name, True)
    from torch.testing._internal.common_methods_invocations import op_db  # reads those flags when it is imported

    return [op for op in op_db if not op.name.startswith(SKIPPED)]


def _variants(catalogue: Catalogue, ops: Iterable[Any]) -> dict[str, list[tuple[OpEntry, Any]]]:
    """The database's ops by torch name: an op may be there several times, with samples of different kinds."""
    variants: dict[str, list[tuple[OpEntry, Any]]] = collections.defaultdict(list)
    for op in ops:
        entry = catalogue.lookup("torch", op.name)
        if entry is not None and entry.op_class not in UNMEASURED:
            variants[torch_base_name(op.name)].append((entry, op))
    return variants


def _samples(op: Any, count: int) -> Iterator[tuple[Call, Any, dict[str, Any]]]:
    """At most ``count`` samples, spread over all of them: the first ones may all be empty tensors."""
    torch.default_generator.manual_seed(0)
    # Not `sample_inputs`: it wraps this for torch's own tests, and for that inspects the call stack at every op.
    found = list(op.sample_inputs_func(op, "cpu", torch.float32, op.supports_autograd))
    for sample in found[:: -(-len(found) // count) or 1]:
        yield op, (sample.input, *sample.args), sample.kwargs


def measure_cpu(catalogue: Catalogue, ops: Iterable[Any], count: int = SAMPLES_PER_OP) -> dict[str, set[str]]:
    """Format -> entry names without a kernel on this CPU. An op lacks a kernel where each of its variants fails."""
    gaps: dict[str, set[str]] = {fmt: set() for fmt in MEASURED_FORMATS}
    for same in _variants(catalogue, ops).values():
        in_fp32 = [op for _, op in same if torch.float32 in op.dtypes]
        failing = [_failing(_samples(op, count)) for op in in_fp32]
        for fmt in set.intersection(*failing) if failing else ():
            gaps[fmt].add(same[0][0].name)
    for name, (call, inputs) in other_samples().items():
        entry = catalogue.lookup("torch", name)
        assert entry is not None, f"{name} has no catalogue entry"
        for fmt in _failing([(call, inputs, {})]):
            gaps[fmt].add(entry.name)
    return gaps


def declared_cuda(catalogue: Catalogue, ops: Iterable[Any]) -> dict[str, set[str]]:
    """Format -> entry names without a kernel on CUDA, forward or backward, as the database declares."""
    gaps: dict[str, set[str]] = {fmt: set() for fmt in MEASURED_FORMATS}
    for same in _variants(catalogue, ops).values():
        in_fp32 = [op for _, op in same if torch.float32 in op.dtypesIfCUDA]
        for fmt, dtype in DTYPES.items():
            if in_fp32 and not any(_declared(op, dtype) for op in in_fp32):
                gaps[fmt].add(same[0][0].name)
    return gaps


def _declared(op: Any, dtype: torch.dtype) -> bool:
    backward = op.supported_backward_dtypes("cuda")
    return dtype in op.dtypesIfCUDA and (dtype in backward or torch.float32 not in backward)


def measure(count: int = SAMPLES_PER_OP) -> Gaps:
    """All gaps, by device kind and format."""
    catalogue, ops = load_catalogue(), database()
    return {"cpu": measure_cpu(catalogue, ops, count), "cuda": declared_cuda(catalogue, ops)}


# ---- the file --------------------------------------------------------------------------------------------------------


def recorded(catalogue: Catalogue) -> Gaps:
    """What the file in the package says."""
    entries = catalogue.entries.values()
    return {
        kind: {fmt: {e.name for e in entries if e.lacks_kernel(fmt, kind)} for fmt in MEASURED_FORMATS}
        for kind in DEVICE_KINDS
    }


def to_toml(gaps: Gaps) -> str:
    lines = [
        "# Ops that torch computes in fp32 but not in this 16-bit format, forward or backward, by kind of device.",
        "# Written by tools/generate_no_kernel.py: run it again, do not edit. cpu: each op called; cuda: as torch's",
        "# own op database declares for compute capability 9.0 or later.",
        "",
        f'torch = "{torch.__version__.partition("+")[0]}"',
    ]
    for kind, by_format in gaps.items():
        lines += ["", f"[{kind}]"]
        for fmt, names in by_format.items():
            lines += [f'{fmt} = """', *sorted(names), '"""']
    return "\n".join(lines) + "\n"


def differences(found: Gaps, known: Gaps) -> list[str]:
    """One line for each op in which the measurement and the file disagree."""
    lines = []
    for kind, by_format in found.items():
        for fmt, names in by_format.items():
            lines += [f"{kind} {fmt} {name}: no kernel, but not recorded" for name in sorted(names - known[kind][fmt])]
            lines += [f"{kind} {fmt} {name}: recorded, but it works" for name in sorted(known[kind][fmt] - names)]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch warns about deprecated ops, which are measured like the others
    torch.set_num_threads(1)
    found = measure()
    if not options.check:
        print(f"wrote {write_text(FILE, to_toml(found))}")
        return 0
    stale = differences(found, recorded(load_catalogue()))
    print("\n".join(stale) or f"{FILE.name} holds for torch {torch.__version__}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
