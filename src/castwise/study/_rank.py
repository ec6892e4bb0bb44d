"""One rank of a study, as ``torchrun`` starts it: see ``ranks``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from castwise.errors import CastwiseError
from castwise.study._torch_ranks import follow, meeting
from castwise.study.ranks import STATUS, WORDS


def main() -> int:
    """Lead, or follow the rank that does."""
    from castwise.cli import main as command

    words: list[str] = json.loads(os.environ[WORDS])
    with meeting() as rank:
        if rank != 0:
            try:
                follow(words)
            except CastwiseError as error:  # the first rank meets it too, and says it at length
                print(f"castwise: rank {rank} has ended: {type(error).__name__}", file=sys.stderr)
            return 0
        status = command(["study", *words])
        Path(os.environ[STATUS]).write_text(str(status), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
