"""``castwise watch run.jsonl``: a run in the terminal, once or as it goes on, or as an HTML page."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from castwise._files import write_text

from . import page, terminal
from .series import Run
from .sinks import read_jsonl

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("file", type=Path, help="what castwise.torch.watch(amp, FILE) writes")
    parser.add_argument("--follow", action="store_true", help="show it again as it grows, until interrupted")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="how often, with --follow")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write an HTML page instead")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    run, offset = Run(), 0
    while True:
        size = _size(args.file)
        if size is not None or not args.follow:  # a run that is followed may not have begun
            if size is not None and size < offset:  # it was begun anew
                run, offset = Run(), 0
            records, offset = read_jsonl(args.file, offset)
            run.add(records)
        _show(run, args)
        if not args.follow:
            return 0
        time.sleep(max(args.every, 0.1))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _show(run: Run, args: argparse.Namespace) -> None:
    if args.html is not None:
        print(f"wrote {write_text(args.html, page.render(run, args.file.name))}")
        return
    clear = "\x1b[2J\x1b[H" if args.follow and sys.stdout.isatty() else ""
    print(clear + terminal.render(run, shutil.get_terminal_size((100, 24)).columns), flush=True)
