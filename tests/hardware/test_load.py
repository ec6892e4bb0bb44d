"""``file.py:Name`` on the command line: what loads, and what each mistake is answered with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from castwise._load import LoadError, build_model, is_object_spec, load_object, split_spec

MODEL_FILE = """
import dataclasses
import beside

runs = getattr(beside, "runs", 0) + 1
beside.runs = runs

class Model:
    def named_modules(self): return []

class Needy(Model):
    def __init__(self, width): self.width = width

class Task:
    def model(self, seed): self.seed = seed; return Model()

class PlainTask:
    def model(self): return Model()

@dataclasses.dataclass
class Outer:
    class inner: value = 3

def build(): return Model()
def wrong(): return 5
ready = Model()
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("runs = 0\n")
    path = tmp_path / "model.py"
    path.write_text(MODEL_FILE)
    yield path
    sys.modules.pop("beside", None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("model.py:Net", True), ("a/b.py:Net", True), ("model.py", True), ("digits", False), ("a:b", False)],
)
def test_a_file_is_told_from_the_name_of_something_built_in(text: str, expected: bool) -> None:
    assert is_object_spec(text) is expected


def test_a_drive_letter_stays_in_the_path() -> None:
    path, name = split_spec(r"C:\models\net.py:Net")
    assert (path.name.endswith("net.py"), name) == (True, "Net")


@pytest.mark.parametrize("spec", ["net.py", "net:Net", ":Net", "net.py:", "net.txt:Net"])
def test_a_spec_without_file_or_name_is_refused_with_an_example(spec: str) -> None:
    with pytest.raises(LoadError, match=r"file\.py:Name, for example"):
        split_spec(spec)


def test_a_file_runs_once_and_may_import_what_lies_beside_it(model_file: Path) -> None:
    before = list(sys.path)
    first = load_object(f"{model_file}:runs")
    assert load_object(f"{model_file}:runs") == first == 1
    assert sys.path == before


def test_dotted_names_reach_inside(model_file: Path) -> None:
    assert load_object(f"{model_file}:Outer.inner.value") == 3


def test_a_misspelt_name_is_answered_with_the_file_and_the_nearest(model_file: Path) -> None:
    with pytest.raises(LoadError, match=r"model\.py defines no 'Modle'.*Did you mean 'Model'"):
        load_object(f"{model_file}:Modle")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"There is no file .*none\.py"):
        load_object(f"{tmp_path / 'none.py'}:Net")


def test_a_file_that_fails_is_named_with_its_own_error_and_can_be_loaded_once_mended(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(LoadError, match=r"broken\.py failed while it was imported.*ZeroDivisionError") as caught:
        load_object(f"{path}:Net")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    path.write_text("Net = 1\n")
    assert load_object(f"{path}:Net") == 1


@pytest.mark.parametrize("name", ["Model", "Task", "PlainTask", "build", "ready"])
def test_a_model_comes_of_a_class_a_function_an_object_or_a_task(model_file: Path, name: str) -> None:
    assert type(build_model(load_object(f"{model_file}:{name}"))).__name__ == "Model"


def test_what_cannot_be_built_says_what_to_point_to(model_file: Path) -> None:
    with pytest.raises(LoadError, match=r"model\.py:Needy'.*without arguments.*width"):
        build_model(load_object(f"{model_file}:Needy"), f"{model_file}:Needy")
    with pytest.raises(LoadError, match=r"gave a int, not a torch\.nn\.Module"):
        build_model(load_object(f"{model_file}:wrong"), "wrong")
