"""What a task must offer to be studied, and the checks that say clearly what is missing.

A task is any object with the five methods below. It needs no base class, so that it can live in a user's own training
file::

    # train.py                                            castwise study train.py:Faces
    class Faces:
        metric, direction, margin = "accuracy", "higher", 0.01

        def model(self, seed): return ResNet18()
        def optimizer(self, model): return torch.optim.AdamW(model.parameters(), lr=1e-3)
        def batches(self, seed): return DataLoader(train_set, 64, shuffle=True)
        def loss(self, model, batch): return F.cross_entropy(model(batch[0]), batch[1])
        def evaluate(self, model): return accuracy(model, test_set)

Randomness is seeded before each call; the random numbers that ``batches`` draws are kept apart from the model's own, so
every arm sees the same samples in the same order, whatever its dropout draws.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from castwise._load import files_behind, is_object_spec, load_object, split_spec
from castwise.errors import StudyError, did_you_mean, nearest
from castwise.study.calls import calling

__all__ = ["BUILT_IN", "Task", "TaskSpec", "describe", "load_task"]

_log = logging.getLogger("castwise.study")

BUILT_IN: Mapping[str, str] = {
    "digits": "castwise.study.tasks.digits:Digits",
    "text": "castwise.study.tasks.text:Text",
}
"""Tasks that ship with Castwise: name -> module:class. Loaded when asked for, as they import a framework."""

_DEFAULT_STEPS = 300
_DEFAULT_SEEDS = 5
_DEFAULT_EVALUATIONS = 10
_DEFAULT_MIN_STEPS = 100


@runtime_checkable
class Task(Protocol):
    """The five methods of a task. ``Any`` stands for the framework's own types (``torch.nn.Module``, …).

    Optional attributes, with what they default to:

    - ``name``: the class's name; ``description``: one sentence for the report, default its docstring's first line;
    - ``metric`` ("metric") and ``direction`` ("higher" or "lower" is better; default "lower"), ``unit`` ("");
    - ``margin``: the worsening of the metric that one would accept, in the metric's units; default 2 % of what fp32
      gains by training. ``loss_margin``: the same for the validation loss;
    - ``resolution``: the smallest step of the metric, such as 1/N for an accuracy over N samples; default measured;
    - ``steps`` (300), ``seeds`` (5), ``evaluate_every`` (steps / 10), ``min_steps`` (100: fewer steps never make an
      arm safe);
    - ``clip_norm`` (None), ``accumulate`` (1), ``framework`` ("torch"; for "jax", ``jax_backend`` says how the methods
      read: parameters for a model, an optax optimizer, functions that JAX traces);
    - ``threads``: CPU threads, default the framework's; 1 for small models, which more threads only slow down;
    - ``layers``: glob patterns of layer paths by kind (``embedding``, ``norm``, ``head``), where the types do not tell.

    Optional methods: ``validation()`` -> batches on which ``loss`` gives the validation loss;
    ``scheduler(optimizer, steps)`` -> a learning-rate scheduler, stepped once per optimizer step.
    """

    def model(self, seed: int) -> Any:
        """A freshly initialised model."""

    def optimizer(self, model: Any) -> Any:
        """An optimizer over the model's parameters."""

    def batches(self, seed: int) -> Iterable[Any]:
        """Training batches. A finite iterable is one epoch and is iterated again when it ends."""

    def loss(self, model: Any, batch: Any) -> Any:
        """The scalar training loss of one batch."""

    def evaluate(self, model: Any) -> float:
        """The metric on held-out data. The model is in evaluation mode and gradients are off."""


_REQUIRED = ("model", "optimizer", "batches", "loss", "evaluate")
_OPTIONAL = (
    "name", "description", "metric", "direction", "unit", "margin", "loss_margin", "resolution", "steps",
    "seeds", "evaluate_every", "min_steps", "clip_norm", "accumulate", "framework", "threads", "layers",
    "validation", "scheduler",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """A task with every optional part resolved and checked; the fields and methods are those of ``Task``.

    An exception in a method of the task becomes a ``StudyError`` that names the method and the line.
    ``digest`` is a hash of the file that defines the task, and of the files beside it that it imports: runs made before
    one of them changed are not continued.
    """

    task: Task
    name: str
    spelled: str
    digest: str
    description: str = ""
    metric: str = "metric"
    higher_is_better: bool = False
    unit: str = ""
    margin: float | None = None
    loss_margin: float | None = None
    resolution: float | None = None
    steps: int = _DEFAULT_STEPS
    seeds: int = _DEFAULT_SEEDS
    evaluate_every: int | None = None
    min_steps: int = _DEFAULT_MIN_STEPS
    clip_norm: float | None = None
    accumulate: int = 1
    framework: str = "torch"
    threads: int | None = None
    layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def interval(self, steps: int) -> int:
        """Steps between two evaluations in a study of ``steps`` steps."""
        return min(steps, self.evaluate_every or max(1, math.ceil(steps / _DEFAULT_EVALUATIONS)))

    def model(self, seed: int) -> Any:
        with calling(self.spelled, "model"):
            return self.task.model(seed)

    def optimizer(self, model: Any) -> Any:
        with calling(self.spelled, "optimizer"):
            return self.task.optimizer(model)

    def batches(self, seed: int) -> Iterable[Any]:
        with calling(self.spelled, "batches"):
            return self.task.batches(seed)

    def loss(self, model: Any, batch: Any) -> Any:
        with calling(self.spelled, "loss"):
            return self.task.loss(model, batch)

    def evaluate(self, model: Any) -> Any:
        with calling(self.spelled, "evaluate"):
            return self.task.evaluate(model)

    def validation(self) -> Iterable[Any] | None:
        """The task's validation batches, or None where it has none."""
        method = getattr(self.task, "validation", None)
        return None if method is None else self._drawn(method)

    def _drawn(self, method: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        with calling(self.spelled, "validation"):
            yield from method()

    def scheduler(self, optimizer: Any, steps: int) -> Any:
        """The task's learning-rate scheduler, or None."""
        method = getattr(self.task, "scheduler", None)
        if method is None:
            return None
        with calling(self.spelled, "scheduler"):
            return method(optimizer, steps)


def load_task(spelled: str) -> TaskSpec:
    """The task called ``spelled``: a built-in name, or ``path/to/file.py:Name`` (a class, a function or an object).

    Raises:
        StudyError: no such task, or it lacks a part; the message says which.
        castwise._load.LoadError: the file or the name in it cannot be loaded.
    """
    if is_object_spec(spelled):
        found = load_object(spelled)
        path, name = split_spec(spelled)
        return describe(_instance(found, spelled), name=name, spelled=spelled, source=path)
    if spelled not in BUILT_IN:
        raise StudyError(
            f"There is no built-in task {spelled!r}.{did_you_mean(spelled, BUILT_IN)} Built in: {', '.join(BUILT_IN)}; "
            f"or name your own as path/to/file.py:Name."
        )
    module_name, _, class_name = BUILT_IN[spelled].partition(":")
    module = importlib.import_module(module_name)
    return describe(
        _instance(getattr(module, class_name), spelled), name=spelled, spelled=spelled, source=module.__file__
    )


def describe(task: object, *, name: str = "", spelled: str = "", source: str | Path | None = None) -> TaskSpec:
    """Check ``task`` against the protocol and fill in what it leaves out.

    Args:
        task: the object with the methods of ``Task``.
        name: used where the task has no ``name`` of its own.
        spelled: how the user named it; goes to the results and to errors.
        source: the file that defines it; its content becomes the digest, with that of the files beside it that it
            imports.

    Raises:
        StudyError: a method is missing or an attribute is out of range.
    """
    spelled = spelled or name or type(task).__name__
    missing = [method for method in _REQUIRED if not callable(getattr(task, method, None))]
    if missing:
        raise StudyError(
            f"Task {spelled!r} has no method {', '.join(missing)}. A task needs {', '.join(_REQUIRED)}; "
            f"castwise.study.Task documents each."
        )
    _warn_of_misspelt(task, spelled)
    direction = _get(task, "direction", str, "lower")
    if direction not in ("higher", "lower"):
        raise StudyError(f"Task {spelled!r}: direction is {direction!r}. Say 'higher' or 'lower', whichever is better.")
    digest = _digest(Path(source)) if source else hashlib.sha256(repr(type(task)).encode()).hexdigest()
    return TaskSpec(
        task=cast("Task", task),
        name=_get(task, "name", str, name or type(task).__name__),
        spelled=spelled,
        digest=digest,
        description=_get(task, "description", str, (type(task).__doc__ or "").strip().partition("\n")[0]),
        metric=_get(task, "metric", str, "metric"),
        higher_is_better=direction == "higher",
        unit=_get(task, "unit", str, ""),
        margin=_positive(task, "margin", spelled),
        loss_margin=_positive(task, "loss_margin", spelled),
        resolution=_positive(task, "resolution", spelled),
        steps=_count(task, "steps", _DEFAULT_STEPS, spelled),
        seeds=_count(task, "seeds", _DEFAULT_SEEDS, spelled),
        evaluate_every=None if _missing(task, "evaluate_every") else _count(task, "evaluate_every", 1, spelled),
        min_steps=_count(task, "min_steps", _DEFAULT_MIN_STEPS, spelled),
        clip_norm=_positive(task, "clip_norm", spelled),
        accumulate=_count(task, "accumulate", 1, spelled),
        threads=None if _missing(task, "threads") else _count(task, "threads", 1, spelled),
        framework=_get(task, "framework", str, "torch"),
        layers=_layers(task, spelled),
    )


def _instance(found: object, spelled: str) -> object:
    if not isinstance(found, type) and (not callable(found) or callable(getattr(found, "batches", None))):
        return found
    build = cast("Callable[[], object]", found)
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise StudyError(
            f"Task {spelled!r} cannot be made without arguments: {error}. "
            f"Name a class or function that takes none, or an object."
        ) from error
    except ValueError:  # some callables written in C tell nothing
        pass
    with calling(spelled, "making it"):
        return build()


def _warn_of_misspelt(task: object, spelled: str) -> None:
    """An optional attribute under another name would be passed over in silence."""
    known = (*_REQUIRED, *_OPTIONAL)
    for attribute in vars(type(task)):
        close = nearest(attribute, known, n=1)
        if not attribute.startswith("_") and attribute not in known and close and not hasattr(task, close[0]):
            _log.warning(
                "task %s has %r, which a study does not read. Did you mean %r? A name with _ in front is left alone.",
                spelled, attribute, close[0],
            )  # fmt: skip


def _missing(task: object, key: str) -> bool:
    return getattr(task, key, None) is None


def _digest(source: Path) -> str:
    """Of one file alone, its own hash; of several, a hash of their names and contents."""
    files = files_behind(source)
    if len(files) == 1:
        return hashlib.sha256(files[0].read_bytes()).hexdigest()
    told = [
        f"{file.relative_to(source.resolve().parent)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files
    ]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _get(task: object, key: str, kind: type, default: str) -> str:
    value = getattr(task, key, None)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise StudyError(f"{type(task).__name__}.{key} is {value!r}. Give a {kind.__name__}.")
    return cast("str", value)


def _positive(task: object, key: str, spelled: str) -> float | None:
    value = getattr(task, key, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise StudyError(f"Task {spelled!r}: {key} is {value!r}. Give a number above 0, or leave it out.")
    return float(value)


def _count(task: object, key: str, default: int, spelled: str) -> int:
    value = getattr(task, key, None)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise StudyError(f"Task {spelled!r}: {key} is {value!r}. Give a whole number of at least 1, or leave it out.")
    return value


def _layers(task: object, spelled: str) -> Mapping[str, tuple[str, ...]]:
    value = getattr(task, "layers", None)
    if value is None:
        return {}
    kinds = ("embedding", "norm", "head")
    if not isinstance(value, Mapping) or not all(
        kind in kinds and isinstance(globs, Sequence) and not isinstance(globs, str) for kind, globs in value.items()
    ):
        raise StudyError(
            f"Task {spelled!r}: layers is {value!r}. Give a mapping from {', '.join(kinds)} to lists of glob patterns."
        )
    return {str(kind): tuple(str(glob) for glob in globs) for kind, globs in value.items()}
