"""Three ways to get between a program and its ops, measured on tiny tensors.

    python benchmarks/interception.py

Each is handed `linear` on 4 x 4 tensors: plain; a torch-function mode that only passes on, and one that casts; Python
kernels registered on the autocast key of the dispatcher; torch's own C++ autocast.
"""

from __future__ import annotations

from _timing import alternate, fix_allocator, table

fix_allocator()

from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import library  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

LOW = torch.bfloat16
CALLS = 2000
lib = library.Library("castwise_benchmark", "DEF")
lib.define("mul(Tensor x, Tensor y) -> Tensor")
lib.impl("mul", lambda x, y: torch.mul(x, y), "CPU")


def _kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return torch.ops.castwise_benchmark.mul(x.to(LOW), y.to(LOW))


class Pass(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Cast(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[a.to(LOW) for a in args], **(kwargs or {}))


def main() -> None:
    torch.set_num_threads(1)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    low_x, low_y = x.to(LOW), y.to(LOW)
    own = torch.ops.castwise_benchmark.mul

    def loop(op: Any, a: torch.Tensor, b: torch.Tensor, context: Any = None) -> Any:
        def run() -> None:
            for _ in range(CALLS):
                op(a, b)

        def inside() -> None:
            with context:
                run()

        return run if context is None else inside

    autocast = torch.autocast("cpu", dtype=LOW)
    with torch.no_grad():
        before = alternate(
            {
                "mul, 16-bit": loop(torch.mul, low_x, low_y),
                "mul, function mode": loop(torch.mul, low_x, low_y, Pass()),
                "mul, function mode that casts": loop(torch.mul, x, y, Cast()),
                "own op, 16-bit": loop(own, low_x, low_y),
                "mm, 16-bit": loop(torch.mm, low_x, low_y),
                "mm, C++ autocast (two casts)": loop(torch.mm, x, y, autocast),
            },
            seconds=10.0,
        )
        lib.impl("mul", _kernel, "AutocastCPU")
        after = alternate({"own op, Python kernel on the autocast key": loop(own, x, y, autocast)}, seconds=4.0)
    us = {name: 1e6 * s / CALLS for name, s in (before | after).items()}
    bases = {"own": "own op, 16-bit", "mm,": "mm, 16-bit", "mul": "mul, 16-bit"}
    rows = [[name, f"{value:.2f}", f"{value - us[bases[name[:3]]]:+.2f}"] for name, value in us.items()]
    print(table(["µs per call", "all", "over the plain op"], rows))


if __name__ == "__main__":
    main()
