"""Load what a command line names as ``path/to/file.py:Name``.

Several commands take a user's own model or task this way. The rules live here once, so that each command says the
same thing about a missing file, a misspelt name or a file that fails while it is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from castwise.errors import CastwiseError, did_you_mean

__all__ = ["LoadError", "build_model", "is_object_spec", "load_object", "split_spec"]


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


def _load_module(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise LoadError(f"There is no file {path} (asked for {spec!r}). Give the path from the current directory.")
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    module_name = f"_castwise_user_{path.stem}_{digest}"
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
