"""Load what a command line names as ``path/to/file.py:Name``.

Several commands take a user's own model or task this way. The rules live here once, so that each command says the
same thing about a missing file, a misspelt name or a file that fails while it is imported.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from castwise.errors import CastwiseError, did_you_mean

__all__ = ["LoadError", "build_model", "files_behind", "is_object_spec", "load_object", "split_spec"]


_ANY_SEED = 0  # where a model is only looked at, its initial values do not matter


class LoadError(CastwiseError, ValueError):
    """A ``file.py:Name`` could not be loaded; the message names the file and the object."""


def is_object_spec(text: str) -> bool:
    """Whether ``text`` is meant as ``file.py:Name``, and not as the name of something built in.

    A path without ``:Name`` counts too, so that forgetting the name is told as such and not as an unknown task.
    """
    path, colon, _ = text.rpartition(":")
    return text.endswith(".py") or (bool(colon) and path.endswith(".py"))


def split_spec(spec: str) -> tuple[Path, str]:
    """Split ``path/to/file.py:Name`` into the path and the name.

    The last colon divides, so that a drive letter in front stays in the path. Raises ``LoadError`` where either
    half is missing.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name or not path.endswith(".py"):
        raise LoadError(f"{spec!r} does not say what to load. Write path/to/file.py:Name, for example model.py:Net.")
    return Path(path).expanduser(), name


def load_object(spec: str) -> object:
    """Import the file of ``path/to/file.py:Name`` and return the object of that name.

    The file is executed as a module of its own. While it runs its directory comes first on ``sys.path``, as with
    ``python file.py``, so that it can import the files beside it; afterwards ``sys.path`` is as before. Loading the
    same file twice executes it once. ``Name`` may be dotted (``Outer.inner``).

    Raises:
        LoadError: no such file, no such name in it, or the file itself failed (the original error is chained).
    """
    path, name = split_spec(spec)
    value: object = _load_module(path, spec)
    for step, part in enumerate(name.split(".")):
        if not hasattr(value, part):
            where = f"{path}" if step == 0 else f"{'.'.join(name.split('.')[:step])} of {path}"
            public = [word for word in dir(value) if not word.startswith("_")]
            raise LoadError(
                f"{where} defines no {part!r} (asked for {spec!r}).{did_you_mean(part, public)} "
                f"Name a class, function or object that the file defines at its top level."
            )
        value = getattr(value, part)
    return value


def files_behind(path: Path) -> list[Path]:
    """The file, and those of its folder that it imports by name, at any place in it, and they in turn."""
    path = path.resolve()
    found: list[Path] = []
    waiting = [path]
    while waiting:
        file = waiting.pop()
        found.append(file)
        waiting += [x for x in sorted(_imported(file, path.parent)) if x not in found and x not in waiting]
    return sorted(found)


def _imported(file: Path, root: Path) -> set[Path]:
    """The files under `root` that the import statements of a file name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        names: list[str] = []
        home = root
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = file.parents[node.level - 1] if node.level else root
            base = f"{node.module}." if node.module else ""
            names = [base + alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                place = home.joinpath(*parts[:end])
                found |= {x for x in (place.with_name(f"{place.name}.py"), place / "__init__.py") if x.is_file()}
    return {x.resolve() for x in found if x.resolve().is_relative_to(root)}


def build_model(value: object, spec: str = "") -> object:
    """Return the model that a loaded object stands for.

    Accepts a model (anything with ``named_modules``), a class or function that takes no argument and returns one, and
    an object or class with a method ``model()`` or ``model(seed)`` (a study task). ``spec`` is only named in errors.

    Raises:
        LoadError: nothing of that kind, or building it failed (the original error is chained).
    """
    label = repr(spec) if spec else repr(value)
    try:
        if isinstance(value, type) or (callable(value) and not _is_model(value) and not hasattr(value, "model")):
            value = value()
        if not _is_model(value) and callable(getattr(value, "model", None)):
            method = value.model  # type: ignore[attr-defined]
            value = method(_ANY_SEED) if _takes_argument(method) else method()
    except Exception as error:
        raise LoadError(
            f"{label} could not be built without arguments: {type(error).__name__}: {error}. "
            f"Point to a function that takes no argument and returns the model."
        ) from error
    if not _is_model(value):
        raise LoadError(
            f"{label} gave a {type(value).__name__}, not a torch.nn.Module. Name a module class, a module, a function "
            f"without arguments that returns one, or an object with a method model()."
        )
    return value


def _takes_argument(method: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # some callables written in C tell nothing
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters)


def _is_model(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "named_modules", None))


def _module_name(path: Path) -> str:
    return f"_castwise_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def _load_module(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise LoadError(f"There is no file {path} (asked for {spec!r}). Give the path from the current directory.")
    path = path.resolve()
    module_name = _module_name(path)
    known = sys.modules.get(module_name)
    if known is not None:
        return known
    recipe = importlib.util.spec_from_file_location(module_name, path)
    if recipe is None or recipe.loader is None:
        raise LoadError(f"{path} cannot be imported as Python (asked for {spec!r}). Give a file that ends in .py.")
    module = importlib.util.module_from_spec(recipe)
    # Registered before it runs: dataclasses and pickle look a class's module up in sys.modules.
    sys.modules[module_name] = module
    directory = str(path.parent)
    sys.path.insert(0, directory)
    try:
        recipe.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, Exception):
            raise LoadError(
                f"{path} failed while it was imported (asked for {spec!r}): {type(error).__name__}: {error}. "
                f"Run `python {path.name}` in its directory to see the whole traceback."
            ) from error
        raise
    finally:
        if directory in sys.path:
            sys.path.remove(directory)
    return module
