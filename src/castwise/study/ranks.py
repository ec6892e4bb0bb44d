"""``castwise study --nproc N``: the study of a task that trains on several processes at once.

The command starts itself again under ``torchrun``, once per rank. The first rank runs the study as on one process:
order, storage, verdict, report. The others follow it, and do in each run what it does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from castwise._extras import require
from castwise.errors import StudyError

__all__ = ["STATUS", "WORDS", "inside", "launch"]

# torchrun reads arguments as its own where they begin alike, wherever they stand: ours travel in the environment.
WORDS = "CASTWISE_STUDY_WORDS"
STATUS = "CASTWISE_STUDY_STATUS"  # names the file in which the first rank leaves the study's exit status
_MOST_RANKS = 1024
_FAULT = 1


def inside(nproc: int) -> bool:
    """Whether this process is one of the ranks of a study already.

    Raises:
        StudyError: it is one of another number of ranks.
    """
    if STATUS not in os.environ:
        return False
    if os.environ.get("WORLD_SIZE") != str(nproc):
        raise StudyError(f"--nproc is {nproc}, and torchrun has started {os.environ.get('WORLD_SIZE')} processes.")
    return True


def launch(words: Sequence[str], nproc: int) -> int:
    """Run ``castwise study`` with the arguments ``words`` on ``nproc`` ranks of this machine.

    Returns:
        The exit status of the study.

    Raises:
        StudyError: the number of ranks is none.
        KeyboardInterrupt: it was interrupted; all ranks have ended.
    """
    if not 1 <= nproc <= _MOST_RANKS:
        raise StudyError(f"--nproc is {nproc}. Give 1 to {_MOST_RANKS} processes.")
    require("torch", extra="torch")
    with tempfile.TemporaryDirectory(prefix="castwise-") as folder:
        status = Path(folder) / "status"
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        share = str(max(1, (os.cpu_count() or 1) // nproc))  # of the cores, for each rank
        environment = {"OMP_NUM_THREADS": share, **os.environ, STATUS: str(status), WORDS: json.dumps(list(words))}
        process = subprocess.Popen([sys.executable, *run, "-m", "castwise.study._rank"], env=environment)
        try:
            ended = process.wait()
        except KeyboardInterrupt:
            process.wait()  # the terminal has told it, too
            raise
        if status.exists():
            return int(status.read_text(encoding="utf-8"))
        return ended or _FAULT
