"""Formats that the machine has no arithmetic for: exact values, the format's own dtype, forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

from castwise.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, NumberFormat, round_to_nearest
from castwise.policy import Policy
from castwise.torch import Amp, _recurrent, _rules, autocast, emulation
from castwise.torch.emulation import Arithmetic, arithmetic, round_fp8, round_tf32

LOW = {torch.float16: FP16, torch.bfloat16: BF16}
both = pytest.mark.parametrize("dtype", list(LOW), ids=["fp16", "bf16"])


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """`force(True)`: every format is native from here on; `force(False)`: none is."""

    def clear() -> None:
        arithmetic.cache_clear()
        _rules.rules_for.cache_clear()

    def choose(native: bool) -> None:
        monkeypatch.setattr(emulation, "computes_natively", lambda device, fmt: native or fmt is FP32)
        clear()

    yield choose
    monkeypatch.undo()
    clear()


def on_grid(x: torch.Tensor, fmt: NumberFormat) -> np.ndarray:
    return round_to_nearest(x.detach().double().numpy(), fmt)


def assert_rounded_once(got: torch.Tensor, exact: np.ndarray, fmt: NumberFormat) -> None:
    """`got` is `exact` (float64 sums) rounded to `fmt`, but for sums so near a tie that their order decides."""
    want = round_to_nearest(exact, fmt)
    mine = got.detach().double().numpy()
    unit = np.maximum(np.abs(want), fmt.smallest_normal) * 2 * fmt.eps
    assert np.all(np.abs(mine - want) <= unit)
    assert np.mean(mine == want) > 0.97


# ---- values --------------------------------------------------------------------------------------------------------


@both
def test_a_product_and_its_gradients_equal_the_exact_reference(
    dtype: torch.dtype, force: Callable[[bool], None]
) -> None:
    force(False)
    fmt = LOW[dtype]
    torch.manual_seed(0)
    x = torch.randn(32, 48, requires_grad=True)
    w = torch.randn(24, 48, requires_grad=True)
    b = torch.randn(24, requires_grad=True)
    with autocast("cpu", dtype=dtype):
        y = F.linear(x, w, b)
    assert y.dtype is dtype
    g = torch.randn(32, 24).to(dtype)
    y.backward(g)
    X, W, B, G = (on_grid(t, fmt) for t in (x, w, b, g))
    assert_rounded_once(y, X @ W.T + B, fmt)
    assert x.grad is not None and w.grad is not None and b.grad is not None
    assert_rounded_once(x.grad, G @ W, fmt)
    assert_rounded_once(w.grad, G.T @ X, fmt)
    assert_rounded_once(b.grad, G.sum(0), fmt)


@both
def test_a_convolution_and_its_gradients_equal_the_exact_reference(
    dtype: torch.dtype, force: Callable[[bool], None]
) -> None:
    force(False)
    fmt = LOW[dtype]
    torch.manual_seed(1)
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    w = torch.randn(4, 3, 3, 3, requires_grad=True)
    with autocast("cpu", dtype=dtype):
        y = F.conv2d(x, w, padding=1)
    assert y.dtype is dtype
    g = torch.randn_like(y)
    y.backward(g)
    X, W = (torch.from_numpy(on_grid(t, fmt)).requires_grad_() for t in (x, w))
    exact = F.conv2d(X, W, padding=1)
    exact.backward(g.double())
    assert_rounded_once(y, exact.detach().numpy(), fmt)
    for mine, theirs in ((x.grad, X.grad), (w.grad, W.grad)):
        assert mine is not None and theirs is not None
        assert_rounded_once(mine, theirs.numpy(), fmt)


def test_overflow_of_an_emulated_product_is_the_formats_own(force: Callable[[bool], None]) -> None:
    force(False)
    big = torch.full((1, 4), 200.0)
    with autocast("cpu", dtype=torch.float16):
        assert torch.isinf(big @ big.T)
    with autocast("cpu", dtype=torch.bfloat16):
        assert (big @ big.T).item() == 159744.0  # 160000 on bfloat16's grid


def test_small_gradients_underflow_as_the_format_does(force: Callable[[bool], None]) -> None:
    force(False)
    w = torch.ones(2, 1, requires_grad=True)
    with autocast("cpu", dtype=torch.float16):
        y = torch.ones(1, 2) @ w
    (y.float() * 1e-9).sum().backward()
    assert w.grad is not None and torch.equal(w.grad, torch.zeros(2, 1))  # below half of the smallest subnormal


def test_tf32_rounding_equals_the_oracle_on_every_kind_of_value() -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(4096) * 10.0 ** torch.randint(-38, 38, (4096,)), torch.tensor([0.0, -0.0, 1 + 2**-11])])
    assert np.array_equal(round_tf32(x).numpy(), round_to_nearest(x.numpy(), TF32))
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert torch.equal(round_tf32(special).isnan(), special.isnan())
    assert torch.equal(round_tf32(special)[:2], special[:2])


@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e6])
def test_fp8_rounding_uses_the_formats_whole_range(fmt: NumberFormat, size: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(512) * size
    y = round_fp8(x, fmt)
    exponent = np.floor(np.log2(fmt.max / x.abs().max().item()))
    scale = np.exp2(np.clip(exponent, -126, 126))
    assert np.array_equal(y.double().numpy(), round_to_nearest(x.double().numpy() * scale, fmt) / scale)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "tf32"])
def test_narrow_inputs_are_rounded_forward_and_gradients_backward(name: str) -> None:
    """fp8 products read E4M3 values and E5M2 gradients and give bfloat16; tf32 ones read tf32 and give float32."""
    policy = Policy(format=name)
    fp8 = policy.low_format is FP8_E4M3
    torch.manual_seed(0)
    x = torch.randn(8, 32, requires_grad=True)
    w = torch.randn(16, 32, requires_grad=True)
    with autocast("cpu", policy=policy):
        y = F.linear(x, w)
    assert y.dtype is (torch.bfloat16 if fp8 else torch.float32)
    g = torch.randn_like(y)
    y.backward(g)
    forward = (lambda t: round_fp8(t, FP8_E4M3)) if fp8 else round_tf32
    backward = (lambda t: round_fp8(t, FP8_E5M2)) if fp8 else round_tf32
    X, W, G = forward(x.detach()), forward(w.detach()), backward(g.float())
    torch.testing.assert_close(y, (X @ W.T).to(y.dtype))
    torch.testing.assert_close(x.grad, G @ W)
    torch.testing.assert_close(w.grad, G.T @ X)


# ---- against torch's own kernels -------------------------------------------------------------------------------------


def _products(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x = torch.randn(4, 8, 16, requires_grad=True)
    w = torch.randn(16, 16, requires_grad=True)
    k = torch.randn(6, 4, 3, requires_grad=True)
    with autocast("cpu", dtype=dtype):
        a = F.linear(x, w)
        b = torch.bmm(a, a.transpose(1, 2)) / 16
        c = F.conv1d(x.transpose(0, 1).reshape(8, 4, 16), k)
        d = F.scaled_dot_product_attention(a[None], a[None], a[None])
        e = torch.einsum("bij,kj->bik", x, w)
    outputs = [a, b, c, d, e]
    assert all(t.dtype is dtype for t in outputs)
    sum(t.float().square().mean() for t in outputs).backward()  # type: ignore[union-attr]
    return [t.detach().float() for t in (*outputs, x.grad, w.grad, k.grad) if t is not None]


@both
def test_native_and_emulated_products_agree(dtype: torch.dtype, force: Callable[[bool], None]) -> None:
    force(True)
    native = _products(dtype)
    force(False)
    emulated = _products(dtype)
    for ours, theirs in zip(emulated, native, strict=True):
        size = theirs.abs().max().item()
        assert (ours - theirs).abs().max().item() <= 4 * LOW[dtype].eps * size


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)).mean(1)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 2)),
    "convnet": lambda: nn.Sequential(
        nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 2)
    ),
    "attention": _Attention,
    "lstm": _Recurrent,
}


def _losses(build: Callable[[], nn.Module], policy: str, steps: int = 12) -> list[float]:
    torch.manual_seed(0)
    model = build()
    amp = Amp(model, torch.optim.AdamW(model.parameters(), 3e-3), policy)
    x, y = torch.randn(16, 6, 16), torch.randint(0, 2, (16,))
    losses = []
    for _ in range(steps):
        with amp:
            loss = F.cross_entropy(model(x), y)
        amp.step(loss)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", list(MODELS))
def test_models_train_alike_in_emulated_and_native_bf16(name: str, force: Callable[[bool], None]) -> None:
    force(True)
    native = _losses(MODELS[name], "bfloat16")
    force(False)
    emulated = _losses(MODELS[name], "bfloat16")
    exact = _losses(MODELS[name], "float32")
    apart = max(abs(a - b) for a, b in zip(native, emulated, strict=True))
    assert apart < 0.02, (native, emulated)
    assert emulated[-1] < emulated[0]
    assert emulated != exact  # the format was there


# ---- recurrent layers ------------------------------------------------------------------------------------------------

CELLS: dict[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}


@pytest.mark.parametrize("form", ["batch", "batch_first", "unbatched", "packed"])
@pytest.mark.parametrize(
    "name,options",
    [
        ("lstm", {}),
        ("lstm", {"bidirectional": True, "bias": False}),
        ("lstm", {"proj_size": 3, "bidirectional": True}),
        ("gru", {"bidirectional": True}),
        ("gru", {"bias": False}),
        ("rnn_tanh", {"bidirectional": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_steps_run_one_by_one_are_torchs_own_layer(name: str, options: dict[str, object], form: str) -> None:
    """In float32, where nothing is rounded between steps, both give the same numbers."""
    torch.manual_seed(0)
    layer = CELLS[name](5, 7, num_layers=2, batch_first=form == "batch_first", **options)
    x = torch.randn(4, 3, 5)
    given = pack_padded_sequence(x, [4, 2, 1]) if form == "packed" else x[:, 0] if form == "unbatched" else x
    want = layer(given)
    ours = _recurrent.stepwise(name, Arithmetic(FP32, torch.float32, emulated=True))
    assert ours is not None
    original = torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh

    class Replace(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return ours(*args) if func in original else func(*args, **(kwargs or {}))

    with Replace():
        got = layer(given)
    compared = 0
    for a, b in zip(tree_leaves(want), tree_leaves(got), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b)
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize("name", list(CELLS))
def test_the_recurrent_state_is_rounded_at_every_step(name: str, force: Callable[[bool], None]) -> None:
    """One call over the whole sequence is what step-by-step calls with a stored state are, up to the order of sums."""
    force(False)
    torch.manual_seed(0)
    layer = CELLS[name](8, 16)
    x = torch.randn(20, 2, 8)
    with autocast("cpu", dtype=torch.float16), torch.no_grad():
        whole, _ = layer(x)
        state, parts = None, []
        for t in range(20):
            y, state = layer(x[t : t + 1], state)
            parts.append(y)
    assert whole.dtype is torch.float16
    stored = torch.cat(parts)
    assert (whole == stored).float().mean() > 0.95
    torch.testing.assert_close(whole, stored, rtol=0, atol=2 * FP16.eps)


def test_emulated_recurrent_gradients_agree_with_float32(force: Callable[[bool], None]) -> None:
    force(False)
    torch.manual_seed(0)
    layer = nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 10, 8)
    gradients = []
    for enabled in (False, True):
        layer.zero_grad()
        with autocast("cpu", dtype=torch.float16, enabled=enabled):
            out, _ = layer(x)
        out.float().square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None]))
    exact, emulated = gradients
    assert (exact - emulated).norm() < 5e-3 * exact.norm()
    assert not torch.equal(exact, emulated)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "tf32"])
def test_recurrent_layers_take_narrow_inputs_too(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.GRU(8, 16)
    x = torch.randn(5, 2, 8)
    want, _ = layer(x)
    with autocast("cpu", policy=Policy(format=name, ops={"gru": "low"})):  # 8 bits are too few for the catalogue
        got, _ = layer(x)
    got.float().sum().backward()
    assert layer.weight_hh_l0.grad is not None and layer.weight_hh_l0.grad.isfinite().all()
    assert 0 < (got.float() - want).abs().max() < (0.2 if name != "tf32" else 2e-3)


# ---- what it says, and what it costs ---------------------------------------------------------------------------------


def test_results_say_emulated(force: Callable[[bool], None]) -> None:
    for native in (True, False):
        force(native)
        model = nn.Linear(2, 1)
        amp = Amp(model, torch.optim.SGD(model.parameters(), 0.1), "bfloat16")
        with amp:
            loss = model(torch.ones(1, 2)).sum()
        assert amp.step(loss).emulated is not native
        assert amp.emulated is not native


def test_an_emulated_step_costs_about_as_much_as_a_float32_step(force: Callable[[bool], None]) -> None:
    """benchmarks/emulation.py measures it (1.5 times at most); a scalar fallback would be tens of times slower."""
    force(False)
    steps: dict[str, Callable[[], object]] = {}
    for policy in ("float32", "float16"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
        amp = Amp(model, torch.optim.SGD(model.parameters(), 1e-3), policy)
        x = torch.randn(256, 512)

        def step(amp: Amp = amp, model: nn.Module = model, x: torch.Tensor = x) -> None:
            with amp:
                loss = model(x).square().mean()
            amp.step(loss)

        steps[policy] = step
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(9):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    assert statistics.median(times["float16"]) < 5 * statistics.median(times["float32"])
