"""The package as a whole: cheap to import, free of frameworks, and clear about what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import castwise
from castwise import MissingExtraError
from castwise._extras import require

PACKAGE = Path(castwise.__file__).parent
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
CORE = {"castwise", "numpy", "scipy", "ml_dtypes"}
FRAMEWORKS = ("torch", "jax", "jaxlib", "keras", "tensorflow", "onnx", "onnxruntime", "flax", "sklearn", "matplotlib")
FRONT_ENDS = [
    name for name in ("torch", "jax", "keras", "tensorflow", "onnx") if (PACKAGE / name / "__init__.py").is_file()
]
NEUTRAL = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__"))
IMPORT_SECONDS = 0.5


def output_of(done: subprocess.CompletedProcess[str]) -> object:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_castwise_imports_nothing_beyond_its_core_dependencies(
    run_python: RunPython,
) -> None:
    loaded = output_of(
        run_python("""
        import json, sys
        before = set(sys.modules)
        import castwise
        print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
    """)
    )
    assert isinstance(loaded, list)
    assert "castwise" in loaded
    assert set(loaded) <= CORE | set(sys.stdlib_module_names)


def test_importing_castwise_takes_under_half_a_second(run_python: RunPython) -> None:
    code = """
        import json, time
        start = time.perf_counter()
        import castwise
        print(json.dumps(time.perf_counter() - start))
    """
    seconds = [output_of(run_python(code)) for _ in range(5)]
    assert statistics.median(seconds) < IMPORT_SECONDS  # type: ignore[type-var]


IMPORT_ALL_NEUTRAL = f"""
import importlib, json, sys
for name in {NEUTRAL!r}:
    importlib.import_module("castwise." + name)
print(json.dumps(sorted(set({FRAMEWORKS!r}) & set(sys.modules))))
"""


def test_every_neutral_module_imports_with_only_the_core_dependencies_installed(run_python: RunPython) -> None:
    beyond_core = f"name not in {CORE!r} and name not in sys.stdlib_module_names"
    assert output_of(run_python(IMPORT_ALL_NEUTRAL, hidden=beyond_core)) == []


def test_every_neutral_module_imports_no_framework_where_all_are_installed(run_python: RunPython) -> None:
    assert output_of(run_python(IMPORT_ALL_NEUTRAL)) == []


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_front_end_without_its_framework_says_which_extra_to_install(name: str, run_python: RunPython) -> None:
    code = f"""
        import castwise
        try:
            import castwise.{name}
        except castwise.MissingExtraError as error:
            print(error)
    """
    done = run_python(code, hidden=f"name in {FRAMEWORKS!r}")
    assert done.returncode == 0, done.stderr
    assert f"'{name}', which is not installed" in done.stdout
    assert f"pip install 'castwise[{name}]'" in done.stdout


def test_a_study_without_its_packages_says_in_one_line_which_extra_to_install(run_python: RunPython) -> None:
    code = """
        from castwise.cli import main
        sys.exit(main(["study", "digits"]))
    """
    done = run_python(code, hidden=f"name in {FRAMEWORKS!r}")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert "pip install 'castwise[" in done.stderr


def test_require_returns_the_module_and_tells_a_missing_one_from_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "castwise_test_broken.py").write_text("import castwise_test_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert require("json", extra="torch") is json
    with pytest.raises(MissingExtraError, match=r"castwise\[torch\]"):
        require("castwise_test_absent", extra="torch")
    with pytest.raises(ModuleNotFoundError) as caught:
        require("castwise_test_broken", extra="torch")
    assert not isinstance(caught.value, MissingExtraError)


@pytest.mark.parametrize("name", castwise.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(castwise, name) is not None
    assert name in dir(castwise)


def test_public_names_are_listed_once_and_others_are_refused() -> None:
    assert sorted(castwise.__all__) == sorted([*castwise._HOME, "__version__"])
    with pytest.raises(AttributeError, match="no attribute 'autocats'"):
        _ = castwise.autocats


def test_the_installed_version_and_its_types_are_those_of_the_source() -> None:
    assert importlib.metadata.version("castwise") == castwise.__version__
    assert (PACKAGE / "py.typed").is_file()
