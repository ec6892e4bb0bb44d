"""Processes that run the functions of `jobs.py` together, started once for all tests: importing torch takes seconds."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_TIMEOUT = 600  # seconds; a rank that waits for others for ever fails its test, not the suite


class RankError(AssertionError):
    """A rank raised, died or hung."""


class Ranks:
    """A pool of processes, each a rank of the groups that its jobs are run in."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._running: list[subprocess.Popen[bytes]] = []

    def __call__(self, ranks: int, job: str, *args: Any, **options: Any) -> list[Any]:
        """What `job(rank, ranks, *args, **options)` of `jobs.py` returns on each rank, in a gloo group of its own."""
        try:
            return self._run(ranks, job, *args, **options)
        except RankError as error:
            if "connectFullMesh failed" not in str(error):
                raise
            return self._run(
                ranks, job, *args, **options
            )  # gloo may miss a connection on a busy machine; new processes

    def _run(self, ranks: int, job: str, *args: Any, **options: Any) -> list[Any]:
        if not self._running:
            self._running = [self._started() for _ in range(self.size)]
        with tempfile.TemporaryDirectory() as folder:
            for rank, process in enumerate(self._running[:ranks]):
                pickle.dump((job, rank, ranks, f"{folder}/store", args, options), process.stdin)  # type: ignore[arg-type]
                process.stdin.flush()  # type: ignore[union-attr]
            timer = threading.Timer(_TIMEOUT, self.stop)
            timer.start()
            try:
                answers = [self._answer(rank) for rank in range(ranks)]
            finally:
                timer.cancel()
        return answers

    def _answer(self, rank: int) -> Any:
        try:
            fine, value = pickle.load(self._running[rank].stdout)  # type: ignore[arg-type]
        except (EOFError, IndexError, OSError):
            ended = [process.poll() for process in self._running] or "stopped, as they waited for ever"
            fine, value = False, f"it gave no answer; exit statuses of all: {ended}"
        if not fine:
            self.stop()
            raise RankError(f"rank {rank}: {value}")
        return value

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-W", "ignore", str(HERE / "ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def stop(self) -> None:
        """End the processes. The next job starts new ones."""
        running, self._running = self._running, []
        for process in running:
            process.kill()
            process.communicate()


def serve() -> None:
    """Run jobs as they come in."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what jobs print must not mix with answers
    sys.path.insert(0, str(HERE))
    import traceback

    import jobs
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            job, rank, ranks, store, args, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
            answer = (True, getattr(jobs, job)(rank, ranks, *args, **options))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
