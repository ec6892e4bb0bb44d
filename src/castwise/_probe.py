"""Try every number format in one framework, and print what happened as JSON: ``python -m castwise._probe torch``.

Runs as a process of its own, for two reasons: an instruction that the processor lacks kills the process that tries it,
and frameworks do not always bear being loaded into one process together. ``doctor.py`` starts these processes and reads
what they print; what a trial is stands in ``_trial.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from castwise._trial import Array, Product, trials
from castwise.formats import FORMATS, FP8_E4M3, FP8_E5M2, TF32, NumberFormat

FRAMEWORKS = ("torch", "jax", "tensorflow", "onnxruntime")

# ---------------------------------------------------------------------------------------------------------------- torch


def probe_torch() -> dict[str, Any]:
    """What torch says of itself, and every format tried on each of its devices."""
    torch: Any = importlib.import_module("torch")
    version = torch.version
    details = {
        "cuda": version.cuda,
        "hip": version.hip,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        **_torch_cpu_says(torch),
    }
    settings = {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "TF32 in cuDNN convolutions": torch.backends.cudnn.allow_tf32,
        "TF32 in CUDA products": torch.backends.cuda.matmul.allow_tf32,
    }
    devices = ["cpu", *(kind for kind in ("cuda", "xpu", "mps", "npu") if _torch_has(torch, kind))]
    if "cuda" in devices:
        details["gpu"] = torch.cuda.get_device_name(0)
        details["is_bf16_supported"] = torch.cuda.is_bf16_supported()
        details["is_bf16_supported without emulation"] = torch.cuda.is_bf16_supported(including_emulation=False)
    found = [one for device in devices for one in _torch_trials(torch, device)]
    fallbacks = [text for device in devices for text in _autocast_fallbacks(torch, device)]
    return _report("torch", torch.__version__, details, settings, devices, found, fallbacks)


def _torch_has(torch: Any, kind: str) -> bool:
    home = torch.backends.mps if kind == "mps" else getattr(torch, kind, None)
    return home is not None and bool(home.is_available())


def _torch_cpu_says(torch: Any) -> dict[str, Any]:
    """What torch and its oneDNN report of the CPU's 16-bit arithmetic, where this version has the questions."""
    questions: dict[str, Callable[[], Any]] = {
        "oneDNN runs bf16": lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "oneDNN runs fp16": lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        "AMX": lambda: torch.cpu._is_amx_tile_supported(),
        "AVX512_BF16": lambda: torch.cpu._is_avx512_bf16_supported(),
    }
    says: dict[str, Any] = {}
    for label, ask in questions.items():
        with contextlib.suppress(AttributeError, RuntimeError):
            says[label] = bool(ask())
    return says


def _torch_trials(torch: Any, device: str) -> list[dict[str, Any]]:
    dtypes = {fmt.name: getattr(torch, fmt.long_name, torch.float32) for fmt in FORMATS.values()}

    def tensors(left: Array, right: Array, fmt: NumberFormat) -> tuple[Any, Any]:
        if fmt is TF32 and device != "cuda":
            raise NotImplementedError(f"torch offers no TF32 on {device}")
        dtype = dtypes[fmt.name]
        return torch.from_numpy(left).to(dtype).to(device), torch.from_numpy(right).to(dtype).to(device)

    def multiply(left: Any, right: Any, fmt: NumberFormat) -> Any:
        if fmt in (FP8_E4M3, FP8_E5M2):
            one = torch.ones((), device=device)
            return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return left @ right

    def matmul(left: Array, right: Array, fmt: NumberFormat) -> tuple[Array, str]:
        a, b = tensors(left, right, fmt)
        if fmt in (FP8_E4M3, FP8_E5M2):
            b = b.t().contiguous().t()  # fp8 kernels want the second factor column by column
        with _torch_tf32(torch, fmt is TF32):
            product = multiply(a, b, fmt)
        return product.double().cpu().numpy() if device != "mps" else product.float().cpu().numpy(), str(product.dtype)

    def conv2d(image: Array, filters: Array, fmt: NumberFormat) -> tuple[Array, str]:
        a, b = tensors(image, filters, fmt)
        with _torch_tf32(torch, fmt is TF32):
            out = torch.nn.functional.conv2d(a, b)
        return out.float().cpu().numpy() if device == "mps" else out.double().cpu().numpy(), str(out.dtype)

    def timed(fmt: NumberFormat, side: int) -> Callable[[], None]:
        a = torch.rand(side, side).to(dtypes[fmt.name]).to(device)
        b = a.t().contiguous().t() if fmt in (FP8_E4M3, FP8_E5M2) else a

        def run() -> None:
            with _torch_tf32(torch, fmt is TF32):
                multiply(a, b, fmt)
            if device != "cpu":
                getattr(torch, device).synchronize()

        return run

    return trials("torch", device, {"matmul": matmul, "conv2d": conv2d}, timed)


@contextlib.contextmanager
def _torch_tf32(torch: Any, on: bool) -> Iterator[None]:
    """TF32 on or off for a while: cuDNN has it on by default, which would spoil float32's trial."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _autocast_fallbacks(torch: Any, device: str) -> list[str]:
    """Formats that ``torch.autocast`` takes without an error and does not use."""
    told = []
    for name in ("float16", "bfloat16", "float8_e4m3fn"):
        dtype = getattr(torch, name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with torch.autocast(device, dtype=dtype):
                    got = (torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)).dtype
        except Exception as error:
            told.append(f"torch.autocast({device!r}, {name}) raises {type(error).__name__}")
            continue
        if got is not dtype:
            told.append(f"torch.autocast({device!r}, {name}) switches itself off with a warning: products run in {got}")
    return told


# -------------------------------------------------------------------------------------------------------- JAX, TF, ONNX


def probe_jax() -> dict[str, Any]:
    """What JAX says of itself, and every format tried on its default device."""
    import jax
    import jax.numpy as jnp

    device = jax.default_backend()
    kind = jax.devices()[0].device_kind
    highest = jax.lax.Precision.HIGHEST

    def pair(left: Any, right: Any, fmt: NumberFormat) -> tuple[Any, Any]:
        if fmt is TF32 and device not in ("gpu", "cuda"):
            raise NotImplementedError(f"JAX offers no TF32 on {device}")
        dtype = fmt.numpy_dtype
        return jnp.asarray(left.astype(dtype)), jnp.asarray(right.astype(dtype))

    def dot(a: Any, b: Any, fmt: NumberFormat) -> Any:
        precision = "tensorfloat32" if fmt is TF32 else highest if fmt.bits >= 32 else None
        wide = jnp.float32 if fmt.bits == 8 else None
        return jnp.matmul(a, b, precision=precision, preferred_element_type=wide)

    def matmul(left: Array, right: Array, fmt: NumberFormat) -> tuple[Array, str]:
        out = dot(*pair(left, right, fmt), fmt)
        return np.asarray(out).astype(np.float64), str(out.dtype)

    def conv2d(image: Array, filters: Array, fmt: NumberFormat) -> tuple[Array, str]:
        a, b = pair(image, filters, fmt)
        precision = None if fmt.bits < 32 else highest
        out = jax.lax.conv(a, b, (1, 1), "VALID", precision=precision)
        return np.asarray(out).astype(np.float64), str(out.dtype)

    def timed(fmt: NumberFormat, side: int) -> Callable[[], None]:
        a = jnp.asarray(np.random.default_rng(0).random((side, side)).astype(fmt.numpy_dtype))
        product = jax.jit(lambda x: dot(x, x, fmt))
        return lambda: product(a).block_until_ready()

    config: Any = jax.config
    settings = {
        "64-bit numbers": bool(config.jax_enable_x64),
        "default matmul precision": config.jax_default_matmul_precision or "the backend's",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # float64 that becomes float32 is reported as a fallback
        found = trials("jax", device, {"matmul": matmul, "conv2d": conv2d}, timed)
    fallbacks = [] if config.jax_enable_x64 else ["JAX turns float64 into float32 unless jax_enable_x64 is set"]
    details = {"jaxlib": importlib.import_module("jaxlib").__version__, "device": kind}
    return _report("jax", jax.__version__, details, settings, [device], found, fallbacks)


def probe_tensorflow() -> dict[str, Any]:
    """What TensorFlow says of itself, and every format tried on its default device."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    device = "gpu" if gpus else "cpu"

    def pair(left: Array, right: Array, fmt: NumberFormat) -> tuple[Any, Any]:
        if fmt is TF32 and not gpus:
            raise NotImplementedError("TensorFlow offers no TF32 on cpu")
        return tf.constant(left.astype(fmt.numpy_dtype)), tf.constant(right.astype(fmt.numpy_dtype))

    @contextlib.contextmanager
    def tf32(on: bool) -> Iterator[None]:
        before = tf.config.experimental.tensor_float_32_execution_enabled()
        tf.config.experimental.enable_tensor_float_32_execution(on)
        try:
            yield
        finally:
            tf.config.experimental.enable_tensor_float_32_execution(before)

    def matmul(left: Array, right: Array, fmt: NumberFormat) -> tuple[Array, str]:
        with tf32(fmt is TF32):
            out = tf.linalg.matmul(*pair(left, right, fmt))
        return out.numpy().astype(np.float64), out.dtype.name

    def conv2d(image: Array, filters: Array, fmt: NumberFormat) -> tuple[Array, str]:
        a, b = pair(image.transpose(0, 2, 3, 1), filters.transpose(2, 3, 1, 0), fmt)  # TF's CPU kernels: channels last
        with tf32(fmt is TF32):
            out = tf.nn.conv2d(a, b, strides=1, padding="VALID")
        return out.numpy().astype(np.float64).transpose(0, 3, 1, 2), out.dtype.name

    def timed(fmt: NumberFormat, side: int) -> Callable[[], None]:
        a = tf.constant(np.random.default_rng(0).random((side, side)).astype(fmt.numpy_dtype))

        def run() -> None:
            with tf32(fmt is TF32):
                tf.linalg.matmul(a, a).numpy()

        return run

    build = tf.sysconfig.get_build_info()
    details = {"cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version"), "gpus": len(gpus)}
    settings = {"TF32": tf.config.experimental.tensor_float_32_execution_enabled()}
    found = trials("tensorflow", device, {"matmul": matmul, "conv2d": conv2d}, timed)
    return _report("tensorflow", tf.__version__, details, settings, [device], found, [])


def probe_onnxruntime() -> dict[str, Any]:
    """What ONNX Runtime says of itself, and every format tried on its CPU provider and its first other one."""
    import onnxruntime as ort

    providers = list(ort.get_available_providers())
    helpers = importlib.util.find_spec("onnx") is not None
    fallbacks = [] if helpers else ["onnx is not installed, so nothing was tried in ONNX Runtime"]
    found: list[dict[str, Any]] = []
    accelerators = ("CUDAExecutionProvider", "ROCMExecutionProvider", "DmlExecutionProvider")
    used = ["CPUExecutionProvider", *[one for one in providers if one in accelerators][:1]] if helpers else []
    for provider in used:
        found += _onnxruntime_trials(ort, provider)
    details = {"providers": ", ".join(providers), "device": ort.get_device()}
    return _report("onnxruntime", ort.__version__, details, {}, [_plain(one) for one in used], found, fallbacks)


def _plain(provider: str) -> str:
    """``"cpu"`` for ``"CPUExecutionProvider"``, as the other frameworks name their devices."""
    return provider.removesuffix("ExecutionProvider").lower()


def _onnxruntime_trials(ort: Any, provider: str) -> list[dict[str, Any]]:
    from onnx import TensorProto, helper

    codes = {"fp64": "DOUBLE", "fp32": "FLOAT", "bf16": "BFLOAT16", "fp16": "FLOAT16"}
    codes |= {"fp8_e4m3": "FLOAT8E4M3FN", "fp8_e5m2": "FLOAT8E5M2"}

    def session(op: str, fmt: NumberFormat, *shapes: tuple[int, ...]) -> Any:
        if fmt is TF32:
            raise NotImplementedError("ONNX has no TF32 type")
        code = getattr(TensorProto, codes[fmt.name])
        # Values come and go as float64 and are cast inside: Python has no 16-bit brain floats to pass.
        double = TensorProto.DOUBLE
        nodes = [helper.make_node("Cast", [f"{name}64"], [name], to=code) for name in "ab"]
        nodes += [helper.make_node(op, ["a", "b"], ["c"]), helper.make_node("Cast", ["c"], ["c64"], to=double)]
        inputs = [helper.make_tensor_value_info(f"{n}64", double, s) for n, s in zip("ab", shapes, strict=True)]
        graph = helper.make_graph(nodes, op, inputs, [helper.make_tensor_value_info("c64", double, None)])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        return ort.InferenceSession(model.SerializeToString(), options, providers=[provider])

    def run(op: str, left: Array, right: Array, fmt: NumberFormat) -> tuple[Array, str]:
        feed = {"a64": left, "b64": right}
        return session(op, fmt, left.shape, right.shape).run(None, feed)[0], fmt.long_name

    def timed(fmt: NumberFormat, side: int) -> Callable[[], None]:
        ready = session("MatMul", fmt, (side, side), (side, side))
        values = np.random.default_rng(0).random((side, side))
        return lambda: ready.run(None, {"a64": values, "b64": values})

    products: dict[str, Product] = {
        "matmul": lambda left, right, fmt: run("MatMul", left, right, fmt),
        "conv2d": lambda left, right, fmt: run("Conv", left, right, fmt),
    }
    return trials("onnxruntime", _plain(provider), products, timed)


# --------------------------------------------------------------------------------------------------------------- report


def _report(
    name: str,
    version: str,
    details: dict[str, Any],
    settings: dict[str, Any],
    devices: list[str],
    found: list[dict[str, Any]],
    fallbacks: list[str],
) -> dict[str, Any]:
    return {
        "name": name,
        "version": version,
        "details": {key: value for key, value in details.items() if value is not None},
        "settings": settings,
        "devices": devices,
        "trials": found,
        "fallbacks": fallbacks,
    }


_PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": probe_torch,
    "jax": probe_jax,
    "tensorflow": probe_tensorflow,
    "onnxruntime": probe_onnxruntime,
}


def main(name: str) -> int:
    """Probe one framework and print the report as the last line of standard output."""
    if hasattr(os, "sched_setaffinity"):
        # One core, before the framework makes its threads: what else runs disturbs one thread less than a team of them.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(json.dumps(_PROBES[name]()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
