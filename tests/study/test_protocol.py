"""Tasks: what is missing is named, what is left out has a default, and the built-in ones load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from castwise._load import files_behind
from castwise.errors import StudyError
from castwise.study.protocol import BUILT_IN, Task, TaskSpec, describe, load_task

SpecOf = Callable[..., TaskSpec]
BODY = """
class Mine:
    "Learn nothing at all."
    metric, direction = "accuracy", "higher"
    def model(self, seed): ...
    def optimizer(self, model): ...
    def batches(self, seed): return [1]
    def loss(self, model, batch): ...
    def evaluate(self, model): return 0.0

class Needs(Mine):
    def __init__(self, size): ...

ready = Mine()
def build(): return Mine()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(BODY)
    return path


@pytest.mark.parametrize("name", ["Mine", "ready", "build"])
def test_a_task_is_a_class_an_object_or_a_function_in_a_file(file: Path, name: str) -> None:
    spec = load_task(f"{file}:{name}")
    assert (spec.name, spec.metric, spec.higher_is_better) == (name, "accuracy", True)
    assert spec.description == "Learn nothing at all."
    assert (spec.steps, spec.seeds, spec.margin) == (300, 5, None)
    assert isinstance(spec.task, Task)


def test_the_digest_changes_with_a_file_beside_it_that_it_imports(tmp_path: Path, file: Path) -> None:
    def digest(folder: str, layer: str) -> str:
        home = tmp_path / folder
        home.mkdir()
        (home / f"layers_{folder}.py").write_text(f"layer = {layer!r}\n\ndef width():\n    import parts_{folder}\n")
        (home / f"parts_{folder}.py").write_text("width = 4\n")
        (home / "unused.py").write_text(f"# {folder}\n")
        task = home / "task.py"
        task.write_text(f"from layers_{folder} import layer, width\n" + file.read_text())
        spec = load_task(f"{task}:Mine")
        assert [f.name for f in files_behind(task)] == [f"layers_{folder}.py", f"parts_{folder}.py", "task.py"]
        (home / f"parts_{folder}.py").write_text("width = 8\n")
        assert load_task(f"{task}:Mine").digest != spec.digest
        return spec.digest

    assert digest("one", "a") != digest("two", "b")


def test_the_digest_changes_with_the_file(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(BODY + "\n# changed\n")
    assert load_task(f"{file}:Mine").digest == load_task(f"{file}:ready").digest
    assert load_task(f"{file}:Mine").digest != load_task(f"{other}:Mine").digest


def test_a_class_that_needs_arguments_is_explained(file: Path) -> None:
    with pytest.raises(StudyError, match="cannot be made without arguments"):
        load_task(f"{file}:Needs")


def test_a_class_that_fails_while_it_is_made_says_where(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("class Mine:\n    def __init__(self):\n        len(3)\n")
    with pytest.raises(StudyError, match=r"making it failed with TypeError: .* \(train.py, line 3\)"):
        load_task(f"{file}:Mine")


def test_missing_methods_are_named() -> None:
    with pytest.raises(StudyError, match="has no method optimizer, batches, loss, evaluate"):
        describe(type("Half", (), {"model": lambda self, seed: None})())


def test_an_unknown_task_suggests_the_nearest() -> None:
    with pytest.raises(StudyError, match="Did you mean 'digits'"):
        load_task("digit")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("direction", "up", "'higher' or 'lower'"),
        ("margin", -1, "above 0"),
        ("margin", True, "above 0"),
        ("resolution", float("inf"), "above 0"),
        ("steps", 0, "at least 1"),
        ("seeds", 2.5, "whole number"),
        ("threads", 0, "at least 1"),
        ("metric", 3, "Give a str"),
        ("layers", ["head"], "mapping"),
        ("layers", {"middle": ["x"]}, "embedding, norm, head"),
        ("layers", {"head": "x"}, "lists of glob patterns"),
    ],
)
def test_attributes_out_of_range_are_refused_by_name(spec_of: SpecOf, key: str, value: object, said: str) -> None:
    with pytest.raises(StudyError, match=key) as caught:
        spec_of(**{key: value})
    assert said in str(caught.value)


def test_a_misspelt_attribute_is_told(spec_of: SpecOf, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="castwise.study"):
        spec_of(evaluate_evry=10, batch_size=3, _margins=1)
    assert [record.getMessage() for record in caplog.records if "evaluate_evry" in record.getMessage()]
    assert "evaluate_every" in caplog.text
    assert "_margins" not in caplog.text


@pytest.mark.parametrize(
    ("steps", "every", "interval"), [(300, None, 30), (7, None, 1), (95, None, 10), (50, 100, 50), (50, 7, 7)]
)
def test_evaluations_are_ten_unless_the_task_says_otherwise(
    spec_of: SpecOf, steps: int, every: int | None, interval: int
) -> None:
    assert spec_of(evaluate_every=every).interval(steps) == interval


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_tasks_keep_the_protocol(name: str) -> None:
    spec = load_task(name)
    assert spec.name == spec.spelled == name
    assert spec.margin is not None
    assert spec.description
