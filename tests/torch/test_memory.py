"""Memory of a step, predicted from fake tensors: against what torch's profiler saw a real step allocate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from castwise.cli import main
from castwise.errors import CastwiseError
from castwise.torch import Amp
from castwise.torch.memory import StorageCount, Workload, largest, predict


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 64), Block(64), Block(64), nn.Linear(64, 64, bias=False))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


TEXT = Workload(
    gpt, lambda b, s: (torch.randint(0, 64, (b, s or 16)), torch.randint(0, 64, (b, s or 16))), cross_entropy, adamw
)
MLP = Workload(
    lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
    lambda b, _s: (torch.randn(b, 64), torch.randint(0, 10, (b,))),
    cross_entropy,
    adamw,
)


def measured(work: Workload, policy: str, batch: int, seq: int | None, weights: str) -> int:
    """The peak of two real steps by torch's records of allocations, with what was there before."""
    model = work.build()
    if weights != "auto":
        model = model.to(torch.bfloat16)
    data = work.batch(batch, seq)
    now = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers(), *data))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        amp = Amp(model, work.optimizer(model), policy, weights=weights)
        for _ in range(2):
            with amp:
                loss = work.loss(model, data)
            amp.step(loss)
            del loss
    peak = now
    events = [e for e in records.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


CONVNET = Workload(
    lambda: nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 256, 10),
        ),
    ),
    lambda b, _s: (torch.randn(b, 3, 16, 16), torch.randint(0, 10, (b,))),
    cross_entropy,
    adamw,
)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


LSTM = Workload(
    Recurrent,
    lambda b, s: (torch.randn(b, s or 16, 64), torch.randint(0, 10, (b,))),
    cross_entropy,
    adamw,
)
CLONED = Workload(
    lambda: nn.Sequential(
        nn.Embedding(64, 64),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 256, batch_first=True, dropout=0.0), 2),
        nn.Linear(64, 64),
    ),
    TEXT.batch,
    cross_entropy,
    adamw,
)


@pytest.mark.parametrize(
    ("steps", "samples", "width", "hidden"),
    [(32, 16, 64, 256), (8, 4, 64, 64), (33, 7, 64, 512), (20, 5, 300, 100), (16, 16, 512, 64), (24, 6, 40, 72)],
)
def test_onednns_lstm_keeps_the_workspace_that_is_counted(steps: int, samples: int, width: int, hidden: int) -> None:
    def workspace() -> int:
        x, state = torch.randn(steps, samples, width), torch.zeros(samples, hidden)
        weights = [torch.randn(4 * hidden, n) for n in (width, hidden)] + [torch.randn(4 * hidden)] * 2
        flags = (False, [], 2, hidden, 1, True, False, False, True)  # forwards, no batch sizes, an LSTM of one layer
        return torch.ops.aten.mkldnn_rnn_layer(x, *weights, state, state, *flags)[3].nbytes

    with FakeTensorMode(), StorageCount():
        counted = workspace()
    assert counted == pytest.approx(workspace(), abs=10 * 4096)  # buffers begin on pages


@pytest.mark.parametrize(
    ("work", "policy", "weights"),
    [
        (TEXT, "float32", "auto"),
        (CLONED, "float32", "auto"),
        (CONVNET, "float32", "auto"),
        (CONVNET, "bfloat16", "auto"),
        (LSTM, "float32", "auto"),
        (LSTM, "bfloat16", "auto"),
        (TEXT, "bfloat16", "auto"),
        (TEXT, "bfloat16", "split"),
        (MLP, "bfloat16", "auto"),
        (MLP, "bfloat16", "master"),
    ],
    ids=[
        "gpt fp32",
        "cloned layers",
        "convnet fp32",
        "convnet bf16",
        "lstm fp32",
        "lstm bf16",
        "gpt bf16",
        "gpt split",
        "mlp bf16",
        "mlp master",
    ],
)
def test_the_predicted_peak_is_the_measured_one(work: Workload, policy: str, weights: str) -> None:
    predicted = predict(work, policy, batch=8, seq=32, weights=weights)
    assert predicted.peak == pytest.approx(measured(work, policy, 8, 32, weights), rel=0.05)


def test_each_kind_of_memory_is_what_it_must_be() -> None:
    count = sum(p.numel() for p in MLP.build().parameters())
    use = predict(MLP, "float32", batch=4)
    assert (use.parameters, use.kept, use.gradients) == (4 * count, 0, 4 * count)
    assert use.optimizer == pytest.approx(8 * count, rel=1e-3)
    split = predict(MLP, "bfloat16", batch=4, weights="split", narrow_gradients=True, optimizer_state="bfloat16")
    assert (split.parameters, split.gradients) == (2 * count, 2 * count)
    assert split.kept == pytest.approx(2 * count, rel=1e-3)
    assert split.optimizer == pytest.approx(4 * count, rel=1e-3)


def test_8_bit_state_is_counted_as_what_it_is() -> None:
    pytest.importorskip("torchao.optim")
    work = Workload(lambda: nn.Linear(256, 256, bias=False), MLP.batch, lambda m, b: m(b[0]).square().mean(), adamw)
    work = replace(work, batch=lambda b, _s: (torch.randn(b, 256),))
    use = predict(work, "bfloat16", batch=4, weights="split", optimizer_state="8bit")
    assert use.optimizer == pytest.approx(2 * 256 * 256 * (1 + 4 / 256), rel=0.03)


def test_a_step_in_16_bits_peaks_at_least_a_third_below_float32() -> None:
    low = predict(TEXT, "bfloat16", batch=64, weights="stochastic", native=True)
    assert low.peak < predict(TEXT, "float32", batch=64).peak * 2 / 3


def test_activations_grow_with_the_batch_and_nothing_else_does() -> None:
    small, large = (predict(TEXT, "bfloat16", batch=b, native=True) for b in (8, 16))
    assert large.parameters == small.parameters and large.optimizer == small.optimizer
    assert 1.7 < large.activations / small.activations < 2.0  # casts of weights stay


def test_a_model_that_looks_at_values_is_refused_with_a_reason() -> None:
    work = Workload(
        MLP.build, MLP.batch, lambda m, b: m(b[0]).sum() if b[0].sum().item() > 0 else m(b[0]).mean(), adamw
    )
    with pytest.raises(CastwiseError, match="looks at values"):
        predict(work, batch=2)


def test_no_memory_is_held_after_the_count() -> None:
    count = StorageCount()
    with count:
        x = torch.ones(1000)
        y = x.view(10, 100)[2:]  # a view owns nothing
        assert count.now == 4000
        z = y + 1
        assert count.now == 4000 + 3200
        del x, y
        assert count.now == 3200
    del z
    assert count.now == 0 and count.peak == 7200


@pytest.mark.parametrize("room", [99, 100, 157, 1000, 10**6])
def test_the_largest_that_fits_fits_and_is_the_largest_to_3_percent(room: int) -> None:
    def peak(n: int) -> int:
        return 90 + 10 * n + n * n // 7

    found = largest(peak, room)
    assert found == 0 or peak(found) <= room
    assert peak(found + max(1, found // 16) + 1) > room


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("weights", ["auto", "split"])
def test_checkpointing_and_accumulation_cast_no_weight_twice(checkpointed: bool, weights: str) -> None:
    model = gpt() if weights == "auto" else gpt().to(torch.bfloat16)
    table, *blocks, head = model
    amp = Amp(model, adamw(model), "bfloat16", weights=weights, accumulate=3)

    def loss(batch: Any) -> torch.Tensor:
        x = table(batch[0])
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return F.cross_entropy(head(x).flatten(0, -2).float(), batch[1].flatten())

    made = []
    for _ in range(6):
        with amp:
            value = loss(TEXT.batch(2, 8))
        amp.step(value)
        made.append(amp._cache.casts_made)
    first = made[0]
    assert first >= 9  # the matrices; in bfloat16 they are widened here, where products are emulated
    assert made[:3] == [first] * 3  # recomputed and accumulated from the casts of the first micro-batch
    assert made[3:] == [2 * first] * 3 or made[3:] == [first] * 3  # anew, or refreshed by the step


# ---- the command -----------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(self.table(tokens))

    def example_inputs(self):
        return torch.zeros(1, 8, dtype=torch.long)
"""


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return f"{path}:Text"


def test_the_command_compares_precisions(model_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", model_file, "--batch", "4", "--seq", "16", "--device", "a100"]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines() if line[:2] in ("fp", "bf")]
    assert rows == ["fp32", "fp16", "bf16"] and "4 samples, 16 positions each" in out


def test_the_command_finds_the_largest_batch_and_says_what_a_mode_cannot(
    model_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--weights", "split", "--precisions", "fp16,bf16", "--largest", "batch", "--device", "t4"]
    assert main(["memory", model_file, "--batch", "1", *options]) == 0
    out = capsys.readouterr().out
    assert '"split" keeps the lower half' in out
    assert int(next(line for line in out.splitlines() if line.startswith("bf16")).split()[-1]) > 1000


def test_the_command_names_what_is_wrong(model_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", model_file, "--batch", "0"]) == 1
    assert "--batch" in capsys.readouterr().err
    assert main(["memory", model_file, "--batch", "1", "--precisions", "bf61"]) == 1
    assert "bf61" in capsys.readouterr().err
    assert main(["memory", "digits", "--batch", "2", "--seq", "16"]) == 1
    assert "no dimension of positions" in capsys.readouterr().err
