"""Training runs of a study in torch: reproducible, comparable between arms, undisturbed by looking at them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise._load import load_object
from castwise.errors import StudyError
from castwise.policy import Policy
from castwise.study import study
from castwise.study._torch_random import Feed, capture, seed_all, seeded
from castwise.study.arms import Arm
from castwise.study.protocol import TaskSpec, describe, load_task
from castwise.study.records import Failure, Interval
from castwise.study.torch_backend import TorchBackend, TorchRun

KNOWN = Path(__file__).parent / "known"
ARMS = {
    "fp32": Arm("fp32", Policy.preset("float32")),
    "bf16": Arm("bf16", Policy.preset("bfloat16")),
    "restless": Arm("restless", Policy.load(KNOWN / "restless.toml")),
}


@pytest.fixture
def spec() -> TaskSpec:
    return load_task(f"{KNOWN / 'awkward.py'}:Awkward")


@pytest.fixture
def backend(spec: TaskSpec) -> Iterator[TorchBackend]:
    found = TorchBackend(spec, threads=1)
    with found.session():
        yield found


def timeless(interval: Interval) -> str:
    """An interval without its wall-clock time; as text, since NaN differs from itself."""
    return repr(replace(interval, seconds=0.0))


@pytest.mark.parametrize("arm", ["fp32", "restless"])
def test_a_run_continued_from_any_interval_is_the_undisturbed_run_bit_for_bit(backend: TorchBackend, arm: str) -> None:
    whole = backend.start(ARMS[arm], 1, 60)
    whole.evaluate()
    saved, expected = [whole.save()], []
    for _ in range(6):
        expected.append(timeless(whole.advance(10)[0]))
        saved.append(whole.save())
    if arm == "restless":
        assert any("skipped=0" not in interval for interval in expected)  # else the scale is not restless
    for kept in (0, 1, 4):
        seed_all(123)  # whatever the process did before it is resumed
        resumed = backend.start(ARMS[arm], 1, 60)
        resumed.load(saved[kept])
        assert [timeless(resumed.advance(10)[0]) for _ in range(6 - kept)] == expected[kept:]
        assert_equal_states(resumed.save(), saved[-1])


def assert_equal_states(ours: bytes, theirs: bytes) -> None:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        return bool(a == b)

    first, second = (torch.load(io.BytesIO(state), weights_only=True) for state in (ours, theirs))
    for key in first:
        assert same(first[key], second[key]), key


def test_every_arm_sees_the_same_batches_and_starts_from_the_same_weights(spec: TaskSpec) -> None:
    def seen(arm: str) -> list[Tensor]:
        backend = TorchBackend(spec, threads=1)
        with backend.session():
            run = backend.start(ARMS[arm], 3, 20)
            found = [parameter.detach().clone() for parameter in run.model.parameters()]
            for _ in range(4):
                run.advance(2)
                found.append(run._recent[0])
            return found

    ours, theirs = seen("fp32"), seen("bf16")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_seeds_differ_in_weights_and_in_data(backend: TorchBackend) -> None:
    first, second = (backend.start(ARMS["fp32"], seed, 20) for seed in (0, 1))
    assert not torch.equal(first.model[0].weight, second.model[0].weight)
    assert not torch.equal(first._next_batch()[0], second._next_batch()[0])


def test_looking_at_a_run_does_not_change_it(backend: TorchBackend) -> None:
    looked_at, left_alone = (backend.start(ARMS["bf16"], 0, 20) for _ in range(2))

    def watched(run: TorchRun, look: bool) -> bytes:
        seed_all(5)
        run.advance(5)
        if look:
            run.evaluate()
            run._direction()
        run.advance(5)
        return run.save()

    assert_equal_states(watched(looked_at, True), watched(left_alone, False))


def test_fp32_agrees_with_itself_and_narrower_formats_agree_less(backend: TorchBackend) -> None:
    gaps = {}
    for name, policy in {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.items():
        run = backend.start(Arm(name, Policy.preset(policy)), 0, 20)
        gaps[name] = 1.0 - run.advance(10)[0].direction
    assert gaps["fp32"] == pytest.approx(0.0, abs=1e-12)
    assert 0 < gaps["fp16"] < gaps["bf16"] < 0.05


def test_evaluation_runs_in_the_arms_own_precision(backend: TorchBackend) -> None:
    seen: list[torch.dtype] = []
    run = backend.start(ARMS["bf16"], 0, 20)
    run.model[6].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    run.evaluate()
    assert set(seen) == {torch.bfloat16}


def test_evaluation_leaves_every_modules_mode_as_it_was(backend: TorchBackend) -> None:
    run = backend.start(ARMS["fp32"], 0, 20)
    run.model[1].eval()  # a batch norm that its user has frozen
    run.evaluate()
    assert run.model.training
    assert not run.model[1].training


def test_memory_is_counted_by_what_it_holds(backend: TorchBackend) -> None:
    run = backend.start(ARMS["fp32"], 0, 20)
    run.advance(2)
    weights = 4 * sum(parameter.numel() for parameter in run.model.parameters())
    assert run.memory["weights"] == run.memory["gradients"] == weights
    assert 2 * weights <= run.memory["optimizer"] < 2 * weights + 200  # Adam's two moments, and its step counts
    batch = 32
    assert batch * 4 * (12 + 4 * 32) < run.memory["activations"] < batch * 4 * 12 * 32


def test_a_session_leaves_torch_as_it_was(spec: TaskSpec) -> None:
    before = (torch.get_num_threads(), torch.get_rng_state())
    backend = TorchBackend(spec, threads=before[0] + 1)
    with backend.session():
        backend.start(ARMS["fp32"], 0, 20).advance(2)
        assert torch.get_num_threads() == before[0] + 1
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def task_like(spec: TaskSpec, **methods: Any) -> TaskSpec:
    return describe(type("Changed", (type(spec.task),), methods)())


def test_a_loss_that_is_no_number_ends_the_run_as_a_result(spec: TaskSpec) -> None:
    changed = task_like(spec, loss=lambda self, model, batch: model(batch[0]).sum() * math.nan)
    backend = TorchBackend(changed, threads=1)
    with backend.session():
        interval, ending = backend.start(ARMS["fp32"], 0, 60).advance(5)
        assert ending is not None
        assert (ending.failure, ending.step) == (Failure.NON_FINITE, 5)
        assert interval.skipped == 5
        assert math.isnan(interval.evaluation.metric)
        interval, ending = backend.start(ARMS["fp32"], 0, 60).advance(60)
        assert ending is not None
        assert ending.step < 60  # the check of gradients has given up long before the interval's end


def test_a_scale_at_its_floor_ends_the_run_as_a_result(spec: TaskSpec) -> None:
    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * math.inf

    changed = task_like(spec, loss=lambda self, model, batch: Explode.apply(model(batch[0]).float().square().mean()))
    backend = TorchBackend(changed, threads=1)
    with backend.session():
        _, ending = backend.start(Arm("fp16", Policy.preset("float16")), 0, 60).advance(60)
    assert ending is not None
    assert ending.failure is Failure.STALLED


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"model": lambda self, seed: "net"}, r"model\(0\) gives a str"),
        ({"model": lambda self, seed: (torch.nn.Linear(2, 2),) * 2}, r"gives a tuple.*several in one nn.ModuleDict"),
        ({"optimizer": lambda self, model: "adam"}, "gives a str. Return a torch.optim.Optimizer"),
        ({"optimizer": lambda self, model: torch.optim.LBFGS(model.parameters())}, "LBFGS.*needs no closure"),
        ({"optimizer": lambda self, model: torch.optim.SGD([torch.zeros(3)])}, "no parameter of the model"),
        ({"scheduler": lambda self, optimizer, steps: 3}, "scheduler gives 3"),
        ({"loss": lambda self, model, batch: 1.0}, "loss gives a float"),
        ({"loss": lambda self, model, batch: model(batch[0])}, r"loss gives a tensor of shape \(\d+, \d+\)"),
        ({"loss": lambda self, model, batch: model(batch[0]).sum() + 0j}, "complex64. Return a tensor with one real"),
        ({"loss": lambda self, model, batch: torch.tensor(1.0)}, "depends on no parameter that is trained"),
        ({"evaluate": lambda self, model: "good"}, "evaluate gives 'good'"),
        ({"evaluate": lambda self, model: torch.zeros(300, 2)}, r"evaluate gives a Tensor of shape \(300, 2\)"),
        ({"batches": lambda self, seed: []}, "gives no batch"),
        ({"batches": lambda self, seed: 5}, "batches failed with TypeError: 'int' object is not iterable"),
    ],
)
def test_a_task_that_breaks_the_protocol_is_told_where(spec: TaskSpec, methods: dict[str, Any], said: str) -> None:
    backend = TorchBackend(task_like(spec, **methods), threads=1)
    with backend.session(), pytest.raises(StudyError, match=said):
        run = backend.start(ARMS["fp32"], 0, 20)
        run.evaluate()
        run.advance(2)


def broken(*_: object) -> Any:
    raise KeyError("column x")


def broken_later(*_: object) -> Iterator[Any]:
    yield from ()
    raise KeyError("column x")


@pytest.mark.parametrize(
    ("method", "failing"),
    [(name, broken) for name in ("model", "optimizer", "scheduler", "batches", "loss", "evaluate", "validation")]
    + [(name, broken_later) for name in ("batches", "validation")],
)
def test_what_a_task_raises_is_told_with_the_method_and_the_line(
    spec: TaskSpec, method: str, failing: Callable[..., Any]
) -> None:
    backend = TorchBackend(task_like(spec, **{method: failing}), threads=1)
    line = failing.__code__.co_firstlineno + (2 if failing is broken_later else 1)
    said = rf"{method} failed with KeyError: 'column x' \(test_torch_backend.py, line {line}\)"
    with backend.session(), pytest.raises(StudyError, match=said) as caught:
        run = backend.start(ARMS["fp32"], 0, 20)
        run.evaluate()
        run.advance(2)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_the_backward_pass_is_the_tasks(spec: TaskSpec) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise KeyError("saved")

    changed = task_like(spec, loss=lambda self, model, batch: Broken.apply(model(batch[0]).float().square().mean()))
    backend = TorchBackend(changed, threads=1)
    with backend.session(), pytest.raises(StudyError, match="the backward pass or the optimizer's step failed"):
        backend.start(ARMS["fp32"], 0, 20).advance(1)


def test_a_feed_goes_on_over_epochs_and_makes_generators_again() -> None:
    feed = Feed(lambda seed: [1, 2, 3], 0, task="t")
    assert [feed.next() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    feed = Feed(lambda seed: iter([1, 2]), 0, task="t")
    assert [feed.next() for _ in range(5)] == [1, 2, 1, 2, 1]


def test_a_feed_draws_from_a_stream_of_its_own() -> None:
    def batches(seed: int) -> Iterator[Tensor]:
        while True:
            yield torch.rand(1)

    quiet, noisy = Feed(batches, 0, task="t"), Feed(batches, 0, task="t")
    before = torch.get_rng_state()
    ours = [quiet.next() for _ in range(5)]
    assert torch.equal(torch.get_rng_state(), before)
    theirs = []
    for _ in range(5):
        torch.rand(17)
        theirs.append(noisy.next())
    assert ours == theirs
    later = Feed(batches, 0, task="t")
    later.skip_to(3)
    assert later.next() == ours[3]


def test_a_seeded_block_restores_all_streams_after_an_error() -> None:
    before = capture()
    with pytest.raises(ZeroDivisionError), seeded(3):
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(capture()["torch"], before["torch"])
    assert capture()["python"] == before["python"]


def known(name: str) -> Any:
    """A class of `known/`, as `file:Class`."""
    file, _, task = name.partition(":")
    return load_object(f"{KNOWN / file}.py:{task}")


def test_layers_are_classified_in_the_order_they_run() -> None:
    backend = TorchBackend(describe(known("healthy:Recall")()), threads=1)
    with backend.session():
        kinds = {layer.path: layer.kind for layer in backend.layers()}
    assert kinds["embedding"] == kinds["place"] == "embedding"
    assert kinds["norm"] == "norm"
    assert kinds["head"] == "head"
    assert next(iter(kinds)) == "embedding"
    assert list(kinds)[-1] == "head"


def test_a_task_may_name_its_own_kinds_of_layers() -> None:
    task = known("healthy:Recall")()
    task.layers = {"head": ["place"], "norm": ["h*"]}
    backend = TorchBackend(describe(task), threads=1)
    with backend.session():
        kinds = {layer.path: layer.kind for layer in backend.layers()}
    assert (kinds["place"], kinds["head"]) == ("head", "norm")


@pytest.mark.parametrize(
    ("name", "fmt", "layer"), [("overflow:Overflow", "float16", "0"), ("mantissa:Mantissa", "bfloat16", "0")]
)
def test_the_layer_at_fault_is_the_one_that_is_blamed(name: str, fmt: str, layer: str) -> None:
    backend = TorchBackend(describe(known(name)()), threads=1)
    with backend.session():
        found = backend.blame(Arm("low", Policy.preset(fmt)), 0, None)
    assert found[0].path == layer
    assert (found[0].overflow > 0.1) == name.endswith("Overflow")
    assert math.fsum(blame.noise for blame in found) == pytest.approx(1.0)
    assert all(blame.overflow == 0 for blame in found[1:])


def test_a_container_is_not_blamed_for_what_its_parts_do() -> None:
    class Nested(known("overflow:Overflow")):  # type: ignore[misc]
        def model(self, seed: int = 0) -> nn.Module:
            inner = super().model(seed)
            return nn.Sequential(nn.Sequential(inner[0], inner[1]), nn.Sequential(inner[2], inner[3]))

    backend = TorchBackend(describe(Nested()), threads=1)
    with backend.session():
        found = backend.blame(Arm("low", Policy.preset("float16")), 0, None)
    assert [blame.path for blame in found if blame.overflow > 0] == ["0.0"]


def test_a_task_that_fails_in_one_precision_says_in_which(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        """
import torch

class Choosy:
    def model(self, seed): return torch.nn.Linear(2, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), 0.1)
    def batches(self, seed): return [torch.ones(4, 2)]
    def loss(self, model, batch):
        y = model(batch)
        if y.dtype is torch.float16:
            raise RuntimeError("not for Half")
        return y.float().square().mean()
    def evaluate(self, model): return self.loss(model, torch.ones(4, 2))
""",
        encoding="utf-8",
    )
    with pytest.raises(
        StudyError, match=r"RuntimeError: not for Half \(task.py, line 11\).* This was in fp16, with seed 0"
    ):
        study(f"{tmp_path / 'task.py'}:Choosy", precisions=["fp16"], steps=2, seeds=1, out=tmp_path / "out")
