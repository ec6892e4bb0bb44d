"""Studying PyTorch tasks: one run as steps that can be saved, and a look into layers for the remedies."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from castwise.errors import NonFiniteError, ScaleStalledError, StudyError
from castwise.guard import GuardConfig
from castwise.study import _torch_layers, _torch_probe, _torch_ranks
from castwise.study._interval import Taken, interval_of, mean_loss, number, stuck
from castwise.study._torch_random import Feed, capture, restore, scattered_seed, seed_all, seeded
from castwise.study.arms import Arm
from castwise.study.backend import Blame, Layer
from castwise.study.calls import calling
from castwise.study.protocol import TaskSpec
from castwise.study.records import Ending, Evaluation, Failure, Interval
from castwise.torch import Amp

__all__ = ["TorchBackend", "TorchRun"]

_log = logging.getLogger("castwise.study")

# What the second number of a scattered seed stands for, so that no two uses share a stream. 1 is the data order.
_INIT, _TRAIN, _EVALUATE, _PROBE = 0, 2, 3, 4


class TorchBackend:
    """See ``backend.Backend``."""

    def __init__(self, spec: TaskSpec, *, threads: int | None = None) -> None:
        self.spec = spec
        self.threads = threads or torch.get_num_threads()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def settings(self) -> Mapping[str, object]:
        found: dict[str, object] = {"torch": torch.__version__, "runs on": self.device.type, "threads": self.threads}
        if self.device.type == "cuda":
            found["runs on"] = torch.cuda.get_device_name(self.device)
        return found

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Fix what decides the last bits (threads, kernels), and leave torch and all random streams as they were.

        A falling loss scale is a result here, and told in the report: what it logs for a user's own run is kept quiet.
        """
        threads, streams = torch.get_num_threads(), capture()
        deterministic, warn_only = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        scaling_log = logging.getLogger("castwise.torch.amp")
        level = scaling_log.level
        scaling_log.setLevel(logging.ERROR)
        torch.set_num_threads(self.threads)
        if self.device.type == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            scaling_log.setLevel(level)
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            restore(streams)

    def start(self, arm: Arm, seed: int, steps: int) -> TorchRun:
        return TorchRun(self.spec, arm, seed, steps, self.device)

    def layers(self) -> Sequence[Layer]:
        seed_all(scattered_seed(0, _INIT))
        model = self.spec.model(0).to(self.device)
        batch = _torch_probe.to_device(Feed(self.spec.batches, 0, task=self.spec.spelled).next(), self.device)
        with _torch_probe.undisturbed(model), torch.no_grad():
            return _torch_layers.classify(model, lambda: self.spec.loss(model, batch), self.spec.layers)

    def blame(self, arm: Arm, seed: int, state: bytes | None) -> Sequence[Blame]:
        run = self.start(arm, seed, self.spec.steps)
        if state is not None:
            run.load(state)
        return run.blame()


class TorchRun:
    """See ``backend.Run``."""

    def __init__(self, spec: TaskSpec, arm: Arm, seed: int, steps: int, device: torch.device) -> None:
        self._spec, self._arm, self._seed, self._device = spec, arm, seed, device
        seed_all(scattered_seed(seed, _INIT))
        model = self._spec.model(seed)
        if not isinstance(model, nn.Module):
            raise StudyError(
                f"Task {spec.spelled!r}: model({seed}) gives a {type(model).__name__}. Return a torch.nn.Module, "
                f"several in one nn.ModuleDict."
            )
        self.model = model.to(device)
        self._rank, self._ranks = 0, 1
        self._trained = self.model
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
            self._trained = _torch_ranks.Wrapped(self.model)
        self.optimizer = _checked_optimizer(self._spec.optimizer(self.model), self.model, spec.spelled)
        self.scheduler = spec.scheduler(self.optimizer, steps)
        if self.scheduler is not None and not callable(getattr(self.scheduler, "step", None)):
            raise StudyError(
                f"Task {spec.spelled!r}: scheduler gives {self.scheduler!r}. Return a learning-rate scheduler."
            )
        # An arm must stay what it is said to be: nothing is raised while it runs.
        policy = replace(arm.policy, guard=GuardConfig(enabled=False))
        self.amp = Amp(self._trained, self.optimizer, policy, scheduler=self.scheduler, accumulate=spec.accumulate)
        self._feed = Feed(self._spec.batches, seed, task=spec.spelled)
        self._step = 0
        self.emulated = self.amp.emulated
        self.memory: dict[str, int] = {}
        self._recent: Any = None
        seed_all(scattered_seed(seed, _TRAIN, *([self._rank] if self._rank else [])))

    # ---- training ----

    def advance(self, steps: int) -> tuple[Interval, Ending | None]:
        losses: list[Tensor] = []
        results: list[Any] = []
        samples, seconds = 0, 0.0
        ending: Ending | None = None
        for _ in range(steps):
            batches = [self._next_batch() for _ in range(self._spec.accumulate)]
            start = time.perf_counter()
            try:
                losses.append(torch.stack([self._micro_step(batch, results) for batch in batches]).mean())
            except (ScaleStalledError, NonFiniteError) as error:
                failure = Failure.STALLED if isinstance(error, ScaleStalledError) else Failure.NON_FINITE
                ending = stuck(failure, self._step + 1)
                _log.info("%s, seed %d: %s", self._arm.name, self._seed, error)
            seconds += time.perf_counter() - start
            self._step += 1
            samples += sum(map(_torch_probe.batch_size, batches))
            if ending is not None:
                break
        if self._device.type == "cuda":
            start = time.perf_counter()
            torch.cuda.synchronize(self._device)
            seconds += time.perf_counter() - start
        return self._close_interval(losses, results, samples, seconds, ending)

    def _next_batch(self) -> Any:
        self._recent = _torch_probe.to_device(self._feed.next(), self._device)
        return self._recent

    def _micro_step(self, batch: Any, results: list[Any]) -> Tensor:
        share = 1.0
        if self._ranks > 1:
            batch, share = _torch_ranks.part_of(batch, self._rank, self._ranks, self._spec.spelled)
        with self.amp:
            loss = self._spec.loss(self._trained, batch)
        loss = _checked_loss(loss, self._spec.spelled)
        if share != 1.0:
            loss = loss * share
        with calling(self._spec.spelled, "the backward pass or the optimizer's step"):
            results.append(self.amp.step(loss, clip_norm=self._spec.clip_norm))
        return loss.detach().float().reshape(())

    def _close_interval(
        self, losses: list[Tensor], results: list[Any], samples: int, seconds: float, ending: Ending | None
    ) -> tuple[Interval, Ending | None]:
        together = torch.stack(losses).double() if losses else torch.zeros(0)
        values = (_torch_ranks.mean_of(together) if self._ranks > 1 else together).tolist()
        results = results[self._spec.accumulate - 1 :: self._spec.accumulate]  # the calls that could have stepped
        norms = [float(result.grad_norm) if result.stepped else math.nan for result in results]
        if ending is not None:  # the step that raised has no result, and was not taken
            norms.append(math.nan)
        taken = Taken(values, norms, samples, seconds)
        return interval_of(self._step, taken, ending, lambda: self.amp.loss_scale, self.evaluate, self._direction)

    # ---- looking ----

    def evaluate(self) -> Evaluation:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with seeded(scattered_seed(self._seed, _EVALUATE)), torch.no_grad(), self.amp:
                return Evaluation(self._validation_loss(), self._metric())
        finally:
            for module, training in modes:
                module.training = training

    def _metric(self) -> float:
        return number(self._spec.evaluate(self.model), self._spec.spelled)

    def _validation_loss(self) -> float:
        def loss_of(batch: Any) -> float:
            loss = self._spec.loss(self.model, _torch_probe.to_device(batch, self._device))
            return float(_one_number(loss, self._spec.spelled))

        return mean_loss(self._spec.validation(), _torch_probe.batch_size, loss_of)

    def _direction(self) -> float:
        """The cosine between this arm's gradient and fp32's, at these weights, on the latest batch."""
        batch, seed = self._recent, scattered_seed(self._seed, _PROBE, self._step)
        ours: list[Tensor] = []

        def forward() -> Tensor:
            with self.amp:
                loss: Tensor = self._spec.loss(self.model, batch)
            return loss

        with _torch_probe.undisturbed(self.model):
            if not self.memory:
                with seeded(seed):
                    activations = _torch_probe.saved_bytes(forward, self.model)
                self.memory = _torch_probe.state_bytes(self.model, self.optimizer) | {"activations": activations}
            with seeded(seed):
                ours = _torch_probe.gradients(forward(), self.model, scale=self.amp.loss_scale)
            with seeded(seed):
                theirs = _torch_probe.gradients(self._spec.loss(self.model, batch), self.model)
        return _torch_probe.agreement(ours, theirs)

    def blame(self) -> list[Blame]:
        """Which layers lose what fp32 keeps, on the next batch; see ``_torch_layers.blame``."""
        batch = self._next_batch()
        with seeded(scattered_seed(self._seed, _PROBE, 0)), _torch_probe.undisturbed(self.model):
            return _torch_layers.blame(
                self.model, lambda: self._spec.loss(self.model, batch), lambda: self.amp, self._arm.policy.low_format
            )

    # ---- saving ----

    def save(self) -> bytes:
        buffer = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "buffers": dict(self.model.named_buffers()),  # those that state_dict leaves out, too
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "amp": self.amp.state_dict(),
            "random": capture() if self._ranks == 1 else _torch_ranks.all_of(capture()),
            "position": self._feed.position,
            "step": self._step,
            "memory": self.memory,
        }
        torch.save(state, buffer)
        return buffer.getvalue()

    def load(self, state: bytes) -> None:
        # weights_only: a checkpoint in a results folder must not be able to run code.
        data = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
        self.model.load_state_dict(data["model"])
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(data["buffers"][name])
        self.optimizer.load_state_dict(data["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(data["scheduler"])
        self.amp.load_state_dict(data["amp"])
        self._feed.skip_to(data["position"])
        self._step, self.memory = data["step"], data["memory"]
        restore(data["random"] if self._ranks == 1 else data["random"][self._rank])


def _checked_optimizer(found: Any, model: nn.Module, task: str) -> torch.optim.Optimizer:
    if not isinstance(found, torch.optim.Optimizer):
        raise StudyError(
            f"Task {task!r}: optimizer(model) gives a {type(found).__name__}. Return a torch.optim.Optimizer, one for "
            f"all of the model: its parameter groups may have options of their own."
        )
    if isinstance(found, torch.optim.LBFGS):
        raise StudyError(
            f"Task {task!r}: optimizer(model) gives LBFGS, whose step calls the loss several times. A study counts and "
            f"skips steps: return an optimizer that needs no closure, such as torch.optim.AdamW."
        )
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in found.param_groups for parameter in group["params"]):
        raise StudyError(
            f"Task {task!r}: the optimizer holds no parameter of the model that it was given. "
            f"Make it from model.parameters()."
        )
    return found


def _one_number(loss: Any, task: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise StudyError(f"Task {task!r}: loss gives a {type(loss).__name__}. Return a tensor with one number.")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise StudyError(
            f"Task {task!r}: loss gives a tensor of shape {tuple(loss.shape)} and {loss.dtype}. "
            f"Return a tensor with one real number, such as the mean over the batch."
        )
    return loss


def _checked_loss(loss: Any, task: str) -> Tensor:
    found = _one_number(loss, task)
    if not found.requires_grad:
        raise StudyError(
            f"Task {task!r}: the loss depends on no parameter that is trained. Compute it from what the model "
            f"returns, without detach() or no_grad(), and do not freeze every parameter."
        )
    return found
