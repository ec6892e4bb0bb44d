"""Claims of the catalogue that torch's kernels can be asked about: missing kernels, promotion, wide sums."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from castwise.catalogue import Mixed, Rule, default_rule, load_catalogue

CATALOGUE = load_catalogue()
BF16, FP32 = torch.bfloat16, torch.float32
N = 4096  # a bf16 sum of ones stops at 256

# ---- kernels ---------------------------------------------------------------------------------------------------------


def test_no_op_lacks_a_kernel_without_being_recorded(kernels_tool, op_db):
    """With few samples, so that it is quick: what fails here must be in the file. The tool's --check takes them all."""
    found = {"cpu": kernels_tool.measure_cpu(CATALOGUE, op_db, count=2)}
    unrecorded = [
        line for line in kernels_tool.differences(found, kernels_tool.recorded(CATALOGUE)) if "not recorded" in line
    ]
    assert unrecorded == [], "run tools/generate_no_kernel.py"


def test_recorded_cpu_gaps_that_change_a_decision_are_real(kernels_tool, op_db):
    changing = {
        (entry.name, fmt)
        for entry in CATALOGUE.entries.values()
        for fmt in ("bf16", "fp16")
        if entry.lacks_kernel(fmt, "cpu") and default_rule(entry, fmt) != Rule.HIGH
    }
    assert ("avg_pool3d", "bf16") in changing and ("quantile", "fp16") in changing
    entries = [CATALOGUE.entries[name] for name, _ in changing]
    ops = [op for op in op_db if CATALOGUE.lookup("torch", op.name) in entries]
    found = kernels_tool.measure_cpu(CATALOGUE, ops)
    assert changing <= {(name, fmt) for fmt in found for name in found[fmt]}


def test_cuda_gaps_are_what_torchs_op_database_declares(kernels_tool, op_db):
    assert kernels_tool.declared_cuda(CATALOGUE, op_db) == kernels_tool.recorded(CATALOGUE)["cuda"]


def test_kernels_were_measured_with_the_torch_that_is_installed():
    installed = torch.__version__.partition("+")[0]
    assert CATALOGUE.kernels_measured_with == installed, "run tools/generate_no_kernel.py"


# ---- mixed formats ---------------------------------------------------------------------------------------------------


def _mixed_dtypes(op: Any) -> list[set[torch.dtype]]:
    """The dtypes that calls gave in which the first floating tensor has another format than the rest."""
    results = []
    for sample in itertools.islice(op.sample_inputs_func(op, "cpu", FP32, False), 6):
        flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        floats = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.dtype is FP32]
        if len(floats) < 2 or any(flat[i].dim() == 0 for i in floats):  # torch lets a 0-dim tensor follow the others
            continue
        for wide in (0, 1):
            mixed = [x.detach() if isinstance(x, torch.Tensor) else x for x in flat]
            for position, i in enumerate(floats):
                if (position == 0) != (wide == 0):
                    mixed[i] = mixed[i].to(BF16)
            inputs, args, kwargs = tree_unflatten(mixed, spec)
            outputs = tree_leaves(op(inputs, *args, **kwargs))
            results.append({x.dtype for x in outputs if isinstance(x, torch.Tensor) and x.is_floating_point()})
    return results


def test_what_promotes_natively_does_and_gives_the_widest(op_db):
    tried, wrong = set(), []
    for op in op_db:
        entry = CATALOGUE.lookup("torch", op.name)
        if entry is None or entry.mixed is not Mixed.NATIVE or FP32 not in op.dtypes:
            continue
        for dtypes in _mixed_dtypes(op):
            tried.add(entry.name)
            if BF16 in dtypes:
                wrong.append((entry.name, dtypes))
    assert wrong == []
    assert len(tried) > 40


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: torch.dot(a, b),
        lambda a, b: a.index_put((torch.tensor([0, 1]),), b),
        lambda a, b: a.scatter_add(0, torch.tensor([0, 1]), b),
        lambda a, b: a.index_add(0, torch.tensor([0, 1]), b),
        lambda a, b: torch.lerp(a, b, 0.5),
        lambda a, b: torch.isclose(a, b),
        lambda a, b: torch.meshgrid(a, b, indexing="ij"),
        lambda a, b: torch.heaviside(a, b),
    ],
)
def test_what_is_said_to_need_a_cast_really_does(call):
    with pytest.raises((RuntimeError, NotImplementedError)):
        call(torch.ones(2), torch.ones(2, dtype=BF16))


def test_batch_norm_reads_a_16_bit_input_beside_fp32_parameters():
    x = torch.randn(8, 3, dtype=BF16)
    mean, var, weight, bias = torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3)
    assert F.batch_norm(x, mean, var, weight, bias, training=True).dtype is BF16
    assert mean.dtype is FP32 and mean.abs().sum() > 0


# ---- sums ------------------------------------------------------------------------------------------------------------


def _ones() -> torch.Tensor:
    return torch.ones(N, dtype=BF16)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


def _alternating() -> torch.Tensor:
    return torch.tensor([1.0, 3.0], dtype=BF16).repeat(N // 2)


WIDE = {
    "sum": (lambda: _ones().sum(), N),
    "nansum": (lambda: _ones().nansum(), N),
    "mean": (lambda: _ones().mean(), 1),
    "var": (lambda: _alternating().var(correction=0), 1),
    "std": (lambda: _alternating().std(correction=0), 1),
    "trace": (lambda: torch.eye(1024, dtype=BF16).trace(), 1024),
    "trapezoid": (lambda: torch.trapezoid(_ones()), N),
    "linalg_vector_norm": (lambda: torch.linalg.vector_norm(_ones(), 1), N),
    "dist": (lambda: torch.dist(_ones(), _zeros(N)), 64),
    "dot": (lambda: _ones().dot(_ones()), N),
    "linalg_vecdot": (lambda: torch.linalg.vecdot(_ones(), _ones()), N),
    "matmul": (lambda: _ones()[None] @ _ones()[:, None], N),
    "mv": (lambda: torch.mv(_ones()[None], _ones()), N),
    "einsum": (lambda: torch.einsum("i,i->", _ones(), _ones()), N),
    "conv1d": (lambda: F.conv1d(_ones()[None, None], _ones()[None, None]), N),
    "bilinear": (lambda: F.bilinear(_ones()[None, :64], _ones()[None, :64], _ones().reshape(1, 64, 64)), N),
    "softmax": (lambda: _zeros(N).softmax(0).float().sum(), 1),
    "layer_norm": (lambda: F.layer_norm(_alternating(), (N,)).float().abs().mean(), 1),
    "group_norm": (lambda: F.group_norm(_alternating()[None, None], 1).float().abs().mean(), 1),
    "batch_norm": (lambda: F.batch_norm(_alternating()[:, None], None, None, training=True).float().abs().mean(), 1),
    "avg_pool2d": (lambda: F.avg_pool2d(_ones().reshape(1, 1, 64, 64), 64, divisor_override=1), N),
    "local_response_norm": (lambda: F.local_response_norm(_ones()[None, :, None], N, 1.0, 1.0, 0.0)[0, N // 2], 1),
    "mse_loss": (lambda: F.mse_loss(_ones(), _zeros(N), reduction="sum"), N),
    "l1_loss": (lambda: F.l1_loss(_ones(), _zeros(N), reduction="sum"), N),
    "nll_loss": (
        lambda: F.nll_loss(-torch.ones(N, 2, dtype=BF16), torch.zeros(N, dtype=torch.long), reduction="sum"),
        N,
    ),
    "upsample_nearest2d": (lambda: _gradient_of_upsampling("nearest"), N),
    "upsample_bilinear2d": (lambda: _gradient_of_upsampling("bilinear"), N),
}


def _gradient_of_upsampling(mode: str) -> torch.Tensor:
    x = torch.ones(1, 1, 1, 1, dtype=BF16, requires_grad=True)
    F.interpolate(x, size=(64, 64), mode=mode).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("name", WIDE)
def test_ops_said_to_accumulate_wide_do(name):
    call, expected = WIDE[name]
    assert CATALOGUE.entries[name].accumulates_wide
    assert call().item() == pytest.approx(expected, rel=2**-7)


NARROW = {
    "index_add": lambda: _zeros(1).index_add(0, torch.zeros(N, dtype=torch.long), _ones()),
    "_segment_reduce": lambda: torch.segment_reduce(_ones(), "sum", lengths=torch.tensor([N])),
    "sparse_mm": lambda: torch.sparse.mm(_ones()[None].to_sparse(), _ones()[:, None]),
    "embedding_dense_backward": lambda: torch.ops.aten.embedding_dense_backward(
        torch.ones(N, 1, dtype=BF16), torch.zeros(N, dtype=torch.long), 1, -1, False
    ),
}


@pytest.mark.parametrize("name", sorted(NARROW))
def test_ops_said_to_carry_a_narrow_sum_do_on_cpu(name):
    """Others are narrow on CUDA alone (cumsum, scatter_add by atomic adds), which this machine cannot show."""
    assert NARROW[name]().item() == 256
    assert not CATALOGUE.entries[name].accumulates_wide
