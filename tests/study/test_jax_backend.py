"""Training runs of a study in JAX: reproducible, rounded where the formats say so, undisturbed by looking at them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax

from castwise.errors import StudyError
from castwise.policy import Policy
from castwise.study import study
from castwise.study._random import seed_all
from castwise.study.arms import Arm
from castwise.study.jax_backend import JaxBackend
from castwise.study.protocol import TaskSpec, describe, load_task
from castwise.study.records import Failure, Interval

KNOWN = Path(__file__).parent / "known"
ARMS = {
    "fp32": Arm("fp32", Policy.preset("float32")),
    "bf16": Arm("bf16", Policy.preset("bfloat16")),
    "fp16": Arm("fp16", Policy.preset("float16")),
    "restless": Arm("restless", Policy.load(KNOWN / "restless.toml")),
}


def known(name: str) -> TaskSpec:
    return load_task(f"{KNOWN / 'jax_tasks.py'}:{name}")


class Line:
    """A straight line, so small that compiling it takes no time."""

    framework, metric, direction = "jax", "squared error", "lower"

    def model(self, seed: int) -> Any:
        return {"w": jnp.ones(4)}

    def optimizer(self, model: Any) -> Any:
        return optax.sgd(0.1)

    def batches(self, seed: int) -> Any:
        return [np.full((2, 4), 0.05, np.float32)]

    def loss(self, model: Any, batch: Any) -> Any:
        return jnp.square(batch @ model["w"]).mean()

    def evaluate(self, model: Any) -> Any:
        return jnp.square(model["w"]).sum()


@pytest.fixture
def line() -> Callable[..., TaskSpec]:
    """The description of ``Line`` with some of its methods replaced."""

    def make(**methods: Any) -> TaskSpec:
        return describe(type("Line", (Line,), methods)(), spelled="line")

    return make


@pytest.fixture
def awkward() -> Iterator[JaxBackend]:
    found = JaxBackend(known("Awkward"), threads=1)
    with found.session():
        yield found


def timeless(interval: Interval) -> str:
    """An interval without its wall-clock time; as text, since NaN differs from itself."""
    return repr(replace(interval, seconds=0.0))


@pytest.mark.parametrize("arm", ["fp32", "restless"])
def test_a_run_continued_from_any_interval_is_the_undisturbed_run_bit_for_bit(awkward: JaxBackend, arm: str) -> None:
    whole = awkward.start(ARMS[arm], 1, 30)
    whole.evaluate()
    saved, expected = [whole.save()], []
    for _ in range(3):
        expected.append(timeless(whole.advance(10)[0]))
        saved.append(whole.save())
    if arm == "restless":
        assert any("skipped=0" not in interval for interval in expected)  # else the scale is not restless
    for kept in (0, 2):
        seed_all(123)  # whatever the process did before it is resumed
        resumed = awkward.start(ARMS[arm], 1, 30)
        resumed.load(saved[kept])
        assert [timeless(resumed.advance(10)[0]) for _ in range(3 - kept)] == expected[kept:]
        assert resumed.save() == saved[-1]


def test_every_arm_starts_from_the_same_weights_and_sees_the_same_batches() -> None:
    seen: dict[str, list[Any]] = {}
    for name in ("fp32", "bf16"):
        run = JaxBackend(known("Awkward"), threads=1).start(ARMS[name], 2, 10)
        seen[name] = [*jax.tree.leaves(run.params), *(leaf for _ in range(9) for leaf in run._next_batch())]
    assert all(np.array_equal(a, b) for a, b in zip(seen["fp32"], seen["bf16"], strict=True))


def test_looking_at_a_run_does_not_change_it(awkward: JaxBackend) -> None:
    run = awkward.start(ARMS["restless"], 0, 30)
    run.advance(5)
    before = run.save()
    run.evaluate()
    run._direction()
    assert run.save() == before


def test_fp32_agrees_with_itself_and_narrower_formats_agree_less() -> None:
    directions = {}
    for name in ("fp32", "bf16"):
        run = JaxBackend(known("Overflow"), threads=1).start(ARMS[name], 0, 10)
        interval, ending = run.advance(10)
        assert ending is None and run.emulated == (name == "bf16")
        directions[name] = interval.direction
        assert run.memory["optimizer"] >= 2 * run.memory["weights"] > 0 and run.memory["activations"] > 0
    assert directions["fp32"] == pytest.approx(1.0, abs=1e-6)
    assert 0.9 < directions["bf16"] < directions["fp32"] - 1e-7


def test_no_rounding_is_left_out_where_operations_are_joined(line: Callable[..., TaskSpec]) -> None:
    x = np.random.default_rng(0).random((64, 4), np.float32)
    bf16 = ml_dtypes.bfloat16
    y = x.astype(bf16).astype(np.float64).sum(1).astype(bf16)
    each = ((y * y) * (y * y)).astype(np.float32)  # NumPy rounds every operation
    once = (y.astype(np.float32) ** 4).astype(bf16).astype(np.float32)
    assert (each != once).sum() > 5

    def evaluate(self: Any, model: Any) -> Any:
        y = x @ model["w"]
        return ((y * y) * (y * y) == each).sum()

    run = JaxBackend(line(evaluate=evaluate), threads=1).start(ARMS["bf16"], 0, 1)
    assert run.evaluate().metric == len(x)


def test_a_bad_step_is_skipped_and_told_and_the_scale_falls(line: Callable[..., TaskSpec]) -> None:
    batches = [np.full((2, 4), value, np.float32) for value in (0.05, np.inf)]
    spec = line(batches=lambda self, seed: batches)
    run = JaxBackend(spec, threads=1).start(ARMS["fp16"], 0, 2)
    first, _ = run.advance(1)
    kept = run.params["w"]
    second, _ = run.advance(1)
    assert np.array_equal(kept, run.params["w"])
    assert (first.skipped, second.skipped) == (0, 1) and math.isnan(second.grad_norms[0])
    assert second.scale == first.scale / 2


@pytest.mark.parametrize(("arm", "failure"), [("fp32", Failure.NON_FINITE), ("fp16", Failure.STALLED)])
def test_gradients_that_stay_infinite_end_the_run_as_a_result(
    line: Callable[..., TaskSpec], arm: str, failure: Failure
) -> None:
    spec = line(loss=lambda self, model, batch: jnp.exp(1e3 * (batch @ model["w"])).mean())
    interval, ending = JaxBackend(spec, threads=1).start(ARMS[arm], 0, 100).advance(100)
    assert ending is not None and ending.failure is failure and interval.step == ending.step < 100


def test_gradients_are_clipped_by_their_unscaled_norm(line: Callable[..., TaskSpec]) -> None:
    moved = {}
    for name in ("fp32", "fp16"):
        run = JaxBackend(line(clip_norm=0.01), threads=1).start(ARMS[name], 0, 1)
        run.advance(1)
        moved[name] = float(jnp.linalg.norm(run.params["w"] - 1.0))
    assert list(moved.values()) == pytest.approx([1e-3, 1e-3], rel=1e-3)


class Named(Line):
    """An embedding, a norm and a head, by what they compute."""

    def model(self, seed: int) -> Any:
        return {"table": jnp.ones((5, 4)) * jnp.arange(4.0), "mix": jnp.eye(4), "out": jnp.ones((4, 2))}

    def batches(self, seed: int) -> Any:
        return [np.array([1, 2, 3])]

    def loss(self, model: Any, batch: Any) -> Any:
        with jax.named_scope("body"):
            with jax.named_scope("words"):
                h = model["table"][batch]
            with jax.named_scope("mix"):
                h = jnp.tanh(h @ model["mix"])
            with jax.named_scope("scale"):
                h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-5)
        with jax.named_scope("out"):
            return jnp.square(h @ model["out"]).mean()


@pytest.mark.parametrize(("layers", "head"), [({}, "out"), ({"head": ["*.mix"]}, "body.mix")])
def test_layers_are_classified_by_what_they_compute_or_as_the_task_says(layers: Any, head: str) -> None:
    spec = describe(type("Named", (Named,), {"layers": layers})(), spelled="named")
    found = {layer.path: layer.kind for layer in JaxBackend(spec).layers()}
    assert found["body.words"] == "embedding" and found["body.scale"] == "norm"
    assert [path for path, kind in found.items() if kind == "head"] == [head]


def test_the_layer_that_overflows_is_the_one_that_is_blamed() -> None:
    blames = JaxBackend(known("Overflow"), threads=1).blame(ARMS["fp16"], 0, None)
    assert [blame.path for blame in blames if blame.overflow > 0] == ["first"]
    assert blames[0].path == "first" and sum(blame.noise for blame in blames) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"model": lambda self, seed: {"n": 3}}, "without a floating-point array"),
        ({"model": lambda self, seed: {"w": jnp.ones(4, jnp.bfloat16)}}, "Return them in float32"),
        ({"optimizer": lambda self, model: "adam"}, "optax.adamw"),
        ({"loss": lambda self, model, batch: batch @ model["w"]}, "shape (2,)"),
        ({"loss": lambda self, model, batch: 1.0}, "gives a float"),
        ({"loss": lambda self, model, batch: model["nothing"]}, "a training step failed with KeyError"),
        ({"evaluate": lambda self, model: float(model["w"].sum())}, "without float"),
        ({"evaluate": lambda self, model: model["w"]}, "Return one number"),
        ({"scheduler": lambda self, optimizer, steps: None}, "schedule of optax"),
    ],
)
def test_a_task_that_breaks_the_protocol_is_told_where(
    line: Callable[..., TaskSpec], methods: dict[str, Any], said: str
) -> None:
    with pytest.raises(StudyError) as caught:
        JaxBackend(line(**methods), threads=1).start(ARMS["bf16"], 0, 1).advance(1)
    assert said in str(caught.value) and "line" in str(caught.value)


def test_weights_that_jax_does_not_keep_so_are_refused(line: Callable[..., TaskSpec]) -> None:
    arm = Arm("kahan", Policy(format="bfloat16", weights="kahan"))
    with pytest.raises(StudyError, match="'kahan'"):
        JaxBackend(line()).start(arm, 0, 1)


def test_a_task_that_needs_mantissa_is_unsafe_in_bf16_and_cured_by_its_first_layer(tmp_path: Path) -> None:
    task = f"{KNOWN / 'jax_tasks.py'}:Mantissa"
    found = study(task, precisions=["bf16"], out=tmp_path, report=False, remedy=True)
    verdict = found["verdict"]
    assert verdict["status"]["bf16"] == "unsafe"
    assert verdict["remedies"] == {"bf16": "bf16+guilty-fp32"}
    cure = Policy.from_toml(found["arms"]["bf16+guilty-fp32"]["policy"])
    assert [rule.match for rule in cure.layers][:1] == ["first"]
    assert found["settings"]["jax"] == jax.__version__
