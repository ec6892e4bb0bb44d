"""Which kernel of several that compute the same is the fastest here, in fp32 and where it is native in bf16.

    python benchmarks/kernels.py

Three choices: a linear layer with oneDNN's own weight layout and gelu inside, against `linear` and `gelu`; convolutions
on channels-last memory, against contiguous; attention as one fused kernel, against batched products and a softmax.
Forward alone where inference is compared, forward and backward else. Alternating, medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from _models import ResNet
from _timing import alternate, fix_allocator, table
from torch.nn import functional as F

from castwise.hardware import detect

Run = Callable[[], object]


def linear(tokens: int, inside: int, outside: int, dtype: torch.dtype) -> dict[str, Run]:
    """A linear layer and gelu, forward."""
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((tokens, inside), (outside, inside), (outside,)))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
    fused = torch.ops.mkldnn._linear_pointwise

    def plain() -> torch.Tensor:
        return F.gelu(F.linear(x, weight, bias))

    def prepacked() -> torch.Tensor:
        return fused(x, packed, bias, "gelu", [], "none")

    with torch.no_grad():
        assert torch.allclose(plain().float(), prepacked().float(), atol=1e-2)
    return {"linear, gelu": torch.no_grad()(plain), "packed, fused": torch.no_grad()(prepacked)}


def convolutions(dtype: torch.dtype) -> dict[str, Run]:
    """A small residual network, forward and backward."""
    x = torch.randn(16, 3, 32, 32).to(dtype)

    def of(layout: torch.memory_format) -> Run:
        model = ResNet(32).to(dtype).to(memory_format=layout)
        given = x.contiguous(memory_format=layout)
        return lambda: model(given).sum().backward()

    return {"contiguous": of(torch.contiguous_format), "channels last": of(torch.channels_last)}


def attention(dtype: torch.dtype) -> dict[str, Run]:
    """Causal attention of 4 sequences, 8 heads, 128 tokens, 64 wide, forward and backward."""
    q, k, v = (torch.randn(4, 8, 128, 64).to(dtype).requires_grad_() for _ in range(3))
    mask = torch.zeros(128, 128, dtype=dtype).masked_fill(torch.ones(128, 128, dtype=torch.bool).triu(1), -1e4)

    def fused() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    def decomposed() -> None:
        (torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=64**-0.5).softmax(-1) @ v.flatten(0, 1)).sum(
        ).backward()  # fmt: skip

    return {"fused": fused, "decomposed": decomposed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="per comparison")
    args = parser.parse_args()
    fix_allocator()
    formats = [torch.float32, *([torch.bfloat16] if detect("cpu").native("bf16") else [])]
    rows = []
    for dtype in formats:
        cases = {f"linear 512 to 2048, {n} tokens": linear(n, 512, 2048, dtype) for n in (1, 64)}
        cases |= {f"linear 2048 to 512, {n} tokens": linear(n, 2048, 512, dtype) for n in (1, 64)}
        cases |= {"ResNet 32, 16 images": convolutions(dtype), "attention 4x8x128x64": attention(dtype)}
        for name, runs in cases.items():
            times = alternate(runs, seconds=args.seconds)
            first, second = times.values()
            labels = " / ".join(reversed(list(times)))
            rows.append(
                [name, str(dtype).removeprefix("torch."), labels, f"{1e3 * first:.2f}", f"{second / first:.2f}"]
            )
    print(f"{torch.get_num_threads()} threads\n")
    print(table(["kernels", "format", "second / first", "ms of the first", "ratio"], rows))


if __name__ == "__main__":
    main()
